# SPDX-License-Identifier: Apache-2.0
"""Times of the operations alone, in CUDA graphs.

A graph holds `CALLS` calls one after another, which is what a decode step looks like to them. Each timed replay begins
at an all-reduce on the device that lines the ranks up; a sample is the slowest rank's time divided by the calls, a
result the median. Variants are measured in the order A B C C B A, so that a drift of the clocks counts for all of them,
and the two halves of a variant's samples give the noise. Inputs stay in the L2 cache (warm).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_mhc.runtime.communicator import Communicator, WaitMode
from trtllm_mhc.runtime.cuda import DeviceArray, Event, Graph, Stream
from trtllm_mhc.runtime.threads import ThreadGroup

Array = npt.NDArray[Any]
Mode = Literal["self-loop", "loopback", "nvlink"]
Operation = Literal["boundary", "boundary_mxfp8", "published", "all_reduce"]

CALLS = 50
WARM_UP = 20
REPLAYS = 40
HIDDEN = 5120
TIMEOUT_S = 30.0

_names = itertools.count()


@dataclass(frozen=True)
class Case:
    """What to measure.

    Attributes:
        operation: "boundary", "boundary_mxfp8", "published" (a publish of its own, then the consumer), or "all_reduce".
        wait_mode: of the communicator.
        rows: M.
    """

    operation: Operation
    wait_mode: WaitMode
    rows: int


@dataclass(frozen=True)
class Result:
    """Microseconds per call.

    Attributes:
        case: what was measured.
        us: median over the samples.
        p10: 10th percentile.
        p90: 90th percentile.
        noise: relative difference of the medians of the samples' two halves.
    """

    case: Case
    us: float
    p10: float
    p90: float
    noise: float


class _Tensors:
    """One rank's inputs and outputs for M rows."""

    def __init__(self, rows: int, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def bf16(*shape: int) -> DeviceArray:
            return DeviceArray.from_numpy(rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16))

        def mix(*shape: int) -> DeviceArray:
            return DeviceArray.from_numpy(rng.random(shape, np.float32))

        self.x = bf16(rows, HIDDEN)
        self.residual = bf16(rows, 4, HIDDEN)
        self.post, self.comb, self.pre = mix(rows, 4), mix(rows, 4, 4), mix(rows, 4)
        self.gamma = bf16(HIDDEN)
        self.residual_out = DeviceArray((rows, 4, HIDDEN), ml_dtypes.bfloat16)
        self.layer_input = DeviceArray((rows, HIDDEN), ml_dtypes.bfloat16)
        self.total = DeviceArray((rows, HIDDEN), ml_dtypes.bfloat16)
        self.data = DeviceArray((rows, HIDDEN), ml_dtypes.float8_e4m3fn)
        self.scales = DeviceArray((128 * -(-rows // 128) * (HIDDEN // 32),), np.uint8)

    def enqueue(self, operation: Operation, communicator: Communicator, stream: Stream) -> None:
        if operation == "all_reduce":
            communicator.all_reduce(self.x, out=self.total, stream=stream)
            return
        published = operation == "published"
        if published:
            communicator.publish(self.x, stream=stream)
        communicator.boundary(
            None if published else self.x,
            self.residual,
            self.post,
            self.comb,
            self.pre,
            self.gamma,
            norm_eps=1e-20,
            residual_out=self.residual_out,
            layer_input=self.layer_input,
            mxfp8=(self.data, self.scales) if operation == "boundary_mxfp8" else None,
            published=published,
            stream=stream,
        )


class _Rank:
    """One rank's communicators, stream and captured graphs."""

    def __init__(self, open_communicator: Callable[[WaitMode], Communicator], cases: Sequence[Case], rank: int) -> None:
        self.stream = Stream()
        self.communicators = {mode: open_communicator(mode) for mode in dict.fromkeys(c.wait_mode for c in cases)}
        self.tensors = {rows: _Tensors(rows, 100 * rank + rows) for rows in sorted({case.rows for case in cases})}
        self.token = _Tensors(1, rank)
        self.events = (Event(), Event())
        self.graphs: list[Graph] = []

    def capture(self, case: Case) -> None:
        communicator, tensors = self.communicators[case.wait_mode], self.tensors[case.rows]
        tensors.enqueue(case.operation, communicator, self.stream)
        self.stream.synchronize(TIMEOUT_S)
        with self.stream.capture() as graph:
            for _ in range(CALLS):
                tensors.enqueue(case.operation, communicator, self.stream)
        self.graphs.append(graph)

    def sample(self, graph: Graph, communicator: Communicator) -> float:
        begin, end = self.events
        self.token.enqueue("all_reduce", communicator, self.stream)
        begin.record(self.stream)
        graph.launch(self.stream)
        end.record(self.stream)
        end.synchronize(TIMEOUT_S)
        return 1000 * end.elapsed_ms(begin) / CALLS

    def close(self) -> None:
        for graph in self.graphs:
            graph.close()
        for communicator in self.communicators.values():
            communicator.close()
        self.stream.close()


def measure(cases: Sequence[Case], tp_size: int, mode: Mode) -> list[Result]:
    """Measures all cases side by side; see the module's docstring.

    Args:
        cases: what to measure.
        tp_size: ranks of the group.
        mode: "self-loop": one rank plays all; "loopback": all ranks on one GPU; "nvlink": a GPU for each.
    """
    alone = mode == "self-loop" or tp_size == 1
    devices = [0] if alone else [0] * tp_size if mode == "loopback" else list(range(tp_size))
    group = ThreadGroup(len(devices), devices)
    name = f"bench {next(_names)}"

    def work(rank: int) -> list[list[float]]:
        def open_communicator(wait_mode: WaitMode) -> Communicator:
            if mode == "self-loop" and tp_size > 1:
                return Communicator.self_loop(
                    tp_size=tp_size, device=0, hidden_size=HIDDEN, wait_mode=wait_mode, timeout_s=TIMEOUT_S
                )
            return Communicator.threads(
                f"{name} {wait_mode}",
                tp_size=tp_size,
                rank=rank,
                device=devices[rank],
                hidden_size=HIDDEN,
                wait_mode=wait_mode,
                timeout_s=TIMEOUT_S,
            )

        own = _Rank(open_communicator, cases, rank)
        group.barrier(TIMEOUT_S)
        for case in cases:
            own.capture(case)
            group.barrier(TIMEOUT_S)
        samples: list[list[float]] = [[] for _ in cases]
        forward = list(range(len(cases)))
        for index in forward + forward[::-1]:
            communicator = own.communicators[cases[index].wait_mode]
            group.barrier(TIMEOUT_S)
            taken = [own.sample(own.graphs[index], communicator) for _ in range(WARM_UP + REPLAYS)]
            samples[index] += taken[WARM_UP:]
        group.barrier(TIMEOUT_S)
        for communicator in own.communicators.values():
            if (record := communicator.status()) is not None:
                raise RuntimeError(f"a measurement failed: {record}")
        own.close()
        return samples

    ranks = group.run(work, timeout_s=600)
    return [_result(case, [rank[index] for rank in ranks]) for index, case in enumerate(cases)]


def _result(case: Case, ranks: Sequence[Sequence[float]]) -> Result:
    slowest = [max(sample) for sample in zip(*ranks, strict=True)]
    halves = statistics.median(slowest[:REPLAYS]), statistics.median(slowest[REPLAYS:])
    ordered = sorted(slowest)
    us = statistics.median(ordered)
    noise = abs(halves[0] - halves[1]) / us
    return Result(case, us, ordered[len(ordered) // 10], ordered[9 * len(ordered) // 10], noise)
