# SPDX-License-Identifier: Apache-2.0
"""A rank's process is killed or stopped while both replay a graph with calls through the mailbox and through NCCL.

tests/gpu/test_processes.py has the same for the mailbox alone, which names the rank; NCCL cannot.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.folder_all_gather import FolderAllGather
from tests.gpu.loopback import DeviceInputs, make_inputs
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.library import ErrorKind, MailboxError

TIMEOUT_S = 2.0
ROWS = (4, 128, 8, 256)


def _rank(rank: int, folder: Path, connection: Any) -> None:
    try:
        cuda.set_device(rank)
        communicator = Communicator.all_gather(
            FolderAllGather(folder, rank, 2),
            tp_size=2,
            rank=rank,
            device=rank,
            hidden_size=5120,
            timeout_s=TIMEOUT_S,
            nccl_rows=128,
        )
        rng = np.random.default_rng(0)
        cases = [make_inputs(rng, 2, rows, 5120) for rows in ROWS]
        expected = [inputs.expected() for inputs in cases]
        calls = [DeviceInputs(inputs, rank) for inputs in cases]
        stream = cuda.Stream()
        with stream.capture() as graph:
            for call in calls:
                call.boundary(communicator, stream)
        connection.send("replaying")
        latest = time.monotonic()
        try:
            while True:
                graph.launch(stream)
                stream.synchronize(10 * TIMEOUT_S)
                if communicator.status() is not None:
                    calls[0].boundary(communicator, stream)
                    raise AssertionError("a lane in error took another call")
                latest = time.monotonic()
                for call, outputs in zip(calls, expected, strict=True):
                    call.check(outputs, stream)
        except MailboxError as error:
            found = (error.record.kind, error.record.rank) if error.record is not None else (None, None)
            connection.send((*found, time.monotonic() - latest))
        graph.close()
        start = time.monotonic()
        communicator.close()
        connection.send(time.monotonic() - start)
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_rank_ends_within_the_time_out(tmp_path: Path, what: signal.Signals, victim: int) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [context.Process(target=_rank, args=(r, tmp_path, pipes[r][1]), daemon=True) for r in range(2)]
    for process in processes:
        process.start()
    survivor = pipes[1 - victim][0]
    try:
        for pipe, _ in pipes:
            assert pipe.poll(60), "a rank did not begin within 60 s"
            assert pipe.recv() == "replaying"
        time.sleep(0.5)
        os.kill(processes[victim].pid or 0, what)
        assert survivor.poll(3 * TIMEOUT_S), "the survivor did not end"
        answer = survivor.recv()
        assert isinstance(answer, tuple), answer
        kind, rank, elapsed = answer
        assert elapsed < 2 * TIMEOUT_S
        assert (kind, rank) in ((ErrorKind.TIMEOUT, victim), (ErrorKind.NCCL, -1))
        assert survivor.poll(10), "closing hangs"
        closing = survivor.recv()
        assert isinstance(closing, float), closing
        assert closing < 5
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
