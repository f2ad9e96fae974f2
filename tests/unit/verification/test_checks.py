# SPDX-License-Identifier: Apache-2.0
"""The checks must pass what is right and find what is planted."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from trtllm_mhc import reference
from trtllm_mhc.verification import checks

Array = npt.NDArray[Any]
EPS = 1e-20
ROWS, HIDDEN, TP = 3, 64, 2


def bf16(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def make_ranks(norm_eps: float | None = EPS) -> list[dict[str, Array]]:
    """What correct ranks show of one boundary."""
    rng = np.random.default_rng(7)
    shared: dict[str, Array] = {
        "residual": bf16(rng, ROWS, 4, HIDDEN),
        "post": rng.random((ROWS, 4), np.float32),
        "comb": rng.random((ROWS, 4, 4), np.float32),
    }
    xs = [bf16(rng, ROWS, HIDDEN) for _ in range(TP)]
    if norm_eps is None:
        streams, _ = reference.boundary(xs, shared["residual"], shared["post"], shared["comb"])
        return [{**shared, "x": x, "residual_out": streams.copy()} for x in xs]
    shared |= {"pre": rng.random((ROWS, 4), np.float32), "gamma": bf16(rng, HIDDEN)}
    mixes = shared["residual"], shared["post"], shared["comb"], shared["pre"], shared["gamma"]
    streams, layer_input = reference.boundary(xs, *mixes, norm_eps)
    assert layer_input is not None
    return [{**shared, "x": x, "residual_out": streams.copy(), "layer_input": layer_input.copy()} for x in xs]


def flip_last_bit(array: Array, index: tuple[int, ...], bits: int = 1) -> None:
    array.view(np.uint16)[index] ^= bits


@pytest.mark.parametrize("norm_eps", [EPS, None])
def test_right_boundary_passes(norm_eps: float | None) -> None:
    assert checks.check_boundary(make_ranks(norm_eps), norm_eps) == checks.BoundaryCheck(True, True)


@pytest.mark.parametrize("role", ["residual_out", "layer_input"])
def test_one_wrong_bit_on_one_rank_is_found_and_named(role: str) -> None:
    ranks = make_ranks()
    index = (2, 1, 5) if role == "residual_out" else (2, 5)
    flip_last_bit(ranks[1][role], index)
    check = checks.check_boundary(ranks, EPS)
    assert not check.bit_equal
    assert not check.ranks_equal
    assert f"rank 1, {role}: 1 of" in check.detail
    assert str(list(index)) in check.detail


def test_same_wrong_bit_on_all_ranks_is_found() -> None:
    ranks = make_ranks()
    for rank in ranks:
        flip_last_bit(rank["layer_input"], (0, 0))
    check = checks.check_boundary(ranks, EPS)
    assert not check.bit_equal
    assert check.ranks_equal


def test_wrong_epsilon_is_found() -> None:
    assert not checks.check_boundary(make_ranks(), 1e-2).bit_equal


def test_every_rank_is_judged_by_its_own_residual() -> None:
    ranks = make_ranks()
    ranks[1]["residual"] = ranks[1]["residual"].copy()
    ranks[1]["residual"][1, 2, 3] += ml_dtypes.bfloat16(1)
    check = checks.check_boundary(ranks, EPS)
    assert not check.bit_equal
    assert check.detail.startswith("rank 1, residual_out")


def agreement(change: int, at: tuple[int, ...] = (1, 2, 3)) -> checks.Agreement:
    """Of an unfused boundary whose stream has one element `change` bf16 numbers off, and the norm that follows it."""
    ranks = make_ranks()
    fused = [{role: rank[role] for role in ("residual_out", "layer_input")} for rank in ranks]
    unfused = [{role: array.copy() for role, array in rank.items()} for rank in fused]
    for rank, out in zip(ranks, unfused, strict=True):
        out["residual_out"].view(np.int16)[at] += change
        collapsed = reference.collapse(out["residual_out"], rank["pre"])
        out["layer_input"] = reference.rms_norm(collapsed, rank["gamma"], EPS)
    return checks.check_agreement(ranks, fused, unfused, EPS)


def test_equal_boundaries_agree() -> None:
    assert agreement(0) == checks.Agreement(True, TP * ROWS * HIDDEN * 5, 0, 0)


def test_a_stream_one_number_off_agrees_and_is_counted() -> None:
    result = agreement(1)
    assert result.agrees
    assert result.different >= TP
    assert result.max_ulp >= 1


def test_a_stream_far_off_does_not_agree() -> None:
    largest = np.unravel_index(np.argmax(np.abs(make_ranks()[0]["residual_out"].astype(np.float32))), (ROWS, 4, HIDDEN))
    assert not agreement(8, tuple(int(i) for i in largest)).agrees


def test_a_wrong_norm_does_not_agree() -> None:
    ranks = make_ranks()
    fused = [{role: rank[role] for role in ("residual_out", "layer_input")} for rank in ranks]
    unfused = [
        {**out, "layer_input": (out["layer_input"].astype(np.float32) * 1.05).astype(ml_dtypes.bfloat16)}
        for out in fused
    ]
    assert not checks.check_agreement(ranks, fused, unfused, EPS).agrees


def test_distances_favour_the_nearer_evaluation() -> None:
    rng = np.random.default_rng(1)
    exact = [rng.standard_normal((4, 32)) for _ in range(16)]
    near = [truth + 0.01 * rng.standard_normal(truth.shape) for truth in exact]
    far = [truth + 0.02 * rng.standard_normal(truth.shape) for truth in exact]
    ratio = checks.compare_distances(near, far, exact)
    assert ratio.low < ratio.ratio < ratio.high
    assert ratio.ratio == pytest.approx(0.5, rel=0.1)
    assert ratio.inputs == 16


def test_ranks_are_compared_by_bits() -> None:
    zero = np.zeros(3, ml_dtypes.bfloat16)
    assert checks.ranks_equal([{"y": zero}, {"y": zero.copy()}])
    assert not checks.ranks_equal([{"y": zero}, {"y": -zero}])
