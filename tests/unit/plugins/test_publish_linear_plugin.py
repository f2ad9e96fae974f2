# SPDX-License-Identifier: Apache-2.0
"""MhcPublishLinear as a layer of real network definitions: shapes, dtypes, attributes read back, refusals, values."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc import reference
from trtllm_mhc.plugin_control import take_error

E4M3 = ml_dtypes.float8_e4m3fn


def inputs_of(
    trt: ModuleType, network: Any, scaled: bool, rows: int = -1, features: int = 1024, hidden: int = 5120, **other: Any
) -> list[Any]:
    """activation, weight and scales; `other` replaces an input's dtype or shape: name=dtype or name=shape."""
    specs = {
        "activation": (trt.bfloat16, (rows, features)),
        "weight": (trt.fp8 if scaled else trt.bfloat16, (hidden, features)),
    }
    if scaled:
        specs["scales"] = (trt.int32, (hidden // 32, features // 128))
    for name, value in other.items():
        dtype, old = specs[name]
        specs[name] = (dtype, value) if isinstance(value, tuple) else (getattr(trt, value), old)
    return [network.add_input(name, dtype, shape) for name, (dtype, shape) in specs.items()]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
@pytest.mark.parametrize("rows", [-1, 6])
def test_shapes_and_fields(trt: ModuleType, network: Any, rows: int, hidden: int, scaled: bool) -> None:
    from trtllm_mhc.network.plugins import PUBLISH_LINEAR, add_publish_linear, is_plugin_layer, read_fields

    inputs = inputs_of(trt, network, scaled, rows=rows, hidden=hidden)
    x = add_publish_linear(network, *inputs, tp_size=4, rank=2, group=(4, 5, 6, 7))
    assert tuple(x.shape) == (rows, hidden)
    assert x.dtype == trt.bfloat16
    layer = network.get_layer(0)
    assert is_plugin_layer(layer, PUBLISH_LINEAR)
    assert [layer.get_input(i).name for i in range(layer.num_inputs)] == [
        "activation",
        "weight",
        *(["scales"] if scaled else []),
    ]
    assert read_fields(layer) == {
        "format": 1,
        "tp_size": 4,
        "rank": 2,
        "group": (4, 5, 6, 7),
        "weight_type": int(scaled),
    }


def test_its_output_is_what_a_published_boundary_takes(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network.plugins import add_boundary, add_publish_linear

    x = add_publish_linear(network, *inputs_of(trt, network, False), tp_size=2)
    add_boundary(
        network,
        x,
        network.add_input("residual", trt.bfloat16, (-1, 4, 5120)),
        network.add_input("post", trt.float32, (-1, 4)),
        network.add_input("comb", trt.float32, (-1, 4, 4)),
        None,
        None,
        tp_size=2,
        norm_eps=None,
        published=True,
    )
    assert network.num_layers == 2


@pytest.mark.parametrize(
    ("scaled", "change", "error", "message"),
    [
        (False, {"activation": (-1, 2048)}, ValueError, r"weight: expected shape \[H, K=2048\], got \[5120, 1024\]"),
        (False, {"activation": (-1, -1)}, ValueError, r"activation: expected shape \[M, K\], got \[-1, -1\]"),
        (False, {"activation": (-1, 4, 256)}, ValueError, r"activation: expected shape \[M, K\], got \(-1, 4, 256\)"),
        (False, {"weight": (-1, 1024)}, ValueError, r"weight: expected shape \[H, K=1024\], got \[-1, 1024\]"),
        (False, {"features": 1000}, ValueError, r"K: expected a multiple of 128 up to 16384, got 1000"),
        (False, {"features": 16512}, ValueError, r"K: expected a multiple of 128 up to 16384, got 16512"),
        (False, {"hidden": 5000}, ValueError, r"hidden size H: expected one of \[4096, 5120, 7168\], got 5000"),
        (True, {"scales": (160, 32)}, ValueError, r"scales: expected shape \[160, 8\], got \[160, 32\]"),
        (True, {"scales": (8, 160)}, ValueError, r"scales: expected shape \[160, 8\], got \[8, 160\]"),
        (False, {"activation": "float16"}, TypeError, "activation: expected DataType.BF16, got DataType.HALF"),
        (False, {"weight": "float32"}, TypeError, "weight: expected DataType.BF16, got DataType.FLOAT"),
        (True, {"weight": "bfloat16"}, TypeError, "weight: expected DataType.FP8, got DataType.BF16"),
        (True, {"scales": "float32"}, TypeError, "scales: expected DataType.INT32, got DataType.FLOAT"),
    ],
)
def test_wrong_tensors_are_refused_in_python_and_by_the_plugin(
    trt: ModuleType, network: Any, scaled: bool, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    from trtllm_mhc.network.layers import tensor_shape
    from trtllm_mhc.network.plugins import add_publish_linear, create_plugin

    inputs = inputs_of(trt, network, scaled, **change)
    with pytest.raises(error, match="MhcPublishLinear: .*" + message):
        add_publish_linear(network, *inputs, tp_size=2)
    assert network.num_layers == 0

    made = create_plugin("MhcPublishLinear", {"tp_size": 2, "weight_type": int(scaled)})
    layer = network.add_plugin_v3(inputs, [], made)
    if layer is not None:
        assert tensor_shape(layer.get_output(0)) is None, "accepted"
    text = take_error(any_thread=True)
    assert text is not None
    assert text.startswith("MhcPublishLinear: input ")
    assert "expected" in text


def test_the_number_of_inputs_follows_from_the_weights_type(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network.layers import tensor_shape
    from trtllm_mhc.network.plugins import create_plugin

    inputs = inputs_of(trt, network, True)
    for weight_type, given, names in ((0, 3, "activation, weight"), (1, 2, "activation, weight, scales")):
        made = create_plugin("MhcPublishLinear", {"tp_size": 2, "weight_type": weight_type})
        layer = network.add_plugin_v3(inputs[:given], [], made)
        assert layer is None or tensor_shape(layer.get_output(0)) is None
        assert f"inputs ({names}), got {given}" in (take_error(any_thread=True) or "")


@pytest.mark.parametrize("attributes", [{"tp_size": 3}, {"tp_size": 2, "rank": 2}, {"tp_size": 2, "group": (1, 1)}])
def test_wrong_attributes_are_refused(trt: ModuleType, network: Any, attributes: dict[str, Any]) -> None:
    from trtllm_mhc.network.plugins import add_publish_linear

    with pytest.raises(ValueError, match=r"MhcPublishLinear: .*expected"):
        add_publish_linear(network, *inputs_of(trt, network, False), **attributes)
    assert network.num_layers == 0


@pytest.mark.parametrize("scaled", [False, True])
def test_interpreted(trt: ModuleType, network: Any, scaled: bool) -> None:
    """Weights are constants: bf16 or E4M3 as they are, whatever the precision of the evaluation."""
    from trtllm_mhc.network import ops
    from trtllm_mhc.network.plugins import add_publish_linear
    from trtllm_mhc.reference.interpreter import evaluate

    rng = np.random.default_rng(2)
    activation = rng.standard_normal((3, 128), np.float32).astype(ml_dtypes.bfloat16)
    weight = rng.standard_normal((4096, 128), np.float32).astype(E4M3 if scaled else ml_dtypes.bfloat16)
    scales = rng.integers(120, 130, (128, 4), np.uint8) if scaled else None
    constants = [ops.constant(network, weight)]
    if scales is not None:
        constants.append(ops.constant(network, reference.pack_weight_scales(scales)))
    given = network.add_input("activation", trt.bfloat16, (-1, 128))
    x = add_publish_linear(network, given, *constants, tp_size=1)
    x.name = "x"
    network.mark_output(x)
    (got,) = evaluate([network], [{"activation": activation}])
    reference.assert_bits_equal(got["x"], reference.publish_linear(activation, weight, scales), "x")
    (got,) = evaluate([network], [{"activation": activation}], precision="float64")
    np.testing.assert_array_equal(got["x"], reference.publish_linear_float64(activation, weight, scales))


@pytest.mark.parametrize("scaled", [False, True])
def test_a_build_configures_the_plugin(trt: ModuleType, builder: Any, network: Any, scaled: bool) -> None:
    """Without a GPU TensorRT 10.15 goes this far."""
    if not trt.__version__.startswith("10.15"):
        pytest.skip("only 10.15 starts a build without a GPU")
    from trtllm_mhc.network import ops
    from trtllm_mhc.network.plugins import add_publish_linear

    constants = [ops.constant(network, np.zeros((5120, 256), E4M3 if scaled else ml_dtypes.bfloat16))]
    if scaled:
        constants.append(ops.constant(network, np.zeros((160, 2), np.int32)))
    activation = network.add_input("activation", trt.bfloat16, (-1, 256))
    network.mark_output(add_publish_linear(network, activation, *constants, tp_size=2))
    profile = builder.create_optimization_profile()
    profile.set_shape("activation", (1, 256), (4, 256), (64, 256))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is None, "no GPU, yet an engine"
    assert take_error(any_thread=True) is None
