# SPDX-License-Identifier: Apache-2.0
"""The layer loop's boundaries as networks."""

import ml_dtypes
import numpy as np
import pytest

HIDDEN = 4096
HC = 4
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(params=["plugin", "dist_collective"])
def spec(request, trt, network):
    from trtllm_mhc.network import CommunicatorSpec

    if request.param == "dist_collective" and not hasattr(network, "add_dist_collective"):
        pytest.skip(f"TensorRT {trt.__version__} has no DIST_COLLECTIVE layer")
    return CommunicatorSpec(2, all_reduce=request.param)


@pytest.fixture
def layer(trt):
    from trtllm_mhc.network import LayerWeights

    rng = np.random.default_rng(2)

    def mixes(features):
        return rng.standard_normal((24, features)).astype(np.float32)

    scale, base, norm = np.ones(3, np.float32), np.zeros(24, np.float32), np.ones(HIDDEN, BFLOAT16)
    return LayerWeights(
        hc_attn_fn=mixes(HC * HIDDEN),
        hc_attn_scale=scale,
        hc_attn_base=base,
        hc_ffn_fn=mixes(HC * HIDDEN),
        hc_ffn_scale=scale,
        hc_ffn_base=base,
        attn_norm=norm,
        ffn_norm=norm,
        norm_eps=1e-20,
        rms_norm_eps=1e-20,
        hc_attn_fn_broadcast=mixes(HIDDEN),
    )


def all_reduces(trt, network):
    kinds = {trt.LayerType.PLUGIN_V3, getattr(trt.LayerType, "DIST_COLLECTIVE", None)}
    return [layer for layer in map(network.get_layer, range(network.num_layers)) if layer.type in kinds]


def described(tensor):
    return tensor.dtype, tuple(tensor.shape)


def test_layer_loop(trt, network, spec, layer):
    from trtllm_mhc.network import Boundaries, Step

    boundaries, step = Boundaries(network, spec), Step()
    streams, mixes = (trt.bfloat16, (-1, HC, HIDDEN)), (trt.float32, (-1, HC))
    row = (trt.bfloat16, (-1, HIDDEN))
    state, x = boundaries.first(layer, network.add_input("x", trt.bfloat16, (-1, HIDDEN)), step)
    assert not all_reduces(trt, network)
    assert described(x) == row
    assert state.pending is None
    state.pending = x
    state, x, quant, aux = boundaries.sublayer(layer, True, state, step)
    assert len(all_reduces(trt, network)) == 1
    assert (described(x), quant, aux) == (row, None, None)
    for tensor, expected in (
        (state.residual, streams),
        (state.post, mixes),
        (state.pre, mixes),
        (state.comb, (trt.float32, (-1, HC, HC))),
    ):
        assert described(tensor) == expected
    state.pending = x
    before = network.num_layers
    boundaries.join(layer, step)
    assert network.num_layers == before
    residual = boundaries.post_only(state)
    assert described(residual) == streams
    assert len(all_reduces(trt, network)) == 2
    state, x = boundaries.pre(layer, residual, state, step)
    assert state.residual is residual
    assert len(all_reduces(trt, network)) == 2
    assert described(x) == row


def test_capture_aux(trt, network, spec, layer):
    from trtllm_mhc.network import Boundaries, Step

    boundaries = Boundaries(network, spec)
    state, state.pending = boundaries.first(layer, network.add_input("x", trt.bfloat16, (-1, HIDDEN)), Step())
    _, _, quant, aux = boundaries.sublayer(layer, False, state, Step(), capture_aux=True)
    assert quant is None
    assert described(aux) == (trt.bfloat16, (-1, HIDDEN))


def test_quantize(trt, network, spec, layer):
    from trtllm_mhc.network import Boundaries, Step

    if not hasattr(network, "add_dynamic_quantize"):
        pytest.skip(f"TensorRT {trt.__version__} has no MXFP8 quantisation (test_functional.py checks the refusal)")
    boundaries = Boundaries(network, spec)
    state, state.pending = boundaries.first(layer, network.add_input("x", trt.bfloat16, (-1, HIDDEN)), Step())
    _, _, quant, _ = boundaries.sublayer(layer, False, state, Step(), quantize=True)
    assert described(quant.data) == (trt.fp8, (-1, HIDDEN))
    assert described(quant.scale) == (trt.DataType.E8M0, (-1, HIDDEN // 32))


def test_sublayer_uses_the_weights_of_its_sublayer(trt, network, spec, layer):
    from dataclasses import replace

    from trtllm_mhc.network import Boundaries, Step

    boundaries = Boundaries(network, spec)
    state, state.pending = boundaries.first(layer, network.add_input("x", trt.bfloat16, (-1, HIDDEN)), Step())
    wrong = np.zeros((24, 8), np.float32)
    boundaries.sublayer(replace(layer, hc_attn_fn=wrong), True, state, Step())
    boundaries.sublayer(replace(layer, hc_ffn_fn=wrong), False, state, Step())
    with pytest.raises(ValueError, match=r"fn: expected shape \(24, 16384\), got \(24, 8\)"):
        boundaries.sublayer(replace(layer, hc_ffn_fn=wrong), True, state, Step())
    with pytest.raises(ValueError, match=r"fn: expected shape \(24, 16384\), got \(24, 8\)"):
        boundaries.sublayer(replace(layer, hc_attn_fn=wrong), False, state, Step())


def test_refusals(trt, network, spec, layer):
    from dataclasses import replace

    from trtllm_mhc.network import Boundaries, Step

    boundaries = Boundaries(network, spec)
    x = network.add_input("x", trt.bfloat16, (3, HIDDEN))
    with pytest.raises(ValueError, match="no hc_attn_fn_broadcast"):
        boundaries.first(replace(layer, hc_attn_fn_broadcast=None), x, Step())
    with pytest.raises(ValueError, match="the step has 8 rows, the tensor 3"):
        boundaries.first(layer, x, Step(rows=8))
    state, _ = boundaries.first(layer, x, Step(rows=3))
    with pytest.raises(ValueError, match=r"state\.pending is not set"):
        boundaries.post_only(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_size": 0}, "tp_size: expected 1 or more, got 0"),
        ({"tp_size": 2, "rank": 2}, "rank: expected -1 to 1, got 2"),
        ({"tp_size": 2, "group": (0, 1, 2)}, r"group: expected 2 distinct ranks, got \(0, 1, 2\)"),
        ({"tp_size": 2, "group": (1, 1)}, "group: expected 2 distinct ranks"),
        ({"tp_size": 2, "all_reduce": "nccl"}, "all_reduce: expected 'plugin' or 'dist_collective', got 'nccl'"),
    ],
)
def test_communicator_spec_refuses(trt, arguments, message):
    from trtllm_mhc.network import CommunicatorSpec

    with pytest.raises(ValueError, match=message):
        CommunicatorSpec(**arguments)


def test_communicator_spec_ranks(trt):
    from trtllm_mhc.network import CommunicatorSpec

    assert CommunicatorSpec(4).ranks == (0, 1, 2, 3)
    assert CommunicatorSpec(2, group=(6, 2)).ranks == (6, 2)


def test_dist_collective_is_refused_where_there_is_none(trt, network, layer):
    from trtllm_mhc.network import CommunicatorSpec, functional

    if hasattr(network, "add_dist_collective"):
        pytest.skip(f"TensorRT {trt.__version__} has a DIST_COLLECTIVE layer")
    x = network.add_input("x", trt.bfloat16, (-1, HIDDEN))
    with pytest.raises(RuntimeError, match=r"needs TensorRT 11\.0 or newer, got 10\."):
        functional.all_reduce(network, x, CommunicatorSpec(2, all_reduce="dist_collective"))


def test_dist_collective_names_its_group(trt, network):
    from trtllm_mhc.network import CommunicatorSpec, functional
    from trtllm_mhc.network.collectives import read_collective

    if not hasattr(network, "add_dist_collective"):
        pytest.skip(f"TensorRT {trt.__version__} has no DIST_COLLECTIVE layer")
    x = network.add_input("x", trt.bfloat16, (-1, HIDDEN))
    functional.all_reduce(network, x, CommunicatorSpec(2, group=(4, 5), all_reduce="dist_collective"))
    collective = read_collective(network.get_layer(0))
    assert collective.is_all_reduce_sum
    assert collective.group == (4, 5)


@pytest.mark.parametrize("collapse", [True, False])
@pytest.mark.parametrize("constant_gamma", [True, False])
def test_single_boundary(trt, network, spec, collapse, constant_gamma):
    from trtllm_mhc.network import build_single_boundary

    gamma = np.ones(HIDDEN, BFLOAT16) if constant_gamma else None
    built = build_single_boundary(network, spec, hidden=HIDDEN, norm_eps=1e-20, gamma=gamma, collapse=collapse)
    expected = {
        "x": (trt.bfloat16, (-1, HIDDEN)),
        "residual": (trt.bfloat16, (-1, HC, HIDDEN)),
        "post": (trt.float32, (-1, HC)),
        "comb": (trt.float32, (-1, HC, HC)),
    }
    if collapse:
        expected["pre"] = (trt.float32, (-1, HC))
        if not constant_gamma:
            expected["gamma"] = (trt.bfloat16, (HIDDEN,))
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    assert {t.name: described(t) for t in inputs} == expected
    assert set(built.inputs) == set(expected)
    outputs = {"residual_out": (trt.bfloat16, (-1, HC, HIDDEN))}
    if collapse:
        outputs["layer_input"] = (trt.bfloat16, (-1, HIDDEN))
    marked = [network.get_output(i) for i in range(network.num_outputs)]
    assert {t.name: described(t) for t in marked} == outputs
    assert set(built.outputs) == set(outputs)
    assert len(all_reduces(trt, network)) == 1


def test_single_boundary_of_fixed_rows(trt, network, spec):
    from trtllm_mhc.network import build_single_boundary

    built = build_single_boundary(network, spec, hidden=HIDDEN, norm_eps=1e-20, rows=7)
    assert tuple(built.outputs["residual_out"].shape) == (7, HC, HIDDEN)


def test_coefficients_by_plugin(trt, network, spec, layer):
    from trtllm_mhc.network import Boundaries, Step, plugins

    boundaries = Boundaries(network, spec, coefficients="plugin")
    x = network.add_input("x", trt.bfloat16, (-1, HIDDEN))
    state, layer_input = boundaries.first(layer, x, Step())
    state.pending = layer_input
    state, *_ = boundaries.sublayer(layer, True, state, Step())
    made = [
        plugins.read_fields(each)
        for each in map(network.get_layer, range(network.num_layers))
        if plugins.is_plugin_layer(each, plugins.COEFFICIENTS)
    ]
    assert [fields["broadcast"] for fields in made] == [1, 0]
    for fields in made:
        assert (fields["hc_eps"], fields["sinkhorn_iters"]) == (float(np.float32(layer.hc_eps)), 20)
        assert (fields["post_alpha"], fields["rms_norm_eps"]) == (2.0, float(np.float32(layer.rms_norm_eps)))
    assert described(state.comb) == (trt.float32, (-1, HC, HC))
    assert described(state.pre) == described(state.post) == (trt.float32, (-1, HC))


def test_unknown_coefficients_are_refused(network, spec):
    from trtllm_mhc.network import Boundaries

    with pytest.raises(ValueError, match="coefficients: expected 'native' or 'plugin', got 'eager'"):
        Boundaries(network, spec, coefficients="eager")
