# SPDX-License-Identifier: Apache-2.0
"""Polygraphy's comparison of two `GroupRunner`s, with the output, the rank and the row of what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from polygraphy.comparator import Comparator, CompareFunc, RunResults
from polygraphy.logger import G_LOGGER

from trtllm_mhc.integrations.polygraphy.runners import GroupRunner, split_output

try:
    from polygraphy.comparator import SimpleCompareFunc
except ImportError:  # before 0.50
    SimpleCompareFunc = CompareFunc.simple

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Tolerance:
    """What Polygraphy accepts, see its `SimpleCompareFunc`.

    Attributes:
        atol: absolute.
        rtol: relative to the second runner's output.
        stat: "elemwise" (each element within one of both), or the statistic of all elements to hold against either.
    """

    atol: float
    rtol: float
    stat: str = "elemwise"


@dataclass(frozen=True)
class OutputComparison:
    """One output of one rank for one input.

    Attributes:
        output: its name in the network.
        rank: whose.
        iteration: number of the input.
        passed: Polygraphy's verdict.
        max_absdiff, mean_absdiff: Polygraphy's statistics.
        row: where the outputs differ most.
    """

    output: str
    rank: int
    iteration: int
    passed: bool
    max_absdiff: float
    mean_absdiff: float
    row: int

    def __str__(self) -> str:
        return (
            f"{self.output} of rank {self.rank}, input {self.iteration}: differs most in row {self.row}, "
            f"by {self.max_absdiff:.3g} (mean {self.mean_absdiff:.3g})"
        )


def run_lockstep(runners: Sequence[GroupRunner], feeds: Sequence[Mapping[str, Array]]) -> RunResults:
    """Runs each group over all inputs, one group after the other, by Polygraphy's `Comparator`.

    Args:
        runners: with different names.
        feeds: one for each input, as the runners take them.
    """
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        return Comparator.run(list(runners), data_loader=list(feeds))


def compare(results: RunResults, tolerance: Tolerance) -> list[OutputComparison]:
    """Compares the outputs of the first runner with those of the second by Polygraphy's `SimpleCompareFunc`.

    Raises:
        ValueError: there are not two runners, or their outputs have different names.
    """
    names = list(results.keys())
    if len(names) != 2:
        raise ValueError(f"expected the results of two runners, got those of {names}")
    first, second = (results[name] for name in names)
    function = SimpleCompareFunc(atol=tolerance.atol, rtol=tolerance.rtol, check_error_stat=tolerance.stat)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        accuracy = Comparator.compare_accuracy(results, compare_func=function)
    # One result for each compare function; older versions give the only one itself.
    by_iteration = (accuracy if hasattr(accuracy, "items") else accuracy[0])[names[0], names[1]]
    found = []
    for iteration, verdicts in enumerate(by_iteration):
        if set(verdicts) != set(first[iteration]) or set(verdicts) != set(second[iteration]):
            raise ValueError(
                f"outputs: {names[0]} has {sorted(first[iteration])}, {names[1]} has {sorted(second[iteration])}"
            )
        for name, verdict in verdicts.items():
            output, rank = split_output(name)
            row = _worst_row(first[iteration][name], second[iteration][name])
            found.append(
                OutputComparison(output, rank, iteration, bool(verdict), verdict.max_absdiff, verdict.mean_absdiff, row)
            )
    return found


def outputs_of(results: RunResults, name: str, ranks: int) -> list[list[dict[str, Array]]]:
    """One runner's outputs: for each input, for each rank, by the network's names."""
    iterations = []
    for result in results[name]:
        by_rank: list[dict[str, Array]] = [{} for _ in range(ranks)]
        for key, array in result.items():
            output, rank = split_output(key)
            by_rank[rank][output] = array
        iterations.append(by_rank)
    return iterations


def _worst_row(first: Array, second: Array) -> int:
    if first.ndim == 0:
        return 0
    with np.errstate(all="ignore"):
        difference = np.abs(first.astype(np.float64) - second.astype(np.float64)).reshape(len(first), -1)
    return int(np.argmax(np.where(np.isnan(difference), np.inf, difference).max(axis=1)))
