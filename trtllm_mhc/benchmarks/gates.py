# SPDX-License-Identifier: Apache-2.0
"""Ratios that must hold: how many times as fast as a peer in the same run. Absolute times differ between machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_mhc.benchmarks.records import Row, ratio
from trtllm_mhc.benchmarks.suite import OURS


@dataclass(frozen=True)
class Gate:
    """One line of the gates' file.

    Attributes:
        op, tp, mode: what is compared, and where.
        peer: the implementation that `ours` is compared with.
        m: the values of M for which the ratio must hold.
        at_least: the smallest ratio, peer's time to ours.
        ours: the implementation.
        cache: "warm" or "cold".
        sublayers: of a stack.
    """

    op: str
    tp: int
    mode: str
    peer: str
    m: tuple[int, ...]
    at_least: float
    ours: str = OURS
    cache: str = "warm"
    sublayers: str | None = None

    def __str__(self) -> str:
        what = f"{self.op}{f' ({self.sublayers})' if self.sublayers else ''}, tp {self.tp}, {self.mode}, {self.cache}"
        return f"{what}: {self.ours} against {self.peer}"


@dataclass(frozen=True)
class Verdict:
    """A gate at one M. `ratio` is None where the rows have not both sides in one run."""

    gate: Gate
    m: int
    ratio: float | None

    @property
    def holds(self) -> bool | None:
        """None where nothing was measured."""
        return None if self.ratio is None else self.ratio >= self.gate.at_least

    def __str__(self) -> str:
        found = "not measured" if self.ratio is None else f"{self.ratio:.3f}"
        return f"{self.gate}, M = {self.m}: {found}, must be at least {self.gate.at_least:g}"


def read(path: Path) -> list[Gate]:
    """The gates of a file.

    Raises:
        ValueError: a line is no gate; the message says which.
    """
    gates = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            fields = json.loads(line)
            gate = Gate(**{**fields, "m": tuple(fields["m"])})
            if not gate.m or not gate.at_least > 0:
                raise ValueError("expected values of M and a ratio above 0")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}:{number}: expected a gate: {error}") from None
        gates.append(gate)
    return gates


def judge(gates: Sequence[Gate], rows: Sequence[Row]) -> list[Verdict]:
    """Every gate at each of its values of M."""
    return [
        Verdict(
            gate,
            m,
            ratio(rows, (gate.op, gate.tp, gate.mode, gate.cache, gate.sublayers), gate.peer, m, gate.ours),
        )
        for gate in gates
        for m in gate.m
    ]
