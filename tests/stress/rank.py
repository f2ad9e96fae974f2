# SPDX-License-Identifier: Apache-2.0
"""One rank of a stress run."""

from __future__ import annotations

import collections
import ctypes
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.gpu.kernels import kernels
from tests.stress.plan import SLOTS, Call, Plan, Step, bursts, schedule
from tests.stress.pool import EPS, TOP_K, DevicePool
from trtllm_mhc import reference
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import DeviceArray, Graph, Stream
from trtllm_mhc.runtime.library import CBoundaryArgs

THREADS = 256
CHECK_STREAMS, CHECK_NORMED, CHECK_SUM, CHECK_QUANTISED = 1, 2, 4, 8
WHAT = {1: "residual_out", 2: "layer_input", 4: "sum", 8: "mxfp8 data", 16: "mxfp8 scales"}


class CWork(ctypes.Structure):
    """`Work` of kernels.cu."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in ("x", "shared", "residual", "streams", "normed", "sum", "quantised", "scales")
        ),
        *((name, ctypes.c_uint64) for name in ("post", "comb", "pre", "weights", "index")),
        ("scale_bytes", ctypes.c_uint64),
    ]


class CPlace(ctypes.Structure):
    """`Place` of kernels.cu."""

    _fields_ = [
        ("schedule", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("calls_per_step", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
    ]


RESULT = np.dtype(
    [
        ("checked_rows", np.uint64),
        ("mismatches", np.uint64),
        *((name, np.uint32) for name in ("first_taken", "step", "call", "row", "what", "word")),
    ]
)


@dataclass(frozen=True)
class RankResult:
    """Attributes:
    checked_rows: rows whose outputs were all compared.
    mismatches: 16-byte words of outputs, or scales, with other bits.
    first: where the first mismatch was found, else "".
    seconds: from the first boundary to the last check.
    """

    checked_rows: int
    mismatches: int
    first: str
    seconds: float


class Rank:
    """Owns everything on the device that a run needs; nothing is allocated once boundaries are under way."""

    def __init__(
        self,
        communicator: Communicator,
        stream: Stream,
        pool: DevicePool,
        plan: Plan,
        seed: int,
        largest: int,
    ) -> None:
        self._communicator = communicator
        self._stream = stream
        self._pool = pool
        self._plan = plan
        self._kernels = kernels()
        rank = communicator.info.rank
        self._host_delays = random.Random(1_000_003 * seed + rank)
        self._result = DeviceArray((1,), RESULT)
        self._result.fill_bytes(0)
        self._arrays: list[DeviceArray] = []
        self._work = [self._make_work(largest) for _ in range(SLOTS)]
        # One counter a graph, and a zero for eager calls.
        self._counters = DeviceArray((len(plan.graphs) + 1,), np.uint32)
        self._counters.fill_bytes(0)
        together, mine = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2, rank])
        replays = collections.Counter(step.graph for step in plan.steps if step.kind == "graph")
        self._eager_calls = sum(len(step.calls) for step in plan.steps)
        shapes = [(max(1, replays[index]), len(calls)) for index, calls in enumerate(plan.graphs)]
        shapes.append((1, max(1, self._eager_calls)))
        rows = pool.arguments.rows
        self._schedules = [DeviceArray.from_numpy(schedule(together, mine, shape, rows)) for shape in shapes]
        self._eager_done = 0
        self._grouping = np.random.default_rng([seed, 3, rank])  # how calls are grouped need not agree
        self._graphs = [self._capture(index) for index in range(len(plan.graphs))]

    def run(self, barrier: Callable[[], None], timeout_s: float) -> RankResult:
        """Does the whole plan. `barrier` waits for all ranks.

        Raises:
            MailboxError, CudaTimeoutError: a boundary did not end well.
        """
        self._stream.synchronize()
        barrier()
        begin = time.monotonic()
        for number, step in enumerate(self._plan.steps):
            if self._host_delays.random() < 0.1:
                time.sleep(self._host_delays.uniform(0, 2e-3))
            self._do(step)
            if number % 8 == 7:
                self._stream.synchronize(timeout_s)
        self._stream.synchronize(timeout_s)
        seconds = time.monotonic() - begin
        record = self._communicator.status()
        if record is not None:
            raise RuntimeError(f"the lane is in error after the run: {record}")
        found = self._result.to_numpy(self._stream)[0]
        first = ""
        if found["first_taken"]:
            first = (
                f"{WHAT[int(found['what'])]}, row {found['row']}, word {found['word']}, call {found['call']} "
                f"of step {found['step']}"
            )
        return RankResult(int(found["checked_rows"]), int(found["mismatches"]), first, seconds)

    def _do(self, step: Step) -> None:
        if step.kind == "graph":
            self._graphs[step.graph].launch(self._stream)
        elif step.kind == "eager":
            self._enqueue(step.calls, len(self._plan.graphs), self._eager_done)
            self._eager_done += len(step.calls)
        else:
            self._communicator.reset()

    def _capture(self, index: int) -> Graph:
        with self._stream.capture() as graph:
            self._enqueue(self._plan.graphs[index], index, 0)
            counter = ctypes.c_uint64(self._counters.pointer + 4 * index)
            self._kernels.launch("advanceKernel", 1, 1, self._stream, counter)
        return graph

    def _enqueue(self, calls: Sequence[Call], which: int, first: int) -> None:
        """`which`: the schedule; `first`: the place of the first call in it."""
        schedule_of = self._schedules[which]
        arguments = self._pool.arguments
        for burst in bursts(list(calls), self._grouping):
            places = [
                CPlace(schedule_of.pointer, self._counters.pointer + 4 * which, schedule_of.shape[1], first + i)
                for i in range(len(burst))
            ]
            first += len(burst)
            works = [self._work_of(slot, call.rows) for slot, call in enumerate(burst)]
            for call, work, place in zip(burst, works, places, strict=True):
                finalize = ctypes.c_int(call.variant.startswith("finalize"))
                self._kernels.launch(
                    "prepareKernel", call.rows, THREADS, self._stream, arguments, work, place, finalize
                )
            for call, work in zip(burst, works, strict=True):
                self._boundary(call, work)
            result = ctypes.c_uint64(self._result.pointer)
            for call, work, place in zip(burst, works, places, strict=True):
                checks = ctypes.c_uint32(_checks(call))
                self._kernels.launch(
                    "checkKernel", call.rows, THREADS, self._stream, arguments, work, place, checks, result
                )

    def _boundary(self, call: Call, work: CWork) -> None:
        communicator, stream = self._communicator, self._stream.handle
        library, handle = communicator.library, communicator.handle
        if call.variant == "all-reduce":
            status = library.mhcAllReduce(handle, 0, work.x, work.sum, call.rows, stream)
            library.check(status, "all-reduce", handle)
            return
        published = call.variant.startswith("published")
        if published:
            library.check(library.mhcPublish(handle, 0, work.x, call.rows, stream), "publish", handle)
        args = CBoundaryArgs(
            struct_size=ctypes.sizeof(CBoundaryArgs),
            rows=call.rows,
            residual=work.residual,
            post=work.post,
            comb=work.comb,
            norm_eps=EPS,
            residual_out=work.streams,
            published=int(published),
        )
        if not call.variant.endswith("residual-only"):
            args.pre, args.gamma, args.layer_input = work.pre, self._pool.gamma.pointer, work.normed
        if call.variant.endswith("mxfp8"):
            args.mxfp8_data, args.mxfp8_scales = work.quantised, work.scales
        if call.variant.startswith("finalize"):
            args.top_k, args.permuted_rows = TOP_K, self._pool.permuted.shape[0]
            args.gemm2_permuted, args.shared_output = self._pool.permuted.pointer, work.shared
            args.expert_weights, args.expanded_idx_to_permuted_idx = work.weights, work.index
        elif not published:
            args.x = work.x
        communicator.enqueue(args, stream=stream)

    def _make_work(self, rows: int) -> CWork:
        hidden = self._pool.arguments.hidden
        sizes = {
            "x": 2 * rows * hidden,
            "shared": 2 * rows * hidden,
            "residual": 8 * rows * hidden,
            "streams": 8 * rows * hidden,
            "normed": 2 * rows * hidden,
            "sum": 2 * rows * hidden,
            "quantised": rows * hidden,
            "scales": reference.scale_bytes(rows, hidden),
            "post": 16 * rows,
            "comb": 64 * rows,
            "pre": 16 * rows,
            "weights": 4 * TOP_K * rows,
            "index": 4 * TOP_K * rows,
        }
        arrays = {name: DeviceArray((size,), np.uint8) for name, size in sizes.items()}
        self._arrays += arrays.values()
        return CWork(**{name: array.pointer for name, array in arrays.items()})

    def _work_of(self, slot: int, rows: int) -> CWork:
        work = CWork.from_buffer_copy(self._work[slot])
        work.scale_bytes = reference.scale_bytes(rows, self._pool.arguments.hidden)
        return work


def _checks(call: Call) -> int:
    if call.variant == "all-reduce":
        return CHECK_SUM
    checks = CHECK_STREAMS
    if not call.variant.endswith("residual-only"):
        checks |= CHECK_NORMED
    if call.variant.endswith("mxfp8"):
        checks |= CHECK_QUANTISED
    return checks
