# SPDX-License-Identifier: Apache-2.0
"""Load on a server: many requests from several clients at once, and how long they took."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_mhc.integrations.triton.client import Client, RequestFailedError
from trtllm_mhc.integrations.triton.tensors import Array

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Case:
    """A request with its right answer.

    Attributes:
        inputs: by name.
        outputs: by name, compared bit for bit; None: whatever comes is right.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array] | None


@dataclass(frozen=True)
class Load:
    """What a run of `measure` found.

    Attributes:
        requests: sent.
        clients: at once.
        errors: what went wrong to how often; a wrong answer counts like an error.
        seconds: from the first request to the last answer.
        latencies_ms: of the requests that were answered rightly.
    """

    requests: int
    clients: int
    errors: Mapping[str, int]
    seconds: float
    latencies_ms: Sequence[float]

    @property
    def failed(self) -> int:
        """Number of requests that failed."""
        return sum(self.errors.values())

    def percentile_ms(self, percent: float) -> float:
        """Latency that `percent` of the requests did not exceed; NaN when none was answered."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else float("nan")

    def to_json(self) -> dict[str, Any]:
        """For records."""
        return {
            "requests": self.requests,
            "clients": self.clients,
            "errors": self.failed,
            "error_kinds": dict(self.errors),
            **{f"p{percent}_ms": round(self.percentile_ms(percent), 3) for percent in (50, 90, 99)},
            "requests_per_s": round(self.requests / self.seconds, 1),
        }


def measure(
    connect: Callable[[], Client],
    model: str,
    cases: Sequence[Case],
    *,
    requests: int,
    clients: int,
    progress: Progress | None = None,
) -> Load:
    """Sends `requests` requests from `clients` threads, each with a connection of its own.

    Args:
        connect: makes a connection.
        model: its name.
        cases: taken in turn.
        requests: over all clients.
        clients: at once; each waits for its answer before it sends the next.
        progress: told (answered, requests) after each tenth of a second in which something was answered.
    """
    numbers = iter(range(requests))
    lock = threading.Lock()
    errors: collections.Counter[str] = collections.Counter()
    latencies: list[float] = []

    def work() -> None:
        try:
            send_all()
        except Exception as error:
            with lock:
                errors[f"a client ended: {type(error).__name__}: {error}"] += 1

    def send_all() -> None:
        with connect() as client:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                case = cases[number % len(cases)]
                begin = time.perf_counter()
                wrong = _send(client, model, case)
                milliseconds = 1000 * (time.perf_counter() - begin)
                with lock:
                    if wrong is None:
                        latencies.append(milliseconds)
                    else:
                        errors[wrong] += 1

    threads = [threading.Thread(target=work, name=f"client {index}", daemon=True) for index in range(clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    reported = 0
    # Ends: every request has a time-out.
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)
        with lock:
            answered = len(latencies) + errors.total()
        if progress is not None and answered > reported:
            reported = answered
            progress(answered, requests)
    return Load(requests, clients, dict(errors), time.perf_counter() - begin, latencies)


def _send(client: Client, model: str, case: Case) -> str | None:
    """None when the answer is right; else what is wrong."""
    try:
        outputs = client.infer(model, case.inputs)
    except (RequestFailedError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    for name, expected in (case.outputs or {}).items():
        if name not in outputs:
            return f"output {name!r} is missing"
        if outputs[name].shape != expected.shape or outputs[name].tobytes() != expected.tobytes():
            return f"output {name!r} has other bits than expected"
    return None
