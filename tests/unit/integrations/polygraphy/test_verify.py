# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc verify` without a GPU: it accepts what is right and names what is planted."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("polygraphy")

from trtllm_mhc.cli.app import app
from trtllm_mhc.cli.findings import Findings
from trtllm_mhc.cli.steps import Steps
from trtllm_mhc.cli.verify import EXIT_HOLDS, EXIT_UNUSABLE, VerifyOptions, run, verify_stack
from trtllm_mhc.runtime import cuda

KEYS = {"outputs", "max_ulp", "ranks_equal", "rms_error_fused", "rms_error_unfused", "device", "tensorrt", "commit"}
SMALL: dict[str, Any] = {"layers": 1, "rows": 2, "inputs": 2, "sublayers": "none"}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, builder: Any) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 0)


def verify(options: VerifyOptions, tmp_path: Path) -> tuple[int, dict[str, Any], str]:
    console = Console(record=True, width=200, file=io.StringIO())
    path = tmp_path / "results" / "record.json"
    code = run(options, path, console)
    return code, json.loads(path.read_text()) if path.exists() else {}, console.export_text()


def test_right_networks_pass(no_gpu: None, trt: Any, tmp_path: Path) -> None:
    code, record, text = verify(VerifyOptions(**SMALL, tp=4, commit="abc"), tmp_path)
    assert code == EXIT_HOLDS, text
    assert set(record) >= KEYS
    assert (record["tp"], record["mode"], record["commit"], record["tensorrt"]) == (4, "numpy", "abc", trt.__version__)
    assert (record["outputs"], record["polygraphy_passed"]) == (8, 8)  # an output of 4 ranks for 2 inputs
    assert record["ranks_equal"] is True
    assert record["first_deviation"] is None
    assert record["max_ulp"] <= 1
    assert 0 < record["rms_error_fused"] < 0.02
    assert record["boundaries_bit_equal_to_reference"] is None
    assert "8 of 8 outputs agree" in text
    assert "No engine was built: this machine has no usable GPU" in text


def test_the_form_that_engines_are_built_of_passes(no_gpu: None, tmp_path: Path) -> None:
    code, record, text = verify(VerifyOptions(**SMALL, coefficients="plugin"), tmp_path)
    assert code == EXIT_HOLDS, text
    assert record["coefficients"] == "plugin"


@pytest.mark.parametrize("name", ["swapped rank", "wrong eps", "corrupted weight"])
def test_planted_errors_are_found_and_named(name: str, no_gpu: None) -> None:
    from planted_errors import PLANTED, a_right_stack, found

    findings = Findings()
    steps = Steps(Console(file=io.StringIO()))
    verify_stack(PLANTED[name](a_right_stack()), VerifyOptions(**SMALL), findings, steps)
    assert found(name, findings.failures), findings.failures
    if name != "wrong eps":  # nothing but bits shows that one
        assert any(
            re.match(r"Polygraphy: hidden_states of rank 1, input \d: differs most in row \d", failure)
            for failure in findings.failures
        )
        assert findings.record["polygraphy_passed"] < findings.record["outputs"]


def test_tensorrt_s_own_all_reduce(no_gpu: None, trt: Any, tmp_path: Path) -> None:
    options = VerifyOptions(**SMALL, all_reduce="dist_collective")
    code, record, text = verify(options, tmp_path)
    if hasattr(trt.INetworkDefinition, "add_dist_collective"):
        assert code == EXIT_HOLDS, text
        assert record["all_reduce"] == "dist_collective"
    else:
        assert code == EXIT_UNUSABLE
        assert "needs TensorRT 11.0 or newer" in text


def test_a_tolerance_that_is_too_tight_fails(no_gpu: None, tmp_path: Path) -> None:
    """Different seeds of rounding: the largest difference is some bf16 numbers."""
    code, record, text = verify(VerifyOptions(**(SMALL | {"layers": 2}), atol=1e-7, stat="max"), tmp_path)
    assert record["polygraphy_tolerance"] == {"atol": 1e-7, "rtol": 0.0, "check_error_stat": "max"}
    failed = record["polygraphy_passed"] < record["outputs"]
    assert failed == (record["polygraphy_max_absdiff"] > 1e-7)
    assert code == int(failed), text


def test_command_line(no_gpu: None, tmp_path: Path) -> None:
    arguments = ["--layers", "1", "--rows", "1", "--inputs", "2", "--sublayers", "none", "--tp", "1"]
    result = CliRunner().invoke(app, ["verify", *arguments, "--json", str(tmp_path / "record.json")])
    assert result.exit_code == EXIT_HOLDS, result.output
    assert json.loads((tmp_path / "record.json").read_text())["tp"] == 1


def test_bad_options_are_named(tmp_path: Path) -> None:
    code, _, text = verify(VerifyOptions(tp=3), tmp_path)
    assert (code, "--tp: expected 1, 2, 4 or 8, got 3" in text) == (EXIT_UNUSABLE, True)
    code, _, text = verify(VerifyOptions(fused=tmp_path), tmp_path)
    assert (code, "--unfused and --fused belong together" in text) == (EXIT_UNUSABLE, True)


def test_missing_engines_are_named(trt: Any, tmp_path: Path) -> None:
    (tmp_path / "rank0.engine").touch()
    code, _, text = verify(VerifyOptions(unfused=tmp_path, fused=tmp_path), tmp_path)
    assert code == EXIT_UNUSABLE
    assert f"missing: {tmp_path / 'rank1.engine'}" in text


def test_engines_without_a_gpu_are_refused(no_gpu: None, tmp_path: Path) -> None:
    (tmp_path / "all.engine").write_bytes(b"plan")
    code, _, text = verify(VerifyOptions(unfused=tmp_path / "all.engine", fused=tmp_path / "all.engine"), tmp_path)
    assert code == EXIT_UNUSABLE
    assert "building and running engines needs a CUDA device" in text


def test_without_polygraphy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "polygraphy", None)
    code, _, text = verify(VerifyOptions(), tmp_path)
    assert code == EXIT_UNUSABLE
    assert "pip install polygraphy" in text


# ---- inputs and outputs of engines that are files --------------------------------------------------------------------


def test_generated_feeds_are_bf16_numbers(trt: Any) -> None:
    import ml_dtypes

    from trtllm_mhc.cli.verify_engines import _feeds
    from trtllm_mhc.integrations.polygraphy.runners import Input

    inputs = {
        "x": Input(np.dtype(ml_dtypes.bfloat16), (-1, 16), (8, 16)),
        "y": Input(np.dtype(np.float32), (3, 4), (3, 4)),
    }
    feeds = list(_feeds(VerifyOptions(rows=5, inputs=3), inputs))
    assert [{name: array.shape for name, array in feed.items()} for feed in feeds] == [{"x": (5, 16), "y": (3, 4)}] * 3
    for feed in feeds:
        assert feed["x"].dtype == np.float32
        np.testing.assert_array_equal(feed["x"].astype(ml_dtypes.bfloat16).astype(np.float32), feed["x"])
    with pytest.raises(ValueError, match="input 'tokens' is int32"):
        list(_feeds(VerifyOptions(), {"tokens": Input(np.dtype(np.int32), (-1,), (8,))}))


def test_data_scripts_feed_engines(trt: Any, tmp_path: Path) -> None:
    from trtllm_mhc.cli.verify_engines import _feeds

    script = tmp_path / "data.py"
    script.write_text("def load_data():\n    yield {'tokens': 1}\ndef other():\n    yield {'tokens': 2}\n")
    assert list(_feeds(VerifyOptions(data=str(script)), {})) == [{"tokens": 1}]
    assert list(_feeds(VerifyOptions(data=f"{script}:other"), {})) == [{"tokens": 2}]


def test_ranks_that_differ_are_named() -> None:
    from trtllm_mhc.cli.verify_engines import _unequal

    right = {"y": np.zeros((4, 3), np.float32)}
    wrong = {"y": right["y"].copy()}
    wrong["y"][2, 1] = 1
    assert _unequal([[right, right], [right, wrong]]) == "y of rank 1, input 1, from row 2 on"


def test_distance_in_bf16_numbers() -> None:
    from trtllm_mhc.cli.verify_engines import _max_ulp

    one = np.ones((2, 2), np.float32)
    assert _max_ulp([[{"y": one}]], [[{"y": one}]]) == 0
    assert _max_ulp([[{"y": one}]], [[{"y": one + np.float32(2**-6)}]]) == 2
    assert _max_ulp([[{"y": one}]], [[{"y": one + np.float32(2**-20)}]]) is None  # fp32, not bf16
