# SPDX-License-Identifier: Apache-2.0
"""Ranks that are processes and meet by environment variables: in a folder, over TCP, and under a launcher's names."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.loopback import Inputs, make_inputs
from tests.gpu.run_plan import pack, unpack
from trtllm_mhc import reference
from trtllm_mhc.runtime import cuda

HIDDEN = 5120
EPS = float(np.float32(1e-20))
ROOT = Path(__file__).parents[2]
OURS = ("TRTLLM_MHC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "MPI_", "SLURM_")


def start(arguments: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    """A rank with these variables, and none that a launcher of the tests has set."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TRTLLM_MHC_TIMEOUT_MS": "20000",
        **variables,
    }
    command = [sys.executable, "-m", "tests.gpu.environment_rank", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(ranks: Sequence[subprocess.Popen[str]], timeout_s: float = 60.0) -> list[dict[str, Any]]:
    """The reports of all ranks, which must come by themselves."""
    end = time.monotonic() + timeout_s
    reports = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
            assert process.returncode == 0, err
            reports.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
    return reports


def variables_of(rank: int, size: int, rendezvous: str, **further: str) -> dict[str, str]:
    return {
        "TRTLLM_MHC_RANK": str(rank),
        "TRTLLM_MHC_WORLD_SIZE": str(size),
        "TRTLLM_MHC_DEVICE": str(rank % cuda.device_count()),
        "TRTLLM_MHC_RENDEZVOUS": rendezvous,
        **further,
    }


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize(("place", "size"), [("folder", 4), ("tcp", 2)])
def test_boundaries(tmp_path: Path, place: str, size: int) -> None:
    rendezvous = str(tmp_path / "meeting") if place == "folder" else free_address()
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test\n")
    secret.chmod(0o600)
    further = {"TRTLLM_MHC_SECRET_FILE": str(secret)} if place == "tcp" else {}
    ranks = [start(["boundaries", str(size)], variables_of(rank, size, rendezvous, **further)) for rank in range(size)]
    reports = finish(ranks)
    sharing = -(-size // cuda.device_count())
    assert reports == [{"rank": rank, "ranks_per_device": sharing} for rank in range(size)]


@pytest.fixture(scope="module")
def plan(trt: Any) -> bytes:
    from trtllm_mhc.runtime.build import RowRange, build_engine
    from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs

    job = SingleBoundaryJobs(HIDDEN, 2, EPS).fused()
    return bytes(build_engine(lambda network: job.populate(network, 0), rows=RowRange(1, 8, 64)).data)


def start_engines(
    mode: str, plan: bytes, inputs: Inputs, folder: Path, timeout_s: float
) -> list[subprocess.Popen[str]]:
    """Two ranks under the variables that torchrun sets."""
    (folder / "plan.engine").write_bytes(plan)
    ranks = []
    for rank, x in enumerate(inputs.xs):
        assert inputs.pre is not None
        assert inputs.gamma is not None
        feeds = {"x": x, "residual": inputs.residual, "post": inputs.post, "comb": inputs.comb}
        feeds |= {"pre": inputs.pre, "gamma": inputs.gamma}
        np.savez(folder / f"inputs{rank}.npz", **pack(feeds))  # type: ignore[arg-type]
        launched = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
        variables = {name: str(value) for name, value in launched.items()}
        variables |= {"MASTER_PORT": str(os.getpid()), "TORCHELASTIC_RUN_ID": mode}
        variables["TRTLLM_MHC_TIMEOUT_MS"] = str(round(1000 * timeout_s))
        # Loaded lazily, a kernel of TensorRT would wait for the other rank's.
        ranks.append(start([mode, str(folder)], {**variables, "CUDA_MODULE_LOADING": "EAGER"}))
    return ranks


def test_engine_in_processes_that_make_no_communicator(plan: bytes, tmp_path: Path) -> None:
    """Capturing too early and a second context are refused, the rest has the right bits."""
    inputs = make_inputs(np.random.default_rng(5), 2, 6, HIDDEN)
    ranks = start_engines("engine", plan, inputs, tmp_path, 20)
    expected = inputs.expected()
    for rank, report in enumerate(finish(ranks, 90)):
        assert report["captured"] is False
        assert "run every rank's engine once before capturing" in report["capture_error"]
        outputs = unpack(np.load(tmp_path / f"outputs{rank}.npz"))
        assert expected[1] is not None
        reference.assert_bits_equal(outputs["residual_out"], expected[0], f"rank {rank}, residual_out")
        reference.assert_bits_equal(outputs["layer_input"], expected[1], f"rank {rank}, layer_input")
        assert report["second"] is False
        assert "which another execution context of this process uses" in report["second_error"]
        assert report["after_the_first"] is True, report["after_the_first_error"]


def test_a_rank_left_alone_traps(plan: bytes, tmp_path: Path) -> None:
    """Nobody looks at the error record in such a process, so the device's error must not be overlooked."""
    ranks = start_engines("trap", plan, make_inputs(np.random.default_rng(5), 2, 6, HIDDEN), tmp_path, 6)
    report = finish(ranks, 90)[0]
    assert report["error"] is not None
    assert report["seconds"] < 20


@pytest.fixture(scope="module")
def meetings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Meetings that go wrong, all at the same time: what each rank of them reported."""
    hasty = {"TRTLLM_MHC_TIMEOUT_MS": "5000"}
    address, folder = free_address(), tmp_path_factory.mktemp("meetings")
    secret = [
        start(
            ["boundaries", "2"], variables_of(rank, 2, address, TRTLLM_MHC_SECRET=f"the secret of rank {rank}", **hasty)
        )
        for rank in range(2)
    ]
    absent = [start(["boundaries", "4"], variables_of(rank, 4, str(folder / "a"), **hasty)) for rank in (0, 1, 3)]
    zero, killed = [start(["boundaries", "4"], variables_of(rank, 4, str(folder / "b"))) for rank in (0, 1)]
    reports = {"secret": finish(secret), "absent": finish(absent)}
    # By now both are at their meeting, where ranks 2 and 3 are missing.
    killed.send_signal(signal.SIGKILL)
    others = [start(["boundaries", "4"], variables_of(rank, 4, str(folder / "b"))) for rank in (2, 3)]
    begin = time.monotonic()
    reports["killed"] = finish([zero, *others])
    reports["killed"].append({"seconds": time.monotonic() - begin})
    killed.wait(10)
    return reports


def test_another_secret_is_an_error_on_both(meetings: dict[str, list[dict[str, Any]]]) -> None:
    reports = meetings["secret"]
    assert "rank(s) 1 of 2 did not come" in reports[0]["error"]
    assert "did not prove that they know the group's secret" in reports[0]["error"]
    assert reports[1]["error"].startswith("PeerFailedError")
    assert "refused this rank" in reports[1]["error"]
    assert not any("the secret of rank" in report["error"] for report in reports)


def test_a_rank_that_is_never_started_is_named(meetings: dict[str, list[dict[str, Any]]]) -> None:
    for report in meetings["absent"]:
        assert "rank(s) 2 of 4 did not come" in report["error"]


def test_a_rank_that_is_killed_while_the_others_come_is_named(meetings: dict[str, list[dict[str, Any]]]) -> None:
    *ranks, time_taken = meetings["killed"]
    assert time_taken["seconds"] < 15  # not the time-out
    for report in ranks:
        assert "rank 1" in report["error"]


def test_a_process_ends_while_its_peer_is_stopped(tmp_path: Path) -> None:
    place = str(tmp_path / "meeting")
    ranks = [start(["join", "2"], variables_of(rank, 2, place)) for rank in range(2)]
    try:
        for process in ranks:
            assert process.stdout is not None
            assert "joined" in json.loads(process.stdout.readline())
        ranks[1].send_signal(signal.SIGSTOP)
        ranks[0].send_signal(signal.SIGINT)  # Python's way out, with everything that runs at the end
        begin = time.monotonic()
        ranks[0].wait(10)
        assert time.monotonic() - begin < 8
    finally:
        for process in ranks:
            process.kill()
            process.wait(10)
