# SPDX-License-Identifier: Apache-2.0
"""The plugins as layers of real network definitions: shapes, dtypes, attributes read back, and refusals."""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from trtllm_mhc.plugin_control import PluginError, take_error

HIDDEN = 5120


def boundary_inputs(trt: ModuleType, network: Any, rows: int = -1, hidden: int = HIDDEN, **other: Any) -> list[Any]:
    """x, residual, post, comb, pre, gamma; `other` replaces an input's dtype or shape: name=dtype or name=shape."""
    specs = {
        "x": (trt.bfloat16, (rows, hidden)),
        "residual": (trt.bfloat16, (rows, 4, hidden)),
        "post": (trt.float32, (rows, 4)),
        "comb": (trt.float32, (rows, 4, 4)),
        "pre": (trt.float32, (rows, 4)),
        "gamma": (trt.bfloat16, (hidden,)),
    }
    for name, value in other.items():
        dtype, shape = specs[name]
        specs[name] = (dtype, value) if isinstance(value, tuple) else (value, shape)
    return [network.add_input(name, dtype, shape) for name, (dtype, shape) in specs.items()]


def finalize_inputs(trt: ModuleType, network: Any, rows: int = -1, top_k: int = 6) -> Any:
    from trtllm_mhc.network.plugins import FinalizeInputs

    return FinalizeInputs(
        network.add_input("gemm2_permuted", trt.bfloat16, (-1, HIDDEN)),
        network.add_input("expert_weights", trt.float32, (rows, top_k)),
        network.add_input("expanded_idx_to_permuted_idx", trt.int32, (rows, top_k)),
        network.add_input("shared_output", trt.bfloat16, (rows, HIDDEN)),
    )


@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
@pytest.mark.parametrize("rows", [-1, 6, 1000])
def test_plain_boundary(trt: ModuleType, network: Any, rows: int, hidden: int) -> None:
    from trtllm_mhc.network.plugins import add_boundary, is_plugin_layer

    inputs = boundary_inputs(trt, network, rows, hidden)
    residual_out, layer_input = add_boundary(network, *inputs, tp_size=4, norm_eps=1e-20)
    assert layer_input is not None
    assert (tuple(residual_out.shape), residual_out.dtype) == ((rows, 4, hidden), trt.bfloat16)
    assert (tuple(layer_input.shape), layer_input.dtype) == ((rows, hidden), trt.bfloat16)
    assert network.num_layers == 1
    layer = network.get_layer(0)
    assert is_plugin_layer(layer, "MhcBoundary")
    assert not is_plugin_layer(layer, "MhcAllReduce")
    assert [layer.get_input(i).name for i in range(layer.num_inputs)] == [tensor.name for tensor in inputs]


def test_residual_only_boundary(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network.plugins import add_boundary

    inputs = boundary_inputs(trt, network)
    residual_out, layer_input = add_boundary(network, *inputs[:4], None, None, tp_size=2, norm_eps=None)
    assert layer_input is None
    assert tuple(residual_out.shape) == (-1, 4, HIDDEN)
    assert network.get_layer(0).num_outputs == 1


@pytest.mark.parametrize(("rows", "words"), [(-1, -1), (1, 5120), (128, 5120), (129, 10240)])
def test_quantized_finalize_boundary(trt: ModuleType, network: Any, rows: int, words: int) -> None:
    from trtllm_mhc.network.plugins import add_boundary_layer, read_fields

    moe = finalize_inputs(trt, network, rows)
    inputs = boundary_inputs(trt, network, rows)[1:]
    outputs = add_boundary_layer(network, moe, *inputs, tp_size=8, norm_eps=1e-6, quantize=True)
    assert (tuple(outputs.mxfp8_data.shape), outputs.mxfp8_data.dtype) == ((rows, HIDDEN), trt.fp8)
    assert (tuple(outputs.mxfp8_scales.shape), outputs.mxfp8_scales.dtype) == ((words,), trt.int32)
    fields = read_fields(network.get_layer(0))
    assert (fields["top_k"], fields["quantize"]) == (6, 1)


def test_all_reduce(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network.plugins import add_all_reduce

    x = network.add_input("x", trt.bfloat16, (-1, HIDDEN))
    total = add_all_reduce(network, x, tp_size=2)
    assert (tuple(total.shape), total.dtype) == ((-1, HIDDEN), trt.bfloat16)
    chained = add_all_reduce(network, total, tp_size=2)
    assert tuple(chained.shape) == (-1, HIDDEN)


def test_rows_may_be_any_expression(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network.plugins import add_all_reduce

    x = network.add_input("x", trt.bfloat16, (-1, -1, HIDDEN))
    flat = network.add_shuffle(x)
    flat.reshape_dims = (-1, HIDDEN)
    assert tuple(add_all_reduce(network, flat.get_output(0), tp_size=2).shape) == (-1, HIDDEN)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"tp_size": 2, "norm_eps": 1e-20}, {"tp_size": 2, "rank": -1, "group": ()}),
        ({"tp_size": 2, "norm_eps": 1e-6, "rank": 1, "group": [7, 3]}, {"rank": 1, "group": (7, 3)}),
        ({"tp_size": 1, "norm_eps": 0.1, "group": (5,)}, {"group": (5,), "published": 0}),
    ],
)
def test_fields_read_back(trt: ModuleType, network: Any, arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    from trtllm_mhc.network.plugins import add_boundary, read_fields

    add_boundary(network, *boundary_inputs(trt, network), **arguments)
    fields = read_fields(network.get_layer(0))
    assert fields == fields | expected
    assert set(fields) == {
        "format", "tp_size", "rank", "group", "hc_mult", "norm_eps", "collapse", "published", "top_k", "quantize",
    }  # fmt: skip
    assert fields["norm_eps"] == float(np.float32(arguments["norm_eps"]))


def test_published_boundary_needs_a_publishing_layer(trt: ModuleType, network: Any) -> None:
    """What the mailbox holds comes from such a layer only; anything else would be waited for."""
    from trtllm_mhc.network.plugins import add_boundary

    x, *inputs = boundary_inputs(trt, network)
    shuffled = network.add_identity(x).get_output(0)
    for tensor in (x, shuffled):
        with pytest.raises(ValueError, match="x: expected the output of a MhcPublishLinear of the network"):
            add_boundary(network, tensor, *inputs, tp_size=2, norm_eps=1e-6, published=True)


def test_fields_are_right_200_times_of_200(trt: ModuleType, network: Any) -> None:
    """What the TensorRT-LLM bookkeeping of V2 plugins gets wrong every time: memory that is no longer there."""
    from trtllm_mhc.network.plugins import add_all_reduce, add_boundary, read_fields

    inputs = boundary_inputs(trt, network)
    expected: list[dict[str, Any]] = []
    for index in range(200):
        rank, group = index % 4, (index, index + 1, index + 2, index + 3)
        eps = float(np.float32(10.0 ** -(index % 30)))
        if index % 2:
            add_boundary(network, *inputs, tp_size=4, norm_eps=eps, rank=rank, group=group)
            expected.append({"tp_size": 4, "norm_eps": eps, "rank": rank, "group": group, "collapse": 1})
        else:
            add_all_reduce(network, inputs[0], tp_size=4, rank=rank, group=group)
            expected.append({"tp_size": 4, "rank": rank, "group": group, "strategy": "oneshot"})
    gc.collect()
    garbage = [np.full(64, 0xDEAD, np.int32) for _ in range(10000)]
    for index, want in enumerate(expected):
        fields = read_fields(network.get_layer(index))
        assert fields == fields | want, index
    del garbage


def test_fields_of_other_layers_are_refused(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network.plugins import read_fields

    network.add_identity(network.add_input("x", trt.float32, (1,)))
    ours = r"\['MhcBoundary', 'MhcAllReduce', 'MhcCoefficients', 'MhcPublishLinear'\]"
    with pytest.raises(ValueError, match=f"expected a layer of one of {ours}, got LayerType"):
        read_fields(network.get_layer(0))


GOOD = {"tp_size": 2, "norm_eps": 1e-20}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp_size": 3}, r"tp_size: expected one of \[1, 2, 4, 8\], got 3"),
        ({"rank": 2}, r"rank: expected -1 \(the communicator's\) to 1, got 2"),
        ({"group": (1, 2, 3)}, r"group: expected 2 distinct world ranks of 0 or more, got \[1, 2, 3\]"),
        ({"group": (1, 1)}, r"group: expected 2 distinct world ranks"),
        ({"norm_eps": None}, r"norm_eps: expected a finite number of 0 or more that float32 can hold, got None"),
        ({"norm_eps": -1e-6}, r"norm_eps: expected .*, got -1e-06"),
        ({"norm_eps": float("nan")}, r"norm_eps: expected .*, got nan"),
        ({"norm_eps": 1e-50}, r"norm_eps: expected .*, got 1e-50"),
        ({"norm_eps": 1e39}, r"norm_eps: expected .*, got 1e\+39"),
    ],
)
def test_wrong_attributes_are_refused(trt: ModuleType, network: Any, change: dict[str, Any], message: str) -> None:
    from trtllm_mhc.network.plugins import add_boundary

    inputs = boundary_inputs(trt, network)
    with pytest.raises(ValueError, match=message):
        add_boundary(network, *inputs, **(GOOD | change))
    assert network.num_layers == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": (-1, 4, HIDDEN)}, ValueError, r"x: expected shape \[M, H\], got \(-1, 4, 5120\)"),
        ({"x": (6, HIDDEN), "residual": (7, 4, HIDDEN)}, ValueError, r"residual: expected shape \[M=6, 4, H=5120\]"),
        ({"residual": (-1, 3, HIDDEN)}, ValueError, r"residual: expected shape \[M, 4, H=5120\], got \[-1, 3, 5120\]"),
        ({"residual": (-1, -1, HIDDEN)}, ValueError, r"residual: expected .*, got \[-1, -1, 5120\]"),
        ({"residual": (-1, 4, 4096)}, ValueError, r"residual: expected .*H=5120\], got \[-1, 4, 4096\]"),
        ({"post": (-1, 4, 1)}, ValueError, r"post: expected shape \[M, 4\], got \(-1, 4, 1\)"),
        ({"comb": (-1, 16)}, ValueError, r"comb: expected shape \[M, 4, 4\], got \(-1, 16\)"),
        ({"gamma": (4096,)}, ValueError, r"gamma: expected shape \[H=5120\], got \[4096\]"),
        ({"x": (-1, -1)}, ValueError, r"x: expected shape \[M, H\], got \[-1, -1\]"),
        ({"hidden": 5000}, ValueError, r"hidden size H: expected one of \[4096, 5120, 7168\], got 5000"),
        ({"x": "float16"}, TypeError, r"x: expected DataType.BF16, got DataType.HALF"),
        ({"residual": "float32"}, TypeError, r"residual: expected DataType.BF16, got DataType.FLOAT"),
        ({"comb": "bfloat16"}, TypeError, r"comb: expected DataType.FLOAT, got DataType.BF16"),
        ({"gamma": "float32"}, TypeError, r"gamma: expected DataType.BF16, got DataType.FLOAT"),
    ],
)
def test_wrong_tensors_are_refused_in_python_and_by_the_plugin(
    trt: ModuleType, network: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    from trtllm_mhc.network.layers import tensor_shape
    from trtllm_mhc.network.plugins import add_boundary, create_plugin

    change = {key: getattr(trt, value) if isinstance(value, str) else value for key, value in change.items()}
    inputs = boundary_inputs(trt, network, **change)
    with pytest.raises(error, match=message):
        add_boundary(network, *inputs, **GOOD)
    assert network.num_layers == 0

    layer = network.add_plugin_v3(inputs, [], create_plugin("MhcBoundary", GOOD))
    if layer is not None:
        assert tensor_shape(layer.get_output(0)) is None, "accepted"
    text = take_error(any_thread=True)
    assert text is not None
    assert text.startswith("MhcBoundary: input ")
    assert "expected" in text


def test_wrong_number_of_inputs_is_refused_by_the_plugin(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network.plugins import create_plugin

    inputs = boundary_inputs(trt, network)
    assert network.add_plugin_v3(inputs[:4], [], create_plugin("MhcBoundary", GOOD)) is None
    assert take_error(any_thread=True) == "MhcBoundary: expected 6 inputs (x, residual, post, comb, pre, gamma), got 4"


def test_half_a_collapse_is_refused(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network.plugins import add_boundary

    inputs = boundary_inputs(trt, network)
    with pytest.raises(ValueError, match="expected both pre and gamma, or neither"):
        add_boundary(network, *inputs[:5], None, **GOOD)


def test_a_refusal_of_tensorrt_itself_is_an_error(trt: ModuleType, network: Any, monkeypatch: Any) -> None:
    from trtllm_mhc.network import plugins

    x = network.add_input("x", trt.float16, (-1, HIDDEN))
    monkeypatch.setattr(plugins, "_check_inputs", lambda *_: None)
    with pytest.raises(PluginError, match=r"MhcAllReduce: input 0 \(x\): expected dtype BF16, got HALF"):
        plugins.add_all_reduce(network, x, tp_size=2)


@pytest.mark.parametrize("rows_of_comb", [(1, 4, 8), (9, 9, 16)])
def test_a_build_reaches_configure_plugin(trt: ModuleType, builder: Any, network: Any, rows_of_comb: Any) -> None:
    """Without a GPU TensorRT 10.15 goes this far: only configurePlugin sees the profiles."""
    if not trt.__version__.startswith("10.15"):
        pytest.skip("only 10.15 starts a build without a GPU")
    from trtllm_mhc.network.plugins import add_boundary

    inputs = boundary_inputs(trt, network)
    for tensor in add_boundary(network, *inputs, **GOOD):
        network.mark_output(tensor)
    profile = builder.create_optimization_profile()
    for tensor in inputs[:5]:
        rows = rows_of_comb if tensor.name == "comb" else (1, 4, 8)
        profile.set_shape(tensor.name, *((count, *tuple(tensor.shape)[1:]) for count in rows))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is None, "no GPU, yet an engine"
    expected = None
    if rows_of_comb[0] > 8:
        expected = (
            "MhcBoundary: input 3 (comb): expected a profile that allows some M from 1 to 8, as the inputs before it, "
            "got 9 to 16"
        )
    assert take_error(any_thread=True) == expected
