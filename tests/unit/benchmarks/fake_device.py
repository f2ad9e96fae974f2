# SPDX-License-Identifier: Apache-2.0
"""A device whose streams only count time: the harness runs on it as on a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtllm_mhc.benchmarks import harness

BARRIER_US, FLUSH_US = 3.0, 40.0


class FakeStream:
    """Time passes by what is enqueued; while capturing it goes into the graph."""

    def __init__(self) -> None:
        self.handle = id(self)
        self.now_us = 0.0
        self._graph: FakeGraph | None = None
        _streams[self.handle] = self

    def spend(self, us: Callable[[], float]) -> None:
        if self._graph is not None:
            self._graph.work.append(us)
        else:
            self.now_us += us()

    @contextlib.contextmanager
    def capture(self) -> Iterator[FakeGraph]:
        self._graph = FakeGraph()
        yield self._graph
        self._graph = None

    def synchronize(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        del _streams[self.handle]


class FakeGraph:
    def __init__(self) -> None:
        self.work: list[Callable[[], float]] = []

    def launch(self, stream: FakeStream) -> None:
        stream.now_us += sum(us() for us in self.work)

    def close(self) -> None:
        pass


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.at_us = stream.now_us

    def synchronize(self, timeout_s: float) -> None:
        pass

    def elapsed_ms(self, since: FakeEvent) -> float:
        return (self.at_us - since.at_us) / 1000


class FakeArray:
    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype, self.pointer = shape, np.dtype(dtype), 0
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize

    @classmethod
    def from_numpy(cls, array: Any) -> FakeArray:
        return cls(array.shape, array.dtype)


class FakeCommunicator:
    made: list[str]

    @classmethod
    def threads(cls, name: str, **options: Any) -> FakeCommunicator:
        return cls()

    self_loop = threads

    def all_reduce(self, x: FakeArray, *, out: FakeArray, stream: FakeStream) -> None:
        stream.spend(lambda: BARRIER_US)


_streams: dict[int, FakeStream] = {}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(function: str, *arguments: Any) -> Any:
        if function == "cudaMemsetAsync":
            _streams[arguments[3]].spend(lambda: FLUSH_US)
        return SimpleNamespace(l2CacheSize=1 << 20)

    for name, fake in (
        ("Stream", FakeStream),
        ("Event", FakeEvent),
        ("DeviceArray", FakeArray),
        ("Communicator", FakeCommunicator),
    ):
        monkeypatch.setattr(harness, name, fake)
    for name, function in (
        ("call", call),
        ("current_device", lambda: 0),
        ("set_device", lambda ordinal: None),
        ("free_dropped", lambda: None),
    ):
        monkeypatch.setattr(harness.cuda, name, function)
