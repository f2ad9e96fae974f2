# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc bench-linear` without a GPU: what it refuses."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from trtllm_mhc.cli.app import app
from trtllm_mhc.runtime import cuda


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "--tp: expected 2, 4 or 8, got 3"),
        (["--rows", "0,65,8"], "--rows: expected 1 to 64, got [0, 65]"),
        (["--features", "1024,1000"], "--features: expected multiples of 128 up to 16384, got [1000]"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench-linear", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert message in result.output


def test_numbers_are_asked_for() -> None:
    result = CliRunner().invoke(app, ["bench-linear", "--rows", "eight"])
    assert result.exit_code == 2
    assert "eight" in result.output


def test_without_a_gpu_it_says_so() -> None:
    if cuda.device_count():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(app, ["bench-linear"])
    assert result.exit_code == 1
    assert "needs a GPU" in result.output
