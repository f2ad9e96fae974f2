# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc trtllm-build` as a user runs it, in a process of its own, up to the engine (`--dry_run`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TINY_BUILD = ("--max_batch_size", "8", "--max_num_tokens", "16", "--dry_run")


@pytest.fixture
def command(trtllm: Any, trtllm_environment: dict[str, str], tmp_path: Path) -> Any:
    """Runs it; returns the exit code and what it printed."""

    def run(*arguments: str | Path, **environment: str) -> tuple[int, str]:
        result = subprocess.run(
            [sys.executable, "-m", "trtllm_mhc", "trtllm-build", *map(str, arguments)],
            env={**trtllm_environment, "COLUMNS": "200", **environment},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=110,
        )
        return result.returncode, result.stdout

    return run


def record(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"mhc_fusion.rank{rank}.json").read_text())


def test_builds_every_rank_and_reports(command: Any, checkpoint: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "engines", tmp_path / "reports/all.json"
    code, text = command(
        "--require", "6", "--report", report, "--", "--checkpoint_dir", checkpoint, "--output_dir", out, *TINY_BUILD
    )
    assert code == 0, text
    assert text.count("6 of 6 boundaries fused") == 2
    for rank in (0, 1):
        found = record(out, rank)
        assert (found["rank"], found["tp_size"], found["fuse"]) == (rank, 2, True)
        assert (found["report"]["boundaries_full"], found["report"]["boundaries_refused"]) == (4, 0)
    assert [each["rank"] for each in json.loads(report.read_text())["ranks"]] == [0, 1]
    config = json.loads((out / "config.json").read_text())
    assert config["pretrained_config"]["architecture"] == "DeepseekV41ForCausalLM"
    assert config["pretrained_config"]["engram_layers"] == [1, 14]


def test_worker_processes_fuse_too(command: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    code, text = command("--", f"--checkpoint_dir={checkpoint}", f"--output_dir={out}", "--workers", "2", *TINY_BUILD)
    assert code == 0, text
    assert [record(out, rank)["report"]["boundaries_fused"] for rank in (0, 1)] == [6, 6]


def test_a_requirement_that_is_not_met_stops_the_build(command: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    code, text = command("--require", "7", "--", "--checkpoint_dir", checkpoint, "--output_dir", out, *TINY_BUILD)
    assert code == 1
    assert "trtllm-build failed: rank 0: expected 7 fused boundaries, got 6 of 6 boundaries fused" in text
    assert record(out, 0)["report"]["boundaries_fused"] == 6
    assert not (out / "config.json").exists()


def test_unfused(command: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "engines"
    code, text = command("--no-fuse", "--", "--checkpoint_dir", checkpoint, "--output_dir", out, *TINY_BUILD)
    assert code == 0, text
    assert "The engines are unfused, as asked." in text
    assert record(out, 1)["report"] is None


def test_weights_from_nothing_but_a_config(command: Any, checkpoint: Path, tmp_path: Path) -> None:
    config = checkpoint / "config.json"
    code, text = command("--", "--model_config", config, "--output_dir", tmp_path / "engines", *TINY_BUILD)
    assert code == 0, text
    assert "6 of 6 boundaries fused" in text


def test_a_class_that_does_not_go_through_the_pass_is_noticed(command: Any, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "undecorated.py"
    file.write_text(
        "from trtllm_mhc.integrations.tensorrt_llm import DeepseekV41ForCausalLM\n"
        "class Plain(DeepseekV41ForCausalLM):\n"
        "    forward = DeepseekV41ForCausalLM.forward.__wrapped__\n"
    )
    arguments = ("--model_cls_file", file, "--model_cls_name", "Plain", "--checkpoint_dir", checkpoint)
    code, text = command("--", *arguments, "--output_dir", tmp_path / "engines", *TINY_BUILD)
    assert code == 1
    assert "not decorated with" in text


def test_another_architecture_needs_a_file(command: Any, checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "config.json"
    path.write_text(path.read_text().replace("DeepseekV41ForCausalLM", "LlamaForCausalLM"))
    code, text = command("--", "--checkpoint_dir", checkpoint)
    assert code == 1
    assert "expected 'DeepseekV41ForCausalLM', got 'LlamaForCausalLM'" in text
    assert "--model_cls_file" in text


def test_a_broken_checkpoint_is_named(command: Any, checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / "rank1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    code, text = command("--", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "engines", *TINY_BUILD)
    assert code == 1
    assert "trtllm-build failed: CheckpointError" in text
    assert "rank1.safetensors" in text


@pytest.fixture
def other_tensorrt_llm(tmp_path: Path) -> dict[str, str]:
    """A TensorRT-LLM as it is since the TensorRT backend was removed."""
    folder = tmp_path / "site"
    (folder / "tensorrt_llm").mkdir(parents=True)
    (folder / "tensorrt_llm/__init__.py").write_text("raise AssertionError('must not be imported')\n")
    info = folder / "tensorrt_llm-1.4.0rc1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: 1.4.0rc1\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def _run_without(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", "trtllm_mhc", "trtllm-build", "--", *arguments],
        env={**os.environ, "COLUMNS": "500", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return result.returncode, result.stdout


def test_removed_backend_is_one_clear_error(other_tensorrt_llm: dict[str, str]) -> None:
    code, text = _run_without(other_tensorrt_llm, "--checkpoint_dir", "x")
    assert code == 1
    assert "TensorRT-LLM 1.4.0rc1 has no TensorRT backend" in text
    assert "it was removed in July 2026" in text
    assert "trtllm-mhc build" in text
    assert "Triton's `tensorrt` backend" in text
    assert len(text.splitlines()) == 1
    assert "Traceback" not in text


def test_model_file_under_a_removed_backend(other_tensorrt_llm: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import trtllm_mhc.integrations.deepseek_v41_model_cls"],
        env={**os.environ, **other_tensorrt_llm},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert "BackendError: TensorRT-LLM 1.4.0rc1 has no TensorRT backend" in result.stderr


def test_without_any_tensorrt_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtllm_mhc.integrations import backend

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(backend.BackendError, match=r"got no tensorrt_llm.*`trtllm-mhc build`"):
        backend.require_backend()
