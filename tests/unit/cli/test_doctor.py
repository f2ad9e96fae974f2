# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trtllm_mhc.cli import doctor
from trtllm_mhc.cli.app import app
from trtllm_mhc.cli.doctor import Finding, State
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime import library as c_api


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that there are GPUs."""

    def pretend(
        count: int, *, capability: tuple[int, int] = (9, 0), peers: bool = True, multicast: bool = True
    ) -> None:
        def info(ordinal: int) -> cuda.DeviceInfo:
            return cuda.DeviceInfo(ordinal, f"NVIDIA Test {ordinal}", capability, 80 << 30, multicast)

        monkeypatch.setattr(cuda, "device_count", lambda: count)
        monkeypatch.setattr(cuda, "driver_version", lambda: (13, 0))
        monkeypatch.setattr(cuda, "device_info", info)
        monkeypatch.setattr(cuda, "can_access_peer", lambda device, peer: device == peer or peers)
        monkeypatch.setattr(c_api.Library, "nccl_version", lambda library: "2.28.9")
        monkeypatch.setattr(doctor, "_build", lambda: iter([Finding("test engine", State.OK, "built")]))

    return pretend


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([State.OK, State.HINT], 0),
        ([State.OK, State.MISSING], 3),
        ([State.MISSING, State.BROKEN, State.OK], 1),
    ],
)
def test_exit_code_is_the_worst_finding(states: list[State], code: int) -> None:
    assert doctor.exit_code([Finding("x", state, "") for state in states]) == code


def test_a_missing_nccl_is_a_hint(gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(library: c_api.Library) -> str:
        raise c_api.UnsupportedError("NCCL cannot be used", c_api.Status.UNSUPPORTED)

    gpus(1)
    monkeypatch.setattr(c_api.Library, "nccl_version", missing)
    found = by_subject(list(doctor.examine({})))
    assert found["NCCL"].state is State.HINT
    assert found["NCCL"].text == "only needed without peer access, or for nccl_rows: NCCL cannot be used"


def test_gpus_are_described(gpus: Callable[..., None]) -> None:
    gpus(2, multicast=False)
    found = by_subject(list(doctor.examine({"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"})))
    assert found["GPU 1"].state is State.OK
    assert "NVIDIA Test 1, compute capability 9.0, 80 GiB, NVLink multicast not supported" in found["GPU 1"].text
    assert found["peer access"] == Finding("peer access", State.OK, "between all 2 GPUs")
    assert found["NCCL"] == Finding("NCCL", State.OK, "2.28.9")
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"].state is State.OK
    assert found["CUDA_MODULE_LOADING"].state is State.OK


def test_what_could_be_better_is_a_hint(gpus: Callable[..., None]) -> None:
    gpus(2, peers=False)
    found = by_subject(list(doctor.examine({"CUDA_DEVICE_MAX_CONNECTIONS": "8"})))
    assert "not between GPUs 0 to 1, 1 to 0" in found["peer access"].text
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"].text.startswith("8; set it to 32")
    assert found["CUDA_MODULE_LOADING"].text.startswith("not set; ")
    hints = {"peer access", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"}
    assert {subject for subject, finding in found.items() if finding.state is State.HINT} == hints


def test_an_old_gpu_is_no_gpu_for_us(gpus: Callable[..., None]) -> None:
    gpus(1, capability=(8, 0))
    found = by_subject(list(doctor.examine({})))
    assert found["GPU 0"].state is State.MISSING
    assert "need 9.0 or newer" in found["GPU 0"].text


def test_missing_and_broken_libraries_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise FileNotFoundError("build it first")

    def broken() -> Any:
        raise OSError("undefined symbol: x")

    monkeypatch.setattr(doctor.c_api, "library", missing)
    assert doctor._library() == Finding("plugin library", State.MISSING, "build it first")
    monkeypatch.setattr(doctor.c_api, "library", broken)
    assert doctor._library() == Finding("plugin library", State.BROKEN, "undefined symbol: x")


def test_registered_plugins_are_listed(trt: Any) -> None:
    found = by_subject(list(doctor.examine({})))
    assert found["TensorRT"].text.startswith(trt.__version__)
    for name in ("MhcBoundary", "MhcAllReduce", "MhcCoefficients", "MhcPublishLinear"):
        assert found[f"plugin {name}"] == Finding(f"plugin {name}", State.OK, "version 1, namespace trtllm_mhc")


def test_command_prints_a_table_and_exits_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda environment: iter([Finding("thing", State.MISSING, "not [here]")]))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 3
    assert "not [here]" in result.stdout
    assert "Engines cannot be built" in result.stdout


def test_works_in_a_process_without_tensorrt(tmp_path: Path) -> None:
    # A tensorrt that cannot be imported, in front of any that is installed.
    (tmp_path / "tensorrt.py").write_text("raise ImportError('no TensorRT in this test')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from trtllm_mhc.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"], capture_output=True, text=True, timeout=100, env={"COLUMNS": "200"}
    )
    assert done.returncode in (1, 3)
    assert "no TensorRT in this test" in done.stdout
    assert "Traceback" not in done.stderr
