# SPDX-License-Identifier: Apache-2.0
"""All-gathers of multiprocessing, torch.distributed and mpi4py, between processes where these can be had."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtllm_mhc.runtime.adapters import mpi, processes, torch_distributed

SIZE = 3
ROUNDS = 20
TIMEOUT_S = 60.0


def exchange(gather: Callable[[bytes], Any], rank: int, size: int) -> None:
    """Some rounds of different lengths, binary zeros among them."""
    for turn in range(ROUNDS):
        parts = list(gather(bytes([rank, 0, turn]) * (1 + turn)))
        assert parts == [bytes([peer, 0, turn]) * (1 + turn) for peer in range(size)]


def run(work: Callable[..., None], arguments: list[tuple[Any, ...]]) -> None:
    """Runs `work(rank, *arguments[rank], results)` in a process each."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=work, args=(rank, *given, results), daemon=True) for rank, given in enumerate(arguments)
    ]
    for process in ranks:
        process.start()
    try:
        answers = {}
        while len(answers) < len(ranks):
            try:
                rank, error = results.get(timeout=TIMEOUT_S)
            except queue.Empty:
                pytest.fail(f"only ranks {sorted(answers)} answered within {TIMEOUT_S:g} s")
            answers[rank] = error
        assert answers == dict.fromkeys(range(len(ranks)))
    finally:
        for process in ranks:
            process.kill()
            process.join(10)


def report(rank: int, results: Any, work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
    else:
        results.put((rank, None))


def queue_rank(rank: int, gather: processes.QueueAllGather, results: Any) -> None:
    report(rank, results, lambda: exchange(gather, rank, SIZE))


def test_multiprocessing() -> None:
    context = multiprocessing.get_context("spawn")
    run(queue_rank, [(gather,) for gather in processes.all_gathers(context, SIZE, TIMEOUT_S)])


def test_ranks_of_multiprocessing_that_do_not_come_are_named() -> None:
    gathers = processes.all_gathers(multiprocessing.get_context("spawn"), 3, timeout_s=0.3)

    def wait() -> None:
        with contextlib.suppress(TimeoutError):
            gathers[2](b"x")

    other = threading.Thread(target=wait)
    other.start()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not come within 0.3 s"):
        gathers[0](b"x")
    other.join(10)


def torch_rank(rank: int, folder: str, results: Any) -> None:
    def work() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=SIZE)
        exchange(torch_distributed.all_gather(), rank, SIZE)
        dist.destroy_process_group()

    report(rank, results, work)


def test_torch_distributed_over_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed", reason="torch is not installed")
    run(torch_rank, [(str(tmp_path),)] * SIZE)


def test_torch_distributed_must_be_initialised() -> None:
    pytest.importorskip("torch.distributed", reason="torch is not installed")
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        torch_distributed.all_gather()


def test_mpi4py() -> None:
    module = pytest.importorskip("mpi4py.MPI", reason="mpi4py is not installed", exc_type=ImportError)
    exchange(mpi.all_gather(module.COMM_SELF), 0, 1)


def test_parts_of_mpi_are_cut_in_rank_order() -> None:
    class Communicator:
        """What is used of mpi4py's."""

        def Get_size(self) -> int:  # noqa: N802
            return 2

        def Allgather(self, send: bytes, receive: bytearray) -> None:  # noqa: N802
            receive[:] = send + bytes(reversed(send))

    assert mpi.all_gather(Communicator())(b"abc") == [b"abc", b"cba"]
