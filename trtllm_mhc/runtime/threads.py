# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from trtllm_mhc.runtime import cuda

Result = TypeVar("Result")


class RankTimeoutError(TimeoutError):
    """Ranks did not come back by the deadline. `ranks` lists them."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class _Run(Generic[Result]):
    """The state of one `ThreadGroup.run`, shared by its threads."""

    def __init__(self, size: int) -> None:
        self.results: dict[int, Result] = {}
        self.failures: list[tuple[int, BaseException]] = []  # in the order in which they happened
        self.finished = threading.Condition()
        self.pending = set(range(size))


class ThreadGroup:
    """Runs a function once per rank, each in a thread of its own, and never waits without a deadline.

    Attributes:
        size: number of ranks.
        devices: the CUDA device of each rank, or None when the function needs no device.
    """

    def __init__(self, size: int, devices: list[int] | None = None) -> None:
        if size < 1:
            raise ValueError(f"a group of at least 1 rank is needed, got {size}")
        if devices is not None and len(devices) != size:
            raise ValueError(f"expected one device for each of {size} ranks, got {devices}")
        self.size = size
        self.devices = devices
        self._barrier = threading.Barrier(size)

    @classmethod
    def on_devices(cls, size: int) -> ThreadGroup:
        """Spreads the ranks over the devices there are: rank r runs on device r modulo their number.

        Raises:
            CudaError: there is no device.
        """
        count = cuda.device_count()
        if count == 0:
            raise cuda.CudaError("no CUDA device is usable on this machine")
        return cls(size, [rank % count for rank in range(size)])

    def barrier(self, timeout_s: float = 60.0) -> None:
        """Called by every rank inside `run`: waits for all of them.

        Raises:
            threading.BrokenBarrierError: a rank failed, or did not come in time.
        """
        self._barrier.wait(timeout_s)

    def run(
        self, function: Callable[[int], Result], *, timeout_s: float = 300.0, grace_s: float = 10.0
    ) -> list[Result]:
        """Runs `function(rank)` on all ranks at once; returns the results in rank order.

        Args:
            function: called once per rank, with that rank's device current.
            timeout_s: seconds that all ranks together may take.
            grace_s: after one rank has failed, seconds that the others get to come back.

        Raises:
            RankTimeoutError: no rank failed and some did not come back; the message says where they are.
            Exception: the first one that a rank raised, with a note on its rank and on the other ranks.
        """
        self._barrier.reset()
        state: _Run[Result] = _Run(self.size)
        threads = [
            # Daemons: a rank that hangs in a driver call must not keep the process from ending.
            threading.Thread(target=self._work, args=(state, function, rank), name=f"rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        self._wait(state, time.monotonic() + timeout_s, grace_s)
        with state.finished:
            late = tuple(sorted(state.pending))
            failures = list(state.failures)
        for rank in range(self.size):
            if rank not in late:
                threads[rank].join(1.0)
        if failures:
            raise _first_failure(failures, late)
        if late:
            where = "".join(f"\n{_stack(threads[rank])}" for rank in late)
            raise RankTimeoutError(f"{_ranks(late)} did not come back within {timeout_s:g} s{where}", late)
        if self.devices is not None:
            cuda.free_dropped()
        return [state.results[rank] for rank in range(self.size)]

    def _work(self, state: _Run[Result], function: Callable[[int], Result], rank: int) -> None:
        failure: BaseException | None = None
        try:
            if self.devices is not None:
                cuda.set_device(self.devices[rank])
            state.results[rank] = function(rank)
        except BaseException as error:
            failure = error
            self._barrier.abort()
        with state.finished:
            if failure is not None:
                state.failures.append((rank, failure))
            state.pending.discard(rank)
            state.finished.notify_all()

    @staticmethod
    def _wait(state: _Run[Result], deadline: float, grace_s: float) -> None:
        with state.finished:
            while state.pending:
                if state.failures:
                    deadline = min(deadline, time.monotonic() + grace_s)
                    grace_s = float("inf")  # the grace runs from the first failure only
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return
                state.finished.wait(remaining)


def _ranks(ranks: tuple[int, ...]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or -1)
    if frame is None:
        return f"{thread.name}: gone"
    return f"{thread.name} is at:\n" + "".join(traceback.format_stack(frame, limit=6))


def _first_failure(failures: list[tuple[int, BaseException]], late: tuple[int, ...]) -> BaseException:
    # A barrier broken by somebody else's failure is a consequence, never the cause.
    causes = [entry for entry in failures if not isinstance(entry[1], threading.BrokenBarrierError)] or failures
    rank, error = causes[0]
    error.add_note(f"raised on rank {rank}")
    for other, consequence in failures:
        if consequence is not error:
            error.add_note(f"rank {other} raised {type(consequence).__name__}: {consequence}")
    if late:
        error.add_note(f"{_ranks(late)} did not come back")
    return error
