# SPDX-License-Identifier: Apache-2.0
"""What of the CUDA layer works, or fails well, on a machine without a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from trtllm_mhc.runtime import cuda

no_gpu = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU")


@no_gpu
def test_no_driver_means_no_devices() -> None:
    assert cuda.device_count() == 0
    assert cuda.driver_version() == (0, 0)
    assert cuda.runtime_version()[0] == 13


@no_gpu
def test_errors_carry_cuda_s_name() -> None:
    with pytest.raises(cuda.CudaError, match="cudaMalloc: cudaErrorInsufficientDriver") as caught:
        cuda.call("cudaMalloc", 16)
    assert caught.value.name == "cudaErrorInsufficientDriver"


def test_missing_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(cuda.importlib, "import_module", fail)
    with pytest.raises(cuda.CudaError, match="pip install 'cuda-bindings"):
        cuda.device_count()


class FakeRuntime:
    """A device that is busy for a number of queries, then answers `final`."""

    cudaError_t = SimpleNamespace(cudaErrorNotReady=600)  # noqa: N815

    def __init__(self, busy: int, final: Any = 0) -> None:
        self.busy = busy
        self.final = final

    def query(self, handle: Any) -> tuple[Any]:
        self.busy -= 1
        return (600,) if self.busy >= 0 else (self.final,)

    def cudaGetErrorString(self, status: Any) -> tuple[int, bytes]:  # noqa: N802
        return 0, b"text of the error"


class Failure(int):
    name = "cudaErrorLaunchFailure"


def test_waiting_ends_when_the_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRuntime(busy=100)
    monkeypatch.setattr(cuda, "runtime", lambda: fake)
    cuda._wait("query", None, 10.0, "stream")
    assert fake.busy == -1


def test_waiting_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "runtime", lambda: FakeRuntime(busy=10**9))
    with pytest.raises(cuda.CudaTimeoutError, match=r"not done after 0\.05 s"):
        cuda._wait("query", None, 0.05, "stream")


def test_waiting_reports_the_device_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "runtime", lambda: FakeRuntime(busy=2, final=Failure(719)))
    with pytest.raises(cuda.CudaError, match="stream: cudaErrorLaunchFailure"):
        cuda._wait("query", None, 10.0, "stream")


class FakeMemory:
    """cudaMalloc and cudaFree with a limit on the number of allocations."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: set[int] = set()
        self.next = 1

    def __call__(self, function: str, *arguments: Any) -> Any:
        if function == "cudaGetDevice":
            return 0
        if function == "cudaFree":
            self.held.remove(arguments[0])
            return None
        assert function == "cudaMalloc"
        if len(self.held) >= self.limit:
            raise cuda.CudaError("out of memory", "cudaErrorMemoryAllocation")
        self.next += 1
        self.held.add(self.next)
        return self.next


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    fake = FakeMemory(limit=2)
    monkeypatch.setattr(cuda, "call", fake)
    cuda._dropped.clear()
    return fake


def test_dropped_arrays_are_freed_later(memory: FakeMemory) -> None:
    array = cuda.DeviceArray((2, 3), "float32")
    view = array.view((3,))
    assert (view.pointer, view.nbytes) == (array.pointer, 12)
    del array
    assert len(memory.held) == 1
    assert not cuda._dropped  # the view keeps it
    del view
    assert len(cuda._dropped) == 1
    assert len(memory.held) == 1  # never at once: freeing would wait for the device
    cuda.free_dropped()
    assert not memory.held


def test_dropped_arrays_make_room_when_memory_runs_out(memory: FakeMemory) -> None:
    first = cuda.DeviceArray((8,), "float32")
    cuda.DeviceArray((8,), "float32")
    third = cuda.DeviceArray((8,), "float32")
    assert len(memory.held) == 2
    with pytest.raises(cuda.CudaError, match="out of memory"):
        cuda.DeviceArray((8,), "float32")
    first.close()
    third.close()
    assert not memory.held
    with pytest.raises(cuda.CudaError, match="closed"):
        _ = first.pointer


def test_arrays_check_shapes(memory: FakeMemory) -> None:
    array = cuda.DeviceArray((2, 3), "float32")
    with pytest.raises(ValueError, match="7 elements"):
        array.view((7,))
    with pytest.raises(ValueError, match=r"sizes >= 0"):
        cuda.DeviceArray((-1, 3), "float32")
