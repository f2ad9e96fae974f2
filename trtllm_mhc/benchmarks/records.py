# SPDX-License-Identifier: Apache-2.0
"""The rows of a recorded measurement, as lines of JSON, and the ratios between them."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trtllm_mhc.benchmarks.harness import Result
from trtllm_mhc.benchmarks.suite import OURS, Place
from trtllm_mhc.runtime import cuda

Row = dict[str, Any]
"""op, implementation, tp, mode, m, us, p10, p90, noise (a fraction of us), cache ("warm" or "cold"), run (when),
device, driver, sm_clock, memory_clock, commit; of a stack also sublayers and boundaries (us is per pass)."""

PLACE = ("op", "tp", "mode", "cache", "sublayers")
"""What two rows must agree in, beside m and the run, to be compared."""


def environment(commit: str | None) -> Row:
    """When and where: start time, device, driver, clocks and commit. Read it while the clocks are up."""
    query = "driver_version,clocks.sm,clocks.mem"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    driver, sm_clock, memory_clock = (part.strip() for part in answer.split(","))
    return {
        "run": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": cuda.device_info(0).name,
        "driver": driver,
        "sm_clock": sm_clock,
        "memory_clock": memory_clock,
        "commit": commit,
    }


def row_of(result: Result, place: Place, where: Row) -> Row:
    """The row of a result that has numbers."""
    case = result.case
    return {
        "op": case.op,
        "implementation": case.implementation,
        "tp": place.tp,
        "mode": place.mode,
        "m": case.rows,
        "us": round(result.us, 3),
        "p10": round(result.p10, 3),
        "p90": round(result.p90, 3),
        "noise": round(result.noise, 4),
        "cache": case.cache,
        **dict(case.details),
        **where,
    }


def read(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError: a line is no row; the message says which.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            if not {"op", "implementation", "tp", "mode", "m", "us", "cache", "run"} <= row.keys():
                raise ValueError("fields are missing")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: expected a row of a measurement: {error}") from None
        rows.append(row)
    return rows


def append(path: Path, rows: Iterable[Row]) -> None:
    """Adds rows to a file, which is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def newest(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """The rows by place, implementation and m; of several runs the newest that has the row."""
    ordered = sorted(rows, key=lambda row: str(row["run"]))
    return {(*place_of(row), row["implementation"], row["m"]): row for row in ordered}


def place_of(row: Row) -> tuple[Any, ...]:
    """The row's values of `PLACE`."""
    return tuple(row.get(key) for key in PLACE)


def ratio(rows: Sequence[Row], place: tuple[Any, ...], peer: str, m: int, ours: str = OURS) -> float | None:
    """How many times as fast `ours` is as `peer`: of the newest run that has both, or None."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if place_of(row) == place and row["m"] == m and row["implementation"] in (ours, peer):
            times.setdefault(str(row["run"]), {})[row["implementation"]] = float(row["us"])
    both = [run for run, found in times.items() if len(found) == 2]
    if not both:
        return None
    found = times[max(both)]
    return found[peer] / found[ours]
