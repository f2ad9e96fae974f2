# SPDX-License-Identifier: Apache-2.0
"""sglang's kernels, as `scripts/fetch_peers.sh` compiles them: its fused boundary, and its push all-reduce.

Its fused kernel also finalizes a MoE. Here every token has one expert of weight 1, so that this step reads x; it then
reads an index and a weight more than ours, and also stores the reduced x.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trtllm_mhc.benchmarks.harness import CAPACITY, HIDDEN, NORM_EPS, CheckError, Rank
from trtllm_mhc.benchmarks.ours import check_mxfp8
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.cuda import DeviceArray, Stream

_SLOT_BYTES = CAPACITY * HIDDEN * 2
_SCALE_ROWS = 128


_POINTERS = (
    *("x", "indices", "weights", "total", "residual", "post", "comb", "pre", "gamma"),
    *("residual_out", "layer_input", "data", "scales"),
)


class _BoundaryArgs(ctypes.Structure):
    """PeerBoundaryArgs of benchmarks/peers/sglang.cu."""

    _fields_ = (
        ("rows", ctypes.c_int32),
        ("quantized", ctypes.c_int32),
        ("norm_eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    )


def missing(folder: Path | None, tp_size: int) -> str | None:
    """Why these kernels cannot be measured, or None."""
    if folder is None:
        return "no folder given: scripts/fetch_peers.sh makes one, --peers names it"
    path = _library_path(folder, tp_size)
    if not path.exists():
        return f"{path} is not there: scripts/fetch_peers.sh makes it"
    if (capability := cuda.device_info(0).compute_capability) != (9, 0):
        return f"compiled for sm_90a, this GPU is sm_{capability[0]}{capability[1]}"
    return None


def missing_triton(folder: Path | None, tp_size: int) -> str | None:
    """Why the unfused chain cannot be measured, or None."""
    if reason := missing(folder, 2 if tp_size == 1 else tp_size):
        return reason
    absent = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def _library_path(folder: Path, tp_size: int) -> Path:
    return folder.resolve() / f"libsglang_tp{tp_size}.so"


class _Plane:
    """One rank's mailbox of sglang's. Two phases of a slot for each rank; zeroed memory means "not arrived"."""

    def __init__(self, rank: Rank, folder: Path) -> None:
        self._library = ctypes.CDLL(str(_library_path(folder, rank.tp_size)))
        self._library.peerLastError.restype = ctypes.c_char_p
        tp_size = rank.tp_size
        blocks = int(cuda.call("cudaGetDeviceProperties", rank.device).multiProcessorCount)
        self._counters = DeviceArray((blocks,), np.uint32)
        # A rank that plays all of them has its "peers'" workspaces one slot apart, so that what it stores for peer i
        # lands where it waits for what peer i stores.
        alone = rank.mode == "self_loop"
        self._workspace = DeviceArray(((3 * tp_size - 1 if alone else 2 * tp_size) * _SLOT_BYTES,), np.uint8)
        for array in (self._counters, self._workspace):
            array.fill_bytes(0)
        own = self._workspace.pointer
        pointers = [own + peer * _SLOT_BYTES for peer in range(tp_size)] if alone else rank.all_gather(own)
        self.handle = ctypes.c_void_p()
        self.check(
            self._library.peerCreate(
                ctypes.byref(self.handle),
                rank.index,
                rank.device,
                (ctypes.c_void_p * tp_size)(*pointers),
                ctypes.c_int64(_SLOT_BYTES),
                ctypes.c_void_p(self._counters.pointer),
                ctypes.c_int64(blocks),
            )
        )

    def check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"sglang: {self._library.peerLastError().decode(errors='replace')}")

    def boundary(self, args: _BoundaryArgs, stream: Stream) -> None:
        self.check(self._library.peerBoundary(self.handle, ctypes.byref(args), ctypes.c_void_p(stream.handle)))

    def all_reduce(self, x: DeviceArray, total: DeviceArray, stream: Stream) -> None:
        x_at, total_at, stream_at = (ctypes.c_void_p(each) for each in (x.pointer, total.pointer, stream.handle))
        self.check(self._library.peerAllReduce(self.handle, x_at, total_at, x.shape[0], stream_at))

    def close(self) -> None:
        if self.handle:
            self._library.peerDestroy(self.handle)
            self.handle = ctypes.c_void_p()


def _plane(rank: Rank, folder: Path) -> _Plane:
    return rank.shared(("sglang", folder), lambda: _Plane(rank, folder))


class Fused:
    """`all_reduce_mhc_post_combine_norm`, or with `mxfp8` its quantising form."""

    def __init__(self, rank: Rank, rows: int, folder: Path, *, mxfp8: bool = False) -> None:
        self._plane = _plane(rank, folder)
        self._tensors = rank.tensors(rows)
        self._residual_out, self._layer_input = self._tensors.new_outputs()
        own = {
            "indices": DeviceArray.from_numpy(np.arange(rows, dtype=np.int32)),
            "weights": DeviceArray.from_numpy(np.ones((rows, 1), np.float32)),
            "total": DeviceArray((rows, HIDDEN), ml_dtypes.bfloat16),
            "residual_out": self._residual_out,
            "layer_input": self._layer_input,
        }
        if mxfp8:
            own["data"] = DeviceArray((rows, HIDDEN), ml_dtypes.float8_e4m3fn)
            own["scales"] = DeviceArray((HIDDEN // 32 * _SCALE_ROWS,), np.uint8)
        self._arrays = {**self._tensors.inputs, **own}
        self._args = _BoundaryArgs(
            rows=rows,
            quantized=int(mxfp8),
            norm_eps=NORM_EPS,
            **{name: array.pointer for name, array in self._arrays.items()},
        )

    def enqueue(self, stream: Stream) -> None:
        """See `Subject`."""
        self._plane.boundary(self._args, stream)

    def check(self) -> None:
        """See `Subject`."""
        self._tensors.check_close(self._residual_out, self._layer_input)
        if self._args.quantized:
            check_mxfp8(self._layer_input, self._arrays["data"], self._arrays["scales"])


class Triton:
    """sglang's two Triton kernels, post and collapse with norm, on a sum that is there; by default x itself."""

    def __init__(self, rank: Rank, rows: int, total: DeviceArray | None = None, *, folder: Path) -> None:
        import torch

        # Not a package of this name that may be installed: its import would bring everything along.
        if (path := str(folder.resolve() / "triton")) not in sys.path:
            sys.path.insert(0, path)
        norm = "sglang.kernels.ops.layernorm"
        self._post = importlib.import_module(f"{norm}.mhc_post_split_h").mhc_post_split_h
        self._combine = importlib.import_module(f"{norm}.hc_combine_norm").hc_combine_norm
        self._torch = torch
        self._tensors = rank.tensors(rows)
        self._stream = torch.cuda.ExternalStream(rank.stream.handle, device=rank.device)
        self._arrays = {**self._tensors.inputs, "total": total or self._tensors.x}
        self._views = {name: _torch_view(array) for name, array in self._arrays.items()}
        # Torch hands out again what the call before gave back, so a captured call allocates nothing.
        self._outputs: tuple[Any, Any] | None = None

    def enqueue(self, stream: Stream) -> None:
        """See `Subject`."""
        v = self._views
        with self._torch.cuda.stream(self._stream):
            streams = self._post(v["total"], v["residual"], v["post"], v["comb"])
            layer_input = self._combine(streams.view(streams.shape[0], 4 * HIDDEN), v["pre"], v["gamma"], NORM_EPS)
        self._outputs = streams, layer_input

    def check(self) -> None:
        """See `Subject`."""
        if self._outputs is None:
            raise CheckError("nothing was run")
        self._tensors.check_close(*(_HostCopy(output) for output in self._outputs))


class Unfused:
    """The chain that sglang had before it fused: push all-reduce, then two Triton kernels."""

    def __init__(self, rank: Rank, rows: int, folder: Path) -> None:
        self._plane = _plane(rank, folder)
        self._x = rank.tensors(rows).x
        self._total = DeviceArray((rows, HIDDEN), ml_dtypes.bfloat16)
        self._local = Triton(rank, rows, self._total, folder=folder)

    def enqueue(self, stream: Stream) -> None:
        """See `Subject`."""
        self._plane.all_reduce(self._x, self._total, stream)
        self._local.enqueue(stream)

    def check(self) -> None:
        """See `Subject`."""
        self._local.check()


class _HostCopy(NamedTuple):
    """A torch tensor as what `check_close` reads."""

    tensor: Any

    def to_numpy(self) -> np.ndarray[Any, Any]:
        """A copy as float32."""
        return np.asarray(self.tensor.float().cpu().numpy())


class _Exposed:
    """The array interface of an array. It has no bf16, which goes as 16-bit integers."""

    def __init__(self, array: DeviceArray, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": typestr,
            "data": (array.pointer, False),
            "version": 3,
        }


def _torch_view(array: DeviceArray) -> Any:
    """The same memory as a torch tensor."""
    import torch

    bf16 = array.dtype == np.dtype(ml_dtypes.bfloat16)
    exposed = _Exposed(array, "<i2" if bf16 else array.dtype.str)
    tensor = torch.as_tensor(exposed, device=f"cuda:{array.device}")
    return tensor.view(torch.bfloat16) if bf16 else tensor
