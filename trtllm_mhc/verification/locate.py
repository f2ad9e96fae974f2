# SPDX-License-Identifier: Apache-2.0
"""Where two forms of a network part: the first tensor at which one of them is off, and on which ranks and rows.

After many layers two right engines differ visibly, since each rounding moves what follows. So neither is compared with
the other, but both with an evaluation in float64: at every tensor that both have, one may not be much farther from the
exact value than the other. In the order of the data, the first tensor where one is names the place of an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_mhc.verification.probes import BoundaryProbe

Array = npt.NDArray[Any]

ROLES = ("x", "residual_out", "layer_input")
# Two right forms round alike, so their errors are nearly the same; this much apart they are not both right.
_FACTOR = 3.0
# Errors below these count as equal: relative to the row's rms, the rounding of a bf16 number to its neighbour in the
# mean, and for the largest element, which may be several times the rms.
_RMS_FLOOR = 2.0**-8
_MAX_FLOOR = 2.0**-6


@dataclass(frozen=True)
class Point:
    """A tensor that both forms have.

    Attributes:
        name: for messages.
        fused: its name among the outputs of the fused form.
        unfused: its name among the outputs of the unfused form and of the exact evaluation.
    """

    name: str
    fused: str
    unfused: str


@dataclass(frozen=True)
class Deviation:
    """One form is off at one tensor.

    Attributes:
        point: the tensor.
        form: "fused" or "unfused", the one that is off.
        ranks: where it is.
        rows: on any of these ranks.
        rank: where it is farthest off.
        row: the same.
        error: rms of the row's error relative to the row's rms there.
        usual: the same of the other form.
    """

    point: Point
    form: str
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    rank: int
    row: int
    error: float
    usual: float

    def __str__(self) -> str:
        ranks = "rank " if len(self.ranks) == 1 else "ranks "
        rows = "row " if len(self.rows) == 1 else "rows "
        return (
            f"{self.form}: {self.point.name} is off on {ranks}{_listed(self.ranks)} in {rows}{_listed(self.rows)}; "
            f"most on rank {self.rank} in row {self.row}, by {self.error:.2e} of the row's rms "
            f"(the other form: {self.usual:.2e})"
        )


def boundary_points(fused: Sequence[BoundaryProbe], unfused: Sequence[BoundaryProbe]) -> list[Point]:
    """Contribution, streams and layer input of every boundary, in the order of the data.

    Args:
        fused: of `probe_boundaries`.
        unfused: of `probe_unfused`.
    """
    return [
        Point(f"{role} of boundary {ours.index} ({ours.layer})", ours.tensors[role], theirs.tensors[role])
        for ours, theirs in zip(fused, unfused, strict=True)
        for role in ROLES
        if role in ours.tensors and role in theirs.tensors
    ]


def first_deviation(
    points: Sequence[Point],
    fused: Sequence[Mapping[str, Array]],
    unfused: Sequence[Mapping[str, Array]],
    exact: Sequence[Mapping[str, Array]],
) -> Deviation | None:
    """The first point where one form is much farther from the exact values than the other, or None.

    Args:
        points: in the order of the data; tensors of any shape [M, ...].
        fused: for each rank the tensors by name.
        unfused: the same.
        exact: the same in float64.
    """
    for point in points:
        found = [
            deviation
            for form, ours, theirs in (("fused", point.fused, point.unfused), ("unfused", point.unfused, point.fused))
            for deviation in _deviations(
                point,
                form,
                [rank[ours] for rank in (fused if form == "fused" else unfused)],
                [rank[theirs] for rank in (unfused if form == "fused" else fused)],
                [rank[point.unfused] for rank in exact],
            )
        ]
        if found:
            return max(found, key=lambda deviation: deviation.error)
    return None


def _deviations(
    point: Point, form: str, actual: Sequence[Array], other: Sequence[Array], exact: Sequence[Array]
) -> list[Deviation]:
    """At most one: the rows of `actual` that are off, over all ranks."""
    ours = np.stack([_errors(values, truth) for values, truth in zip(actual, exact, strict=True)])
    theirs = np.stack([_errors(values, truth) for values, truth in zip(other, exact, strict=True)])
    floors = np.array([_RMS_FLOOR, _MAX_FLOOR])
    excess = ours / (_FACTOR * np.maximum(np.where(np.isfinite(theirs), theirs, 0), floors))
    off = np.asarray((excess > 1).any(axis=2))
    if not off.any():
        return []
    rank, row = (int(at) for at in np.unravel_index(np.argmax(excess.max(axis=2)), off.shape))
    ranks = tuple(int(at) for at in np.flatnonzero(off.any(axis=1)))
    rows = tuple(int(at) for at in np.flatnonzero(off.any(axis=0)))
    return [Deviation(point, form, ranks, rows, rank, row, float(ours[rank, row, 0]), float(theirs[rank, row, 0]))]


def _errors(actual: Array, exact: Array) -> Array:
    """Of each row [M, 2]: the rms and the largest error, relative to the row's rms. Not finite: infinite."""
    truth = exact.reshape(len(exact), -1).astype(np.float64)
    with np.errstate(all="ignore"):
        error = np.abs(actual.reshape(truth.shape).astype(np.float64) - truth)
        size = np.sqrt(np.mean(np.square(truth), axis=1)) + np.finfo(np.float64).tiny
        both = np.stack([np.sqrt(np.mean(np.square(error), axis=1)), error.max(axis=1)], axis=1) / size[:, None]
    return np.where(np.isnan(both), np.inf, both)


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown}, ... ({len(numbers)})"
