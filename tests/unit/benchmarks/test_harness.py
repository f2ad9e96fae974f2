# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.unit.benchmarks.fake_device import FakeStream, install
from trtllm_mhc.benchmarks import harness
from trtllm_mhc.benchmarks.harness import Case, CheckError, Rank, measure


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


class Spends:
    """A subject of which call number n on rank r takes `us(r, n)`."""

    def __init__(
        self, rank: Rank, us: Callable[[int, int], float], log: list[str], name: str, error: str | None
    ) -> None:
        self._rank, self._us, self._error = rank, us, error
        self._log, self._name = log, name
        self._calls = itertools.count()

    def enqueue(self, stream: FakeStream) -> None:
        def spend() -> float:
            self._log.append(self._name)
            return self._us(self._rank.index, next(self._calls))

        stream.spend(spend)

    def check(self) -> None:
        if self._error:
            raise CheckError(self._error)


def case(
    us: Callable[[int, int], float],
    *,
    name: str = "ours",
    rows: int = 1,
    log: list[str] | None = None,
    error: str | None = None,
) -> Case:
    return Case("boundary", name, rows, lambda rank: Spends(rank, us, log if log is not None else [], name, error))  # type: ignore[arg-type]


def test_time_per_call() -> None:
    (result,) = measure([case(lambda rank, call: 4.0)], 2, "self_loop")
    assert result.us == pytest.approx(4.0)
    assert result.noise == pytest.approx(0)
    assert result.failure is None


def test_slowest_rank_of_every_replay_counts_and_not_the_alignment_before_it() -> None:
    # The ranks are slow in turns: the median of each is 4, of the slowest 6.
    def us(rank: int, call: int) -> float:
        replay = (call - 2) // harness.CALLS  # two calls are outside of the graph
        return 6.0 if replay % 2 == rank else 4.0

    (result,) = measure([case(us)], 2, "loopback")
    assert result.us == pytest.approx(6.0)


def test_noise_is_the_difference_of_the_halves() -> None:
    half = 2 + harness.CALLS * (harness.WARM_UP + harness.REPLAYS)
    (result,) = measure([case(lambda rank, call: 4.0 if call < half else 5.0)], 1, "single")
    assert result.us == pytest.approx(4.5)
    assert result.noise == pytest.approx(1 / 4.5)


def test_cases_of_one_operation_and_m_take_turns() -> None:
    log: list[str] = []
    cases = [case(lambda rank, call: 1.0, name=name, rows=m, log=log) for m in (1, 2) for name in "ABC"]
    measure(cases, 1, "single")
    timed = [name for name, calls in itertools.groupby(log) if len(list(calls)) > 2]
    # C's second half follows its first without a break.
    assert timed == list("ABCBA") * 2


def test_cold_subtracts_the_flush() -> None:
    (result,) = measure([case(lambda rank, call: 7.0).cold], 1, "single")
    assert result.us == pytest.approx(7.0)
    assert result.case.cache == "cold"


def test_a_case_that_computes_something_wrong_has_no_numbers() -> None:
    wrong, right = measure(
        [case(lambda rank, call: 1.0, error="other bits"), case(lambda rank, call: 2.0)], 1, "single"
    )
    assert wrong.failure == "CheckError: other bits"
    assert right.failure is None
    assert right.us == pytest.approx(2.0)


def test_a_failure_on_one_rank_is_the_case_s_on_all() -> None:
    def make(rank: Rank) -> Spends:
        return Spends(rank, lambda rank, call: 1.0, [], "", "rank 1 only" if rank.index == 1 else None)

    failed, after = measure(
        [Case("boundary", "peer", 1, make), case(lambda rank, call: 3.0)],  # type: ignore[arg-type]
        2,
        "loopback",
    )
    assert failed.failure == "CheckError: rank 1 only"
    assert after.us == pytest.approx(3.0)


@pytest.mark.parametrize(("tp", "mode"), [(1, "loopback"), (2, "single")])
def test_mode_must_fit_the_group(tp: int, mode: harness.Mode) -> None:
    with pytest.raises(ValueError, match="single"):
        measure([], tp, mode)
