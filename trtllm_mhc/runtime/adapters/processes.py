# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes of Python's multiprocessing.

gathers = processes.all_gathers(multiprocessing.get_context("spawn"), 2)
# rank r is started with gathers[r], and calls Communicator.all_gather(gathers[r], tp_size=2, rank=r, ...)
"""

from __future__ import annotations

import queue
import time
from multiprocessing.context import BaseContext
from typing import Any


class QueueAllGather:
    """One rank's all-gather over queues, one for each rank to read from. Sent to its process when that is started."""

    def __init__(self, queues: list[Any], rank: int, timeout_s: float) -> None:
        self._queues = queues
        self._rank = rank
        self._timeout_s = timeout_s
        self._round = 0
        self._early: dict[tuple[int, int], bytes] = {}  # what faster ranks have sent for later rounds

    def __call__(self, mine: bytes) -> list[bytes]:
        """Gives this rank's bytes to all and returns everybody's.

        Raises:
            TimeoutError: ranks did not come in time; the message names them.
        """
        now, self._round = self._round, self._round + 1
        for inbox in self._queues:
            inbox.put((now, self._rank, mine))
        ranks = range(len(self._queues))
        end = time.monotonic() + self._timeout_s
        while not all((now, rank) in self._early for rank in ranks):
            try:
                sent, rank, part = self._queues[self._rank].get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                absent = [rank for rank in ranks if (now, rank) not in self._early]
                raise TimeoutError(f"ranks {absent} did not come within {self._timeout_s:g} s") from None
            self._early[sent, rank] = part
        return [self._early.pop((now, rank)) for rank in ranks]


def all_gathers(context: BaseContext, size: int, timeout_s: float = 60.0) -> list[QueueAllGather]:
    """One all-gather for each of `size` ranks.

    Args:
        context: multiprocessing's, by which the processes are started.
        size: number of ranks.
        timeout_s: of each call.
    """
    queues = [context.Queue() for _ in range(size)]
    return [QueueAllGather(queues, rank, timeout_s) for rank in range(size)]
