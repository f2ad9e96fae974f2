# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc bench`: the operations' times, as a table and as lines of JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from trtllm_mhc.benchmarks import kernels
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import WaitMode


def run(
    mode: kernels.Mode,
    tp: int,
    rows: Sequence[int],
    operations: Sequence[kernels.Operation],
    waits: Sequence[WaitMode],
    json_path: Path | None,
    commit: str | None,
    console: Console,
) -> int:
    """Measures and prints; returns the exit code."""
    for given, known, option in (
        (operations, get_args(kernels.Operation), "--operations"),
        (waits, get_args(WaitMode), "--waits"),
    ):
        if unknown := [each for each in given if each not in known]:
            console.print(f"[red]{option}: expected some of {', '.join(known)}, got {', '.join(unknown)}[/]")
            return 1
    devices = cuda.device_count()
    needed = tp if mode == "nvlink" else 1
    if devices < needed:
        console.print(f"[red]--mode {mode} with --tp {tp} needs {needed} GPUs, this machine has {devices}[/]")
        return 1
    cases = [kernels.Case(operation, wait, m) for m in rows for operation in operations for wait in waits]
    results = kernels.measure(cases, tp, mode)
    environment = describe_environment(commit)
    lines = [_line(result, mode, tp, environment) for result in results]
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        with json_path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    console.print(_table(lines, rows, mode, tp))
    return 0


def describe_environment(commit: str | None) -> dict[str, Any]:
    """Device, driver, clocks and commit."""
    query = "driver_version,clocks.sm,clocks.mem"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    driver, sm_clock, memory_clock = (part.strip() for part in answer.split(","))
    return {
        "device": cuda.device_info(0).name,
        "driver": driver,
        "sm_clock": sm_clock,
        "memory_clock": memory_clock,
        "commit": commit,
    }


def _line(result: kernels.Result, mode: str, tp: int, environment: dict[str, Any]) -> dict[str, Any]:
    return {
        "op": result.case.operation,
        "implementation": f"trtllm_mhc ({result.case.wait_mode})",
        "tp": tp,
        "mode": mode,
        "m": result.case.rows,
        "us": round(result.us, 3),
        "p10": round(result.p10, 3),
        "p90": round(result.p90, 3),
        "noise": round(result.noise, 4),
        "cache": "warm",
        **environment,
    }


def _table(lines: Sequence[dict[str, Any]], rows: Sequence[int], mode: str, tp: int) -> Table:
    table = Table(title=f"us per call, tp {tp}, {mode}, CUDA graph of {kernels.CALLS} calls, warm L2")
    table.add_column("operation")
    table.add_column("waiting")
    for m in rows:
        table.add_column(f"m={m}", justify="right")
    for key in dict.fromkeys((line["op"], line["implementation"]) for line in lines):
        values = {line["m"]: line["us"] for line in lines if (line["op"], line["implementation"]) == key}
        table.add_row(*key, *(f"{values[m]:.2f}" for m in rows))
    return table
