# SPDX-License-Identifier: Apache-2.0
"""The comparisons over a whole boundary stack, whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_mhc.verification.backends import NetworkMaker, Runner, split_rows
from trtllm_mhc.verification.boundary_stack import INPUT, OUTPUT, SingleBoundaryJobs, StackJobs
from trtllm_mhc.verification.checks import Agreement, BoundaryCheck, check_boundary, in_parallel
from trtllm_mhc.verification.probes import BoundaryProbe

Array = npt.NDArray[Any]


def generate_inputs(count: int, rows: int, hidden_size: int, seed: int) -> list[Array]:
    """Embeddings for `count` steps, each [rows, H] bf16 and standard normal."""
    rng = np.random.default_rng(seed)
    shape = (rows, hidden_size)
    return [rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for _ in range(count)]


def evaluate_exactly(jobs: StackJobs, maker: NetworkMaker, inputs: Sequence[Array]) -> list[Array]:
    """The stack's output for each input in float64, without any rounding in between; all inputs have as many rows."""
    exact = maker.runner(jobs.unfused(), jobs.tp_size, "float64").run([{INPUT: np.concatenate(inputs)}] * jobs.tp_size)
    return split_rows(exact[0][OUTPUT], inputs[0].shape[0])


def single_boundary_jobs(jobs: StackJobs) -> list[SingleBoundaryJobs]:
    """One boundary alone, of each kind that the stack has."""
    # As the boundaries hold it: rounded to fp32.
    eps = float(np.float32(jobs.config.rms_norm_eps))
    return [SingleBoundaryJobs(jobs.config.hidden_size, jobs.tp_size, each) for each in (eps, None)]


def expected_eps(jobs: StackJobs) -> list[float | None]:
    """For each probed boundary the epsilon that its norm should have, whatever it does have; None: residual-only."""
    eps = float(np.float32(jobs.config.rms_norm_eps))
    return [None if probe.residual_only else eps for probe in jobs.probes]


def read_probes(
    probes: Sequence[BoundaryProbe], x: Array, shown: Sequence[Mapping[str, Array]]
) -> list[list[dict[str, Array]]]:
    """For each boundary each rank's tensors by role.

    Args:
        probes: the boundaries.
        x: the stack's input.
        shown: for each rank the outputs of the form that shows the boundaries.
    """
    return [[probe.read({INPUT: x, **rank}) for rank in shown] for probe in probes]


def check_bits(
    boundaries: Sequence[Sequence[Mapping[str, Array]]], norm_eps: Sequence[float | None]
) -> list[BoundaryCheck]:
    """Each boundary of `read_probes` against the reference, with the epsilon that its norm should have."""
    pairs = list(zip(boundaries, norm_eps, strict=True))
    return in_parallel(lambda pair: check_boundary(pair[0], pair[1]), pairs)


def compare_singles(
    singles: Sequence[SingleBoundaryJobs],
    runners: Mapping[str, Runner],
    boundaries: Sequence[Sequence[Mapping[str, Array]]],
    norm_eps: Sequence[float | None],
) -> list[tuple[Agreement, BoundaryCheck]]:
    """Each boundary of `read_probes` alone, unfused against fused and fused against the reference.

    Args:
        singles: one for each epsilon.
        runners: of the jobs of `singles`, by the jobs' names.
        boundaries: their inputs.
        norm_eps: each boundary's epsilon; None: residual-only.
    """
    by_eps: dict[float | None, Callable[[Sequence[Mapping[str, Array]]], tuple[Agreement, BoundaryCheck]]] = {}
    for single in singles:
        fused, unfused = runners[single.fused().name], runners[single.unfused().name]
        by_eps[single.norm_eps] = lambda ranks, s=single, f=fused, u=unfused: s.compare(f, u, ranks)  # type: ignore[misc]
    return [by_eps[eps](ranks) for eps, ranks in zip(norm_eps, boundaries, strict=True)]
