# SPDX-License-Identifier: Apache-2.0
"""The few pieces of CUDA that the runtime needs, over PyPI `cuda-bindings`.

Streams are non-blocking and graphs are captured in thread-local mode, so that ranks which are threads of one process
do not disturb each other. Every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

DEFAULT_TIMEOUT_S = 120.0
_PER_THREAD_STREAM = 2  # cudaStreamPerThread: unlike the legacy stream it does not serialise with other threads' work


class CudaError(RuntimeError):
    """A CUDA call failed. `name` is the CUDA error's name."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class CudaTimeoutError(CudaError, TimeoutError):
    """Device work was not done by the deadline."""


def _bindings(module: str) -> ModuleType:
    try:
        return importlib.import_module(f"cuda.bindings.{module}")
    except ImportError as error:
        raise CudaError(f"cannot import cuda.bindings.{module} ({error}): pip install 'cuda-bindings==13.*'") from None


def runtime() -> ModuleType:
    """`cuda.bindings.runtime`.

    Raises:
        CudaError: the package is not installed.
    """
    return _bindings("runtime")


def call(function: str, *arguments: Any) -> Any:
    """Calls `function` of the CUDA runtime; returns its result, a tuple for several, None for none.

    Raises:
        CudaError: any status other than cudaSuccess.
    """
    module = runtime()
    status, *values = getattr(module, function)(*arguments)
    if int(status) != 0:
        name = getattr(status, "name", str(status))
        _, text = module.cudaGetErrorString(status)
        described = text.decode() if isinstance(text, bytes) else str(text)
        raise CudaError(f"{function}: {name} ({described})", name)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


# ---- devices ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceInfo:
    """A CUDA device.

    Attributes:
        ordinal: the CUDA device ordinal.
        name: for example "NVIDIA H200".
        compute_capability: (major, minor).
        total_memory: bytes.
        multicast: the device says that it supports NVLink multicast; None when the driver could not be asked.
    """

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    total_memory: int
    multicast: bool | None


def device_count() -> int:
    """The number of usable devices; 0 where there is no driver or no device.

    Raises:
        CudaError: cuda-bindings is missing, or the driver fails for another reason.
    """
    try:
        return int(call("cudaGetDeviceCount"))
    except CudaError as error:
        if error.name in ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorStubLibrary"):
            return 0
        raise


def set_device(ordinal: int) -> None:
    """Makes a device current for the calling thread."""
    call("cudaSetDevice", ordinal)


def current_device() -> int:
    """The calling thread's device ordinal."""
    return int(call("cudaGetDevice"))


def driver_version() -> tuple[int, int]:
    """The newest CUDA version that the driver supports, (0, 0) without a driver."""
    version = int(call("cudaDriverGetVersion"))
    return version // 1000, version % 1000 // 10


def runtime_version() -> tuple[int, int]:
    """The CUDA version of cuda-bindings' runtime."""
    version = int(call("cudaRuntimeGetVersion"))
    return version // 1000, version % 1000 // 10


def can_access_peer(device: int, peer: int) -> bool:
    """Whether `device` can map the memory of `peer`. A device reaches itself."""
    return device == peer or bool(call("cudaDeviceCanAccessPeer", device, peer))


def _multicast_supported(ordinal: int) -> bool | None:
    """Reads the attribute and nothing more: no multicast object is made."""
    try:
        driver = _bindings("driver")
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
        for status in driver.cuInit(0):
            if int(status) != 0:
                return None
        status, device = driver.cuDeviceGet(ordinal)
        if int(status) != 0:
            return None
        status, value = driver.cuDeviceGetAttribute(attribute, device)
        return bool(value) if int(status) == 0 else None
    except (CudaError, AttributeError, RuntimeError):
        return None


def device_info(ordinal: int) -> DeviceInfo:
    """Describes one device."""
    properties = call("cudaGetDeviceProperties", ordinal)
    name = properties.name
    return DeviceInfo(
        ordinal=ordinal,
        name=name.decode() if isinstance(name, bytes) else str(name),
        compute_capability=(int(properties.major), int(properties.minor)),
        total_memory=int(properties.totalGlobalMem),
        multicast=_multicast_supported(ordinal),
    )


# ---- streams, events, graphs ------------------------------------------------------------------------------------


def _wait(query: str, handle: Any, timeout_s: float, what: str) -> None:
    """Polls until the work behind `handle` is done. Spins for a moment, then sleeps, so that timing stays sharp."""
    module = runtime()
    function = getattr(module, query)
    begin = time.monotonic()
    while True:
        (status,) = function(handle)
        if int(status) == 0:
            return
        if status != module.cudaError_t.cudaErrorNotReady:
            _, text = module.cudaGetErrorString(status)
            described = text.decode() if isinstance(text, bytes) else str(text)
            raise CudaError(f"{what}: {status.name} ({described})", status.name)
        waited = time.monotonic() - begin
        if waited > timeout_s:
            raise CudaTimeoutError(f"{what}: the device's work was not done after {timeout_s:g} s", "timeout")
        if waited > 1e-3:
            time.sleep(5e-5)


class Event:
    """A CUDA event on the device that is current when it is made."""

    def __init__(self, *, timing: bool = True) -> None:
        flags = 0 if timing else int(runtime().cudaEventDisableTiming)
        self._event = call("cudaEventCreateWithFlags", flags)

    @property
    def handle(self) -> int:
        """cudaEvent_t as an integer."""
        return int(self._event)

    def record(self, stream: Stream) -> None:
        """Marks the work given to `stream` so far."""
        call("cudaEventRecord", self._event, stream.handle)

    def synchronize(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Waits for the marked work.

        Raises:
            CudaTimeoutError: it was not done in time.
            CudaError: the device reports an error.
        """
        _wait("cudaEventQuery", self._event, timeout_s, "event")

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds of device time between `since` and this event; both must be done."""
        return float(call("cudaEventElapsedTime", since._event, self._event))

    def close(self) -> None:
        """Destroys the event. Further use is an error."""
        if self._event is not None:
            call("cudaEventDestroy", self._event)
            self._event = None


class Graph:
    """A captured and instantiated CUDA graph."""

    def __init__(self) -> None:
        self._executable: Any = None
        self.nodes = 0

    def launch(self, stream: Stream) -> None:
        """Gives one replay to `stream`.

        Raises:
            CudaError: the capture has not ended, or the launch fails.
        """
        if self._executable is None:
            raise CudaError("the graph cannot be launched: its capture has not ended, or it is closed")
        call("cudaGraphLaunch", self._executable, stream.handle)

    def close(self) -> None:
        """Destroys the graph. Further use is an error."""
        if self._executable is not None:
            call("cudaGraphExecDestroy", self._executable)
            self._executable = None


class Stream:
    """A non-blocking stream on the device that is current when it is made."""

    def __init__(self) -> None:
        self.device = current_device()
        self._stream = call("cudaStreamCreateWithFlags", int(runtime().cudaStreamNonBlocking))

    @property
    def handle(self) -> int:
        """cudaStream_t as an integer."""
        if self._stream is None:
            raise CudaError("the stream is closed")
        return int(self._stream)

    def synchronize(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Waits until all work given so far is done.

        Raises:
            CudaTimeoutError: it was not done in time.
            CudaError: the device reports an error.
        """
        _wait("cudaStreamQuery", self.handle, timeout_s, f"stream on device {self.device}")

    def wait(self, event: Event) -> None:
        """Orders later work of this stream after `event`."""
        call("cudaStreamWaitEvent", self.handle, event.handle, 0)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Captures the work given to this stream inside the block into the graph that it yields.

        The graph can be launched after the block. Capture is thread-local: other threads may allocate and synchronise.
        """
        module = runtime()
        graph = Graph()
        call("cudaStreamBeginCapture", self.handle, module.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            yield graph
        except BaseException:
            # Ends the capture so that the stream stays usable; the first error is the one worth reporting.
            _, broken = module.cudaStreamEndCapture(self.handle)
            if broken is not None and int(broken) != 0:
                module.cudaGraphDestroy(broken)
            module.cudaGetLastError()
            raise
        captured = call("cudaStreamEndCapture", self.handle)
        try:
            graph._executable = call("cudaGraphInstantiate", captured, 0)
            # Otherwise the first launch would allocate, and an allocation can wait for a peer's kernel on the device.
            call("cudaGraphUpload", graph._executable, self.handle)
            _, graph.nodes = call("cudaGraphGetNodes", captured)
        finally:
            call("cudaGraphDestroy", captured)

    def close(self) -> None:
        """Destroys the stream. Further use is an error."""
        if self._stream is not None:
            call("cudaStreamDestroy", self._stream)
            self._stream = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


# ---- memory -----------------------------------------------------------------------------------------------------

# cudaFree waits for the whole device. Where ranks share one, a rank that frees a temporary would wait for a peer's
# kernel that waits for this rank. So a dropped array is only put here, and freed where no rank is waiting.
_dropped: deque[int] = deque()


def free_dropped() -> None:
    """Frees the memory of arrays that were dropped without `close`. Waits for their device's work."""
    while _dropped:
        try:
            pointer = _dropped.popleft()
        except IndexError:  # another thread took the last one
            return
        call("cudaFree", pointer)


class DeviceArray:
    """A contiguous array in device memory, of any numpy or ml_dtypes dtype.

    The memory belongs to the device that is current at construction. `close` frees it at once and waits for the device;
    without it the memory is freed by `free_dropped`, which `ThreadGroup.run` calls, or when memory runs out.
    `view` gives another shape of the same memory and keeps it alive.
    """

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        self.shape = tuple(int(size) for size in shape)
        if any(size < 0 for size in self.shape):
            raise ValueError(f"a shape of sizes >= 0 is needed, got {self.shape}")
        self.dtype = np.dtype(dtype)
        self.device = current_device()
        self._owner: DeviceArray | None = None
        # A zero-sized tensor still needs an address: TensorRT refuses null.
        size = max(self.nbytes, 256)
        self._pointer: int | None
        try:
            self._pointer = int(call("cudaMalloc", size))
        except CudaError as error:
            if error.name != "cudaErrorMemoryAllocation" or not _dropped:
                raise
            free_dropped()
            self._pointer = int(call("cudaMalloc", size))

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any], stream: Stream | None = None) -> DeviceArray:
        """Copies `array` to the current device."""
        result = cls(array.shape, array.dtype)
        result.copy_from(array, stream)
        return result

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize

    @property
    def pointer(self) -> int:
        """Device address."""
        if self._owner is not None:
            return self._owner.pointer
        if self._pointer is None:
            raise CudaError("the device array is closed")
        return self._pointer

    def view(self, shape: Sequence[int]) -> DeviceArray:
        """The first elements of this memory under another shape, not larger than this one."""
        result = object.__new__(DeviceArray)
        result.shape = tuple(int(size) for size in shape)
        result.dtype = self.dtype
        result.device = self.device
        result._owner = self
        result._pointer = None
        if result.size > self.size:
            raise ValueError(f"shape {result.shape} has {result.size} elements, the array only {self.size}")
        return result

    def copy_from(self, array: npt.NDArray[Any], stream: Stream | None = None) -> None:
        """Overwrites the whole array from the host, ordered in `stream`; returns when the copy is done.

        Raises:
            ValueError: another shape or dtype.
        """
        if array.shape != self.shape or array.dtype != self.dtype:
            raise ValueError(f"expected {self.dtype} {self.shape}, got {array.dtype} {array.shape}")
        source = np.ascontiguousarray(array)
        self._copy(self.pointer, source.ctypes.data, "cudaMemcpyHostToDevice", stream)

    def to_numpy(self, stream: Stream | None = None) -> npt.NDArray[Any]:
        """A host copy, ordered in `stream`. Without a stream the caller has synchronised the work that writes it."""
        result = np.empty(self.shape, self.dtype)
        self._copy(result.ctypes.data, self.pointer, "cudaMemcpyDeviceToHost", stream)
        return result

    def fill_bytes(self, value: int, stream: Stream | None = None) -> None:
        """Sets every byte to `value` (0 to 255), ordered in `stream`; returns when it is done."""
        handle = _PER_THREAD_STREAM if stream is None else stream.handle
        if self.nbytes:
            call("cudaMemsetAsync", self.pointer, value, self.nbytes, handle)
            _wait("cudaStreamQuery", handle, DEFAULT_TIMEOUT_S, "memset")

    def _copy(self, target: int, source: int, kind: str, stream: Stream | None) -> None:
        handle = _PER_THREAD_STREAM if stream is None else stream.handle
        if self.nbytes:
            # A copy from or to pageable memory blocks in the driver until the stream gets to it, and keeps other
            # threads from launching meanwhile: behind a kernel that waits for such a thread's rank, neither goes on.
            _wait("cudaStreamQuery", handle, DEFAULT_TIMEOUT_S, f"work before a copy of {self.nbytes} bytes")
            call("cudaMemcpyAsync", target, source, self.nbytes, getattr(runtime().cudaMemcpyKind, kind), handle)
            _wait("cudaStreamQuery", handle, DEFAULT_TIMEOUT_S, f"copy of {self.nbytes} bytes")

    def close(self) -> None:
        """Frees the memory (a view: forgets it). Further use is an error."""
        if self._owner is None and self._pointer is not None:
            call("cudaFree", self._pointer)
        self._pointer = None

    def __del__(self) -> None:
        pointer = getattr(self, "_pointer", None)
        if pointer is not None:
            _dropped.append(pointer)

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}, {self.shape}, device {self.device})"
