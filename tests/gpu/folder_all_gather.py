# SPDX-License-Identifier: Apache-2.0
"""How process ranks of the tests meet."""

from __future__ import annotations

import time
from pathlib import Path

TIMEOUT_S = 20.0


class FolderAllGather:
    """An all-gather through files of one folder."""

    def __init__(self, folder: Path, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> None:
        self._folder, self._rank, self._size, self._timeout_s, self._round = folder, rank, size, timeout_s, 0

    def __call__(self, mine: bytes) -> list[bytes]:
        def path(rank: int) -> Path:
            return self._folder / f"{self._round}.{rank}"

        partial = self._folder / f"{self._round}.{self._rank}.partial"
        partial.write_bytes(mine)
        partial.rename(path(self._rank))
        end = time.monotonic() + self._timeout_s
        while not all(path(rank).exists() for rank in range(self._size)):
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self._rank}: the others did not come")
            time.sleep(0.001)
        parts = [path(rank).read_bytes() for rank in range(self._size)]
        self._round += 1
        return parts
