# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc build` up to the engines, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trtllm_mhc.cli.app import app
from trtllm_mhc.runtime import cuda


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["build", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.fixture
def checkpoint(trt: Any, builder: Any, tmp_path: Path) -> Path:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
    from trtllm_mhc.models.deepseek_v41.checkpoint import write_checkpoint

    config = DeepseekV41Config(hidden_size=4096, num_hidden_layers=2, o_lora_rank=16, mlp_size=32)
    write_checkpoint(tmp_path / "ckpt", config, ModelWeights(config), 2)
    return tmp_path / "ckpt"


def test_from_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    code, text = run("-o", tmp_path / "out", "--checkpoint", checkpoint, "--dry-run", "--max-rows", 32)
    assert code == 0, text
    assert "4 of 4 boundaries fused" in text
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rows"] == {"minimum": 1, "optimum": 8, "maximum": 32}
    assert (config["engines"], config["fuse"], config["seed"]) == ([], True, None)
    assert config["pretrained_config"] == json.loads((checkpoint / "config.json").read_text())
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert sorted(report["ranks"]) == ["0", "1"]
    assert [each["boundaries_full"] for each in report["ranks"].values()] == [2, 2]


def test_from_a_seed(trt: Any, builder: Any, tmp_path: Path) -> None:
    code, text = run("-o", tmp_path, "--tp", 4, "--layers", 1, "--sublayers", "none", "--seed", 3, "--dry-run")
    assert code == 0, text
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["seed"], config["pretrained_config"]["mapping"]["tp_size"]) == (3, 4)


def test_unfused(checkpoint: Path, tmp_path: Path) -> None:
    code, text = run("-o", tmp_path / "out", "--checkpoint", checkpoint, "--dry-run", "--no-fuse")
    assert code == 0, text
    assert json.loads((tmp_path / "out/report.json").read_text()) == {"fuse": False, "ranks": {}}


def test_more_boundaries_than_there_are(checkpoint: Path, tmp_path: Path) -> None:
    code, text = run("-o", tmp_path / "out", "--checkpoint", checkpoint, "--dry-run", "--require", 5)
    assert code == 1
    assert "rank 0: expected 5 boundaries fused, got 4 of 4" in text
    assert not (tmp_path / "out/config.json").exists()


def test_engines_need_a_gpu(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 0)
    code, text = run("-o", tmp_path / "out", "--checkpoint", checkpoint)
    assert code == 1
    assert "needs a CUDA device" in text
    assert not (tmp_path / "out/config.json").exists()


def test_no_checkpoint_there(trt: Any, tmp_path: Path) -> None:
    code, text = run("-o", tmp_path / "out", "--checkpoint", tmp_path / "nothing", "--dry-run")
    assert code == 1
    assert "config.json" in text


def test_rows_out_of_order(trt: Any, builder: Any, tmp_path: Path) -> None:
    code, text = run("-o", tmp_path / "out", "--max-rows", 4, "--opt-rows", 8, "--dry-run")
    assert code == 1
    assert "expected 1 <= minimum <= optimum <= maximum" in text


def test_ranks_that_the_plugin_lacks(trt: Any, builder: Any, tmp_path: Path) -> None:
    code, text = run("-o", tmp_path / "out", "--tp", 3, "--layers", 1, "--dry-run")
    assert code == 1
    assert "3" in text
