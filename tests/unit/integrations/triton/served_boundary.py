# SPDX-License-Identifier: Apache-2.0
"""The model that test_triton_server.py serves: one fused boundary, with faults on request.

Runs in the python backend's stub. The first element of `x` asks for a fault.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from trtllm_mhc.integrations.triton.groups import Feeds, Outputs
from trtllm_mhc.integrations.triton.network_ranks import NetworkRanks
from trtllm_mhc.integrations.triton.settings import Settings
from trtllm_mhc.integrations.triton.tensors import InputRange
from trtllm_mhc.verification.backends import NetworkMaker
from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs

HIDDEN = 4096
EPS = float(np.float32(1e-20))
MAXIMUM_ROWS = 4
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
DYING, HANGING, SLOW, UNPREPARED, STUCK = (2.0**power for power in range(40, 45))
SLOW_S = 1.5
# As the model is served.
DEADLINE_S = 5.0
QUEUE = 8
# A file in the model's folder, a byte longer with each slow request that a rank has begun.
BEGUN = "slow_requests_begun"


def ranges() -> dict[str, InputRange]:
    def rows(dtype: np.dtype, *rest: int) -> InputRange:  # type: ignore[type-arg]
        return InputRange(dtype, (1, *rest), (MAXIMUM_ROWS, *rest))

    return {
        "x": rows(BF16, HIDDEN),
        "residual": rows(BF16, 4, HIDDEN),
        "post": rows(F32, 4),
        "comb": rows(F32, 4, 4),
        "pre": rows(F32, 4),
        "gamma": InputRange(BF16, (HIDDEN,), (HIDDEN,)),
    }


class FaultyRanks(NetworkRanks):
    """Rank 1 does what the request asks for."""

    begun: Path

    def prepare(self, feeds: Sequence[Feeds]) -> None:
        super().prepare(feeds)
        asked = float(feeds[0]["x"][0, 0])
        if asked == UNPREPARED:
            raise OSError("rank 1 cannot prepare this")
        if asked == STUCK:
            self._threads.run(lambda rank: time.sleep(600 * rank), timeout_s=self._timeout_s)

    def run(self) -> list[Outputs]:
        def work(rank: int) -> None:
            asked = float(self._feeds[rank]["x"][0, 0])
            if rank == 1 and asked == DYING:
                raise OSError("rank 1 has lost its device")
            if rank == 1 and asked == SLOW:
                with self.begun.open("ab") as file:
                    file.write(b".")
            if rank == 1 and asked in (SLOW, HANGING):
                time.sleep(SLOW_S if asked == SLOW else 600)
            self._meet()

        self._threads.run(work, timeout_s=self._timeout_s)
        return super().run()


def open_group(settings: Settings, folder: Path) -> FaultyRanks:
    job = SingleBoundaryJobs(HIDDEN, settings.tp_size, EPS).fused()
    maker = NetworkMaker()
    networks = [maker.make(job, rank) for rank in range(settings.tp_size)]
    group = FaultyRanks(networks, ranges(), settings.deadline_s)
    group.begun = folder / BEGUN
    group.keep_alive = maker  # type: ignore[attr-defined]
    return group
