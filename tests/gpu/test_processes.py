# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes: peer memory through CUDA IPC, rendezvous through a caller's all-gather."""

from __future__ import annotations

import multiprocessing
import queue
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.loopback import DeviceInputs, make_inputs
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.library import ErrorKind, MailboxError

TIMEOUT_S = 20.0


class FolderAllGather:
    """An all-gather through files of one folder."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self._rank, self._size, self._round = folder, rank, size, 0

    def __call__(self, mine: bytes) -> list[bytes]:
        def path(rank: int) -> Path:
            return self._folder / f"{self._round}.{rank}"

        partial = self._folder / f"{self._round}.{self._rank}.partial"
        partial.write_bytes(mine)
        partial.rename(path(self._rank))
        end = time.monotonic() + TIMEOUT_S
        while not all(path(rank).exists() for rank in range(self._size)):
            if time.monotonic() > end:
                raise TimeoutError(f"rank {self._rank}: the others did not come")
            time.sleep(0.001)
        parts = [path(rank).read_bytes() for rank in range(self._size)]
        self._round += 1
        return parts


def _rank(rank: int, size: int, folder: Path, dies: bool, results: Any) -> None:
    try:
        cuda.set_device(rank % cuda.device_count())
        gather = FolderAllGather(folder, rank, size)
        communicator = Communicator.all_gather(
            gather, tp_size=size, rank=rank, device=rank % cuda.device_count(), hidden_size=5120, timeout_s=3.0
        )
        rng = np.random.default_rng(0)
        calls = [make_inputs(rng, size, rows, 5120) for rows in (1, 8, 3, 80)]
        inputs = [DeviceInputs(call, rank) for call in calls]
        stream = cuda.Stream()
        gather(b"ready")
        for call, on_device in zip(calls, inputs, strict=True):
            on_device.boundary(communicator, stream)
            on_device.check(call.expected(), stream, f" on rank {rank}")
        gather(b"done ")
        if not dies:
            communicator.close()
        elif rank > 0:
            inputs[0].boundary(communicator, stream)
            stream.synchronize()
            with pytest.raises(MailboxError) as raised:
                inputs[0].boundary(communicator, stream)
            assert raised.value.record is not None
            assert (raised.value.record.kind, raised.value.record.rank) == (ErrorKind.TIMEOUT, 0)
        results.put((rank, None))
    except BaseException as error:
        results.put((rank, f"{type(error).__name__}: {error}"))


def _run(size: int, folder: Path, dies: bool) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, size, folder, dies, results), daemon=True) for rank in range(size)
    ]
    for process in processes:
        process.start()
    answers: dict[int, str | None] = {}
    end = time.monotonic() + 60
    try:
        while len(answers) < size:
            try:
                rank, error = results.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"ranks {sorted(set(range(size)) - set(answers))} did not answer within 60 s")
            answers[rank] = error
        for process in processes:
            process.join(10)
            assert not process.is_alive()
    finally:
        for process in processes:
            process.kill()
    assert answers == dict.fromkeys(range(size))


@pytest.mark.parametrize("size", [2, 4])
def test_boundaries_between_processes(tmp_path: Path, size: int) -> None:
    _run(size, tmp_path, dies=False)


def test_a_process_that_ends_without_a_word(tmp_path: Path) -> None:
    """Rank 0 leaves after a few calls; the other one's next boundary ends with rank 0 named."""
    _run(2, tmp_path, dies=True)
