# SPDX-License-Identifier: Apache-2.0
"""In which order engines are built, and which ranks share one; with builds that only note that they happened."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def builds(trt: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces `build_engine`: a plan's data says which network it was, and the list in which order."""
    from trtllm_mhc.runtime import build

    done: list[str] = []
    lock = threading.Lock()

    def build_engine(populate: Any, *, rows: Any, timing_cache: Any) -> build.Plan:
        network: list[str] = []
        populate(network)
        with lock:
            done.append(network[0])
        return build.Plan(network[0].encode(), 0.5)

    monkeypatch.setattr(build, "build_engine", build_engine)
    return done


def job(name: str, **options: Any) -> Any:
    from trtllm_mhc.verification.backends import Job

    return Job(name, lambda network, rank: network.append(f"{name} of rank {rank}"), **options)  # type: ignore[attr-defined]


def test_timed_engines_come_first_and_every_rank_gets_its_own(builds: list[str]) -> None:
    from trtllm_mhc.runtime.build import RowRange, TimingCache
    from trtllm_mhc.verification.backends import build_jobs

    said: list[str] = []
    jobs = [job("shown"), job("unfused", timed=True), job("fused", timed=True), job("alone", per_rank=False)]
    plans = build_jobs(jobs, 2, RowRange(1, 2, 3), TimingCache(), said.append)
    assert builds[:2] == ["unfused of rank 0", "fused of rank 0"]
    assert sorted(builds[2:]) == [
        "alone of rank 0",
        "fused of rank 1",
        "shown of rank 0",
        "shown of rank 1",
        "unfused of rank 1",
    ]
    assert [plan.data for plan in plans["fused"]] == [b"fused of rank 0", b"fused of rank 1"]
    assert plans["alone"][0] is plans["alone"][1]
    assert len(said) == 7
    assert any(text.startswith("built alone, all ranks: 0.5 s") for text in said)


def test_a_failing_build_is_raised(builds: list[str]) -> None:
    from trtllm_mhc.runtime.build import RowRange, TimingCache
    from trtllm_mhc.verification.backends import Job, build_jobs

    def fail(network: Any, rank: int) -> None:
        if rank == 1:
            raise ValueError("no such rank")

    def first(network: Any, rank: int) -> None:
        network.append("fine")
        fail(network, rank)

    with pytest.raises(ValueError, match="no such rank"):
        build_jobs([Job("bad", first)], 2, RowRange(1, 2, 3), TimingCache(), lambda text: None)


def test_rows_are_split_into_inputs(trt: Any) -> None:
    from trtllm_mhc.verification.backends import split_rows

    pieces = split_rows(np.arange(12).reshape(6, 2), 2)
    assert [piece.tolist() for piece in pieces] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
