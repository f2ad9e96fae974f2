# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver with TensorRT engines: two ranks, on one GPU if there is only one. Writes the record of it.

The record goes to tests/gpu/results/triton_<device>.json, or to the folder that TRTLLM_MHC_RESULTS names.

Needs, beside a TensorRT on the path, `scripts/fetch_triton.sh .triton PYTHON` and `trtllm-mhc[triton]`. On a machine
without a network: `scripts/pack_triton.sh .triton/device.tar.xz .venv/bin/python` makes one file of 39 MB here (for a
machine with the same Python version, 3.12); carry it along, and there

    tar -C .triton -xf .triton/device.tar.xz
    PYTHONPATH=$PWD/.triton/site${PYTHONPATH:+:$PYTHONPATH} CUDA_DEVICE_MAX_CONNECTIONS=32 \
        scripts/with_tensorrt.sh 10.6 python3 -m pytest tests/gpu/test_triton.py

The packages of the running Python (numpy, ml_dtypes, cuda-bindings) are used by the served model as well. Where that
Python has no shared library, which the python backend's stub needs, the packed one takes its place.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.gpu.triton_faults import DYING, INPUT, MISSING, SLOW, SLOW_S

pytest.importorskip("tritonclient.http")
pytest.importorskip("tritonclient.grpc")

from trtllm_mhc.integrations.triton.client import Client, Protocol, RequestFailedError
from trtllm_mhc.integrations.triton.load import Case
from trtllm_mhc.integrations.triton.server import ENVIRONMENT, Installation, ServerError, TritonServer, library_folder

Array = npt.NDArray[Any]

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(os.environ.get("TRTLLM_MHC_RESULTS", Path(__file__).parent / "results"))
MODEL = "boundary_stack"
TP, LAYERS, ROWS, REQUESTS, CLIENTS = 2, 2, 16, 1000, 8
DEADLINE_S = 20.0
CLIENT_S = 120.0
PROTOCOLS: list[Protocol] = ["http", "grpc"]
# What the tests found, in the order of this file; the last one writes it.
RECORD: dict[str, Any] = {}


@pytest.fixture(scope="module")
def deploy(trt: Any) -> Iterator[ModuleType]:
    """The example."""
    folder = str(ROOT / "examples" / "triton_deployment")
    sys.path.insert(0, folder)
    yield importlib.import_module("deploy")
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def options(deploy: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    packages = tuple(Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages"))
    return deploy.Options(
        tmp_path_factory.mktemp("deployment"),
        tp=TP,
        layers=LAYERS,
        rows=ROWS,
        requests=REQUESTS,
        clients=CLIENTS,
        deadline_s=DEADLINE_S,
        group="triton_faults:open_group",
        python_path=(Path(__file__).parent, *packages),
    )


@pytest.fixture(scope="module")
def deployment(deploy: ModuleType, options: Any) -> Any:
    os.environ.setdefault(ENVIRONMENT, str(ROOT / ".triton"))
    try:
        Installation.find()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return deploy.write_repositories(options)


@pytest.fixture(scope="module")
def cases(deploy: ModuleType, deployment: Any, options: Any) -> list[Case]:
    """Requests, and what the engines make of them outside the server."""
    made: list[Case] = deploy.make_cases(deployment, options, 16)
    assert all(np.isfinite(array.astype(np.float32)).all() for case in made for array in (case.outputs or {}).values())
    return made


@pytest.fixture(scope="module")
def server(deploy: ModuleType, deployment: Any, cases: list[Case]) -> Iterator[TritonServer]:
    python = Path(sys.executable)
    try:
        library_folder(python)
    except ServerError:
        python = ROOT / ".triton" / "python" / "bin" / "python3"
    with deploy.serve(deployment, python) as running:
        yield running


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with connect(server) as http:
        yield http


def connect(server: TritonServer, protocol: Protocol = "http") -> Client:
    return Client(server.http if protocol == "http" else server.grpc, protocol, CLIENT_S)


def assert_serves(client: Client, case: Case) -> None:
    outputs = client.infer(MODEL, case.inputs)
    for name, array in (case.outputs or {}).items():
        assert outputs[name].tobytes() == array.tobytes()


def faulty(case: Case, fault: float) -> dict[str, Array]:
    x = case.inputs[INPUT].copy()
    x[0, 0] = fault
    return {INPUT: x}


def test_the_networks_are_fused(deployment: Any) -> None:
    report = deployment.jobs.reports[0]
    assert len(report.fused) == len(report.found) == 2 * LAYERS


def test_load(deploy: ModuleType, options: Any, server: TritonServer, cases: list[Case]) -> None:
    loads = deploy.put_load(options, server, cases)
    with connect(server) as client:
        version = client.server_version()
    RECORD.update(deploy.make_record(options, loads, False, version))
    assert RECORD["requests"] == REQUESTS
    assert RECORD["errors"] == 0, RECORD["protocols"]
    assert len(server.stubs()) == 1


MALFORMED: dict[str, tuple[Callable[[Array], dict[str, Array]], str]] = {
    "wrong dtype": (lambda x: {INPUT: x.astype(np.float32)}, "BF16"),
    "wrong rank": (lambda x: {INPUT: x[None]}, "5120"),
    "wrong hidden size": (lambda x: {INPUT: x[:, :4096]}, "5120"),
    "zero rows": (lambda x: {INPUT: x[:0]}, rf"expected shape \[1 to {ROWS}, 5120\], got \[0, 5120\]"),
    "more rows than the profile": (
        lambda x: {INPUT: np.resize(x, (ROWS + 1, x.shape[1]))},
        rf"expected shape \[1 to {ROWS}, 5120\], got \[{ROWS + 1}, 5120\]",
    ),
    "missing input": (lambda x: {}, "input"),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", list(MALFORMED))
def test_malformed_request_is_refused(server: TritonServer, cases: list[Case], kind: str, protocol: Protocol) -> None:
    change, says = MALFORMED[kind]
    stubs = server.stubs()
    with connect(server, protocol) as client:
        with pytest.raises(RequestFailedError, match=says) as caught:
            client.infer(MODEL, change(cases[0].inputs[INPUT]))
        assert caught.value.status in ("400", "StatusCode.INVALID_ARGUMENT")
        assert_serves(client, cases[0])
    assert server.stubs() == stubs
    RECORD.setdefault("malformed_refused", []).append(f"{kind}, {protocol}")


def test_late_request_is_refused(client: Client, cases: list[Case]) -> None:
    with pytest.raises(RequestFailedError, match=r"Request timeout expired|time-out passed before the ranks began"):
        client.infer(MODEL, cases[0].inputs, server_timeout_s=1e-6)
    assert_serves(client, cases[0])


@pytest.mark.parametrize(
    ("kind", "fault", "says"),
    [("dying", DYING, "rank 1 has lost its device"), ("missing", MISSING, r"MailboxError(.|\n)*rank 0")],
)
def test_lost_rank_is_an_error_and_reloading_recovers(
    server: TritonServer, client: Client, cases: list[Case], kind: str, fault: float, says: str
) -> None:
    stubs = server.stubs()
    begin = time.monotonic()
    with pytest.raises(RequestFailedError, match=says) as caught:
        client.infer(MODEL, faulty(cases[0], fault))
    seconds = time.monotonic() - begin
    assert seconds < DEADLINE_S + 5
    assert caught.value.status == "503"
    with pytest.raises(RequestFailedError, match="load the model again"):
        client.infer(MODEL, cases[0].inputs)
    client.reload(MODEL)
    assert_serves(client, cases[0])
    assert set(server.stubs()).isdisjoint(stubs)
    RECORD.setdefault("lost_rank_answered_s", {})[kind] = round(seconds, 2)


def test_unloading_lets_the_request_in_flight_end(server: TritonServer, client: Client, cases: list[Case]) -> None:
    answers: list[dict[str, Array] | Exception] = []

    def send() -> None:
        with connect(server) as other:
            try:
                answers.append(other.infer(MODEL, faulty(cases[0], SLOW)))
            except (RequestFailedError, TimeoutError) as error:
                answers.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    time.sleep(SLOW_S / 3)
    client.unload(MODEL)
    thread.join(CLIENT_S + 5)
    assert len(answers) == 1
    assert isinstance(answers[0], dict), answers
    client.load(MODEL)
    assert_serves(client, cases[0])


def test_stub_killed_under_a_request_is_an_error(server: TritonServer, client: Client, cases: list[Case]) -> None:
    threading.Timer(SLOW_S / 3, lambda: [os.kill(pid, signal.SIGKILL) for pid in server.stubs()]).start()
    begin = time.monotonic()
    with pytest.raises(RequestFailedError):
        client.infer(MODEL, faulty(cases[0], SLOW))
    assert time.monotonic() - begin < 10
    client.reload(MODEL)
    assert_serves(client, cases[0])


def test_killed_stub_is_seen_and_reloading_recovers(
    deploy: ModuleType, server: TritonServer, cases: list[Case]
) -> None:
    RECORD["recovered_after_kill"] = deploy.kill_and_recover(server, cases[0])
    assert RECORD["recovered_after_kill"]


def test_write_the_record(deploy: ModuleType) -> None:
    assert {"requests", "p50_ms", "p99_ms", "errors", "recovered_after_kill"} <= set(RECORD)
    assert RECORD["mode"] == "engines"
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"triton_{RECORD['device'].split()[-1].lower()}.json"
    path.write_text(json.dumps(RECORD, indent=2) + "\n")
