# SPDX-License-Identifier: Apache-2.0
"""Judging what engines (or the interpreter) computed, boundary by boundary and at the end of the network.

`reference.compare` says what counts as equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trtllm_mhc import reference
from trtllm_mhc.reference import compare

Array = npt.NDArray[Any]
Roles = Mapping[str, Array]
"""One rank's tensors of one boundary, by role (`BoundaryProbe.read`)."""

HC_MULT = 4
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class BoundaryCheck:
    """One fused boundary against the reference, on all ranks.

    Attributes:
        bit_equal: every output of every rank has the reference's bits (any NaN equals any NaN).
        ranks_equal: the outputs have the same bits on all ranks.
        detail: the first difference, empty when there is none.
    """

    bit_equal: bool
    ranks_equal: bool
    detail: str = ""


def check_boundary(ranks: Sequence[Roles], norm_eps: float | None) -> BoundaryCheck:
    """Compares what every rank's boundary gave with `reference.boundary` of what went in.

    Args:
        ranks: the boundary's tensors on each rank; each rank's own residual and mixes are used for its outputs.
        norm_eps: epsilon of the norm; None: residual-only.
    """
    outputs = ["residual_out"] if norm_eps is None else ["residual_out", "layer_input"]
    shared = [role for role in ("residual", "post", "comb", "pre", "gamma") if role in ranks[0]]
    xs = [rank["x"] for rank in ranks]
    expected: dict[str, Array] | None = None
    details = []
    for index, rank in enumerate(ranks):
        # The ranks' residuals and mixes are normally the same: the reference is then needed once.
        if expected is None or not _same(ranks[index - 1], rank, shared):
            expected = _reference(xs, rank, norm_eps)
        for role in outputs:
            try:
                compare.assert_bits_equal(rank[role], expected[role], f"rank {index}, {role}")
            except (AssertionError, TypeError, ValueError) as error:
                details.append(str(error))
    ranks_equal = all(_same(ranks[0], rank, outputs) for rank in ranks[1:])
    return BoundaryCheck(not details, ranks_equal, details[0] if details else "")


@dataclass(frozen=True)
class Agreement:
    """One unfused boundary against the fused one on the same inputs.

    Attributes:
        agrees: every element is as near as the order of the sums allows.
        elements: number of elements compared, over all ranks and outputs.
        different: how many of them have other bits.
        max_ulp: the largest distance in bf16 numbers.
    """

    agrees: bool
    elements: int
    different: int
    max_ulp: int


def check_agreement(
    inputs: Sequence[Roles], fused: Sequence[Roles], unfused: Sequence[Roles], norm_eps: float | None
) -> Agreement:
    """Compares an unfused boundary's outputs with the fused one's by the rule for sums of unknown order.

    Args:
        inputs: for each rank "x", "residual", "post", "comb" and, unless residual-only, "pre" and "gamma".
        fused: for each rank "residual_out" and, unless residual-only, "layer_input", of the fused boundary.
        unfused: the same of TensorRT's own layers.
        norm_eps: epsilon of the norm; None: residual-only.
    """
    reduced = reference.all_reduce([rank["x"] for rank in inputs])
    agrees, elements, different, max_ulp = True, 0, 0, 0
    for given, ours, theirs in zip(inputs, fused, unfused, strict=True):
        magnitude = compare.stream_magnitude(reduced, given["residual"], given["post"], given["comb"])
        streams = theirs["residual_out"]
        agrees &= bool(compare.sums_agree(streams, ours["residual_out"], magnitude, HC_MULT + 1).all())
        pairs = [(streams, ours["residual_out"])]
        if norm_eps is not None:
            # A stream that differs shifts the norm: the layer input is judged against the unfused streams' own.
            collapsed = reference.collapse(streams, given["pre"])
            own = reference.rms_norm(collapsed, given["gamma"], norm_eps)
            near = compare.norms_agree(theirs["layer_input"], own, streams, given["pre"], given["gamma"], norm_eps)
            agrees &= bool(near.all())
            pairs.append((theirs["layer_input"], ours["layer_input"]))
        for actual, expected in pairs:
            elements += actual.size
            different += int((~compare.bits_equal(actual, expected)).sum())
            max_ulp = max(max_ulp, int(np.max(compare.ulp_distance(actual, expected), initial=0)))
    return Agreement(agrees, elements, different, max_ulp)


def ranks_equal(outputs: Sequence[Mapping[str, Array]]) -> bool:
    """Whether all ranks gave the same bits in every output."""
    return all(_same(outputs[0], rank, list(outputs[0])) for rank in outputs[1:])


def compare_distances(fused: Sequence[Array], unfused: Sequence[Array], exact: Sequence[Array]) -> reference.ErrorRatio:
    """The rms distances of two evaluations to the exact one, over at least two inputs.

    Args:
        fused: one output for each input.
        unfused: the same of the baseline.
        exact: the same in float64, without intermediate rounding.
    """
    return reference.error_ratio(
        [reference.mean_square_error(ours, truth) for ours, truth in zip(fused, exact, strict=True)],
        [reference.mean_square_error(theirs, truth) for theirs, truth in zip(unfused, exact, strict=True)],
    )


def in_parallel(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Maps over threads: the checks spend their time inside numpy, which lets other threads run."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))


def _reference(xs: Sequence[Array], rank: Roles, norm_eps: float | None) -> dict[str, Array]:
    mixes = rank["residual"], rank["post"], rank["comb"]
    if norm_eps is None:
        streams, _ = reference.boundary(xs, *mixes)
        return {"residual_out": streams}
    streams, layer_input = reference.boundary(xs, *mixes, rank["pre"], rank["gamma"], norm_eps)
    assert layer_input is not None
    return {"residual_out": streams, "layer_input": layer_input}


def _same(first: Mapping[str, Array], second: Mapping[str, Array], names: Sequence[str]) -> bool:
    return all(
        first[name].shape == second[name].shape and bool(np.all(compare.bits_equal(second[name], first[name])))
        for name in names
    )
