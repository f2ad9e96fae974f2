# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trtllm_mhc.benchmarks import gates, records, report
from trtllm_mhc.cli.app import app

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results/peers_h200.jsonl"
GATES = ROOT / "benchmarks/gates.jsonl"


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "220"})
    return result.exit_code, result.output


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    common = {"op": "local", "tp": 1, "mode": "single", "m": 8, "noise": 0.0, "cache": "warm", "run": "1"}
    path = tmp_path / "rows.jsonl"
    records.append(path, [{**common, "implementation": "trtllm_mhc", "us": 2.0}])
    records.append(path, [{**common, "implementation": "tensorrt", "us": 14.0}])
    return path


def write_gate(tmp_path: Path, at_least: float, m: int = 8) -> Path:
    path = tmp_path / "gates.jsonl"
    gate = {"op": "local", "tp": 1, "mode": "single", "peer": "tensorrt", "m": [m], "at_least": at_least}
    path.write_text(json.dumps(gate) + "\n")
    return path


def test_recorded_rows_are_shown(rows: Path) -> None:
    code, output = run("--records", rows)
    assert code == 0
    assert output.index("7.00") < output.index("14.00")  # ratios first


def test_gate_decides_the_exit_code(rows: Path, tmp_path: Path) -> None:
    code, output = run("--records", rows, "--gate", write_gate(tmp_path, 6.9))
    assert code == 0
    assert "gates: 1 of 1 hold, 0 were not measured" in output
    code, output = run("--records", rows, "--gate", write_gate(tmp_path, 7.1))
    assert code == 1
    assert "M = 8: 7.000, must be at least 7.1" in output


def test_gates_of_which_none_was_measured_fail(rows: Path, tmp_path: Path) -> None:
    code, output = run("--records", rows, "--gate", write_gate(tmp_path, 1.0, m=4))
    assert code == 1
    assert "0 of 0 hold, 1 were not measured" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "bandwidth"), "--only: expected some of boundary"),
        (("--modes", "ring"), "--modes: expected some of single"),
        (("--against", "vllm"), "--against: expected some of sglang_fused"),
        (("--tp", "3"), "--tp: expected some of 1, 2, 4, 8"),
        (("--rows", "0"), "--rows: expected 1 to 64"),
        (("--sublayers", "attention"), "--sublayers: expected some of none"),
        (("--rows", "a"), "expected numbers separated by commas"),
    ],
)
def test_options_are_checked(arguments: tuple[str, ...], message: str) -> None:
    code, output = run(*arguments)
    assert code != 0
    assert message in " ".join(output.split())


def test_recorded_gates_hold_in_the_recorded_rows() -> None:
    verdicts = gates.judge(gates.read(GATES), records.read(RESULTS))
    assert [str(verdict) for verdict in verdicts if not verdict.holds] == []


def test_readme_shows_the_recorded_rows() -> None:
    text = (ROOT / "README.md").read_text()
    assert report.with_table(text, records.read(RESULTS)) == text
