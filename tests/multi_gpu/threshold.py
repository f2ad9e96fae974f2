# SPDX-License-Identifier: Apache-2.0
"""From which M on is NCCL the faster way? `python -m tests.multi_gpu.threshold`, on a machine with a GPU for each rank.

The boundary and the all-reduce in a CUDA graph, through the mailbox in chunks and through NCCL, for M around the
threshold: microseconds a call, the slowest rank's median. Prints the least M from which on NCCL wins every time, which
is what to give `nccl_rows`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.gpu.loopback import BF16, DeviceInputs, Loopback, make_inputs
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import DeviceArray, Event, Stream

ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
CALLS, WARM_UP, REPLAYS = 20, 5, 30
Way = Literal["mailbox", "nccl"]


def measure(tp: int, way: Way, capacity: int) -> list[dict[str, Any]]:
    """Lines of {operation, m, us} of one way."""
    cases = [(operation, rows) for operation in ("boundary", "all_reduce") for rows in ROWS]

    def work(rank: int, communicator: Communicator, stream: Stream) -> list[list[float]]:
        samples = []
        begin, end = Event(), Event()
        line_up = DeviceArray((1, 5120), BF16)
        lined_up = DeviceArray((1, 5120), BF16)
        for operation, rows in cases:
            call = DeviceInputs(make_inputs(np.random.default_rng(rows), tp, rows, 5120), rank)
            total = DeviceArray(call.x.shape, BF16)
            group.barrier()
            with stream.capture() as graph:
                for _ in range(CALLS):
                    if operation == "boundary":
                        call.boundary(communicator, stream)
                    else:
                        communicator.all_reduce(call.x, out=total, stream=stream)
            taken = []
            for _ in range(WARM_UP + REPLAYS):
                communicator.all_reduce(line_up, out=lined_up, stream=stream)
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize(30)
                taken.append(1000 * end.elapsed_ms(begin) / CALLS)
            samples.append(taken[WARM_UP:])
            group.barrier()
            graph.close()
        assert communicator.status() is None
        return samples

    with Loopback(tp, timeout_s=20.0, capacity=capacity, nccl_rows=1 if way == "nccl" else -1) as group:
        by_rank = group.run(work)
        version = group.ranks[0][0].info.nccl_version
    lines = []
    for index, (operation, rows) in enumerate(cases):
        slowest = [max(samples) for samples in zip(*(ranks[index] for ranks in by_rank), strict=True)]
        us = round(statistics.median(slowest), 2)
        lines.append({"op": operation, "way": way, "tp": tp, "m": rows, "us": us, "nccl": version})
    return lines


def threshold(lines: Sequence[dict[str, Any]], operation: str) -> int | None:
    """The least M from which on NCCL is the faster one throughout."""
    times = {(line["way"], line["m"]): line["us"] for line in lines if line["op"] == operation}
    wins = [times["nccl", rows] < times["mailbox", rows] for rows in ROWS]
    least = None
    for rows, won in zip(reversed(ROWS), reversed(wins), strict=True):
        if not won:
            break
        least = rows
    return least


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--capacity", type=int, default=64, help="rows of a mailbox slot")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    count = cuda.device_count()
    if count < options.tp:
        print(f"skipped: needs {options.tp} GPUs, this machine has {count}")
        return
    lines = [line for way in ("mailbox", "nccl") for line in measure(options.tp, way, options.capacity)]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    device, driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split(",")
    for line in lines:
        line |= {"device": device.strip(), "driver": driver.strip(), "capacity": options.capacity}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for operation in ("boundary", "all_reduce"):
        print(operation)
        for rows in ROWS:
            us = {line["way"]: line["us"] for line in lines if (line["op"], line["m"]) == (operation, rows)}
            print(f"  m {rows:5}   mailbox {us['mailbox']:8.2f} us   nccl {us['nccl']:8.2f} us")
        print(f"  nccl_rows: {threshold(lines, operation)}")


if __name__ == "__main__":
    sys.exit(main())
