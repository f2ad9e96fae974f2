# SPDX-License-Identifier: Apache-2.0
"""NCCL's all-reduce before somebody else's local part. Ranks need a GPU each; a rank alone cannot play its group."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import ml_dtypes

from trtllm_mhc.benchmarks.harness import Rank, Subject
from trtllm_mhc.runtime import nccl
from trtllm_mhc.runtime.cuda import DeviceArray, Stream

_BFLOAT16, _SUM = 9, 0  # ncclDataType_t, ncclRedOp_t


class _UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


def missing(mode: str) -> str | None:
    """Why it cannot be measured, or None."""
    if mode != "nvlink":
        return "NCCL wants a GPU for each rank"
    if nccl.wheel_library() is None and _loaded() is None:
        return "no libnccl.so.2: pip install nvidia-nccl-cu13"
    return None


def _loaded() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(nccl.wheel_library() or Path("libnccl.so.2")))
    except OSError:
        return None


class _Communicator:
    """An `ncclComm_t` of the measured ranks."""

    def __init__(self, rank: Rank) -> None:
        library = _loaded()
        if library is None:
            raise RuntimeError(missing(rank.mode))
        self._library = library
        own = _UniqueId()
        if rank.index == 0:
            self._check(library.ncclGetUniqueId(ctypes.byref(own)))
        first = rank.all_gather(own)[0]
        self._handle = ctypes.c_void_p()
        self._check(library.ncclCommInitRank(ctypes.byref(self._handle), rank.tp_size, first, rank.index))

    def _check(self, status: int) -> None:
        if status != 0:
            self._library.ncclGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NCCL: {self._library.ncclGetErrorString(status).decode()}")

    def all_reduce(self, x: DeviceArray, total: DeviceArray, stream: Stream) -> None:
        pointers = ctypes.c_void_p(x.pointer), ctypes.c_void_p(total.pointer)
        count, handle = ctypes.c_size_t(x.size), ctypes.c_void_p(stream.handle)
        self._check(self._library.ncclAllReduce(*pointers, count, _BFLOAT16, _SUM, self._handle, handle))

    def close(self) -> None:
        self._library.ncclCommDestroy(self._handle)


class Chain:
    """NCCL's all-reduce, then a subject that reads the sum.

    Args:
        rank: where it runs.
        rows: M.
        local: makes that subject: called with the rank, M, and where the sum will be.
    """

    def __init__(self, rank: Rank, rows: int, local: Callable[[Rank, int, DeviceArray], Subject]) -> None:
        self._communicator = rank.shared("nccl", lambda: _Communicator(rank))
        self._x = rank.tensors(rows).x
        self._total = DeviceArray(self._x.shape, ml_dtypes.bfloat16)
        self._local = local(rank, rows, self._total)

    def enqueue(self, stream: Stream) -> None:
        """See `Subject`."""
        self._communicator.all_reduce(self._x, self._total, stream)
        self._local.enqueue(stream)

    def check(self) -> None:
        """See `Subject`."""
        self._local.check()
