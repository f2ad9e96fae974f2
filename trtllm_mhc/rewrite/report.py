# SPDX-License-Identifier: Apache-2.0
"""What the rewrite pass found and did: for people as a table, for programs as JSON, for CI as an exit code."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from rich.console import Console
from rich.table import Table

Status = Literal["full", "residual_only", "refused"]
Contribution = Literal["plain", "finalize", "published"]

#: Version of the JSON form.
FORMAT = 1


@dataclass(frozen=True)
class Reason:
    """Why a boundary was refused, or fused as less than it could be.

    Attributes:
        code: stable, for programs.
        what: what was found, as a sentence.
        remedy: what to change so that it is not found again.
    """

    code: str
    what: str
    remedy: str


@dataclass(frozen=True)
class BoundaryEntry:
    """One boundary.

    Attributes:
        name: the new plugin layer's name, or for a refused boundary the name it would have had.
        status: ``"full"`` (all-reduce, post, collapse and norm in one layer), ``"residual_only"`` (all-reduce and
            post; the streams go to something else than a delayed collapse) or ``"refused"`` (left as it was).
        all_reduce: name of the replaced all-reduce layer.
        form: ``"MhcAllReduce"``, ``"DistCollective"`` or ``"AllReduce"``.
        streams: name of the tensor of streams in the network as it was.
        layer_input: name of the norm's result in the network as it was; None if there is no delayed collapse.
        hidden, hc, tp_size: the dimensions; ``tp_size`` is None if unknown.
        contribution: what the new layer takes from this rank: ``"plain"`` (the all-reduce's summand), ``"finalize"``
            (a MoE's output whose end it also replaces) or ``"published"`` (what a linear layer before it, replaced as
            well, has stored into the mailbox).
        reasons: why it was refused.
        notes: what else to know: what was recognised around the boundary and left as it was, and why.
        exactness: by how much the fused values may differ from the unfused ones.
    """

    name: str
    status: Status
    all_reduce: str
    form: str
    streams: str
    layer_input: str | None
    hidden: int
    hc: int
    tp_size: int | None
    contribution: Contribution = "plain"
    reasons: tuple[Reason, ...] = ()
    notes: tuple[Reason, ...] = ()
    exactness: tuple[str, ...] = ()


@dataclass(frozen=True)
class CoefficientsEntry:
    """The layers that compute a sublayer's mixes.

    Attributes:
        name: the new layer's name.
        status: ``"fused"`` or ``"refused"``.
        streams: name of the tensor that they are computed from.
        comb: name of the residual mix.
        reasons: why it was refused.
    """

    name: str
    status: Literal["fused", "refused"]
    streams: str
    comb: str
    reasons: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Report:
    """The boundaries of a network, in the order of the layer loop.

    Attributes:
        found: every boundary whose all-reduce and post were recognised.
        other_all_reduces: names of the all-reduce layers that end in no boundary.
        already_fused: boundaries that were plugins before the pass ran.
        coefficients: the mixes that were looked for because the options ask for it.
    """

    found: tuple[BoundaryEntry, ...]
    other_all_reduces: tuple[str, ...] = ()
    already_fused: int = 0
    coefficients: tuple[CoefficientsEntry, ...] = ()
    format: int = field(default=FORMAT, init=False)

    @property
    def fused(self) -> tuple[BoundaryEntry, ...]:
        """The boundaries that were replaced."""
        return tuple(entry for entry in self.found if entry.status != "refused")

    @property
    def refused(self) -> tuple[BoundaryEntry, ...]:
        """The boundaries that were left as they were."""
        return tuple(entry for entry in self.found if entry.status == "refused")

    @property
    def full(self) -> int:
        """How many were replaced as a whole."""
        return sum(entry.status == "full" for entry in self.found)

    @property
    def residual_only(self) -> int:
        """How many were replaced up to the streams."""
        return sum(entry.status == "residual_only" for entry in self.found)

    def exit_code(self, require: int | None = None) -> int:
        """0 if enough boundaries are fused, else 1.

        Args:
            require: how many must be, counting those that were before; None: every one that was found.
        """
        fused = len(self.fused) + self.already_fused
        return int(fused < require if require is not None else bool(self.refused))

    def to_dict(self) -> dict[str, object]:
        """The report as plain data."""
        counts = {
            "boundaries_found": len(self.found),
            "boundaries_fused": len(self.fused),
            "boundaries_full": self.full,
            "boundaries_residual_only": self.residual_only,
            "boundaries_refused": len(self.refused),
        }
        return {**counts, **asdict(self)}

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def summary(self) -> str:
        """The counts in one line."""
        kinds = f"{self.full} full, {self.residual_only} residual-only"
        text = f"{len(self.fused)} of {len(self.found)} boundaries fused ({kinds})"
        if self.already_fused:
            text += f", {self.already_fused} fused before"
        if self.coefficients:
            fused = sum(entry.status == "fused" for entry in self.coefficients)
            text += f"; coefficients of {fused} of {len(self.coefficients)} sublayers fused"
        if self.other_all_reduces:
            text += f"; {len(self.other_all_reduces)} all-reduce layers belong to no boundary"
        return text

    def table(self) -> Table:
        """The boundaries for a terminal, equal ones in one row each."""
        table = Table(title=self.summary(), title_justify="left")
        for heading in ("boundaries", "result", "all-reduce", "streams", "why"):
            table.add_column(heading, overflow="fold")
        for entries in _runs(self.found):
            first = entries[0]
            name = first.name if len(entries) == 1 else f"{first.name} .. {entries[-1].name} ({len(entries)})"
            why = "\n".join(f"{reason.what} {reason.remedy}".strip() for reason in (*first.reasons, *first.notes))
            result = first.status.replace("_", "-")
            if first.contribution != "plain":
                result += f", {first.contribution}"
            table.add_row(name, result, first.form, f"{first.hc} x {first.hidden}, tp {first.tp_size or '?'}", why)
        return table

    def to_text(self, width: int = 120) -> str:
        """The table as plain text."""
        console = Console(file=io.StringIO(), width=width, color_system=None)
        console.print(self.table())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


def _runs(entries: Sequence[BoundaryEntry]) -> list[list[BoundaryEntry]]:
    """Neighbouring entries that differ in names only."""
    runs: list[list[BoundaryEntry]] = []
    for entry in entries:
        if runs and _same(runs[-1][-1], entry):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs


def _same(a: BoundaryEntry, b: BoundaryEntry) -> bool:
    def key(entry: BoundaryEntry) -> tuple[object, ...]:
        codes = tuple(reason.code for reason in (*entry.reasons, *entry.notes))
        return entry.status, entry.contribution, entry.form, entry.hidden, entry.hc, entry.tp_size, codes

    return key(a) == key(b)
