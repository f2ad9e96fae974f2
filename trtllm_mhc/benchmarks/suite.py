# SPDX-License-Identifier: Apache-2.0
"""What is measured against what: the cases of one group size and mode."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from trtllm_mhc.benchmarks import ours
from trtllm_mhc.benchmarks.harness import Case, Mode, Rank, Subject
from trtllm_mhc.benchmarks.peers import nccl, sglang
from trtllm_mhc.runtime import cuda

if TYPE_CHECKING:
    from trtllm_mhc.models.deepseek_v41.stack import Sublayers

Op = Literal["boundary", "boundary_mxfp8", "consumer", "local", "coefficients", "stack"]
OPS: tuple[Op, ...] = get_args(Op)

OURS = "trtllm_mhc"
SPIN = f"{OURS}_spin"
PEERS = ("sglang_fused", "unfused_push", "unfused_triton", "unfused_nccl", "tensorrt", "tensorrt_nccl")
COLD_ROWS = (1, 8, 64)
ENGINE_ROWS = (1, 8, 64)  # every M is an engine to build
STACK_ROWS = (1, 8)
SHARED_SPIN_ROWS = 16  # of more, the CTAs that wait can leave a peer on the same GPU no room


@dataclass(frozen=True)
class Place:
    """Where ranks are: a group size and a mode."""

    tp: int
    mode: Mode

    def missing(self) -> str | None:
        """Why this machine cannot have it, or None."""
        needed = self.tp if self.mode == "nvlink" else 1
        if (there := cuda.device_count()) < needed:
            return f"needs {needed} GPUs, this machine has {there}"
        return None


@dataclass
class Suite:
    """The cases of one place, and what is left out.

    Attributes:
        place: where.
        cases: in the order in which they are measured.
        skipped: (what, why).
    """

    place: Place
    cases: list[Case] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)


def places(tps: Sequence[int], modes: Sequence[Mode]) -> list[Place]:
    """The combinations that make sense: tp 1 is "single"; ranks share one GPU only as a pair."""

    def makes_sense(tp: int, mode: Mode) -> bool:
        return mode == "single" if tp == 1 else mode in ("self_loop", "nvlink") or (mode, tp) == ("loopback", 2)

    return [Place(tp, mode) for tp in tps for mode in modes if makes_sense(tp, mode)]


def plan(
    place: Place,
    ops: Sequence[Op],
    rows: Sequence[int],
    *,
    peers: Path | None,
    against: Sequence[str] = PEERS,
    layers: int = 40,
    sublayers: Sequence[Sublayers] = ("none", "matmul"),
) -> Suite:
    """Chooses the cases, and builds the engines that they need.

    Args:
        place: a group size and a mode.
        ops: what to measure, of `OPS`; those that do not exist at this place are passed over.
        rows: values of M.
        peers: the folder that `scripts/fetch_peers.sh` made, or None.
        against: the peers, of `PEERS`; the stack has its own.
        layers: of the boundary stack.
        sublayers: of the boundary stack.
    """
    suite = Suite(place)
    for op in ops:
        if (op in ("local", "coefficients")) != (place.tp == 1):
            continue
        if op == "stack":
            _add_stack(suite, [m for m in STACK_ROWS if m in rows], layers, sublayers)
            continue
        implementations = _implementations(op, suite, peers, against)
        engines = _engines(op, suite, [m for m in ENGINE_ROWS if m in rows], against)
        for m in rows:
            at_m = [
                Case(op, name, m, partial(make, rows=m))
                for name, make in implementations
                if name != SPIN or m <= SHARED_SPIN_ROWS
            ]
            at_m += [case for case in engines if case.rows == m]
            suite.cases += at_m
            if m in COLD_ROWS and place.mode != "loopback":
                suite.cases += [case.cold for case in at_m]
    return suite


def _implementations(
    op: Op, suite: Suite, peers: Path | None, against: Sequence[str]
) -> list[tuple[str, Callable[..., Subject]]]:
    place = suite.place
    if op == "coefficients":
        return [(OURS, ours.Coefficients)]
    if op == "consumer":
        return [(f"{OURS}_with_publish", partial(ours.Boundary, published=True))]
    mxfp8 = op == "boundary_mxfp8"
    found: list[tuple[str, Callable[..., Subject]]] = [(OURS, partial(ours.Boundary, mxfp8=mxfp8))]
    if place.mode == "loopback":
        # By default ranks that share a GPU wait in a kernel of one CTA, so that they cannot starve each other.
        found.append((SPIN, partial(ours.Boundary, wait_mode="spin", mxfp8=mxfp8)))

    def add(name: str, reason: str | None, make: Callable[..., Subject]) -> None:
        if name not in against:
            return
        if reason is None and peers is not None:
            found.append((name, partial(make, folder=peers)))
        else:
            suite.skipped.append((f"{op}, {name}", reason or "no folder of peers"))

    if op != "local":
        add("sglang_fused", sglang.missing(peers, place.tp), partial(sglang.Fused, mxfp8=mxfp8))
    if not mxfp8:
        reason = sglang.missing_triton(peers, place.tp)
        if place.mode == "loopback":
            reason = "its all-reduce waits with a CTA on every SM, which ranks that share a GPU cannot"
        add(*(("unfused_push", reason, sglang.Unfused) if place.tp > 1 else ("unfused_triton", reason, sglang.Triton)))
        if place.tp > 1:
            add("unfused_nccl", nccl.missing(place.mode) or reason, _nccl_and_triton)
    return found


def _nccl_and_triton(rank: Rank, rows: int, folder: Path) -> Subject:
    return nccl.Chain(rank, rows, partial(sglang.Triton, folder=folder))


def _engines(op: Op, suite: Suite, rows: Sequence[int], against: Sequence[str]) -> list[Case]:
    place = suite.place
    if op not in ("boundary", "local") or not rows or place.tp > 2 or place.mode == "loopback":
        return []
    wanted = [name for name in ("tensorrt", "tensorrt_nccl") if name in against]
    if place.tp == 1 or nccl.missing(place.mode) is not None:
        wanted = [name for name in wanted if name != "tensorrt_nccl"]
    if not wanted:
        return []
    if reason := _why_no_tensorrt():
        suite.skipped += [(f"{op}, {name}", reason) for name in wanted]
        return []
    from trtllm_mhc.benchmarks import engines
    from trtllm_mhc.runtime.build import TimingCache

    return engines.boundary_cases(rows, place.tp, wanted, TimingCache())


def _why_no_tensorrt() -> str | None:
    try:
        importlib.import_module("tensorrt")
    except ImportError as error:  # the package is missing, or its libraries are
        return f"{error.msg}"
    return None


def _add_stack(suite: Suite, rows: Sequence[int], layers: int, sublayers: Sequence[Sublayers]) -> None:
    place = suite.place
    if place.tp != 2 or place.mode == "loopback" or not rows:
        return
    if reason := _why_no_tensorrt():
        suite.skipped.append(("stack", reason))
        return
    from trtllm_mhc.benchmarks import engines
    from trtllm_mhc.runtime.build import TimingCache

    ranks = 1 if place.mode == "self_loop" else place.tp
    suite.cases += engines.stack_cases(rows, place.tp, ranks, sublayers, layers, TimingCache())
