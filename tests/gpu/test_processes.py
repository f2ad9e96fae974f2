# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes: peer memory through CUDA IPC, rendezvous through a caller's all-gather."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
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
from trtllm_mhc.runtime.library import ErrorKind, MailboxError, MhcError


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


def test_a_process_that_never_starts(tmp_path: Path) -> None:
    """The other one has an error once its all-gather has, and no memory."""
    cuda.call("cudaFree", 0)
    free = cuda.call("cudaMemGetInfo")[0]
    with pytest.raises(MhcError) as raised:
        Communicator.all_gather(
            FolderAllGather(tmp_path, 0, 2, timeout_s=1.0),
            tp_size=2,
            rank=0,
            device=0,
            hidden_size=5120,
            lanes=16,
            timeout_s=1.0,
        )
    assert isinstance(raised.value.__cause__, TimeoutError)
    assert free - cuda.call("cudaMemGetInfo")[0] < 16 << 20  # kernels may have been loaded


FAILURE_TIMEOUT_S = 2.0


def _fails(rank: int, size: int, folder: Path, how: str, captured: bool, results: Any) -> None:
    """The last rank is killed, or stopped for a while, with boundaries under way on all ranks."""
    try:
        device = rank % cuda.device_count()
        cuda.set_device(device)
        gather = FolderAllGather(folder, rank, size)
        communicator = Communicator.all_gather(
            gather, tp_size=size, rank=rank, device=device, hidden_size=5120, lanes=16, timeout_s=FAILURE_TIMEOUT_S
        )
        inputs = make_inputs(np.random.default_rng(0), size, 3, 5120)
        expected = inputs.expected()
        call = DeviceInputs(inputs, rank)
        stream = cuda.Stream()

        def enqueue() -> None:
            for _ in range(10):
                call.boundary(communicator, stream)

        with stream.capture() as graph:
            enqueue()
        gather(b"ready")
        enqueue()
        call.check(expected, stream, f" on rank {rank}")
        gather(b"alive")
        begin = time.monotonic()
        with contextlib.suppress(MailboxError):  # eager calls find out while they are being enqueued
            for _ in range(20):
                graph.launch(stream) if captured else enqueue()
                if rank == size - 1 and how in ("killed", "stopped"):
                    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                    how = "continued"
        stream.synchronize(30)
        seconds = time.monotonic() - begin
        record = communicator.status()
        assert record is not None
        assert record.kind == ErrorKind.TIMEOUT
        assert record.rank != rank
        for output in (call.residual_out, call.layer_input):
            assert output is not None
            assert np.isnan(output.to_numpy(stream).astype(np.float32)).all()
        results.put((rank, "error", record.rank, seconds))
        if how in ("stopped", "continued"):
            communicator.reset()
            enqueue()
            call.check(expected, stream, f" on rank {rank} after the reset")
            graph.launch(stream)
            call.check(expected, stream, f" of a replay on rank {rank} after the reset")
        free = cuda.call("cudaMemGetInfo")[0]
        communicator.close()
        if how == "killed":  # nobody else allocates or frees now
            assert cuda.call("cudaMemGetInfo")[0] - free > 0.9 * communicator.info.mailbox_bytes
        results.put((rank, "done", -1, 0.0))
    except BaseException as error:
        results.put((rank, f"{type(error).__name__}: {error}", -1, 0.0))


@pytest.mark.parametrize(
    ("how", "captured", "size"),
    [("killed", True, 2), ("killed", False, 4), ("stopped", True, 4), ("stopped", False, 2)],
)
def test_a_rank_that_is_killed_or_stopped(tmp_path: Path, how: str, captured: bool, size: int) -> None:
    """The others end within one time-out with NaN and the rank's number, and leave by themselves; a rank that was only
    stopped finds out when it goes on, and a collective reset makes the group work again."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_fails, args=(rank, size, tmp_path, how, captured, results), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    victim = size - 1
    survivors = set(range(size - 1))
    blamed: dict[int, int] = {}
    done: set[int] = set()
    end = time.monotonic() + 80
    try:
        while done != (survivors if how == "killed" else survivors | {victim}):
            rank, what, other, seconds = results.get(timeout=max(0.1, end - time.monotonic()))
            assert what in ("error", "done"), f"rank {rank}: {what}"
            if what == "done":
                done.add(rank)
                continue
            blamed[rank] = other
            if rank != victim:
                # One time-out for up to 200 boundaries; processes that share a device take turns, hence the allowance.
                assert seconds < 1.9 * FAILURE_TIMEOUT_S
            if how == "stopped" and set(blamed) == survivors:
                os.kill(processes[victim].pid or 0, signal.SIGCONT)
        for process in processes:
            process.join(15)
            assert not process.is_alive()
        assert processes[victim].exitcode == (-signal.SIGKILL if how == "killed" else 0)
        # Who had the victim's last contribution waits for one who had not.
        assert victim in {blamed[rank] for rank in survivors}
    finally:
        for process in processes:
            process.kill()
