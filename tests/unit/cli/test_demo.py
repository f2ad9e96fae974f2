# SPDX-License-Identifier: Apache-2.0
"""The demo without a GPU, on a stack of one or two layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from trtllm_mhc.cli import demo
from trtllm_mhc.cli.app import app
from trtllm_mhc.cli.findings import LARGEST_ERROR_RATIO
from trtllm_mhc.runtime import cuda

# As the record of a run with engines must have them, see README.
KEYS = {
    "boundaries_found",
    "boundaries_fused",
    "layers",
    "tp",
    "boundaries_full",
    "boundaries_residual_only",
    "boundaries_bit_equal_to_reference",
    "unfused_agreement",
    "rms_error_fused",
    "rms_error_unfused",
    "inputs",
    "ranks_equal",
    "m",
    "mode",
    "unfused_us",
    "fused_us",
    "device",
    "driver",
    "tensorrt",
    "commit",
}


def options(**changes: Any) -> demo.DemoOptions:
    small: dict[str, Any] = {"tp": 2, "layers": 1, "rows": 1, "inputs": 4, "sublayers": "none", "seed": 3}
    return demo.DemoOptions(**(small | changes))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, builder: Any) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 0)


def run(tmp_path: Path, **changes: Any) -> tuple[int, dict[str, Any], str]:
    console = Console(record=True, width=160, file=(tmp_path / "out").open("w"))
    path = tmp_path / "results" / "record.json"
    code = demo.run(options(**changes), path, console)
    return code, json.loads(path.read_text()), console.export_text()


def test_record_without_engines(no_gpu: None, trt: Any, tmp_path: Path) -> None:
    code, record, text = run(tmp_path, layers=2, tp=4, commit="abc")
    assert code == 0
    assert set(record) >= KEYS
    assert (record["boundaries_found"], record["boundaries_fused"]) == (4, 4)
    assert (record["boundaries_full"], record["boundaries_residual_only"]) == (2, 2)
    assert (record["tp"], record["layers"], record["m"], record["inputs"]) == (4, 2, 1, 4)
    assert (record["mode"], record["commit"], record["tensorrt"]) == ("numpy", "abc", trt.__version__)
    assert record["coefficients"] == "native"
    assert record["ranks_equal"] is True
    assert record["unfused_agreement"] == 1
    assert record["boundaries_bit_equal_to_reference"] is None
    assert record["fused_us"] is None
    assert 0 < record["rms_error_fused"] < 0.05
    low, high = record["rms_error_ratio_interval"]
    assert low <= record["rms_error_ratio"] <= high <= LARGEST_ERROR_RATIO
    assert "4 of 4 boundaries fused" in text
    assert "No engine was built: this machine has no usable GPU" in text
    assert "Every comparison holds" in text


def test_coefficients_by_plugin(no_gpu: None, tmp_path: Path) -> None:
    code, record, _ = run(tmp_path, coefficients="plugin")
    assert code == 0
    assert (record["coefficients"], record["boundaries_fused"]) == ("plugin", 2)


def test_a_wrong_fused_network_is_found(no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_mhc.models.deepseek_v41 import ModelWeights
    from trtllm_mhc.verification.backends import Job
    from trtllm_mhc.verification.boundary_stack import StackJobs

    right = StackJobs.probed

    def wrong(jobs: StackJobs) -> Job:
        other = StackJobs(jobs.config, ModelWeights(jobs.config, 99), jobs.tp_size, jobs.sublayers)

        def populate(network: Any, rank: int) -> None:
            right(other).populate(network, rank)
            jobs.probes = other.probes

        return Job("wrong", populate)

    monkeypatch.setattr(StackJobs, "probed", wrong)
    code, record, text = run(tmp_path)
    assert code == 1
    assert record["rms_error_ratio"] > 2
    assert "failed: the fused network is farther from the exact result" in text


def test_a_pass_that_fuses_nothing_is_found(no_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_mhc.rewrite import Report
    from trtllm_mhc.verification import boundary_stack

    monkeypatch.setattr(boundary_stack, "fuse_boundaries", lambda network: Report(found=()))
    console = Console(record=True, width=160, file=(tmp_path / "out").open("w"))
    assert demo.run(options(), None, console) == 1
    assert "expected (2, 1, 1) boundaries fused" in console.export_text()


def test_bad_tp_is_refused() -> None:
    result = CliRunner().invoke(app, ["demo", "--tp", "3"])
    assert result.exit_code == 1
    assert "expected 1, 2, 4 or 8, got 3" in result.stdout
