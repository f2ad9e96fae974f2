# SPDX-License-Identifier: Apache-2.0
"""Deploys a tensor-parallel network with fused boundaries in Triton Inference Server, and puts load on it.

    examples/triton_deployment/run.sh

Builds the engines of all ranks (one GPU will do: the ranks share it), writes model repositories for the python backend
and the C++ `tensorrt` backend, starts a server for the first, sends BF16 requests over HTTP and gRPC from several
clients, kills the model's process and brings it back. Every answer is compared with that of the engines outside the
server, bit for bit. Without a GPU the numpy interpreter takes the engines' place, with TensorRT 10.15 or newer.

Exit code 0 when everything was as expected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorrt
from numpy_group import DESCRIPTION, StackRanks

from trtllm_mhc import plugin
from trtllm_mhc.integrations.triton import repository as repositories
from trtllm_mhc.integrations.triton.client import Client, Protocol
from trtllm_mhc.integrations.triton.groups import EngineRanks, RankGroup
from trtllm_mhc.integrations.triton.load import Case, Load, measure
from trtllm_mhc.integrations.triton.model import CANARY_FILE
from trtllm_mhc.integrations.triton.runner import GroupRunner
from trtllm_mhc.integrations.triton.server import ENVIRONMENT, Installation, TritonServer
from trtllm_mhc.integrations.triton.settings import ENGINE_GROUP, Settings
from trtllm_mhc.integrations.triton.tensors import specs_of_network
from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
from trtllm_mhc.runtime import build, cuda
from trtllm_mhc.verification.backends import NetworkMaker, build_jobs
from trtllm_mhc.verification.boundary_stack import INPUT, StackJobs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MODEL = "boundary_stack"
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # for ranks that share a GPU
PROTOCOLS: tuple[Protocol, ...] = ("http", "grpc")


@dataclass(frozen=True)
class Options:
    """What is deployed, and how much load it gets.

    Attributes:
        folder: gets the repositories.
        tp: ranks.
        layers: decoder layers; two boundaries each.
        rows: largest number of tokens in a request.
        requests: over all clients and both protocols.
        clients: at once.
        deadline_s: of the model.
        group: what the model opens; None: engines, or without a GPU the interpreter.
        python_path: more folders that the model imports from.
    """

    folder: Path
    tp: int = 2
    layers: int = 2
    rows: int = 16
    requests: int = 1000
    clients: int = 8
    deadline_s: float = 20.0
    group: str | None = None
    python_path: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Deployment:
    """What `write_repositories` wrote.

    Attributes:
        repository: for the python backend.
        folder: the model's version folder.
        settings: of the model.
        jobs: its networks.
    """

    repository: Path
    folder: Path
    settings: Settings
    jobs: StackJobs


def has_gpu() -> bool:
    return cuda.device_count() > 0


def say(text: str) -> None:
    print(text, flush=True)


# ---- what is served -------------------------------------------------------------------------------------------------


def write_repositories(options: Options) -> Deployment:
    """Writes the model for the python backend and, with engines, also for the C++ backend."""
    # The interpreter is no serving engine: the smallest hidden size, and no matrices.
    config = DeepseekV41Config(hidden_size=5120 if has_gpu() else 4096, num_hidden_layers=options.layers)
    jobs = StackJobs(config, ModelWeights(config), options.tp, "matmul" if has_gpu() else "none")
    group = options.group or (ENGINE_GROUP if has_gpu() else "numpy_group:open_group")
    settings = Settings(options.tp, config.hidden_size, deadline_s=options.deadline_s, group=group)

    maker = NetworkMaker()
    inputs, outputs = specs_of_network(maker.make(jobs.fused(), 0))
    engines: list[Any] = []
    if has_gpu():
        rows = build.RowRange(1, min(8, options.rows), options.rows)
        plans = build_jobs([jobs.fused()], options.tp, rows, build.TimingCache(), say)
        engines = [plan.data for plan in plans[jobs.fused().name]]
    report = jobs.reports[0]
    say(f"{len(report.fused)} of {len(report.found)} boundaries fused, {options.tp} ranks")

    # The backend ignores PYTHONPATH.
    environment = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    repository = options.folder / "python_backend"
    folder = repositories.write_python_model(
        repository,
        MODEL,
        engines,
        inputs,
        outputs,
        settings,
        python_path=[*options.python_path, HERE, ROOT, *environment],
    )
    described = {"layers": options.layers, "rows": options.rows, "sublayers": jobs.sublayers}
    (folder / DESCRIPTION).write_text(json.dumps(described))
    if engines:
        repositories.write_tensorrt_model(
            options.folder / "tensorrt_backend", MODEL, engines, inputs, outputs, gpus=range(options.tp)
        )
    return Deployment(repository, folder, settings, jobs)


def print_launch_lines(options: Options, deployment: Deployment) -> None:
    """How a server is started for each backend."""
    library = plugin.library_path()
    lines = {
        "python backend": repositories.server_command(deployment.repository),
        "C++ tensorrt backend, TensorRT 11 with multi-device support": repositories.server_command(
            options.folder / "tensorrt_backend", options=repositories.tensorrt_backend_options([library])
        ),
        "legacy tensorrtllm backend": repositories.tensorrtllm_launch(
            Path("TENSORRT_LLM_REPOSITORY"), library, options.tp
        ),
    }
    for backend, command in lines.items():
        say(f"{backend}:\n  {shlex.join(command)}")


def make_cases(deployment: Deployment, options: Options, count: int) -> list[Case]:
    """Requests with the answers of the group outside the server; also the canary's record."""
    settings, folder = deployment.settings, deployment.folder
    group: RankGroup
    if has_gpu():
        group = EngineRanks(settings, folder)
    else:
        group = StackRanks(deployment.jobs, options.rows, settings.deadline_s)
    runner = GroupRunner(group)
    rng = np.random.default_rng(0)
    cases = []
    for index in range(count):
        shape = (1 + index % min(8, options.rows), settings.hidden_size)
        inputs = {INPUT: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)}
        cases.append(Case(inputs, runner.infer(inputs)))
    runner.record_canary(folder / CANARY_FILE, cases[0].inputs)
    runner.close()
    return cases


# ---- serving --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serve(deployment: Deployment, python: Path = Path(sys.executable)) -> Iterator[TritonServer]:
    if (ROOT / ".triton").is_dir():
        os.environ.setdefault(ENVIRONMENT, str(ROOT / ".triton"))
    with TritonServer(Installation.find(), deployment.repository, python=python, ready_s=180.0) as server:
        yield server


def connector(server: TritonServer, protocol: Protocol, timeout_s: float = 120.0) -> Callable[[], Client]:
    return lambda: Client(server.http if protocol == "http" else server.grpc, protocol, timeout_s)


def put_load(options: Options, server: TritonServer, cases: list[Case]) -> dict[str, Load]:
    """Half of the requests over each protocol."""
    loads = {}
    shown = [time.monotonic()]

    def progress(done: int, of: int) -> None:
        if time.monotonic() - shown[0] > 1 or done == of:
            shown[0] = time.monotonic()
            say(f"  {done} of {of} requests")

    for protocol in PROTOCOLS:
        say(f"load over {protocol}, {options.clients} clients")
        loads[protocol] = measure(
            connector(server, protocol),
            MODEL,
            cases,
            requests=options.requests // len(PROTOCOLS),
            clients=options.clients,
            progress=progress,
        )
    return loads


def kill_and_recover(server: TritonServer, case: Case) -> bool:
    """Kills the model's process; True when the canary sees it and reloading brings right answers back."""
    with connector(server, "http")() as client:
        stubs = server.stubs()
        for pid in stubs:
            os.kill(pid, signal.SIGKILL)
        why = client.canary(MODEL, case.inputs)
        say(f"killed the model's process; the canary: {why}")
        client.reload(MODEL)
        outputs = client.infer(MODEL, case.inputs)
    right = all(outputs[name].tobytes() == array.tobytes() for name, array in (case.outputs or {}).items())
    return bool(stubs) and why is not None and right


def make_record(options: Options, loads: dict[str, Load], recovered: bool, version: str) -> dict[str, Any]:
    latencies = [each for load in loads.values() for each in load.latencies_ms]
    return {
        "requests": sum(load.requests for load in loads.values()),
        "clients": options.clients,
        "errors": sum(load.failed for load in loads.values()),
        "p50_ms": round(float(np.percentile(latencies, 50)), 3) if latencies else None,
        "p99_ms": round(float(np.percentile(latencies, 99)), 3) if latencies else None,
        "recovered_after_kill": recovered,
        "protocols": {protocol: load.to_json() for protocol, load in loads.items()},
        "mode": "engines" if has_gpu() else "numpy",
        "tp": options.tp,
        "layers": options.layers,
        "largest_m": options.rows,
        "device": cuda.device_info(0).name if has_gpu() else None,
        "tensorrt": tensorrt.__version__,
        "tritonserver": version,
        "commit": os.environ.get("GIT_COMMIT") or _git_commit(),
    }


def _git_commit() -> str | None:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return None


def run(options: Options, json_path: Path | None) -> int:
    say("serving engines" if has_gpu() else "no GPU: the numpy interpreter takes the engines' place")
    deployment = write_repositories(options)
    print_launch_lines(options, deployment)
    cases = make_cases(deployment, options, 16 if has_gpu() else 2)
    with serve(deployment) as server:
        say(f"server at {server.http} (HTTP) and {server.grpc} (gRPC)")
        with connector(server, "http")() as client:
            version = client.server_version()
        loads = put_load(options, server, cases)
        recovered = kill_and_recover(server, cases[0])
    record = make_record(options, loads, recovered, version)
    say(json.dumps(record, indent=2))
    if json_path is not None:
        json_path.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if record["errors"] == 0 and recovered else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers; two boundaries each")
    parser.add_argument("--rows", type=int, default=16, help="largest number of tokens in a request")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--repository", type=Path, help="keep the model repositories in this folder")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.repository or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return run(
            Options(
                folder,
                tp=arguments.tp,
                layers=arguments.layers,
                rows=arguments.rows,
                requests=arguments.requests,
                clients=arguments.clients,
            ),
            arguments.json,
        )


if __name__ == "__main__":
    sys.exit(main())
