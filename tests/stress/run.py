# SPDX-License-Identifier: Apache-2.0
"""Stress runs with thread ranks and process ranks, and their record."""

from __future__ import annotations

import collections
import datetime
import json
import multiprocessing
import os
import queue
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from tests.gpu.folder_all_gather import FolderAllGather
from tests.gpu.loopback import Loopback
from tests.stress.plan import Plan, make_plan
from tests.stress.pool import DevicePool, Pool, make_pool
from tests.stress.rank import Rank, RankResult
from trtllm_mhc.cli.findings import environment
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator, WaitMode
from trtllm_mhc.runtime.cuda import Stream
from trtllm_mhc.runtime.library import MailboxError

HIDDEN = 5120
CAPACITY = 16
LARGEST = 70  # M beyond the capacity goes through in up to five chunks
POOL_ROWS = 192


def plan_and_pool(seed: int, tp: int, boundaries: int) -> tuple[Plan, Pool]:
    """What all ranks of a run must have alike."""
    plan = make_plan(np.random.default_rng([seed, tp, 10]), boundaries, CAPACITY, LARGEST)
    return plan, make_pool(np.random.default_rng([seed, tp, 11]), tp, POOL_ROWS, HIDDEN)


def run_threads(
    tp: int, boundaries: int, seed: int, wait_mode: str = "auto", timeout_s: float = 20.0
) -> dict[str, Any]:
    """One run with ranks that are threads of this process; its entry in the record."""
    plan, pool = plan_and_pool(seed, tp, boundaries)
    results: list[RankResult | BaseException]
    begin = time.monotonic()
    group = Loopback(tp, HIDDEN, timeout_s=timeout_s, capacity=CAPACITY, wait_mode=cast(WaitMode, wait_mode))

    def work(rank: int, communicator: Communicator, stream: Stream) -> RankResult | BaseException:
        runner = Rank(communicator, stream, DevicePool(pool, rank), plan, seed, LARGEST)
        group.barrier()
        try:
            return runner.run(lambda: None, 3 * timeout_s)
        except Exception as error:
            return error

    results = group.run(work, timeout_s=600)
    if not any(isinstance(result, BaseException) for result in results):
        group.__exit__()
    return _entry("threads", wait_mode, plan, results, time.monotonic() - begin)


def run_processes(tp: int, boundaries: int, seed: int, timeout_s: float = 20.0) -> dict[str, Any]:
    """One run with ranks that are processes; its entry in the record."""
    plan, _ = plan_and_pool(seed, tp, boundaries)
    begin = time.monotonic()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    results: dict[int, RankResult | BaseException] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_process, args=(rank, tp, boundaries, seed, timeout_s, folder, answers), daemon=True)
            for rank in range(tp)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + 300
        try:
            while len(results) < tp:
                rank, result = answers.get(timeout=max(0.1, end - time.monotonic()))
                results[rank] = result
            for process in processes:
                process.join(10)
        except queue.Empty:
            pass
        finally:
            for process in processes:
                process.kill()
    missing = TimeoutError("the process did not answer")
    return _entry(
        "processes", "auto", plan, [results.get(rank, missing) for rank in range(tp)], time.monotonic() - begin
    )


def _process(rank: int, tp: int, boundaries: int, seed: int, timeout_s: float, folder: str, answers: Any) -> None:
    try:
        device = rank % cuda.device_count()
        cuda.set_device(device)
        plan, pool = plan_and_pool(seed, tp, boundaries)
        gather = FolderAllGather(Path(folder), rank, tp)
        communicator = Communicator.all_gather(
            gather,
            tp_size=tp,
            rank=rank,
            device=device,
            hidden_size=HIDDEN,
            capacity=CAPACITY,
            timeout_s=timeout_s,
        )
        with Stream() as stream:
            runner = Rank(communicator, stream, DevicePool(pool, rank), plan, seed, LARGEST)
            result = runner.run(lambda: cast(None, gather(b"ready")), 3 * timeout_s)
        answers.put((rank, result))
        communicator.close()
    except BaseException as error:
        error.add_note(traceback.format_exc(limit=4))
        answers.put((rank, RuntimeError("\n".join([f"{type(error).__name__}: {error}", *error.__notes__]))))


def _entry(
    kind: str, wait_mode: str, plan: Plan, results: Sequence[RankResult | BaseException], wall_s: float
) -> dict[str, Any]:
    calls = plan.calls()
    rows = sum(call.rows for call in calls)
    good = [result for result in results if isinstance(result, RankResult)]
    errors = [f"rank {i}: {result}" for i, result in enumerate(results) if isinstance(result, BaseException)]
    # A run that all ranks finished has compared every row of every boundary.
    errors += [
        f"{result.checked_rows} rows were checked, expected {rows}" for result in good if result.checked_rows != rows
    ]
    hangs = sum(isinstance(result, (TimeoutError, MailboxError)) for result in results)
    entry: dict[str, Any] = {
        "kind": kind,
        "ranks": len(results),
        "wait_mode": wait_mode,
        "boundaries": len(calls),
        "rows": rows,
        "eager": sum(len(step.calls) for step in plan.steps),
        "beyond_capacity": sum(call.rows > CAPACITY for call in calls),
        "resets": sum(step.kind == "reset" for step in plan.steps),
        "variants": dict(sorted(collections.Counter(call.variant for call in calls).items())),
        "seconds": round(max((result.seconds for result in good), default=0.0), 2),
        "seconds_with_setup": round(wall_s, 2),
        "mismatches": sum(result.mismatches for result in good),
        "hangs": hangs,
        "errors": errors + [result.first for result in good if result.first],
    }
    print(json.dumps(entry), flush=True)
    return entry


def passed(record: dict[str, Any]) -> bool:
    """No mismatch, no hang, no error, everything checked."""
    return all(not (run["mismatches"] or run["hangs"] or run["errors"]) for run in record["runs"])


def run_all(
    *,
    thread_ranks: Sequence[int],
    boundaries: int,
    wait_modes: Sequence[str],
    process_ranks: Sequence[int],
    process_boundaries: int,
    seed: int | None,
    timeout_s: float,
    output: Path | None,
) -> dict[str, Any]:
    """All runs asked for; prints the seed first and writes the record after each.

    Returns the record of these runs. A file that is there already keeps its runs of other kinds, numbers of ranks and
    ways of waiting.
    """
    seed = random.randrange(2**31) if seed is None else seed
    print(f"seed {seed}", flush=True)
    versions = environment(None, os.environ.get("GIT_COMMIT"))
    where = {
        "device": cuda.device_info(0).name,
        "devices": cuda.device_count(),
        "driver": versions["driver"],
        "commit": versions["commit"],
        "seed": seed,
        "hidden_size": HIDDEN,
        "capacity": CAPACITY,
    }
    runs: list[dict[str, Any]] = []

    def add(run: dict[str, Any]) -> None:
        runs.append({"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), **where, **run})
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            old = json.loads(output.read_text())["runs"] if output.exists() else []
            output.write_text(json.dumps(_merged(old, runs), indent=1) + "\n")

    for tp in thread_ranks:
        for wait_mode in wait_modes:
            add(run_threads(tp, boundaries, seed, wait_mode, timeout_s))
            if runs[-1]["hangs"]:
                # Threads that wait in the driver cannot be ended.
                print("a rank did not come back: no further runs in this process", file=sys.stderr, flush=True)
                return {"runs": runs}
    for tp in process_ranks:
        add(run_processes(tp, process_boundaries, seed, timeout_s))
    return {"runs": runs}


def _merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> dict[str, Any]:
    def kind(run: dict[str, Any]) -> tuple[str, int, str]:
        return run["kind"], run["ranks"], run["wait_mode"]

    replaced = {kind(run) for run in new}
    runs = sorted([run for run in old if kind(run) not in replaced] + new, key=kind)
    totals = {key: round(sum(run[key] for run in runs), 2) for key in ("boundaries", "seconds", "mismatches", "hangs")}
    return {**totals, "ranks": sorted({run["ranks"] for run in runs}), "runs": runs}
