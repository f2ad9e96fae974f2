# SPDX-License-Identifier: Apache-2.0
"""The C interface `cpp/include/mhc/mhc.h`, bound with ctypes.

Structures mirror the header field by field. Every status other than success becomes an exception of this module; the
exception of a mailbox error carries the record that the kernel wrote.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from trtllm_mhc import plugin
from trtllm_mhc.runtime import nccl

MAX_RANKS = 8
STREAMS = 4
MAX_GROUP = 64
REASON_BYTES = 192


class Status(IntEnum):
    """`mhcStatus`."""

    SUCCESS = 0
    INVALID_ARGUMENT = 1
    CUDA_ERROR = 2
    TIMEOUT = 3
    MAILBOX_ERROR = 4
    NOT_BOUND = 5
    UNSUPPORTED = 6
    PEER_FAILED = 7
    CAPTURE_NOT_READY = 8
    NCCL_ERROR = 9


class ErrorKind(IntEnum):
    """`mhcErrorKind`: what went wrong inside a kernel."""

    NONE = 0
    TIMEOUT = 1
    HEADER_MISMATCH = 2
    INDEX = 3
    TICKET = 4
    NOT_PUBLISHED = 5
    NCCL = 6


class NcclFailure(IntEnum):
    """What became of an all-reduce through NCCL, in the `field` of its error record."""

    TIMEOUT = 0
    REPORTED = 1
    STALE_GRAPH = 2


class Transport(IntEnum):
    """`mhcTransport`: what carries the contributions."""

    LOCAL = 0
    MAILBOX = 1
    MAILBOX_NCCL = 2
    NCCL = 3


class HeaderField(IntEnum):
    """The word of a mailbox header that two ranks disagree on."""

    SEQUENCE = 0
    ROWS = 1
    OPERATION = 2
    LANE = 3


class OnError(IntEnum):
    """`mhcOnError`: what a kernel does after it has written its error record."""

    RAISE = 0
    TRAP = 1


class WaitMode(IntEnum):
    """`mhcWaitMode`: who polls the mailbox."""

    AUTO = 0
    SPIN = 1
    GATE = 2
    SPLIT = 3


class Reach(IntEnum):
    """`mhcReach`: how one rank reaches another's memory."""

    NONE = 0
    SELF = 1
    PEER_ACCESS = 2
    IPC = 3


class CErrorRecord(ctypes.Structure):
    """`mhcErrorRecord`."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("token", ctypes.c_int32),
        ("generation", ctypes.c_uint32),
        ("sequence", ctypes.c_uint32),
        ("expected", ctypes.c_uint32),
        ("got", ctypes.c_uint32),
        ("field", ctypes.c_uint32),
    ]


class CCommConfig(ctypes.Structure):
    """`mhcCommConfig`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("tp_size", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("lanes", ctypes.c_int32),
        ("on_error", ctypes.c_int32),
        ("wait_mode", ctypes.c_int32),
        ("timeout_ms", ctypes.c_uint32),
        ("group_size", ctypes.c_int32),
        ("group", ctypes.POINTER(ctypes.c_int32)),
        ("nccl_rows", ctypes.c_int32),
        ("nccl_workspace_rows", ctypes.c_int32),
    ]


class CCommInfo(ctypes.Structure):
    """`mhcCommInfo`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("tp_size", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("lanes", ctypes.c_int32),
        ("ranks_per_device", ctypes.c_int32),
        ("waits_at_gate", ctypes.c_int32),
        ("exchange_rows", ctypes.c_int32),
        ("multicast", ctypes.c_int32),
        ("mailbox_bytes", ctypes.c_size_t),
        ("transport", ctypes.c_int32),
        ("nccl_rows", ctypes.c_int32),
        ("nccl_workspace_rows", ctypes.c_int32),
        ("nccl_version", ctypes.c_int32),
        ("transport_reason", ctypes.c_char * REASON_BYTES),
    ]


class CGroupInfo(ctypes.Structure):
    """`mhcGroupInfo`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint32),
        ("on_error", ctypes.c_int32),
        ("wait_mode", ctypes.c_int32),
        ("device", ctypes.c_int32 * MAX_RANKS),
        ("first_in_process", ctypes.c_int32 * MAX_RANKS),
        ("first_on_device", ctypes.c_int32 * MAX_RANKS),
        ("reach", ctypes.c_int32 * MAX_RANKS * MAX_RANKS),
        ("multicast_reason", ctypes.c_char * REASON_BYTES),
        ("sentence", ctypes.c_char * 1024),
    ]


class CBoundaryArgs(ctypes.Structure):
    """`mhcBoundaryArgs`. Device addresses are plain integers."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("rows", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("post", ctypes.c_void_p),
        ("comb", ctypes.c_void_p),
        ("pre", ctypes.c_void_p),
        ("gamma", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
        ("residual_out", ctypes.c_void_p),
        ("layer_input", ctypes.c_void_p),
        ("top_k", ctypes.c_int32),
        ("permuted_rows", ctypes.c_int32),
        ("gemm2_permuted", ctypes.c_void_p),
        ("expert_weights", ctypes.c_void_p),
        ("expanded_idx_to_permuted_idx", ctypes.c_void_p),
        ("shared_output", ctypes.c_void_p),
        ("mxfp8_data", ctypes.c_void_p),
        ("mxfp8_scales", ctypes.c_void_p),
        ("published", ctypes.c_int32),
    ]


class WeightType(IntEnum):
    """`mhcWeightType`."""

    BF16 = 0
    E4M3_BLOCK32 = 1


class CPublishLinearArgs(ctypes.Structure):
    """`mhcPublishLinearArgs`. Device addresses are plain integers."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("rows", ctypes.c_int32),
        ("in_features", ctypes.c_int32),
        ("weight_type", ctypes.c_int32),
        ("activation", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("weight_scales", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    ]


class CCoefficientsArgs(ctypes.Structure):
    """`mhcCoefficientsArgs`. Device addresses are plain integers."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("rows", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("broadcast", ctypes.c_int32),
        ("sinkhorn_iters", ctypes.c_int32),
        ("rms_norm_eps", ctypes.c_float),
        ("hc_eps", ctypes.c_float),
        ("post_alpha", ctypes.c_float),
        ("streams", ctypes.c_void_p),
        ("fn", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("post", ctypes.c_void_p),
        ("comb", ctypes.c_void_p),
        ("pre", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
    ]


class CPublishTarget(ctypes.Structure):
    """`mhcPublishTarget`."""

    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("tp_size", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("hidden_size", ctypes.c_int32),
        ("capacity", ctypes.c_int32),
        ("owner", ctypes.c_uint32),
        ("slots", ctypes.c_void_p * MAX_RANKS),
        ("generation_stride", ctypes.c_size_t),
        ("rank_stride", ctypes.c_size_t),
        ("row_stride", ctypes.c_size_t),
        ("state", ctypes.c_void_p),
    ]


AllGatherFn = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class MailboxRecord:
    """What a kernel wrote when it gave up.

    Attributes:
        kind: what went wrong.
        rank: the rank waited for, or that sent the other header; -1 where no rank is meant.
        token: the row waited for.
        generation: the mailbox generation, 0 to 2.
        sequence: the lane's call number.
        expected: header mismatch: this rank's word; index error: rows of the tensor.
        got: header mismatch: the peer's word; index error: the index found; NCCL: its result, or 0.
        field: header mismatch: the word that differs; NCCL: what became of the all-reduce.
    """

    kind: ErrorKind
    rank: int
    token: int
    generation: int
    sequence: int
    expected: int
    got: int
    field: HeaderField | NcclFailure

    @classmethod
    def from_c(cls, record: CErrorRecord) -> MailboxRecord:
        """Decodes the C structure."""
        return cls(
            kind=ErrorKind(record.kind),
            rank=record.rank,
            token=record.token,
            generation=record.generation,
            sequence=record.sequence,
            expected=record.expected,
            got=record.got,
            field=(NcclFailure if record.kind == ErrorKind.NCCL else HeaderField)(record.field),
        )

    def __str__(self) -> str:
        where = f"generation {self.generation}, call {self.sequence}"
        if self.kind is ErrorKind.TIMEOUT:
            return f"time-out: nothing from rank {self.rank} for token {self.token} ({where})"
        if self.kind is ErrorKind.HEADER_MISMATCH:
            return (
                f"header mismatch: rank {self.rank} came with {self.field.name.lower()} {self.got}, "
                f"this rank has {self.expected} (token {self.token}, {where})"
            )
        if self.kind is ErrorKind.INDEX:
            index = ctypes.c_int32(self.got).value
            return f"index {index} of token {self.token} lies outside a tensor of {self.expected} rows ({where})"
        if self.kind is ErrorKind.TICKET:
            return f"the lane was in use by another stream, context or graph ({where})"
        if self.kind is ErrorKind.NOT_PUBLISHED:
            return f"a published boundary found nothing published ({where})"
        if self.kind is ErrorKind.NCCL:
            why = {
                NcclFailure.TIMEOUT: "a rank did not take part in time",
                NcclFailure.REPORTED: f"NCCL reported an error ({self.got})",
                NcclFailure.STALE_GRAPH: "its graph was captured before the reset that made a new NCCL communicator",
            }
            return f"an all-reduce through NCCL did not come to its end: {why[NcclFailure(self.field)]}"
        return "no error"


class MhcError(RuntimeError):
    """A call of the C interface failed. `status` says how, the message why."""

    def __init__(self, message: str, status: Status) -> None:
        super().__init__(message)
        self.status = status


class InvalidArgumentError(MhcError, ValueError):
    """An argument is out of range, or shapes disagree."""


class CudaCallError(MhcError):
    """A CUDA call inside the library failed."""


class CollectiveTimeoutError(MhcError, TimeoutError):
    """A collective host call ended without all ranks."""


class MailboxError(MhcError):
    """A kernel recorded an error; the lane stays closed until a collective reset. `record` says what happened."""

    def __init__(self, message: str, record: MailboxRecord | None = None) -> None:
        super().__init__(f"{message}: {record}" if record is not None else message, Status.MAILBOX_ERROR)
        self.record = record


class NotBoundError(MhcError):
    """No communicator for this group and device."""


class UnsupportedError(MhcError):
    """The library was not built for this, or the hardware cannot do it."""


class PeerFailedError(MhcError):
    """A collective host call failed on another rank."""


class CaptureNotReadyError(MhcError):
    """Stream capture began before the group had met."""


class NcclError(MhcError):
    """A call of NCCL failed."""


_EXCEPTIONS: dict[Status, type[MhcError]] = {
    Status.INVALID_ARGUMENT: InvalidArgumentError,
    Status.CUDA_ERROR: CudaCallError,
    Status.TIMEOUT: CollectiveTimeoutError,
    Status.NOT_BOUND: NotBoundError,
    Status.UNSUPPORTED: UnsupportedError,
    Status.PEER_FAILED: PeerFailedError,
    Status.CAPTURE_NOT_READY: CaptureNotReadyError,
    Status.NCCL_ERROR: NcclError,
}

_COMM = ctypes.c_void_p
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "mhcVersion": (ctypes.c_char_p, []),
    "mhcLastError": (ctypes.c_char_p, []),
    "mhcStatusName": (ctypes.c_char_p, [ctypes.c_int]),
    "mhcCommCreateThreads": (
        ctypes.c_int,
        [ctypes.POINTER(_COMM), ctypes.POINTER(CCommConfig), ctypes.c_char_p],
    ),
    "mhcCommCreateAllGather": (
        ctypes.c_int,
        [ctypes.POINTER(_COMM), ctypes.POINTER(CCommConfig), AllGatherFn, ctypes.c_void_p],
    ),
    "mhcCommCreateSelfLoop": (ctypes.c_int, [ctypes.POINTER(_COMM), ctypes.POINTER(CCommConfig)]),
    "mhcCommCreateNccl": (ctypes.c_int, [ctypes.POINTER(_COMM), ctypes.POINTER(CCommConfig), ctypes.c_void_p]),
    "mhcNcclSetPath": (ctypes.c_int, [ctypes.c_char_p]),
    "mhcNcclVersion": (ctypes.c_int, [ctypes.POINTER(ctypes.c_int32)]),
    "mhcCommCreateEnvironment": (ctypes.c_int, [ctypes.POINTER(_COMM), ctypes.POINTER(CCommConfig)]),
    "mhcCommDestroy": (ctypes.c_int, [_COMM]),
    "mhcCommReset": (ctypes.c_int, [_COMM]),
    "mhcCommStatus": (ctypes.c_int, [_COMM, ctypes.c_int32, ctypes.POINTER(CErrorRecord)]),
    "mhcCommGetInfo": (ctypes.c_int, [_COMM, ctypes.POINTER(CCommInfo)]),
    "mhcCommGetGroupInfo": (ctypes.c_int, [_COMM, ctypes.POINTER(CGroupInfo)]),
    "mhcCommSetCurrent": (ctypes.c_int, [_COMM, ctypes.c_int32]),
    "mhcMxfp8ScaleBytes": (ctypes.c_size_t, [ctypes.c_int32, ctypes.c_int32]),
    "mhcBoundary": (ctypes.c_int, [_COMM, ctypes.c_int32, ctypes.POINTER(CBoundaryArgs), ctypes.c_void_p]),
    "mhcPublish": (ctypes.c_int, [_COMM, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]),
    "mhcCommPublishTarget": (ctypes.c_int, [_COMM, ctypes.c_int32, ctypes.POINTER(CPublishTarget)]),
    "mhcMarkPublished": (
        ctypes.c_int,
        [_COMM, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int32, ctypes.c_void_p],
    ),
    "mhcBoundaryLocal": (ctypes.c_int, [ctypes.c_int32, ctypes.POINTER(CBoundaryArgs), ctypes.c_void_p]),
    "mhcAllReduce": (
        ctypes.c_int,
        [_COMM, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p],
    ),
    "mhcAllReduceNccl": (
        ctypes.c_int,
        [_COMM, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p],
    ),
    "mhcAllReduceLocal": (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p],
    ),
    "mhcPublishLinear": (ctypes.c_int, [_COMM, ctypes.c_int32, ctypes.POINTER(CPublishLinearArgs), ctypes.c_void_p]),
    "mhcPublishLinearLocal": (ctypes.c_int, [ctypes.c_int32, ctypes.POINTER(CPublishLinearArgs), ctypes.c_void_p]),
    "mhcCoefficientsWorkspaceBytes": (ctypes.c_size_t, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
    "mhcCoefficients": (ctypes.c_int, [ctypes.POINTER(CCoefficientsArgs), ctypes.c_void_p]),
}


class Library:
    """The loaded library with typed functions; `library()` makes the only one a process needs."""

    def __init__(self, cdll: ctypes.CDLL) -> None:
        for name, (result, arguments) in _PROTOTYPES.items():
            try:
                function = getattr(cdll, name)
            except AttributeError:
                raise ImportError(f"{cdll._name} has no function {name}: it was built from another version") from None
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"mhc.h declares no function {name} that is bound here")

    def version(self) -> str:
        """The library's version, as `major.minor.patch`."""
        text: bytes = self.mhcVersion()
        return text.decode()

    def nccl_version(self) -> str:
        """The version of the NCCL that is used, for example "2.28.9"; loads it.

        Raises:
            UnsupportedError: there is none that can be used; the message says where it was looked for.
        """
        version = ctypes.c_int32()
        self.check(self.mhcNcclVersion(ctypes.byref(version)), "mhcNcclVersion")
        return nccl.version_text(version.value)

    def check(self, status: int, what: str, comm: ctypes.c_void_p | None = None, lane: int = -1) -> None:
        """Raises unless `status` is success.

        Args:
            status: an `mhcStatus`.
            what: the call, for the message.
            comm: the communicator of the call; its error record is read for a mailbox error.
            lane: the lane of the call, -1 for any.
        """
        if status == Status.SUCCESS:
            return
        text: bytes | None = self.mhcLastError()
        message = f"{what}: {(text or b'').decode(errors='replace') or Status(status).name}"
        if status == Status.MAILBOX_ERROR:
            raise MailboxError(message, self.record(comm, lane) if comm is not None else None)
        raise _EXCEPTIONS[Status(status)](message, Status(status))

    def record(self, comm: ctypes.c_void_p, lane: int) -> MailboxRecord | None:
        """The error record of `lane` (-1: the first lane in error), or None when there is no error."""
        record = CErrorRecord()
        status = self.mhcCommStatus(comm, lane, ctypes.byref(record))
        if status == Status.MAILBOX_ERROR:
            return MailboxRecord.from_c(record)
        self.check(status, "mhcCommStatus")
        return None


@functools.cache
def library() -> Library:
    """Loads the library on the first call.

    Raises:
        OSError: the shared library is missing or cannot be loaded.
        ImportError: it lacks a function of the header.
    """
    loaded = Library(plugin.load())
    if wheel := nccl.wheel_library():
        loaded.check(loaded.mhcNcclSetPath(str(wheel).encode()), "mhcNcclSetPath")
    return loaded
