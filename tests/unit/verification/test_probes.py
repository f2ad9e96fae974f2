# SPDX-License-Identifier: Apache-2.0
"""Fused networks that show their boundaries, evaluated by the interpreter."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from trtllm_mhc.verification import checks

Array = npt.NDArray[Any]
HIDDEN, ROWS, TP, EPS = 4096, 2, 2, 1e-6


def bf16(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def two_boundaries(network: Any, trt: Any) -> None:
    """A full boundary with a constant gamma, and a residual-only one on what comes out of it."""
    from trtllm_mhc.network import ops, plugins

    x = network.add_input("x", trt.bfloat16, (-1, HIDDEN))
    residual = network.add_input("residual", trt.bfloat16, (-1, 4, HIDDEN))
    post = network.add_input("post", trt.float32, (-1, 4))
    comb = network.add_input("comb", trt.float32, (-1, 4, 4))
    pre = network.add_input("pre", trt.float32, (-1, 4))
    gamma = ops.constant(network, bf16(np.random.default_rng(3), HIDDEN))
    streams, layer_input = plugins.add_boundary(network, x, residual, post, comb, pre, gamma, tp_size=TP, norm_eps=EPS)
    assert layer_input is not None
    partial = network.add_activation(layer_input, trt.ActivationType.TANH).get_output(0)
    last, _ = plugins.add_boundary(network, partial, streams, post, comb, None, None, tp_size=TP, norm_eps=None)
    last.name = "last"
    network.mark_output(last)


def feeds() -> list[dict[str, Array]]:
    rng = np.random.default_rng(5)
    shared = {
        "residual": bf16(rng, ROWS, 4, HIDDEN),
        "post": rng.random((ROWS, 4), np.float32),
        "comb": rng.random((ROWS, 4, 4), np.float32),
        "pre": rng.random((ROWS, 4), np.float32),
    }
    return [{**shared, "x": bf16(rng, ROWS, HIDDEN)} for _ in range(TP)]


def test_probes_show_every_boundary(trt: Any, network: Any) -> None:
    from trtllm_mhc.reference.interpreter import evaluate
    from trtllm_mhc.verification.probes import probe_boundaries

    two_boundaries(network, trt)
    probes = probe_boundaries(network)
    assert [probe.residual_only for probe in probes] == [False, True]
    assert probes[0].norm_eps == pytest.approx(EPS, rel=1e-7)
    assert list(probes[0].constants) == ["gamma"]
    assert set(probes[0].tensors) == {"x", "residual", "post", "comb", "pre", "residual_out", "layer_input"}
    assert set(probes[1].tensors) == {"x", "residual", "post", "comb", "residual_out"}
    assert probes[1].tensors["residual"] == probes[0].tensors["residual_out"]
    # layer_input, partial and the first streams have become outputs; network inputs and the old output have not.
    assert network.num_outputs == 4

    given = feeds()
    outputs = evaluate([network] * TP, given)
    for probe in probes:
        ranks = [probe.read({**feed, **out}) for feed, out in zip(given, outputs, strict=True)]
        assert checks.check_boundary(ranks, probe.norm_eps) == checks.BoundaryCheck(True, True)
        wrong = [{**rank, "post": rank["post"] * np.float32(1.5)} for rank in ranks]
        assert not checks.check_boundary(wrong, probe.norm_eps).bit_equal


def test_published_and_finalizing_boundaries(trt: Any, builder: Any) -> None:
    """Of every kind of contribution a stack has, what went in explains what came out."""
    from trtllm_mhc.models.deepseek_v41.config import DeepseekV41Config
    from trtllm_mhc.models.deepseek_v41.stack import TOP_K, build_boundary_stack
    from trtllm_mhc.models.deepseek_v41.weights import ModelWeights
    from trtllm_mhc.network import CommunicatorSpec
    from trtllm_mhc.reference.interpreter import evaluate
    from trtllm_mhc.rewrite import FuseOptions, fuse_boundaries
    from trtllm_mhc.verification.probes import probe_boundaries

    config = DeepseekV41Config(num_hidden_layers=2)
    weights = ModelWeights(config)
    options = FuseOptions(publish_linear="bf16", coefficients=True)

    def make(rank: int, fuse: bool) -> Any:
        flags = 0
        if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
            flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = builder.create_network(flags)
        spec = CommunicatorSpec(TP)
        build_boundary_stack(network, config, weights, spec, rank=rank, sublayers="routed")
        if fuse:
            report = fuse_boundaries(network, options)
            assert [entry.contribution for entry in report.found] == ["published", "finalize"] * 2
            assert [entry.status for entry in report.coefficients] == ["fused"] * 4
            return network, probe_boundaries(network)
        return network, []

    rng = np.random.default_rng(4)
    embeddings = bf16(rng, ROWS, config.hidden_size)
    owner = rng.integers(0, TP, (ROWS, TOP_K))
    rows = np.arange(ROWS * TOP_K, dtype=np.int32).reshape(ROWS, TOP_K)
    given = [{"embeddings": embeddings, "routes": np.where(owner == rank, rows, -1)} for rank in range(TP)]
    made = [make(rank, True) for rank in range(TP)]
    outputs = evaluate([network for network, _ in made], given)
    probes = made[0][1]
    assert [probe.residual_only for probe in probes] == [False, True, False, True]
    for probe in probes:
        ranks = [probe.read({**feed, **out}) for feed, out in zip(given, outputs, strict=True)]
        assert checks.check_boundary(ranks, probe.norm_eps) == checks.BoundaryCheck(True, True)
    unfused = evaluate([make(rank, False)[0] for rank in range(TP)], given)
    got, expected = (each[0]["hidden_states"].astype(np.float32) for each in (outputs, unfused))
    assert np.sqrt(np.mean((got - expected) ** 2)) < 0.02 * np.sqrt(np.mean(expected**2))


def test_unfused_network_has_nothing_to_probe(trt: Any, network: Any) -> None:
    from trtllm_mhc.network import CommunicatorSpec, build_single_boundary
    from trtllm_mhc.verification.probes import probe_boundaries

    build_single_boundary(network, CommunicatorSpec(TP), hidden=HIDDEN, norm_eps=EPS)
    assert probe_boundaries(network) == []
    assert network.num_outputs == 2
