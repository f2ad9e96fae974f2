# SPDX-License-Identifier: Apache-2.0
"""The group that test_triton.py serves: engines, with faults on request.

Loaded by the model in the python backend's process (`Settings.group`). The first element of the input asks for a fault.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from trtllm_mhc.integrations.triton.groups import EngineRanks, Feeds, Outputs
from trtllm_mhc.integrations.triton.settings import Settings

INPUT = "embeddings"
DYING, MISSING, SLOW = (2.0**power for power in range(40, 43))
SLOW_S = 1.5


class FaultyEngines(EngineRanks):
    """Rank 1 does what the request asks for."""

    def prepare(self, feeds: Sequence[Feeds]) -> None:
        self._asked = float(feeds[0][INPUT][0, 0])
        super().prepare(feeds)

    def run(self) -> list[Outputs]:
        if self._asked == SLOW:
            time.sleep(SLOW_S)
        if self._asked not in (DYING, MISSING):
            return super().run()
        group, work = self._engines._group, self._engines._pass

        def rank_1_fails(rank: int) -> Outputs:
            if rank == 1:
                if self._asked == DYING:
                    raise OSError("rank 1 has lost its device")
                return {}  # its kernels never come, so rank 0's give up
            return work(rank)

        return group.run(rank_1_fails, timeout_s=self._engines._timeout_s)


def open_group(settings: Settings, folder: Path) -> FaultyEngines:
    return FaultyEngines(settings, folder)
