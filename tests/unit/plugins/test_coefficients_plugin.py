# SPDX-License-Identifier: Apache-2.0
"""MhcCoefficients as a layer of real network definitions: shapes, dtypes, attributes read back, refusals, values."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc.plugin_control import take_error
from trtllm_mhc.reference import broadcast_projection, coefficients_float32, coefficients_float64

HIDDEN = 5120
SETTINGS: dict[str, Any] = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "post_alpha": 2.0, "sinkhorn_iters": 20}


def inputs_of(trt: ModuleType, network: Any, shape: tuple[int, ...] = (-1, 4, HIDDEN), **other: Any) -> list[Any]:
    """streams, fn, scale, base; `other` replaces an input's dtype or shape: name=dtype or name=shape."""
    features = shape[-1] if len(shape) == 2 else 4 * shape[-1]
    specs = {
        "streams": (trt.bfloat16, shape),
        "fn": (trt.float32, (24, features)),
        "scale": (trt.float32, (3,)),
        "base": (trt.float32, (24,)),
    }
    for name, value in other.items():
        dtype, old = specs[name]
        specs[name] = (dtype, value) if isinstance(value, tuple) else (getattr(trt, value), old)
    return [network.add_input(name, dtype, shape) for name, (dtype, shape) in specs.items()]


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
@pytest.mark.parametrize("rows", [-1, 6])
def test_shapes_and_fields(trt: ModuleType, network: Any, rows: int, hidden: int, broadcast: bool) -> None:
    from trtllm_mhc.network.plugins import COEFFICIENTS, add_coefficients, is_plugin_layer, read_fields

    inputs = inputs_of(trt, network, (rows, hidden) if broadcast else (rows, 4, hidden))
    outputs = add_coefficients(network, *inputs, **(SETTINGS | {"hc_eps": 0.1, "sinkhorn_iters": 3}))
    assert [tuple(tensor.shape) for tensor in outputs] == [(rows, 4), (rows, 4, 4), (rows, 4)]
    assert {tensor.dtype for tensor in outputs} == {trt.float32}
    layer = network.get_layer(0)
    assert is_plugin_layer(layer, COEFFICIENTS)
    assert [layer.get_input(i).name for i in range(layer.num_inputs)] == ["streams", "fn", "scale", "base"]
    fields = read_fields(layer)
    assert fields == {
        "format": 1,
        "hc_mult": 4,
        "rms_norm_eps": float(np.float32(1e-20)),
        "hc_eps": float(np.float32(0.1)),
        "post_alpha": 2.0,
        "sinkhorn_iters": 3,
        "broadcast": int(broadcast),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": -1e-6}, r"rms_norm_eps: expected a finite number of 0 or more that float32 .*, got -1e-06"),
        ({"rms_norm_eps": 1e-50}, r"rms_norm_eps: expected .*, got 1e-50"),
        ({"hc_eps": float("nan")}, r"hc_eps: expected .*, got nan"),
        ({"post_alpha": 1e39}, r"post_alpha: expected a finite number that float32 can hold, got 1e\+39"),
        ({"sinkhorn_iters": 0}, r"sinkhorn_iters: expected 1 or more, got 0"),
    ],
)
def test_wrong_attributes_are_refused(trt: ModuleType, network: Any, change: dict[str, Any], message: str) -> None:
    from trtllm_mhc.network.plugins import add_coefficients

    inputs = inputs_of(trt, network)
    with pytest.raises(ValueError, match="MhcCoefficients: " + message):
        add_coefficients(network, *inputs, **(SETTINGS | change))
    assert network.num_layers == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"streams": (-1, 3, HIDDEN)}, ValueError, r"streams: expected shape \[M, 4, H\], got \[-1, 3, 5120\]"),
        ({"streams": (-1, 4, -1)}, ValueError, r"streams: expected shape \[M, 4, H\], got \[-1, 4, -1\]"),
        ({"fn": (24, HIDDEN)}, ValueError, r"fn: expected shape \[24, 20480\], got \[24, 5120\]"),
        ({"fn": (8, 4 * HIDDEN)}, ValueError, r"fn: expected shape \[24, 20480\], got \[8, 20480\]"),
        ({"fn": (24, -1)}, ValueError, r"fn: expected shape \[24, 20480\], got \[24, -1\]"),
        ({"scale": (4,)}, ValueError, r"scale: expected shape \[3\], got \[4\]"),
        ({"base": (1, 24)}, ValueError, r"base: expected shape \[24\], got \(1, 24\)"),
        ({"shape": (-1, 4, 5000)}, ValueError, r"hidden size H: expected one of \[4096, 5120, 7168\], got 5000"),
        ({"streams": "float32"}, TypeError, r"streams: expected DataType.BF16, got DataType.FLOAT"),
        ({"fn": "bfloat16"}, TypeError, r"fn: expected DataType.FLOAT, got DataType.BF16"),
        ({"scale": "float16"}, TypeError, r"scale: expected DataType.FLOAT, got DataType.HALF"),
    ],
)
def test_wrong_tensors_are_refused_in_python_and_by_the_plugin(
    trt: ModuleType, network: Any, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    from trtllm_mhc.network.layers import tensor_shape
    from trtllm_mhc.network.plugins import add_coefficients, create_plugin

    inputs = inputs_of(trt, network, **change)
    with pytest.raises(error, match="MhcCoefficients: " + message):
        add_coefficients(network, *inputs, **SETTINGS)
    assert network.num_layers == 0

    layer = network.add_plugin_v3(inputs, [], create_plugin("MhcCoefficients", SETTINGS))
    if layer is not None:
        assert tensor_shape(layer.get_output(0)) is None, "accepted"
    text = take_error(any_thread=True)
    assert text is not None
    assert text.startswith("MhcCoefficients: input ")
    assert "expected" in text


def values(rows: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "streams": rng.standard_normal((rows, 4, 4096), np.float32).astype(ml_dtypes.bfloat16),
        "fn": rng.standard_normal((24, 4 * 4096), np.float32) / np.float32(128),
        "scale": np.float32([1.0, 0.7, 1.3]),
        "base": rng.standard_normal(24, np.float32),
    }


@pytest.mark.parametrize("broadcast", [False, True])
def test_interpreted(trt: ModuleType, network: Any, broadcast: bool) -> None:
    from trtllm_mhc.network.plugins import add_coefficients
    from trtllm_mhc.reference.interpreter import evaluate

    feed = values(3, seed=1)
    if broadcast:
        feed |= {"streams": feed["streams"][:, 0].copy(), "fn": broadcast_projection(feed["fn"], 4)}
    outputs = add_coefficients(network, *inputs_of(trt, network, (-1, *feed["streams"].shape[1:])), **SETTINGS)
    for name, tensor in zip(("post", "comb", "pre"), outputs, strict=True):
        tensor.name = name
        network.mark_output(tensor)
    arguments = list(feed.values())
    for precision, function in (("network", coefficients_float32), ("float64", coefficients_float64)):
        (got,) = evaluate([network], [feed], precision=precision)
        want = function(*arguments, **SETTINGS)
        for name in ("post", "comb", "pre"):
            assert got[name].dtype == getattr(want, name).dtype
            np.testing.assert_array_equal(got[name], getattr(want, name))


def test_plugin_and_native_layers_are_the_same_function(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network import functional
    from trtllm_mhc.network.plugins import add_coefficients
    from trtllm_mhc.reference.interpreter import evaluate

    feed = values(2, seed=2)
    streams = network.add_input("streams", trt.bfloat16, (-1, 4, 4096))
    weights = [feed[name] for name in ("fn", "scale", "base")]
    native = functional.mhc_coefficients(network, streams, *weights, **SETTINGS)
    ours = add_coefficients(network, streams, *(functional.constant(network, each) for each in weights), **SETTINGS)
    for name, pair in zip(("post", "comb", "pre"), zip(native, ours, strict=True), strict=True):
        for form, tensor in zip(("native", "plugin"), pair, strict=True):
            tensor.name = f"{name} {form}"
            network.mark_output(tensor)
    (got,) = evaluate([network], [{"streams": feed["streams"]}], precision="float64")
    for name in ("post", "comb", "pre"):
        np.testing.assert_allclose(got[f"{name} plugin"], got[f"{name} native"], rtol=1e-12)


def test_a_build_configures_the_plugin(trt: ModuleType, builder: Any, network: Any) -> None:
    """Without a GPU TensorRT 10.15 goes this far."""
    if not trt.__version__.startswith("10.15"):
        pytest.skip("only 10.15 starts a build without a GPU")
    from trtllm_mhc.network import functional
    from trtllm_mhc.network.plugins import add_coefficients

    feed = values(1, seed=3)
    streams = network.add_input("streams", trt.bfloat16, (-1, 4, 4096))
    weights = [functional.constant(network, feed[name]) for name in ("fn", "scale", "base")]
    for tensor in add_coefficients(network, streams, *weights, **SETTINGS):
        network.mark_output(tensor)
    profile = builder.create_optimization_profile()
    profile.set_shape("streams", (1, 4, 4096), (4, 4, 4096), (64, 4, 4096))
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is None, "no GPU, yet an engine"
    assert take_error(any_thread=True) is None
