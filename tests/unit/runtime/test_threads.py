# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
import time

import pytest

from trtllm_mhc.runtime.threads import RankTimeoutError, ThreadGroup


def test_results_come_in_rank_order() -> None:
    group = ThreadGroup(4)

    def work(rank: int) -> int:
        group.barrier(10)  # proves that all four run at once
        time.sleep(0.01 * (4 - rank))
        return rank * rank

    assert group.run(work, timeout_s=20) == [0, 1, 4, 9]


def test_first_exception_is_raised_with_its_rank() -> None:
    group = ThreadGroup(3)

    def work(rank: int) -> None:
        if rank == 1:
            raise KeyError("the cause")
        group.barrier(10)

    with pytest.raises(KeyError, match="the cause") as caught:
        group.run(work, timeout_s=20)
    notes = "\n".join(caught.value.__notes__)
    assert "raised on rank 1" in notes
    assert "rank 0 raised BrokenBarrierError" in notes


def test_late_rank_is_named_with_its_stack() -> None:
    group = ThreadGroup(2)
    release = threading.Event()

    def hangs_here() -> None:
        release.wait(30)

    def work(rank: int) -> None:
        if rank == 1:
            hangs_here()

    begin = time.monotonic()
    try:
        with pytest.raises(RankTimeoutError, match=r"rank 1 did not come back within 0\.2 s") as caught:
            group.run(work, timeout_s=0.2)
    finally:
        release.set()
    assert caught.value.ranks == (1,)
    assert "hangs_here" in str(caught.value)
    assert time.monotonic() - begin < 5


def test_a_failure_gives_the_others_a_grace_only() -> None:
    group = ThreadGroup(2)
    release = threading.Event()

    def work(rank: int) -> None:
        if rank == 0:
            raise ValueError("broken input")
        release.wait(30)

    begin = time.monotonic()
    try:
        with pytest.raises(ValueError, match="broken input") as caught:
            group.run(work, timeout_s=60, grace_s=0.2)
    finally:
        release.set()
    assert "rank 1 did not come back" in "\n".join(caught.value.__notes__)
    assert time.monotonic() - begin < 10


def test_group_can_run_again_after_a_failure() -> None:
    group = ThreadGroup(2)

    def fails(rank: int) -> None:
        raise ValueError(str(rank))

    with pytest.raises(ValueError, match=r"0|1"):
        group.run(fails, timeout_s=20)

    def works(rank: int) -> int:
        group.barrier(10)
        return rank

    assert group.run(works, timeout_s=20) == [0, 1]


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1 rank"):
        ThreadGroup(0)
    with pytest.raises(ValueError, match="one device for each of 2 ranks"):
        ThreadGroup(2, [0])
