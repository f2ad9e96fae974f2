# SPDX-License-Identifier: Apache-2.0
"""The functional layers as networks: what they are made of, and what they refuse."""

import gc
import weakref
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

HIDDEN = 64
HC = 4
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def functional(trt):
    from trtllm_mhc.network import functional

    return functional


@pytest.fixture
def tensors(trt, network):
    """Inputs with the dtypes and shapes of a boundary's, M dynamic."""
    shapes = {
        "x": (trt.bfloat16, (-1, HIDDEN)),
        "residual": (trt.bfloat16, (-1, HC, HIDDEN)),
        "post": (trt.float32, (-1, HC)),
        "comb": (trt.float32, (-1, HC, HC)),
        "pre": (trt.float32, (-1, HC)),
        "gamma": (trt.bfloat16, (HIDDEN,)),
    }
    return {name: network.add_input(name, dtype, shape) for name, (dtype, shape) in shapes.items()}


def layer_types(network):
    return Counter(network.get_layer(i).type.name for i in range(network.num_layers))


def coefficients_weights(features=HC * HIDDEN, hc=HC):
    rng = np.random.default_rng(1)
    count = (2 + hc) * hc
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((count, features), (3,), (count,))]


COEFFICIENTS = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "post_alpha": 2.0, "sinkhorn_iters": 20}


def test_post(trt, network, functional, tensors):
    out = functional.mhc_post(network, *(tensors[name] for name in ("x", "residual", "post", "comb")))
    assert out.dtype == trt.bfloat16
    assert tuple(out.shape) == (-1, HC, HIDDEN)


def test_collapses(trt, network, functional, tensors):
    for collapse in (functional.mhc_collapse, functional.mhc_final_collapse):
        out = collapse(network, tensors["residual"], tensors["pre"])
        assert out.dtype == trt.bfloat16
        assert tuple(out.shape) == (-1, HIDDEN)


def test_final_collapse_is_a_chain_of_products_and_sums(network, functional, tensors):
    functional.mhc_final_collapse(network, tensors["residual"], tensors["pre"])
    types = layer_types(network)
    assert types["ELEMENTWISE"] == HC + HC - 1
    assert types["REDUCE"] == 0


@pytest.mark.parametrize("as_array", [True, False])
def test_rms_norm(trt, network, functional, tensors, as_array):
    gamma = np.ones(HIDDEN, BFLOAT16) if as_array else tensors["gamma"]
    out = functional.rms_norm(network, tensors["x"], gamma, 1e-20)
    assert out.dtype == trt.bfloat16
    assert tuple(out.shape) == (-1, HIDDEN)


def test_rms_norm_keeps_a_tiny_epsilon(trt, network, functional, tensors):
    from trtllm_mhc.network.layers import constant_array

    functional.rms_norm(network, tensors["x"], tensors["gamma"], 1e-20)
    constants = [network.get_layer(i) for i in range(network.num_layers)]
    constants = [layer for layer in constants if layer.type == trt.LayerType.CONSTANT]
    assert len(constants) == 1
    eps = constants[0].get_output(0)
    assert eps.dtype == trt.float32
    assert constant_array(constants[0]).reshape(-1).tolist() == [np.float32(1e-20)]


def test_pre_delayed_without_pre_takes_stream_zero(network, functional, tensors):
    out = functional.mhc_pre_delayed(network, tensors["residual"], None, tensors["gamma"], 1e-20)
    assert tuple(out.shape) == (-1, HIDDEN)
    assert layer_types(network)["GATHER"] == 1


@pytest.mark.parametrize("name", ["residual", "x"])
def test_coefficients(trt, network, functional, tensors, name):
    features = HC * HIDDEN if name == "residual" else HIDDEN
    fn, scale, base = coefficients_weights(features)
    post, comb, pre = functional.mhc_coefficients(network, tensors[name], fn, scale, base, **COEFFICIENTS)
    assert [tuple(t.shape) for t in (post, comb, pre)] == [(-1, HC), (-1, HC, HC), (-1, HC)]
    assert {t.dtype for t in (post, comb, pre)} == {trt.float32}
    types = layer_types(network)
    assert types["MATRIX_MULTIPLY"] == 1
    assert types["SOFTMAX"] == 1
    # The mean square, and the sums of Sinkhorn's 20 column and 19 row normalisations.
    assert types["REDUCE"] == 1 + 20 + 19


def test_broadcast_and_mean(trt, network, functional, tensors):
    streams = functional.broadcast_streams(network, tensors["x"], HC)
    assert (streams.dtype, tuple(streams.shape)) == (trt.bfloat16, (-1, HC, HIDDEN))
    mean = functional.mean_streams(network, streams)
    assert (mean.dtype, tuple(mean.shape)) == (trt.bfloat16, (-1, HIDDEN))


def test_mxfp8(trt, network, functional, tensors):
    if not hasattr(network, "add_dynamic_quantize"):
        with pytest.raises(RuntimeError, match="no MXFP8"):
            functional.mxfp8_quantize(network, tensors["x"])
        return
    data, scale = functional.mxfp8_quantize(network, tensors["x"])
    assert (data.dtype, tuple(data.shape)) == (trt.fp8, (-1, HIDDEN))
    assert (scale.dtype, tuple(scale.shape)) == (trt.DataType.E8M0, (-1, HIDDEN // 32))


def test_mxfp8_refuses_a_ragged_block(trt, network, functional):
    x = network.add_input("x", trt.bfloat16, (-1, 48))
    with pytest.raises(ValueError, match="multiple of 32 columns, got 48"):
        functional.mxfp8_quantize(network, x)


@pytest.mark.parametrize(
    ("swap", "error", "message"),
    [
        ({"x": "post"}, TypeError, "mhc_post: x: expected .*BF16, got .*FLOAT"),
        ({"x": "residual"}, ValueError, r"mhc_post: x: expected shape \[any, 64\].*got \(-1, 4, 64\)"),
        ({"residual": "x"}, ValueError, r"mhc_post: residual: expected shape \[any, any, any\]"),
        ({"post": "comb"}, ValueError, r"mhc_post: post: expected shape \[any, 4\].*got \(-1, 4, 4\)"),
        ({"comb": "pre"}, ValueError, r"mhc_post: comb: expected shape \[any, 4, 4\].*got \(-1, 4\)"),
        ({"comb": "residual"}, TypeError, "mhc_post: comb: expected .*FLOAT, got .*BF16"),
    ],
)
def test_post_refuses(network, functional, tensors, swap, error, message):
    args = [tensors[swap.get(name, name)] for name in ("x", "residual", "post", "comb")]
    with pytest.raises(error, match=message):
        functional.mhc_post(network, *args)
    assert network.num_layers == 0


def test_refuses_other_sizes(trt, network, functional, tensors):
    narrow = network.add_input("narrow", trt.bfloat16, (-1, 32))
    three = network.add_input("three", trt.float32, (-1, 3))
    unknown = network.add_input("unknown", trt.bfloat16, (-1, -1))
    with pytest.raises(ValueError, match=r"x: expected shape \[any, 64\].*got \(-1, 32\)"):
        functional.mhc_post(network, narrow, tensors["residual"], tensors["post"], tensors["comb"])
    with pytest.raises(ValueError, match=r"pre: expected shape \[any, 4\].*got \(-1, 3\)"):
        functional.mhc_collapse(network, tensors["residual"], three)
    with pytest.raises(ValueError, match=r"gamma: expected shape \(64,\), got \(32,\)"):
        functional.rms_norm(network, tensors["x"], np.ones(32, BFLOAT16), 1e-20)
    with pytest.raises(TypeError, match="gamma: expected bfloat16, got float32"):
        functional.rms_norm(network, tensors["x"], np.ones(HIDDEN, np.float32), 1e-20)
    with pytest.raises(ValueError, match="at most the first dimension dynamic"):
        functional.rms_norm(network, unknown, tensors["gamma"], 1e-20)


def test_coefficients_refuse(network, functional, tensors):
    fn, scale, base = coefficients_weights()

    def make(fn=fn, scale=scale, base=base, streams=tensors["residual"], **options):
        functional.mhc_coefficients(network, streams, fn, scale, base, **(COEFFICIENTS | options))

    with pytest.raises(ValueError, match=r"fn: expected shape \(24, 256\), got \(24, 128\)"):
        make(fn=fn[:, :128])
    with pytest.raises(TypeError, match="fn: expected float32, got bfloat16"):
        make(fn=fn.astype(BFLOAT16))
    with pytest.raises(ValueError, match=r"scale: expected shape \(3,\), got \(2,\)"):
        make(scale=scale[:2])
    with pytest.raises(ValueError, match=r"base: expected \[hc \* \(hc \+ 2\)\] values, got shape \(23,\)"):
        make(base=base[:23])
    with pytest.raises(ValueError, match="sinkhorn_iters: expected 1 or more, got 0"):
        make(sinkhorn_iters=0)
    with pytest.raises(TypeError, match=r"streams: expected .*BF16, got .*FLOAT"):
        make(streams=tensors["comb"])
    assert network.num_layers == 0


def test_linear_refuses(network, functional, tensors):
    with pytest.raises(ValueError, match=r"x: expected shape \[any, 32\].*got \(-1, 64\)"):
        functional.linear(network, tensors["x"], np.ones((8, 32), BFLOAT16))
    with pytest.raises(TypeError, match=r"x: expected .*FLOAT, got .*BF16"):
        functional.linear(network, tensors["x"], np.ones((8, HIDDEN), np.float32))
    with pytest.raises(ValueError, match=r"weight: expected shape \[N, K\], got \(64,\)"):
        functional.linear(network, tensors["x"], np.ones(HIDDEN, BFLOAT16))


def test_constant_refuses_other_dtypes(network, functional):
    with pytest.raises(TypeError, match="expected float32, int32, bfloat16 or float8_e4m3fn, got float64"):
        functional.constant(network, np.ones(3))


def test_network_keeps_its_weights_alive(trt, builder, functional):
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    array = np.arange(1 << 16, dtype=np.float32).astype(BFLOAT16)
    alive = weakref.ref(array)
    functional.constant(network, array)
    del array
    gc.collect()
    assert alive() is not None
    del network
    gc.collect()
    assert alive() is None


def test_constant_of_a_strided_view(trt, network, functional):
    from trtllm_mhc.network.layers import constant_array

    view = np.arange(24, dtype=np.float32).reshape(4, 6)[:, 1:3]
    functional.constant(network, view)
    np.testing.assert_array_equal(constant_array(network.get_layer(0)), view)
