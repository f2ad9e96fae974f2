# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc bench`: ours against its peers, recorded as lines of JSON, as tables and as a plot."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.markup import escape

from trtllm_mhc.benchmarks import gates, harness, records, report, suite
from trtllm_mhc.benchmarks.suite import Suite


@dataclass(frozen=True)
class BenchOptions:
    """The command's options."""

    ops: Sequence[str]
    tps: Sequence[int]
    modes: Sequence[str]
    rows: Sequence[int]
    peers: Path | None
    against: Sequence[str]
    layers: int
    sublayers: Sequence[str]
    commit: str | None


@dataclass(frozen=True)
class Files:
    """What is read and written.

    Attributes:
        records: rows to show instead of measuring.
        json: where measured rows are added.
        plot: where the plot goes.
        table: a document whose table is renewed.
        gates: the ratios that must hold.
    """

    records: Path | None = None
    json: Path | None = None
    plot: Path | None = None
    table: Path | None = None
    gates: Path | None = None


def run(options: BenchOptions, files: Files, console: Console) -> int:
    """Measures, or reads, and reports; returns the exit code."""
    # Ranks that share a GPU need hardware queues of their own; CUDA reads it when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        required = gates.read(files.gates) if files.gates is not None else None
        rows = records.read(files.records) if files.records is not None else None
        _check(options)
    except (OSError, ValueError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    failures = 0
    if rows is None:
        rows, failures = _measure(options, files.json, console)
    if not rows:
        console.print("[red]nothing was measured[/]")
        return 1
    console.print(report.ratio_table(rows))
    for table in report.time_tables(rows):
        console.print(table)
    if files.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            console.print("[red]--plot needs matplotlib: pip install 'trtllm-mhc\\[bench]'[/]")
            return 1
        report.plot(rows, files.plot)
    if files.table is not None:
        files.table.write_text(report.with_table(files.table.read_text(), rows))
    below = _judge(required, rows, console) if required is not None else 0
    return 1 if failures or below else 0


def _check(options: BenchOptions) -> None:
    for given, known, option in (
        (options.ops, suite.OPS, "--only"),
        (options.against, suite.PEERS, "--against"),
        (options.modes, get_args(harness.Mode), "--modes"),
        (options.sublayers, ("none", "matmul"), "--sublayers"),
        (options.tps, (1, 2, 4, 8), "--tp"),
    ):
        if unknown := [each for each in given if each not in known]:
            raise ValueError(f"{option}: expected some of {', '.join(map(str, known))}, got {unknown}")
    if bad := [m for m in options.rows if not 1 <= m <= harness.CAPACITY]:
        raise ValueError(f"--rows: expected 1 to {harness.CAPACITY}, got {bad}")


def _measure(options: BenchOptions, json_path: Path | None, console: Console) -> tuple[list[records.Row], int]:
    measured: list[records.Row] = []
    failures = 0
    where: records.Row | None = None
    for place in suite.places(options.tps, options.modes):  # type: ignore[arg-type]
        if reason := place.missing():
            console.print(f"[yellow]skipped: tp {place.tp}, {place.mode}[/]: {escape(reason)}")
            continue
        begin = time.monotonic()
        planned = suite.plan(
            place,
            options.ops,  # type: ignore[arg-type]
            options.rows,
            peers=options.peers,
            against=options.against,
            layers=options.layers,
            sublayers=options.sublayers,  # type: ignore[arg-type]
        )
        built = time.monotonic()
        for what, why in planned.skipped:
            console.print(f"[yellow]skipped: tp {place.tp}, {place.mode}, {what}[/]: {escape(why)}")
        if not planned.cases:
            continue
        results = harness.measure(planned.cases, place.tp, place.mode)
        if where is None:
            where = records.environment(options.commit)
        failures += _note_failures(planned, results, console)
        rows = [records.row_of(result, place, where) for result in results if result.failure is None]
        if json_path is not None:
            records.append(json_path, rows)
        measured += rows
        console.print(
            f"tp {place.tp}, {place.mode}: {len(rows)} of {len(results)} cases in {time.monotonic() - built:.1f} s, "
            f"engines built in {built - begin:.1f} s"
        )
    return measured, failures


def _note_failures(planned: Suite, results: Sequence[harness.Result], console: Console) -> int:
    failed = [result for result in results if result.failure is not None]
    for result in failed:
        case = result.case
        console.print(
            f"[red]failed: tp {planned.place.tp}, {planned.place.mode}, {case.op}, {case.implementation}, "
            f"M = {case.rows}, {case.cache}[/]: {escape(result.failure or '')}"
        )
    return len(failed)


def _judge(required: Sequence[gates.Gate], rows: Sequence[records.Row], console: Console) -> int:
    """Prints what does not hold; returns how many that are, or 1 if no gate could be judged."""
    verdicts = gates.judge(required, rows)
    judged = [verdict for verdict in verdicts if verdict.holds is not None]
    below = [verdict for verdict in judged if not verdict.holds]
    for verdict in below:
        console.print(f"[red]below its gate:[/] {escape(str(verdict))}")
    console.print(
        f"gates: {len(judged) - len(below)} of {len(judged)} hold, {len(verdicts) - len(judged)} were not measured"
    )
    return len(below) if judged else 1
