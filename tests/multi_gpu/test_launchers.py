# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun or mpirun starts, a GPU each: peer memory by CUDA IPC, and NCCL."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command: list[str], ranks: int, gpus: int) -> None:
    environment = os.environ | {"MHC_TEST_GPUS": str(gpus), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: ok" in output, output


def torchrun(ranks: int) -> list[str]:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


@pytest.mark.parametrize("meet", ["torch", "torch-nccl", "environment"])
@pytest.mark.parametrize("order", ["same", "reversed"])
def test_torchrun(gpus: int, meet: str, order: str) -> None:
    """With "reversed" device ordinals differ between the ranks: CUDA_VISIBLE_DEVICES is the other way round."""
    command = [*torchrun(2), "-m", "tests.multi_gpu.worker", "--meet", meet]
    run(command + (["--reversed"] if order == "reversed" else []), 2, gpus)


@pytest.mark.parametrize("ranks", [4, 8])
def test_torchrun_with_more_ranks(gpus: int, ranks: int) -> None:
    if gpus < ranks:
        pytest.skip(f"needs {ranks} GPUs, this machine has {gpus}")
    run([*torchrun(ranks), "-m", "tests.multi_gpu.worker", "--meet", "torch-nccl"], ranks, gpus)


@pytest.mark.parametrize("meet", ["mpi", "environment"])
def test_mpirun(gpus: int, meet: str) -> None:
    mpirun = shutil.which("mpirun")
    if mpirun is None or (meet == "mpi" and importlib.util.find_spec("mpi4py") is None):
        pytest.skip("needs mpirun and mpi4py" if meet == "mpi" else "needs mpirun")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    run([mpirun, *root, "-np", "2", sys.executable, "-m", "tests.multi_gpu.worker", "--meet", meet], 2, gpus)
