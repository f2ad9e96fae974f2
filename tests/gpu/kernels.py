# SPDX-License-Identifier: Apache-2.0
"""The tests' own kernels (kernels.cu), compiled for the device at hand, and how to launch them."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from pathlib import Path
from typing import Any

from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import PublishTarget
from trtllm_mhc.runtime.cuda import DeviceArray, Stream

SOURCE = Path(__file__).with_name("kernels.cu")


class NoCompilerError(RuntimeError):
    """There is no nvcc."""


class CTarget(ctypes.Structure):
    """`Target` of kernels.cu."""

    _fields_ = [
        ("slots", ctypes.c_uint64 * 8),
        ("generation_stride", ctypes.c_uint64),
        ("rank_stride", ctypes.c_uint64),
        ("row_stride", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
        ("owner", ctypes.c_uint32),
        ("tp", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("takes_ticket", ctypes.c_int32),
        ("late_row", ctypes.c_int32),
        ("late_fragment", ctypes.c_int32),
        ("late_nanoseconds", ctypes.c_uint64),
    ]


def nvcc() -> str:
    """The compiler: of the path, of the CUDA wheels, or of a toolkit."""
    wheel = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin/nvcc")
    for candidate in (shutil.which("nvcc"), wheel, "/usr/local/cuda/bin/nvcc"):
        if candidate and os.access(candidate, os.X_OK):
            return str(candidate)
    raise NoCompilerError("no nvcc: neither on PATH, nor in the CUDA wheels, nor in /usr/local/cuda")


def compile_kernels(architecture: str) -> bytes:
    """The cubin of kernels.cu for an architecture such as "sm_90"."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernels.cubin")
        command = [nvcc(), "-cubin", f"-arch={architecture}", "-o", str(cubin), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr}")
        return cubin.read_bytes()


def _driver(function: str, *arguments: Any) -> Any:
    module = cuda._bindings("driver")
    status, *values = getattr(module, function)(*arguments)
    if int(status) != 0:
        raise cuda.CudaError(f"{function}: {status.name}", status.name)
    return values[0] if values else None


class Kernels:
    """kernels.cu on the current device. Everything is loaded at once: a kernel that is loaded on first use would wait
    for kernels that wait for its rank."""

    def __init__(self) -> None:
        cuda.call("cudaFree", 0)  # makes the device's context current
        major, minor = cuda.device_info(cuda.current_device()).compute_capability
        self._module = _driver("cuModuleLoadData", _cubin(f"sm_{major}{minor}"))
        self._functions: dict[str, Any] = {}
        for name in ("sleepKernel", "producerKernel", "prepareKernel", "checkKernel", "advanceKernel"):
            self._functions[name] = _driver("cuModuleGetFunction", self._module, name.encode())
            _driver("cuFuncLoad", self._functions[name])

    def launch(self, name: str, ctas: int, threads: int, stream: Stream, *arguments: Any) -> None:
        """Enqueues a kernel; the arguments are ctypes values of the parameters' exact types."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        _driver(
            "cuLaunchKernel",
            self._functions[name],
            ctas,
            1,
            1,
            threads,
            1,
            1,
            0,
            stream.handle,
            ctypes.addressof(pointers),
            0,
        )

    def sleep(self, seconds: float, stream: Stream) -> None:
        """Holds up the stream."""
        self.launch("sleepKernel", 1, 1, stream, ctypes.c_uint64(int(seconds * 1e9)))

    def produce(
        self,
        target: PublishTarget,
        x: DeviceArray,
        stream: Stream,
        *,
        takes_ticket: bool = True,
        late: tuple[int, int, float] | None = None,
    ) -> None:
        """Stores `x` [M, H] into the mailbox as a producer that is not the library's.

        Args:
            target: where to.
            x: the contribution, bf16.
            stream: in it.
            takes_ticket: the producer does the protocol's first step itself.
            late: (row, fragment of 8 elements, seconds): these 16 bytes come so much later than the others.
        """
        row, fragment, seconds = late or (-1, 0, 0.0)
        argument = CTarget(
            slots=(ctypes.c_uint64 * 8)(*target.slots),
            generation_stride=target.generation_stride,
            rank_stride=target.rank_stride,
            row_stride=target.row_stride,
            state=target.state,
            owner=target.owner,
            tp=len(target.slots),
            rank=target.rank,
            hidden=x.shape[1],
            takes_ticket=int(takes_ticket),
            late_row=row,
            late_fragment=fragment,
            late_nanoseconds=int(seconds * 1e9),
        )
        self.launch("producerKernel", x.shape[0], 256, stream, argument, ctypes.c_uint64(x.pointer))


@functools.cache
def _cubin(architecture: str) -> bytes:
    return compile_kernels(architecture)


_lock = threading.Lock()
_loaded: dict[int, Kernels] = {}


def kernels() -> Kernels:
    """Those of the current device, made once."""
    with _lock:
        device = cuda.current_device()
        if device not in _loaded:
            _loaded[device] = Kernels()
        return _loaded[device]
