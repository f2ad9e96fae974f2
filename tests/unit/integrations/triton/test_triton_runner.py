# SPDX-License-Identifier: Apache-2.0
"""What fails one request, and what ends the group: the runner over a group that is told how to behave."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc.integrations.triton.groups import Feeds, Outputs
from trtllm_mhc.integrations.triton.runner import (
    BadRequestError,
    CanaryError,
    DeadlineError,
    GroupBrokenError,
    GroupRunner,
    PrepareError,
)
from trtllm_mhc.integrations.triton.tensors import InputRange, TensorSpec
from trtllm_mhc.runtime.threads import RankTimeoutError

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


class Group:
    """Doubles `x`; raises what is put into `prepare_errors` and `run_errors`, one for each call."""

    def __init__(self) -> None:
        self.tp_size = 2
        self.inputs = {"x": InputRange(BF16, (1, 4), (3, 4)), "scale": InputRange(F32, (1,), (1,))}
        self.outputs = ["y"]
        self.prepare_errors: list[Exception | None] = []
        self.run_errors: list[Exception | None] = []
        self.calls: list[str] = []
        self.noise = 0.0
        self._feeds: Sequence[Feeds] = []

    def prepare(self, feeds: Sequence[Feeds]) -> None:
        self.calls.append("prepare")
        self._feeds = feeds
        self._raise(self.prepare_errors)

    def run(self) -> list[Outputs]:
        self.calls.append("run")
        self._raise(self.run_errors)
        return [{"y": (feed["x"].astype(F32) * 2 + self.noise).astype(BF16)} for feed in self._feeds]

    def close(self) -> None:
        self.calls.append("close")

    @staticmethod
    def _raise(errors: list[Exception | None]) -> None:
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def runner(group: Group) -> GroupRunner:
    return GroupRunner(group)


def inputs(rows: int = 2) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {"x": np.full((rows, 4), 1.5, BF16), "scale": np.ones(1, F32)}


def test_outputs_are_the_first_rank_s(runner: GroupRunner) -> None:
    np.testing.assert_array_equal(runner.infer(inputs())["y"], np.full((2, 4), 3.0, BF16))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"x": np.zeros((2, 4), BF16)}, r"missing \['scale'\]"),
        ({**inputs(), "z": np.zeros(1)}, r"unknown \['z'\]"),
        ({**inputs(), "x": np.zeros((2, 4), F32)}, "'x': expected dtype bfloat16, got float32"),
        ({**inputs(), "x": np.zeros((2, 5), BF16)}, r"'x': expected shape \[1 to 3, 4\], got \[2, 5\]"),
        ({**inputs(), "x": np.zeros((0, 4), BF16)}, r"got \[0, 4\]"),
        ({**inputs(), "x": np.zeros((4, 4), BF16)}, r"got \[4, 4\]"),
        ({**inputs(), "x": np.zeros((4,), BF16)}, r"got \[4\]"),
    ],
)
def test_bad_input_reaches_no_rank(group: Group, runner: GroupRunner, bad: Feeds, says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        runner.infer(bad)
    assert group.calls == []
    runner.infer(inputs())


def test_value_error_in_prepare_is_the_request_s(group: Group, runner: GroupRunner) -> None:
    group.prepare_errors = [ValueError("outside the profile")]
    with pytest.raises(BadRequestError, match="outside the profile"):
        runner.infer(inputs())
    assert group.calls == ["prepare"]
    runner.infer(inputs())


def test_other_error_in_prepare_runs_the_canary(group: Group, runner: GroupRunner) -> None:
    group.prepare_errors = [OSError("no memory")]
    with pytest.raises(PrepareError, match="no memory"):
        runner.infer(inputs())
    assert group.calls == ["prepare", "prepare", "run"]
    assert runner.broken is None
    runner.infer(inputs())


def test_error_in_prepare_breaks_a_group_whose_canary_fails(group: Group, runner: GroupRunner) -> None:
    group.prepare_errors = [OSError("no memory")]
    group.run_errors = [OSError("device lost")]
    with pytest.raises(GroupBrokenError, match="device lost"):
        runner.infer(inputs())
    assert runner.broken is not None


def test_lasting_error_in_prepare_ends(group: Group, runner: GroupRunner) -> None:
    group.prepare_errors = [OSError("no memory")] * 50
    with pytest.raises(GroupBrokenError, match="no memory"):
        runner.infer(inputs())
    assert len(group.calls) < 5


@pytest.mark.parametrize("phase", ["prepare", "run"])
def test_lost_rank_breaks_the_group(group: Group, runner: GroupRunner, phase: str) -> None:
    getattr(group, f"{phase}_errors").append(RankTimeoutError("rank 1 did not come back", (1,)))
    with pytest.raises(GroupBrokenError, match="rank 1 did not come back"):
        runner.infer(inputs())
    calls = list(group.calls)
    with pytest.raises(GroupBrokenError, match=r"load the model again.*rank 1 did not come back"):
        runner.infer(inputs())
    assert group.calls == calls


def test_value_error_in_run_breaks_the_group(group: Group, runner: GroupRunner) -> None:
    group.run_errors = [ValueError("of whatever origin")]
    with pytest.raises(GroupBrokenError, match="of whatever origin"):
        runner.infer(inputs())


def test_passed_deadline_is_the_request_s(group: Group, runner: GroupRunner) -> None:
    with pytest.raises(DeadlineError):
        runner.infer(inputs(), time.monotonic() - 1)
    assert group.calls == []
    runner.infer(inputs(), time.monotonic() + 60)


def test_deadline_that_passes_in_prepare_keeps_the_ranks_from_running(
    group: Group, runner: GroupRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    times = iter([now, now + 2])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    with pytest.raises(DeadlineError):
        runner.infer(inputs(), now + 1)
    assert group.calls == ["prepare"]


def test_canary_compares_every_rank_s_bits(group: Group, runner: GroupRunner, tmp_path: Path) -> None:
    path = tmp_path / "canary.npz"
    runner.record_canary(path, inputs())
    runner.canary(path)
    group.noise = 0.25
    with pytest.raises(CanaryError, match=r"'y' of rank 0: 8 of 8 elements .* first at \[0, 0\]"):
        runner.canary(path)


def test_canary_of_other_inputs_is_refused(runner: GroupRunner, tmp_path: Path) -> None:
    path = tmp_path / "canary.npz"
    np.savez(path, **{"input.x": np.zeros((1, 4), np.uint16)})
    with pytest.raises(CanaryError, match=r"expected \['input.scale', 'input.x'\], got \['input.x'\]"):
        runner.canary(path)


def test_canary_without_a_record_runs_the_ranks(group: Group, runner: GroupRunner, tmp_path: Path) -> None:
    runner.canary(tmp_path / "canary.npz")
    assert group.calls == ["prepare", "run"]


GOOD_INPUTS = [TensorSpec("x", BF16, (-1, 4)), TensorSpec("scale", F32, (1,))]
GOOD_OUTPUTS = [TensorSpec("y", BF16, (-1, 4))]


def test_signature_that_fits(runner: GroupRunner) -> None:
    runner.require_signature(GOOD_INPUTS, GOOD_OUTPUTS)


@pytest.mark.parametrize(
    ("inputs_", "outputs", "says"),
    [
        (GOOD_INPUTS[:1], GOOD_OUTPUTS, r"expected the inputs \['x', 'scale'\], got \['x'\]"),
        ([TensorSpec("x", F32, (-1, 4)), GOOD_INPUTS[1]], GOOD_OUTPUTS, "'x': expected bfloat16 .* got float32"),
        ([TensorSpec("x", BF16, (-1, 5)), GOOD_INPUTS[1]], GOOD_OUTPUTS, r"got bfloat16 \[-1, 5\]"),
        ([TensorSpec("x", BF16, (1, 4)), GOOD_INPUTS[1]], GOOD_OUTPUTS, r"got bfloat16 \[1, 4\]"),
        (GOOD_INPUTS, [TensorSpec("z", BF16, (-1, 4))], r"outputs among \['y'\], got \['z'\]"),
    ],
)
def test_signature_that_does_not_fit(
    runner: GroupRunner, inputs_: list[TensorSpec], outputs: list[TensorSpec], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        runner.require_signature(inputs_, outputs)
