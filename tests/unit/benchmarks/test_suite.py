# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from trtllm_mhc.benchmarks import suite
from trtllm_mhc.benchmarks.suite import Place


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.cuda, "device_count", lambda: 1)


def test_places_that_make_sense() -> None:
    assert suite.places([1, 2, 8], ["single", "self_loop", "loopback", "nvlink"]) == [
        Place(1, "single"),
        Place(2, "self_loop"),
        Place(2, "loopback"),
        Place(2, "nvlink"),
        Place(8, "self_loop"),
        Place(8, "nvlink"),
    ]


def test_a_place_needs_a_gpu_for_each_rank_only_over_nvlink() -> None:
    assert Place(8, "self_loop").missing() is None
    assert Place(2, "nvlink").missing() == "needs 2 GPUs, this machine has 1"


def test_operations_of_a_place() -> None:
    ops = suite.OPS
    group = suite.plan(Place(2, "loopback"), ops, [1, 8], peers=None, against=["sglang_fused"])
    assert {case.op for case in group.cases} == {"boundary", "boundary_mxfp8", "consumer"}
    alone = suite.plan(Place(1, "single"), ops, [1, 8], peers=None, against=["sglang_fused"])
    assert {case.op for case in alone.cases} == {"local", "coefficients"}


def test_cases_that_are_compared_follow_each_other() -> None:
    planned = suite.plan(Place(2, "loopback"), ["boundary"], [1, 8, 64], peers=None, against=[])
    names = [(case.rows, case.implementation) for case in planned.cases]
    both = [(m, name) for m in (1, 8) for name in ("trtllm_mhc", "trtllm_mhc_spin")]
    assert names == [*both, (64, "trtllm_mhc")]  # spinning with 64 rows leaves the peer no room


def test_what_is_missing_has_a_reason() -> None:
    planned = suite.plan(Place(2, "self_loop"), ["boundary"], [8], peers=None, against=["sglang_fused", "unfused_nccl"])
    assert planned.skipped == [
        ("boundary, sglang_fused", "no folder given: scripts/fetch_peers.sh makes one, --peers names it"),
        ("boundary, unfused_nccl", "NCCL wants a GPU for each rank"),
    ]
    assert {case.implementation for case in planned.cases} == {"trtllm_mhc"}


@pytest.mark.parametrize("error", ["No module named 'tensorrt'", "libnvinfer.so.10: cannot open shared object file"])
def test_without_tensorrt_everything_else_is_measured(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    def fail(name: str) -> None:
        raise ImportError(error)

    monkeypatch.setattr(suite.importlib, "import_module", fail)
    planned = suite.plan(Place(2, "self_loop"), ["boundary", "stack"], [8], peers=None, against=["tensorrt"])
    assert planned.skipped == [("boundary, tensorrt", error), ("stack", error)]
    assert {case.implementation for case in planned.cases} == {"trtllm_mhc"}


def test_cold_cases_only_where_they_can_be_measured() -> None:
    def caches(place: Place) -> set[str]:
        return {case.cache for case in suite.plan(place, ["boundary"], [8], peers=None, against=[]).cases}

    assert caches(Place(2, "self_loop")) == {"warm", "cold"}
    assert caches(Place(2, "loopback")) == {"warm"}
