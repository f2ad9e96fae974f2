# SPDX-License-Identifier: Apache-2.0
"""The interpreter on several ranks: where they meet, what comes out, and what happens when they do not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

BF16 = ml_dtypes.bfloat16
HIDDEN = 4096
EPS = 1e-20


@pytest.fixture
def evaluate(trt):
    from trtllm_mhc.reference.interpreter import evaluate

    return evaluate


@pytest.fixture
def networks(trt, builder):
    """Makes as many fresh networks as asked for."""
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return lambda count: [builder.create_network(flags) for _ in range(count)]


def boundary_feeds(ranks, rows=3, seed=0, collapse=True):
    """Inputs of a boundary: another ``x`` on each rank, everything else the same."""
    rng = np.random.default_rng(seed)

    def values(*shape, dtype=np.float32):
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    shared = {
        "residual": values(rows, 4, HIDDEN, dtype=BF16),
        "post": values(rows, 4),
        "comb": values(rows, 4, 4),
    }
    if collapse:
        shared |= {"pre": values(rows, 4), "gamma": values(HIDDEN, dtype=BF16)}
    return [{"x": values(rows, HIDDEN, dtype=BF16), **shared} for _ in range(ranks)]


def add_inputs(trt, network, feed):
    dtypes = {np.dtype(BF16): trt.bfloat16, np.dtype(np.float32): trt.float32, np.dtype(np.int32): trt.int32}
    return {
        name: network.add_input(name, dtypes[array.dtype], array.shape if name == "gamma" else (-1, *array.shape[1:]))
        for name, array in feed.items()
    }


def mark(network, **tensors):
    for name, tensor in tensors.items():
        tensor.name = name
        network.mark_output(tensor)


def add_fused(trt, network, feed, **attributes):
    from trtllm_mhc.network import plugins

    tensors = add_inputs(trt, network, feed)
    arguments = [tensors.get(name) for name in ("x", "residual", "post", "comb", "pre", "gamma")]
    streams, layer_input = plugins.add_boundary(network, *arguments, **({"norm_eps": EPS} | attributes))
    mark(network, residual_out=streams)
    if layer_input is not None:
        mark(network, layer_input=layer_input)


def add_sum(trt, network, rows=-1, **attributes):
    from trtllm_mhc.network import plugins

    x = network.add_input("x", trt.bfloat16, (rows, HIDDEN))
    mark(network, sum=plugins.add_all_reduce(network, x, **attributes))


def assert_bits(got, want):
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


def random_x(rows=2, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, HIDDEN)).astype(np.float32).astype(BF16)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_reduce_is_the_reference(trt, networks, evaluate, ranks):
    from trtllm_mhc.reference import operations

    made = networks(ranks)
    for network in made:
        add_sum(trt, network, tp_size=ranks)
    xs = [random_x(seed=rank) for rank in range(ranks)]
    xs[0][0, :8] = np.array([-0.0], BF16)
    for x in xs[1:]:
        x[0, :8] = 0
    outputs = evaluate(made, [{"x": x} for x in xs])
    want = operations.all_reduce(xs)
    for output in outputs:
        assert_bits(output["sum"], want)

    exact = evaluate(made, [{"x": x} for x in xs], precision="float64")
    for output in exact:
        np.testing.assert_array_equal(output["sum"], sum(x.astype(np.float64) for x in xs))
    if ranks > 1:
        assert np.mean(exact[0]["sum"] != want.astype(np.float64)) > 0.1


@pytest.mark.parametrize("collapse", [True, False], ids=["full", "residual-only"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_boundary_is_the_reference(trt, networks, evaluate, ranks, collapse):
    from trtllm_mhc.reference import float64, operations

    made, feeds = networks(ranks), boundary_feeds(ranks, collapse=collapse)
    for network, feed in zip(made, feeds, strict=True):
        add_fused(trt, network, feed, tp_size=ranks)
    arguments = [
        [feed["x"] for feed in feeds],
        *(feeds[0].get(name) for name in ("residual", "post", "comb", "pre", "gamma")),
        EPS if collapse else None,
    ]
    for precision, reference in (("network", operations), ("float64", float64)):
        streams, layer_input = reference.boundary(*arguments)
        for output in evaluate(made, feeds, precision=precision):
            assert set(output) == ({"residual_out", "layer_input"} if collapse else {"residual_out"})
            assert_bits(output["residual_out"], streams)
            if collapse:
                assert_bits(output["layer_input"], layer_input)


@pytest.mark.parametrize("all_reduce", ["plugin", "dist_collective"])
@pytest.mark.parametrize("collapse", [True, False], ids=["full", "residual-only"])
def test_native_layers_agree_with_the_fused_boundary(trt, networks, evaluate, collapse, all_reduce):
    """The unfused form in native layers is the same function: exactly so in float64, almost so in bf16."""
    from trtllm_mhc.network.boundaries import CommunicatorSpec
    from trtllm_mhc.network.single_boundary import build_single_boundary

    unfused, fused, feeds = networks(2), networks(2), boundary_feeds(2, collapse=collapse)
    if all_reduce == "dist_collective" and not hasattr(unfused[0], "add_dist_collective"):
        pytest.skip(f"TensorRT {trt.__version__} has no DIST_COLLECTIVE layer")
    spec = CommunicatorSpec(2, all_reduce=all_reduce)
    for network, twin, feed in zip(unfused, fused, feeds, strict=True):
        build_single_boundary(network, spec, hidden=HIDDEN, norm_eps=EPS, collapse=collapse)
        add_fused(trt, twin, feed, tp_size=2)
    for native, plugin in zip(
        evaluate(unfused, feeds, precision="float64"), evaluate(fused, feeds, precision="float64"), strict=True
    ):
        assert set(native) == set(plugin)
        for name, value in native.items():
            np.testing.assert_allclose(value, plugin[name], rtol=1e-12, atol=1e-12)
    for native, plugin in zip(evaluate(unfused, feeds), evaluate(fused, feeds), strict=True):
        for name, value in native.items():
            assert value.dtype == BF16
            same = value.view(np.uint16) == plugin[name].view(np.uint16)
            assert np.mean(same) > 0.99
            np.testing.assert_allclose(
                value.astype(np.float64), plugin[name].astype(np.float64), rtol=2.0**-6, atol=0.05
            )


@pytest.mark.parametrize("precision", ["network", "float64"])
def test_boundary_finalizes_a_moe_output(trt, networks, evaluate, precision):
    from trtllm_mhc.network import plugins
    from trtllm_mhc.reference import float64, operations

    reference = operations if precision == "network" else float64
    made, feeds, contributions = networks(2), boundary_feeds(2, collapse=False), []
    for rank, (network, feed) in enumerate(zip(made, feeds, strict=True)):
        rng = np.random.default_rng(rank)
        moe = {
            "gemm2_permuted": rng.standard_normal((8, HIDDEN)).astype(np.float32).astype(BF16),
            "expert_weights": rng.random((3, 2)).astype(np.float32),
            "expanded_idx_to_permuted_idx": np.array([[0, 5], [-1, 3], [7, -1]], np.int32),
            "shared_output": feed.pop("x"),
        }
        contributions.append(reference.finalize(*moe.values()))
        tensors = add_inputs(trt, network, moe | feed)
        outputs = plugins.add_boundary_layer(
            network,
            plugins.FinalizeInputs(**{name: tensors[name] for name in moe}),
            *(tensors[name] for name in ("residual", "post", "comb")),
            None,
            None,
            tp_size=2,
            norm_eps=None,
        )
        mark(network, residual_out=outputs.residual_out)
        feed.update(moe)
    mixes = [feeds[0][name] for name in ("residual", "post", "comb")]
    streams, _ = reference.boundary(contributions, *mixes)
    for output in evaluate(made, feeds, precision=precision):
        assert_bits(output["residual_out"], streams)


def test_quantized_boundary(trt, networks, evaluate):
    from trtllm_mhc.network import plugins
    from trtllm_mhc.reference import mxfp8, operations

    made, feeds = networks(2), boundary_feeds(2)
    for network, feed in zip(made, feeds, strict=True):
        tensors = add_inputs(trt, network, feed)
        outputs = plugins.add_boundary_layer(network, *tensors.values(), tp_size=2, norm_eps=EPS, quantize=True)
        mark(network, data=outputs.mxfp8_data, scales=outputs.mxfp8_scales)
    arguments = [feeds[0][name] for name in ("residual", "post", "comb", "pre", "gamma")]
    _, layer_input = operations.boundary([feed["x"] for feed in feeds], *arguments, EPS)
    data, scales = mxfp8.quantize(layer_input)
    for output in evaluate(made, feeds):
        assert_bits(output["data"], data)
        assert output["scales"].dtype == np.int32
        np.testing.assert_array_equal(output["scales"].view(np.uint8), scales)
    with pytest.raises(NotImplementedError, match=r"quantize=1 in float64"):
        evaluate(made, feeds, precision="float64")


def test_dist_collective_sums_in_fp32_and_rounds_once(trt, networks, evaluate):
    from trtllm_mhc.network.collectives import label_all_reduce_sum

    made = networks(4)
    if not hasattr(made[0], "add_dist_collective"):
        pytest.skip(f"TensorRT {trt.__version__} has no DIST_COLLECTIVE layer")
    for network in made:
        x = network.add_input("x", trt.bfloat16, (-1, 8))
        layer = network.add_dist_collective(
            x, trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM, -1, np.arange(4)
        )
        layer.num_ranks = 4
        label_all_reduce_sum(layer, range(4))
        mark(network, sum=layer.get_output(0))
    # Rounding to bf16 after every addition would give 1.
    xs = [np.full((1, 8), value, BF16) for value in (1, 2.0**-8, 2.0**-8, 2.0**-8)]
    outputs = evaluate(made, [{"x": x} for x in xs])
    for output in outputs:
        assert output["sum"].dtype == BF16
        assert output["sum"].astype(np.float64).tolist() == [[1 + 2.0**-7 * 2] * 8]
    exact = evaluate(made, [{"x": x} for x in xs], precision="float64")
    assert exact[3]["sum"].tolist() == [[1 + 3 * 2.0**-8] * 8]


def test_dist_collective_that_nothing_describes(trt, networks, evaluate):
    (network,) = networks(1)
    if not hasattr(network, "add_dist_collective"):
        pytest.skip(f"TensorRT {trt.__version__} has no DIST_COLLECTIVE layer")
    x = network.add_input("x", trt.bfloat16, (-1, 8))
    layer = network.add_dist_collective(x, trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM, -1, [0])
    layer.name = "mystery"
    mark(network, sum=layer.get_output(0))
    with pytest.raises(NotImplementedError, match=r"'mystery' of type DIST_COLLECTIVE.*nothing describes"):
        evaluate([network], [{"x": np.zeros((1, 8), BF16)}])


def test_groups_are_summed_apart(trt, networks, evaluate):
    from trtllm_mhc.reference import operations

    made = networks(4)
    groups = [(0, 2), (3, 1), (0, 2), (3, 1)]
    for network, group in zip(made, groups, strict=True):
        add_sum(trt, network, tp_size=2, group=group)
    xs = [random_x(rows=2 if rank % 2 else 3, seed=rank) for rank in range(4)]
    outputs = evaluate(made, [{"x": x} for x in xs])
    for rank, group in enumerate(groups):
        assert_bits(outputs[rank]["sum"], operations.all_reduce([xs[member] for member in group]))


def test_groups_may_have_different_numbers_of_collectives(trt, networks, evaluate):
    from trtllm_mhc.network import plugins

    made = networks(3)
    add_sum(trt, made[0], tp_size=1, group=(0,))
    for network in made[1:]:
        x = network.add_input("x", trt.bfloat16, (-1, HIDDEN))
        once = plugins.add_all_reduce(network, x, tp_size=2, group=(1, 2))
        mark(network, sum=plugins.add_all_reduce(network, once, tp_size=2, group=(1, 2)))
    outputs = evaluate(made, [{"x": np.full((1, HIDDEN), rank + 1, BF16)} for rank in range(3)])
    assert [float(output["sum"][0, 0]) for output in outputs] == [1, 10, 10]


def test_insertion_order_may_differ_between_ranks(trt, networks, evaluate):
    from trtllm_mhc.network import plugins

    made = networks(2)
    for rank, network in enumerate(made):
        inputs = {name: network.add_input(name, trt.bfloat16, (-1, HIDDEN)) for name in ("a", "b")}
        sums = {}
        for name in ("a", "b") if rank == 0 else ("b", "a"):
            sums[name] = plugins.add_all_reduce(network, inputs[name], tp_size=2)
        mark(network, a_sum=sums["a"], b_sum=sums["b"])
    feeds = [{"a": random_x(seed=rank), "b": random_x(seed=10 + rank)} for rank in range(2)]
    first, second = evaluate(made, feeds)
    for name in ("a", "b"):
        want = (feeds[0][name].astype(np.float32) + feeds[1][name].astype(np.float32)).astype(BF16)
        np.testing.assert_array_equal(first[f"{name}_sum"], want)
        np.testing.assert_array_equal(second[f"{name}_sum"], want)


def test_rank_without_the_collective_is_an_error(trt, networks, evaluate):
    from trtllm_mhc.reference.interpreter import LockstepError

    made = networks(2)
    add_sum(trt, made[0], tp_size=2)
    made[0].get_layer(0).name = "lonely"
    x = made[1].add_input("x", trt.bfloat16, (-1, HIDDEN))
    mark(made[1], sum=made[1].add_identity(x).get_output(0))
    with pytest.raises(LockstepError, match=r"(?s)rank 0: layer 'lonely', MhcAllReduce.*rank 1: no collective left"):
        evaluate(made, [{"x": random_x()}] * 2)


def test_different_collectives_are_an_error(trt, networks, evaluate):
    from trtllm_mhc.reference.interpreter import LockstepError

    made, feeds = networks(2), boundary_feeds(2)
    add_fused(trt, made[0], feeds[0], tp_size=2)
    made[0].get_layer(0).name = "boundary"
    add_sum(trt, made[1], tp_size=2)
    made[1].get_layer(0).name = "sum only"
    message = r"(?s)rank 0: layer 'boundary', MhcBoundary.*rank 1: layer 'sum only', MhcAllReduce"
    with pytest.raises(LockstepError, match=message):
        evaluate(made, [feeds[0], {"x": feeds[1]["x"]}])


def test_different_attributes_are_an_error(trt, networks, evaluate):
    from trtllm_mhc.reference.interpreter import LockstepError

    made, feeds = networks(2), boundary_feeds(2)
    add_fused(trt, made[0], feeds[0], tp_size=2, norm_eps=2.0**-20)
    add_fused(trt, made[1], feeds[1], tp_size=2, norm_eps=2.0**-10)
    with pytest.raises(
        LockstepError, match=r"(?s)rank 0: .*norm_eps=9.5367431640625e-07.*rank 1: .*norm_eps=0.0009765625"
    ):
        evaluate(made, feeds)


def test_different_rows_are_an_error(trt, networks, evaluate):
    from trtllm_mhc.reference.interpreter import LockstepError

    made = networks(2)
    for network in made:
        add_sum(trt, network, tp_size=2)
    with pytest.raises(LockstepError, match=r"(?s)rank 0: .*inputs \[2, 4096\].*rank 1: .*inputs \[3, 4096\]"):
        evaluate(made, [{"x": random_x(rows=2)}, {"x": random_x(rows=3)}])


def test_different_groups_are_an_error(trt, networks, evaluate):
    from trtllm_mhc.reference.interpreter import LockstepError

    made = networks(2)
    add_sum(trt, made[0], tp_size=2, group=(0, 1))
    add_sum(trt, made[1], tp_size=2, group=(1, 0))
    with pytest.raises(LockstepError, match=r"(?s)rank 0: .*ranks \[0, 1\].*rank 1: .*ranks \[1, 0\]"):
        evaluate(made, [{"x": random_x()}] * 2)


@pytest.mark.parametrize(("tp_size", "group"), [(4, ()), (2, (0, 5)), (2, (1, 2))])
def test_group_outside_the_networks_is_an_error(trt, networks, evaluate, tp_size, group):
    made = networks(2)
    for network in made:
        add_sum(trt, network, tp_size=tp_size, group=group)
    with pytest.raises(ValueError, match=r"distinct ranks below 2 \(the number of networks\) that contains rank 0"):
        evaluate(made, [{"x": random_x()}] * 2)


def test_rank_that_contradicts_the_group_is_an_error(trt, networks, evaluate):
    made = networks(2)
    for network in made:
        add_sum(trt, network, tp_size=2, rank=0)
    with pytest.raises(ValueError, match=r"network 1: expected rank 1 in group \[0, 1\] or -1, got 0"):
        evaluate(made, [{"x": random_x()}] * 2)


def test_ranks_named_explicitly(trt, networks, evaluate):
    made = networks(2)
    for rank, network in enumerate(made):
        add_sum(trt, network, tp_size=2, rank=rank)
    outputs = evaluate(made, [{"x": np.full((1, HIDDEN), 1.5, BF16)}] * 2)
    assert float(outputs[1]["sum"][0, 7]) == 3


def test_unknown_plugin_is_named(trt, networks, evaluate, monkeypatch):
    from trtllm_mhc.network import plugins

    (network,) = networks(1)
    add_sum(trt, network, tp_size=1)
    network.get_layer(0).name = "foreign"
    monkeypatch.setattr(plugins, "is_plugin_layer", lambda layer, name: False)
    message = r"'foreign' of type PLUGIN_V3: plugin trtllm_mhc::MhcAllReduce version 1 is not supported"
    with pytest.raises(NotImplementedError, match=message):
        evaluate([network], [{"x": random_x()}])


def test_collective_that_no_output_needs_is_not_met(trt, networks, evaluate):
    from trtllm_mhc.network import plugins

    made = networks(2)
    for network in made:
        x = network.add_input("x", trt.bfloat16, (-1, HIDDEN))
        mark(network, out=network.add_identity(x).get_output(0))
    plugins.add_all_reduce(made[0], made[0].get_input(0), tp_size=2)
    x = random_x()
    for output in evaluate(made, [{"x": x}] * 2):
        assert_bits(output["out"], x)


@pytest.mark.parametrize("coefficients", ["native", "plugin"])
def test_stack_is_the_same_function_for_any_number_of_ranks(trt, networks, evaluate, coefficients):
    """Sharding only regroups the sums: nothing of it shows in float64, and rounding shows in bf16."""
    from trtllm_mhc.models.deepseek_v41.config import DeepseekV41Config
    from trtllm_mhc.models.deepseek_v41.stack import build_boundary_stack
    from trtllm_mhc.models.deepseek_v41.weights import ModelWeights
    from trtllm_mhc.network.boundaries import CommunicatorSpec

    config = DeepseekV41Config(
        hidden_size=HIDDEN, num_hidden_layers=3, o_groups=1, o_lora_rank=256, mlp_size=64, engram_layers=(1,)
    )
    weights = ModelWeights(config, seed=3)
    embeddings = random_x(rows=2)
    results = {}
    for ranks in (1, 2, 4):
        made = networks(ranks)
        for rank, network in enumerate(made):
            spec = CommunicatorSpec(ranks)
            stack = build_boundary_stack(network, config, weights, spec, rank=rank, coefficients=coefficients)
        feeds = [{stack.input.name: embeddings}] * ranks
        for precision in ("network", "float64"):
            outputs = [output[stack.output.name] for output in evaluate(made, feeds, precision=precision)]
            for output in outputs[1:]:
                assert_bits(output, outputs[0])
            results[ranks, precision] = outputs[0]
    exact = results[1, "float64"]
    assert 0.1 < np.abs(exact).mean() < 10
    for ranks in (2, 4):
        np.testing.assert_allclose(results[ranks, "float64"], exact, rtol=1e-9, atol=1e-9)
    for ranks in (1, 2, 4):
        error = np.sqrt(np.mean((results[ranks, "network"].astype(np.float64) - exact) ** 2))
        assert 1e-4 < error < 0.05
