# SPDX-License-Identifier: Apache-2.0
"""The boundary stack of DeepSeek V4.1: weights, structure, and values under the interpreter."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def models(trt):
    from trtllm_mhc.models import deepseek_v41

    return deepseek_v41


@pytest.fixture
def config(models):
    """The real structure (Engram layer, hc 4, 20 iterations) with small matrices."""
    return models.DeepseekV41Config(hidden_size=4096, num_hidden_layers=3, o_lora_rank=32, mlp_size=64)


@pytest.fixture(params=["plugin", "dist_collective"])
def all_reduce(request, trt):
    if request.param == "dist_collective" and not hasattr(trt.INetworkDefinition, "add_dist_collective"):
        pytest.skip(f"TensorRT {trt.__version__} has no DIST_COLLECTIVE layer")
    return request.param


@pytest.fixture
def build(trt, builder, models, all_reduce):
    """Builds a stack for every rank; returns (networks, stacks)."""
    from trtllm_mhc.network import CommunicatorSpec

    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def build(config, tp_size, weights=None, **options):
        weights = weights or models.ModelWeights(config, seed=11)
        networks = [builder.create_network(flags) for _ in range(tp_size)]
        spec = CommunicatorSpec(tp_size, all_reduce=all_reduce)
        stacks = [
            models.build_boundary_stack(network, config, weights, spec, rank=rank, **options)
            for rank, network in enumerate(networks)
        ]
        return networks, stacks

    return build


def layers(network):
    return [network.get_layer(i) for i in range(network.num_layers)]


def collectives(trt, network):
    kinds = {trt.LayerType.PLUGIN_V3, getattr(trt.LayerType, "DIST_COLLECTIVE", None)}
    return [layer for layer in layers(network) if layer.type in kinds]


def collapsed_streams(trt, network, streams):
    """How many of ``streams`` enter a collapse: widened, times a mix, summed over the streams."""
    from trtllm_mhc.network.layers import downcast

    users = {}
    for layer in layers(network):
        for i in range(layer.num_inputs):
            users.setdefault(layer.get_input(i).name, []).append(layer)

    def follow(tensors, kind):
        return [u for t in tensors for u in users.get(t.name, []) if u.type == kind]

    count = 0
    for stream in streams:
        casts = follow([stream], trt.LayerType.CAST)
        products = follow([c.get_output(0) for c in casts], trt.LayerType.ELEMENTWISE)
        sums = follow([p.get_output(0) for p in products], trt.LayerType.REDUCE)
        count += any(
            downcast(r).axes == 1 << 1 and tuple(r.get_output(0).shape) == (stream.shape[0], stream.shape[2])
            for r in sums
        )
    return count


def test_flash_has_77_full_and_3_residual_only_boundaries(models):
    config = models.DeepseekV41Config()
    assert (config.hidden_size, config.num_hidden_layers, config.attention_size) == (5120, 40, 8192)
    assert (config.boundaries, config.boundaries_full, config.boundaries_residual_only) == (80, 77, 3)


@pytest.mark.parametrize("sublayers", ["matmul", "none"])
def test_all_boundaries_are_in_the_network(trt, models, build, sublayers):
    config = models.DeepseekV41Config(hidden_size=4096, o_lora_rank=8, mlp_size=8)
    (network,), (stack,) = build(config, 1, sublayers=sublayers)
    assert len(collectives(trt, network)) == len(stack.streams) == 80
    assert collapsed_streams(trt, network, stack.streams) == 77
    # Coefficients at every sublayer's entry; matrices of the sublayers on top of theirs.
    kinds = [layer.type for layer in layers(network)]
    assert kinds.count(trt.LayerType.SOFTMAX) == 80
    assert kinds.count(trt.LayerType.MATRIX_MULTIPLY) == 80 + (160 if sublayers == "matmul" else 0)


def test_inputs_and_outputs(trt, build, config):
    (network,), (stack,) = build(config, 1, sublayers="none")
    assert (network.num_inputs, network.num_outputs) == (1, 1)
    for tensor, name in ((network.get_input(0), "embeddings"), (network.get_output(0), "hidden_states")):
        assert (tensor.name, tensor.dtype, tuple(tensor.shape)) == (name, trt.bfloat16, (-1, 4096))
    assert (stack.input.name, stack.output.name) == ("embeddings", "hidden_states")


def test_output_streams(trt, build, config):
    (network,), _ = build(config, 1, sublayers="none", output_streams=True, rows=8)
    names = [network.get_output(i).name for i in range(network.num_outputs)]
    assert names == ["hidden_states"] + [f"streams_{i}" for i in range(6)]
    assert tuple(network.get_output(1).shape) == (8, 4, 4096)


def test_refusals(models, build, config):
    weights = models.ModelWeights(config)
    with pytest.raises(ValueError, match="weights: expected those of"):
        build(replace(config, num_hidden_layers=2), 1, weights)
    with pytest.raises(ValueError, match=r"sublayers: expected one of .*'routed'.*, got 'all'"):
        build(config, 1, weights, sublayers="all")
    with pytest.raises(ValueError, match="mlp_size: expected a multiple of tp_size 8, got 12"):
        build(replace(config, mlp_size=12), 8)


def test_rank_must_agree(network, models, config):
    from trtllm_mhc.network import CommunicatorSpec

    weights = models.ModelWeights(config)
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        models.build_boundary_stack(network, config, weights, CommunicatorSpec(2), rank=2)
    with pytest.raises(ValueError, match="rank: expected 0 as in the communicator spec, got 1"):
        models.build_boundary_stack(network, config, weights, CommunicatorSpec(2, rank=0), rank=1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 0, "hidden_size: expected 1 or more, got 0"),
        ("engram_layers", (0,), r"engram_layers: expected layers after the first \(0\), got \(0,\)"),
    ],
)
def test_config_refuses(models, field, value, message):
    with pytest.raises(ValueError, match=message):
        models.DeepseekV41Config(**{field: value})


def test_weights_are_deterministic(models, config):
    one, same, other = (models.ModelWeights(config, seed=seed) for seed in (1, 1, 2))
    # Not in the order of the other: neither the order of calls nor their number may matter.
    same.mlp(2, 0, 1)
    for get in (
        lambda w: w.attention(1, 1, 2).wo_b,
        lambda w: w.mlp(1, 1, 2).down,
        lambda w: w.layer(1).hc_ffn_fn,
        lambda w: w.layer(1).hc_ffn_base,
        lambda w: w.elementwise(3, 0, 2).out,
        lambda w: w.engram(1).value,
        lambda w: w.final_norm(),
    ):
        np.testing.assert_array_equal(get(one), get(same))
        assert (get(one) != get(other)).mean() > 0.5


@pytest.mark.parametrize("tp_size", [2, 8])
def test_shards_make_up_the_whole(models, config, tp_size):
    weights = models.ModelWeights(config)
    attention = [weights.attention(2, rank, tp_size) for rank in range(tp_size)]
    mlp = [weights.mlp(2, rank, tp_size) for rank in range(tp_size)]
    whole, whole_mlp = weights.attention(2, 0, 1), weights.mlp(2, 0, 1)
    assert attention[0].wo_b.shape == (4096, 256 // tp_size)
    np.testing.assert_array_equal(np.concatenate([a.wo_b for a in attention], axis=1), whole.wo_b)
    np.testing.assert_array_equal(np.concatenate([a.columns for a in attention]), whole.columns)
    np.testing.assert_array_equal(np.concatenate([a.gain for a in attention], axis=1), whole.gain)
    np.testing.assert_array_equal(np.concatenate([m.gate for m in mlp]), whole_mlp.gate)
    np.testing.assert_array_equal(np.concatenate([m.up for m in mlp]), whole_mlp.up)
    np.testing.assert_array_equal(np.concatenate([m.down for m in mlp], axis=1), whole_mlp.down)


def test_no_two_layers_share_a_matrix(models, config):
    weights = models.ModelWeights(config)
    for get in (
        lambda index: weights.attention(index, 0, 1).wo_b,
        lambda index: weights.mlp(index, 0, 1).gate,
        lambda index: weights.mlp(index, 0, 1).down,
        lambda index: weights.layer(index).hc_attn_fn,
    ):
        first, second = get(0), get(1)
        assert (first != second).mean() > 0.9
        assert abs(np.corrcoef(first.astype(np.float32).ravel(), second.astype(np.float32).ravel())[0, 1]) < 0.02


def test_layers_compute_unrelated_things(models, config):
    """Windows into the same numbers must not give one layer's MLP most of another's units."""
    weights = models.ModelWeights(config)
    x = np.random.default_rng(3).standard_normal((16, 4096)).astype(np.float32)

    def mlp(index):
        gate, up, down = (getattr(weights.mlp(index, 0, 1), name).astype(np.float32) for name in ("gate", "up", "down"))
        g = x @ gate.T
        return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T

    outputs = [mlp(index).ravel() for index in range(3)]
    assert np.abs(np.corrcoef(outputs) - np.eye(3)).max() < 0.05
    assert all(0.15 < output.std() < 0.35 for output in outputs)


def test_attention_and_ffn_have_their_own_coefficients(models, config):
    layer = models.ModelWeights(config).layer(0)
    assert (layer.hc_attn_fn != layer.hc_ffn_fn).mean() > 0.9
    assert layer.hc_attn_fn_broadcast.shape == (24, 4096)
    assert models.ModelWeights(config).layer(1).hc_attn_fn_broadcast is None


def test_coefficients_are_spread(models, config):
    """Neither saturated nor all alike, so that a mistake in any of them shows."""
    from trtllm_mhc.reference.coefficients import coefficients_float64

    streams = np.random.default_rng(0).standard_normal((16, 4, 4096)).astype(BFLOAT16)
    weights = models.ModelWeights(config)
    found = [
        coefficients_float64(
            streams,
            layer.hc_attn_fn,
            layer.hc_attn_scale,
            layer.hc_attn_base,
            rms_norm_eps=layer.rms_norm_eps,
            hc_eps=layer.hc_eps,
            post_alpha=layer.hc_post_alpha,
            sinkhorn_iters=layer.hc_sinkhorn_iters,
        )
        for layer in map(weights.layer, range(3))
    ]
    for name, low, high in (("pre", 0.02, 0.98), ("post", 0.04, 1.96), ("comb", 0.001, 0.99)):
        values = np.concatenate([getattr(f, name).reshape(16, -1) for f in found], axis=1)
        assert low < values.min(), name
        assert values.max() < high, name
        assert values.std(axis=0).min() > 0.005, name  # across rows: they depend on the input


def test_engram_injection(trt, network, models, config):
    from trtllm_mhc.models.deepseek_v41.stack import inject_engram
    from trtllm_mhc.reference.interpreter import evaluate

    weights = models.ModelWeights(config).engram(1)
    streams = np.random.default_rng(1).standard_normal((3, 4, 4096)).astype(BFLOAT16)
    out = inject_engram(network, network.add_input("h", trt.bfloat16, (-1, 4, 4096)), weights, 1e-20)
    out.name = "out"
    network.mark_output(out)
    actual = evaluate([network], [{"h": streams}], precision="float64")[0]["out"]

    h = streams.astype(np.float64)
    norm, key, value = (a.astype(np.float64).reshape(-1) for a in (weights.norm, weights.key, weights.value))
    dot = np.einsum("mih,h,h->mi", h / np.sqrt((h**2).mean(axis=2, keepdims=True)), norm, key) / 64
    gate = 1 / (1 + np.exp(-np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), 1e-6))))
    np.testing.assert_allclose(actual, h + gate[:, :, None] * value, rtol=1e-7, atol=1e-9)
    assert np.abs(actual - h).mean() > 0.1


def evaluate_ranks(networks, embeddings, precision):
    from trtllm_mhc.reference.interpreter import evaluate

    return evaluate(networks, [{"embeddings": embeddings}] * len(networks), precision=precision)


@pytest.fixture
def embeddings():
    return np.random.default_rng(2).standard_normal((3, 4096)).astype(BFLOAT16)


def test_ranks_agree_and_streams_stay_of_order_one(build, config, embeddings):
    for sublayers in ("matmul", "none"):
        networks, _ = build(config, 2, sublayers=sublayers, output_streams=True)
        first, second = evaluate_ranks(networks, embeddings, "network")
        for name, values in first.items():
            np.testing.assert_array_equal(values, second[name])
            rms = np.sqrt(np.square(values.astype(np.float32)).mean())
            assert 0.3 < rms < 3, (sublayers, name, rms)


def test_every_rank_contributes(build, config, embeddings):
    """Two halves of one model give what the whole gives: the reduction sums different partial outputs."""
    whole = evaluate_ranks(build(config, 1)[0], embeddings, "float64")[0]["hidden_states"]
    halves = evaluate_ranks(build(config, 2)[0], embeddings, "float64")[0]["hidden_states"]
    np.testing.assert_allclose(halves, whole, rtol=1e-9, atol=1e-9)


def test_rounding_is_small_against_the_signal(build, config, embeddings):
    networks, _ = build(config, 2)
    exact = evaluate_ranks(networks, embeddings, "float64")[0]["hidden_states"]
    rounded = evaluate_ranks(networks, embeddings, "network")[0]["hidden_states"].astype(np.float64)
    relative = np.sqrt(np.square(rounded - exact).mean() / np.square(exact).mean())
    assert 1e-4 < relative < 0.05


def test_sublayers_matter(build, config, embeddings):
    matmul = evaluate_ranks(build(config, 1)[0], embeddings, "float64")[0]["hidden_states"]
    none = evaluate_ranks(build(config, 1, sublayers="none")[0], embeddings, "float64")[0]["hidden_states"]
    assert np.abs(matmul - none).mean() > 0.05
