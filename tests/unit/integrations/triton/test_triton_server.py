# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver with the python-backend model: load, bad requests, deadlines, faults and recovery."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("tensorrt")
pytest.importorskip("tritonclient.http")
pytest.importorskip("tritonclient.grpc")

from served_boundary import (
    BEGUN,
    DEADLINE_S,
    DYING,
    HANGING,
    HIDDEN,
    MAXIMUM_ROWS,
    QUEUE,
    SLOW,
    SLOW_S,
    STUCK,
    UNPREPARED,
)

from trtllm_mhc.integrations.triton.client import Client, Protocol, RequestFailedError
from trtllm_mhc.integrations.triton.load import Case, measure
from trtllm_mhc.integrations.triton.server import TritonServer

Array = npt.NDArray[Any]
Make = Callable[..., dict[str, Array]]
Expect = Callable[[dict[str, Array]], dict[str, Array]]

MODEL = "boundary"
# No request of these tests may take longer: both phases of the model, and an overloaded machine.
CLIENT_S = 30.0
PROTOCOLS: list[Protocol] = ["http", "grpc"]


def connect(server: TritonServer, protocol: Protocol = "http", timeout_s: float = CLIENT_S) -> Client:
    return Client(server.http if protocol == "http" else server.grpc, protocol, timeout_s)


@pytest.fixture
def client(server: TritonServer) -> Iterator[Client]:
    with connect(server) as http:
        yield http


def assert_serves(client: Client, make_inputs: Make, expect: Expect) -> None:
    inputs = make_inputs(2, seed=99)
    outputs = client.infer(MODEL, inputs)
    for name, array in expect(inputs).items():
        assert outputs[name].dtype == array.dtype
        assert outputs[name].tobytes() == array.tobytes(), name


class InBackground:
    """A request from a thread of its own."""

    def __init__(self, server: TritonServer, inputs: dict[str, Array]) -> None:
        self._server, self._inputs = server, inputs
        self._result: list[dict[str, Array] | Exception] = []
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def result(self) -> dict[str, Array] | Exception:
        """The outputs, or the error that the client raised."""
        self._thread.join(CLIENT_S + 5)
        assert self._result, "the client never came back"
        return self._result[0]

    def _send(self) -> None:
        with connect(self._server) as client:
            try:
                self._result.append(client.infer(MODEL, self._inputs))
            except (RequestFailedError, TimeoutError) as error:
                self._result.append(error)


SendSlow = Callable[[dict[str, Array]], InBackground]


@pytest.fixture
def send_slow(server: TritonServer, repository: Path) -> SendSlow:
    """Sends a slow request and returns once the model is at it."""
    begun = repository / MODEL / "1" / BEGUN

    def count() -> int:
        return begun.stat().st_size if begun.exists() else 0

    def send(inputs: dict[str, Array]) -> InBackground:
        before = count()
        request = InBackground(server, inputs)
        _wait_until(lambda: count() > before, "the slow request begins")
        return request

    return send


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("rows", [1, MAXIMUM_ROWS])
def test_answers_have_the_reference_s_bits(
    server: TritonServer, make_inputs: Make, expect: Expect, protocol: Protocol, rows: int
) -> None:
    inputs = make_inputs(rows)
    with connect(server, protocol) as client:
        outputs = client.infer(MODEL, inputs)
    expected = expect(inputs)
    assert set(outputs) == set(expected)
    for name, array in expected.items():
        assert outputs[name].shape == array.shape
        assert outputs[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_only_the_wanted_output_comes(server: TritonServer, make_inputs: Make, protocol: Protocol) -> None:
    with connect(server, protocol) as client:
        assert set(client.infer(MODEL, make_inputs(), ["layer_input"])) == {"layer_input"}


@pytest.mark.timeout(300)
def test_a_thousand_requests_of_eight_clients(server: TritonServer, make_inputs: Make, expect: Expect) -> None:
    cases = []
    for seed in range(8):
        inputs = make_inputs(2 if seed == 0 else 1, seed)
        cases.append(Case(inputs, expect(inputs)))
    http = measure(lambda: connect(server), MODEL, cases, requests=600, clients=8)
    grpc = measure(lambda: connect(server, "grpc"), MODEL, cases, requests=400, clients=8)
    for load in (http, grpc):
        assert not load.errors
        assert len(load.latencies_ms) == load.requests
        assert 0 < load.percentile_ms(50) <= load.percentile_ms(99)


def test_load_counts_wrong_answers(server: TritonServer, make_inputs: Make, expect: Expect) -> None:
    inputs = make_inputs()
    expected = expect(inputs)
    wrong = {name: array.copy() for name, array in expected.items()}
    wrong["layer_input"].view(np.uint16)[0, 7] ^= 1
    cases = [Case(inputs, expected), Case(inputs, wrong)]
    load = measure(lambda: connect(server), MODEL, cases, requests=4, clients=1)
    assert load.errors == {"output 'layer_input' has other bits than expected": 2}


def _without(name: str) -> Callable[[dict[str, Array]], dict[str, Array]]:
    return lambda inputs: {key: array for key, array in inputs.items() if key != name}


def _with(name: str, change: Callable[[Array], Array]) -> Callable[[dict[str, Array]], dict[str, Array]]:
    return lambda inputs: {key: change(array) if key == name else array for key, array in inputs.items()}


def _rows(count: int) -> Callable[[dict[str, Array]], dict[str, Array]]:
    return lambda inputs: {
        key: array if key == "gamma" else np.resize(array, (count, *array.shape[1:])) for key, array in inputs.items()
    }


MALFORMED = {
    "wrong dtype": (_with("x", lambda x: x.astype(np.float32)), "BF16"),
    "wrong rank": (_with("x", lambda x: x[None]), r"\[-1,4096\]"),
    "wrong hidden size": (_with("x", lambda x: x[:, :4088]), r"\[-1,4096\]"),
    "zero rows": (_rows(0), rf"expected shape \[1 to {MAXIMUM_ROWS}, {HIDDEN}\], got \[0, {HIDDEN}\]"),
    "more rows than the profile": (_rows(5), rf"expected shape \[1 to {MAXIMUM_ROWS}, {HIDDEN}\], got \[5, {HIDDEN}\]"),
    "missing input": (_without("residual"), "residual"),
    "unknown input": (lambda inputs: {**inputs, "y": inputs["x"]}, "'y'"),
    "rows that differ": (_with("residual", lambda a: np.resize(a, (3, *a.shape[1:]))), "."),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", list(MALFORMED))
def test_malformed_request_is_refused_and_the_server_goes_on(
    server: TritonServer, make_inputs: Make, expect: Expect, kind: str, protocol: Protocol
) -> None:
    change, says = MALFORMED[kind]
    stubs = server.stubs()
    with connect(server, protocol) as client:
        with pytest.raises(RequestFailedError, match=says) as caught:
            client.infer(MODEL, change(make_inputs(2)))
        if kind != "rows that differ":  # only TensorRT knows that rows belong together
            assert caught.value.status in ("400", "StatusCode.INVALID_ARGUMENT")
        assert_serves(client, make_inputs, expect)
    assert server.stubs() == stubs


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_request_that_is_late_before_it_begins_is_refused(
    server: TritonServer, make_inputs: Make, expect: Expect, protocol: Protocol
) -> None:
    with connect(server, protocol) as client:
        # By the server's queue, or by the model.
        says = "Request timeout expired|time-out passed before the ranks began"
        with pytest.raises(RequestFailedError, match=says) as caught:
            client.infer(MODEL, make_inputs(), server_timeout_s=1e-6)
        assert caught.value.status in ("503", "StatusCode.UNAVAILABLE")
        assert_serves(client, make_inputs, expect)


def test_request_that_waits_too_long_is_refused(
    client: Client, make_inputs: Make, expect: Expect, send_slow: SendSlow
) -> None:
    slow = send_slow(make_inputs(fault=SLOW))
    with pytest.raises(RequestFailedError, match="Request timeout expired"):
        client.infer(MODEL, make_inputs(), server_timeout_s=SLOW_S / 5)
    assert isinstance(slow.result(), dict)
    assert_serves(client, make_inputs, expect)


def test_requests_beyond_the_queue_are_refused_at_once(
    server: TritonServer, client: Client, make_inputs: Make, expect: Expect, send_slow: SendSlow
) -> None:
    slow = send_slow(make_inputs(fault=SLOW))
    waiting = [InBackground(server, make_inputs()) for _ in range(QUEUE + 5)]
    results = [each.result() for each in waiting]
    assert isinstance(slow.result(), dict)
    refused = [result for result in results if not isinstance(result, dict)]
    assert 1 <= len(refused) <= 5, results  # the slow request may end before the last ones come
    assert all("Exceeds maximum queue size" in str(error) for error in refused)
    assert_serves(client, make_inputs, expect)


def test_client_that_gives_up_costs_the_others_nothing(
    server: TritonServer, client: Client, make_inputs: Make, expect: Expect
) -> None:
    for protocol in PROTOCOLS:
        with connect(server, protocol, 0.3) as hasty, pytest.raises(TimeoutError, match=r"no answer within 0\.3 s"):
            hasty.infer(MODEL, make_inputs(fault=SLOW))
    assert_serves(client, make_inputs, expect)


def test_failure_to_prepare_costs_one_request(
    server: TritonServer, client: Client, make_inputs: Make, expect: Expect
) -> None:
    stubs = server.stubs()
    with pytest.raises(RequestFailedError, match="rank 1 cannot prepare this") as caught:
        client.infer(MODEL, make_inputs(fault=UNPREPARED))
    assert caught.value.status == "500"
    assert_serves(client, make_inputs, expect)
    assert server.stubs() == stubs


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (DYING, "rank 1 has lost its device"),
        (HANGING, r"ranks 0, 1 did not come back within 5 s(.|\n)*rank 1 is at:"),
        (STUCK, "rank 1 did not come back within 5 s"),
    ],
    ids=["dying", "hanging", "stuck in prepare"],
)
def test_lost_rank_is_an_error_and_reloading_recovers(
    server: TritonServer, client: Client, make_inputs: Make, expect: Expect, fault: float, says: str
) -> None:
    stubs = server.stubs()
    begin = time.monotonic()
    with pytest.raises(RequestFailedError, match=says) as caught:
        client.infer(MODEL, make_inputs(fault=fault))
    assert time.monotonic() - begin < 2 * DEADLINE_S + 5
    assert caught.value.status == "503"

    # The group is not used again, whatever comes, and says why at once.
    begin = time.monotonic()
    for protocol in PROTOCOLS:
        with connect(server, protocol) as other, pytest.raises(RequestFailedError, match=says) as caught:
            other.infer(MODEL, make_inputs())
        assert "load the model again" in str(caught.value)
        assert caught.value.status in ("503", "StatusCode.UNAVAILABLE")
    assert time.monotonic() - begin < 5
    assert server.stubs() == stubs

    client.reload(MODEL)
    assert_serves(client, make_inputs, expect)
    _wait_until(lambda: set(server.stubs()).isdisjoint(stubs), "the broken group's process ends")
    assert len(server.stubs()) == 1


def test_requests_waiting_behind_a_lost_rank_are_answered(
    server: TritonServer, client: Client, make_inputs: Make, expect: Expect
) -> None:
    waiting = [InBackground(server, make_inputs(fault=HANGING)) for _ in range(4)]
    results = [each.result() for each in waiting]
    assert all(isinstance(result, RequestFailedError) for result in results), results
    client.reload(MODEL)
    assert_serves(client, make_inputs, expect)
    _wait_until(lambda: len(server.stubs()) == 1, "the broken group's process ends")


def test_killed_stub_is_an_error_and_reloading_recovers(
    server: TritonServer, client: Client, make_inputs: Make, expect: Expect
) -> None:
    assert_serves(client, make_inputs, expect)
    (stub,) = server.stubs()
    os.kill(stub, signal.SIGKILL)
    begin = time.monotonic()
    assert client.canary(MODEL, make_inputs()) is not None
    assert time.monotonic() - begin < 10
    client.reload(MODEL)
    assert_serves(client, make_inputs, expect)
    assert len(server.stubs()) == 1
    assert server.stubs() != [stub]


def test_stub_killed_under_a_request_is_an_error(
    server: TritonServer, client: Client, make_inputs: Make, expect: Expect
) -> None:
    threading.Timer(SLOW_S / 3, lambda: [os.kill(pid, signal.SIGKILL) for pid in server.stubs()]).start()
    begin = time.monotonic()
    with pytest.raises(RequestFailedError):
        client.infer(MODEL, make_inputs(fault=SLOW))
    assert time.monotonic() - begin < 10
    client.reload(MODEL)
    assert_serves(client, make_inputs, expect)


def test_unloading_lets_the_request_in_flight_end(
    server: TritonServer, client: Client, make_inputs: Make, expect: Expect, send_slow: SendSlow
) -> None:
    inputs = make_inputs(fault=SLOW)
    slow = send_slow(inputs)
    client.unload(MODEL)
    with pytest.raises(RequestFailedError):
        client.infer(MODEL, make_inputs())
    outputs = slow.result()
    assert isinstance(outputs, dict), outputs
    assert outputs["layer_input"].tobytes() == expect(inputs)["layer_input"].tobytes()
    _wait_until(lambda: server.stubs() == [], "the stub ends")
    client.load(MODEL)
    assert_serves(client, make_inputs, expect)


def _wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)
