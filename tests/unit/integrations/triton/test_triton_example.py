# SPDX-License-Identifier: Apache-2.0
"""examples/triton_deployment, from one end to the other, without a GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtllm_mhc.integrations.triton.server import Installation, ServerError, TritonServer

ROOT = Path(__file__).resolve().parents[4]
EXAMPLE = ROOT / "examples" / "triton_deployment"


@pytest.fixture(scope="module")
def folder(
    installation: Installation, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What deploy.py leaves: a repository and a record. Not once more for each TensorRT, see conftest.py."""
    request.getfixturevalue("builder")
    folder = tmp_path_factory.mktemp("deployment")
    command = [sys.executable, EXAMPLE / "deploy.py", "--layers", "1", "--rows", "2", "--requests", "16"]
    command += ["--clients", "4", "--repository", folder, "--json", folder / "record.json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GIT_COMMIT": "abc"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_deployment_serves_and_recovers(folder: Path) -> None:
    record: dict[str, Any] = json.loads((folder / "record.json").read_text())
    assert record["requests"] == 16
    assert record["errors"] == 0
    assert record["recovered_after_kill"] is True
    assert 0 < record["p50_ms"] <= record["p99_ms"]
    assert record["mode"] == "numpy"
    assert record["commit"] == "abc"
    assert record["tritonserver"].startswith("triton 2.")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_client_talks_to_it(folder: Path, installation: Installation, protocol: str) -> None:
    with TritonServer(installation, folder / "python_backend") as server:
        url = server.http if protocol == "http" else server.grpc
        command = [sys.executable, EXAMPLE / "client.py", "--protocol", protocol, "--url", url]
        command += ["--rows", "1", "--requests", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    sizes = re.findall(r"bfloat16 \[1, 4096\], root mean square (\S+), \S+ ms", done.stdout)
    assert len(sizes) == 2, done.stdout
    assert all(0.8 < float(size) < 1.25 for size in sizes), sizes  # what a norm puts out


def test_server_whose_canary_fails_does_not_start(folder: Path, installation: Installation, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    shutil.copytree(folder / "python_backend", repository)
    canary = repository / "boundary_stack" / "1" / "canary.npz"
    with np.load(canary) as arrays:
        changed = dict(arrays)
    changed["output.1.hidden_states"][0, 5] ^= 1
    np.savez(canary, **changed)  # type: ignore[arg-type]
    with pytest.raises(ServerError, match=r"output 'hidden_states' of rank 1: 1 of 4096 elements .* first at \[0, 5\]"):
        TritonServer(installation, repository)
