# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc bench-linear`: the linear layer that publishes beside cuBLAS, as a table and as lines of JSON."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_mhc.benchmarks import publish_linear, records
from trtllm_mhc.runtime import cuda

MAXIMUM_ROWS = 64
_COLUMNS = ("k", "weights", "m", "publish_gemm_us", "cublas_us", "linear_us", "cublas_gemm_us", "bandwidth_fraction")


def run(
    tp: int,
    rows: Sequence[int],
    features: Sequence[int],
    json_path: Path | None,
    commit: str | None,
    console: Console,
) -> int:
    """Measures and prints; returns the exit code."""
    table = Table(title=f"us per call, tp {tp}, one rank that plays all, weights from memory")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    try:
        _check(tp, rows, features)
        where = records.environment(commit) | {"tensorrt": _tensorrt_version()}
        for result in publish_linear.measure(rows, features, tp):
            line = _line(result, tp) | where
            if json_path is not None:
                records.append(json_path, [line])
            table.add_row(*(str(line[name]) for name in _COLUMNS))
    except (ValueError, RuntimeError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    console.print(table)
    return 0


def _check(tp: int, rows: Sequence[int], features: Sequence[int]) -> None:
    if tp not in (2, 4, 8):
        raise ValueError(f"--tp: expected 2, 4 or 8, got {tp}")
    if bad := [m for m in rows if not 1 <= m <= MAXIMUM_ROWS]:
        raise ValueError(f"--rows: expected 1 to {MAXIMUM_ROWS}, got {bad}")
    if bad := [k for k in features if k < 128 or k > 16384 or k % 128]:
        raise ValueError(f"--features: expected multiples of 128 up to 16384, got {bad}")
    if cuda.device_count() == 0:
        raise RuntimeError("this needs a GPU, and this machine has none")


def _line(result: publish_linear.Result, tp: int) -> dict[str, Any]:
    return {
        "m": result.rows,
        "k": result.features,
        "weights": result.weights,
        "publish_gemm_us": round(result.publish_gemm_us, 3),
        "cublas_us": round(result.cublas_us, 3),
        "linear_us": round(result.linear_us, 3),
        "cublas_gemm_us": round(result.cublas_gemm_us, 3),
        "bandwidth_fraction": round(result.bandwidth_fraction, 4),
        "tp": tp,
        "mode": "self_loop",
        "cache": "weights from memory",
    }


def _tensorrt_version() -> str | None:
    if importlib.util.find_spec("tensorrt") is None:
        return None
    return str(importlib.import_module("tensorrt").__version__)
