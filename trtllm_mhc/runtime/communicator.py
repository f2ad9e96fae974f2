# SPDX-License-Identifier: Apache-2.0
"""The group of ranks that share a mailbox, and the operations that run over it.

    with Communicator.threads("demo", tp_size=2, rank=rank, device=0, hidden_size=5120) as communicator:
        with communicator.bound():
            context = engine.create_execution_context()

Creation, `reset` and `close` are collective: every rank of the group calls them, and each ends within the
time-out.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypedDict, Unpack, get_args

import ml_dtypes
import numpy as np

from trtllm_mhc.runtime import library as c_api
from trtllm_mhc.runtime import nccl
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.library import Library, MailboxRecord, Transport, library

AllGather = Callable[[bytes], Sequence[bytes]]
"""Gives this rank's bytes to the group and returns all ranks' bytes in rank order, each as long as the argument."""

WaitMode = Literal["auto", "spin", "gate", "split"]
OnError = Literal["raise", "trap"]


class CommunicatorOptions(TypedDict, total=False):
    """What a group may choose, alike on all its ranks. Every key may be left out.

    Keys:
        capacity: rows of one mailbox slot (64); larger M goes through in chunks.
        lanes: independent mailboxes, one per concurrent context, stream or graph (1).
        on_error: "raise": outputs become NaN and the next call raises (default); "trap": the kernel traps.
        wait_mode: who waits for the peers. "gate": a one-CTA kernel; "spin": every CTA, publish and consume in one
            kernel where that fits; "split": every CTA, always two kernels; "auto" (default): "gate" where ranks share
            a device, else "spin".
        timeout_s: of a kernel's wait and of every collective call (60).
        group: world ranks, as in the plugins' `group` field; empty (default): 0 to tp_size - 1.
        nccl_rows: M from which on NCCL's all-reduce is used. 0 (default): only where ranks have no peer access to each
            other, for every M; -1: never. Ranks that share a device do without NCCL; `info.transport_reason` says so.
        nccl_workspace_rows: rows that go through NCCL at once, of 2 H bytes each and lane (0: 2048).
    """

    capacity: int
    lanes: int
    on_error: OnError
    wait_mode: WaitMode
    timeout_s: float
    group: Sequence[int]
    nccl_rows: int
    nccl_workspace_rows: int


_BF16 = np.dtype(ml_dtypes.bfloat16)
_F32 = np.dtype(np.float32)
_I32 = np.dtype(np.int32)
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)

_current = threading.local()


@dataclass(frozen=True)
class CommunicatorInfo:
    """What the group agreed on.

    Attributes:
        tp_size: number of ranks.
        rank: this rank's index in the group.
        device: this rank's CUDA device ordinal.
        hidden_size: H.
        capacity: rows of one mailbox slot; larger M goes through in chunks.
        lanes: number of independent mailboxes.
        ranks_per_device: the group's maximum.
        waits_at_gate: a one-CTA kernel waits for the peers, so that ranks can share a device.
        exchange_rows: up to which M publish and consume are one kernel; 0: never.
        multicast: NVLink multicast is used.
        mailbox_bytes: of this rank, all lanes.
        transport: what carries the contributions.
        transport_reason: why, as a sentence.
        nccl_rows: M from which on NCCL's all-reduce is used; 0: never.
        nccl_workspace_rows: rows that go through NCCL at once; 0: NCCL is not used.
        nccl_version: for example "2.28.9"; None: NCCL is not used.
    """

    tp_size: int
    rank: int
    device: int
    hidden_size: int
    capacity: int
    lanes: int
    ranks_per_device: int
    waits_at_gate: bool
    exchange_rows: int
    multicast: bool
    mailbox_bytes: int
    transport: Transport
    transport_reason: str
    nccl_rows: int
    nccl_workspace_rows: int
    nccl_version: str | None


@dataclass(frozen=True)
class GroupInfo:
    """What is the same on all ranks: where they are, and what they decided from it.

    Attributes:
        devices: each rank's CUDA device ordinal, in its own process.
        first_in_process: for each rank the first one of its process.
        first_on_device: for each rank the first one of its device.
        reach: how each rank reaches each one's memory, [from][to].
        timeout_s: of a kernel's wait and of every collective call.
        on_error: "raise" or "trap".
        wait_mode: as asked for.
        multicast_reason: why NVLink multicast is not used.
        sentence: the whole decision, as it is logged.
    """

    devices: tuple[int, ...]
    first_in_process: tuple[int, ...]
    first_on_device: tuple[int, ...]
    reach: tuple[tuple[c_api.Reach, ...], ...]
    timeout_s: float
    on_error: str
    wait_mode: str
    multicast_reason: str
    sentence: str


@dataclass(frozen=True)
class Finalize:
    """A MoE output left unfinalized, in place of `x`.

    Attributes:
        gemm2_permuted: [P, H] bf16.
        expert_weights: [M, K] float32.
        expanded_idx_to_permuted_idx: [M, K] int32; -1: the expert is not on this rank.
        shared_output: [M, H] bf16.
    """

    gemm2_permuted: DeviceArray
    expert_weights: DeviceArray
    expanded_idx_to_permuted_idx: DeviceArray
    shared_output: DeviceArray


@dataclass(frozen=True)
class BoundaryOutputs:
    """Outputs of one boundary.

    Attributes:
        residual_out: [M, hc, H] bf16.
        layer_input: [M, H] bf16; None for a residual-only boundary.
    """

    residual_out: DeviceArray
    layer_input: DeviceArray | None


@dataclass(frozen=True)
class PublishTarget:
    """Where a producer that is not ours stores its contribution to a boundary, and how.

    In kernels of this rank's device, ordered after the lane's call before, it does for every row t < M:

    1. If it can: compare-and-swap `ticket` of row t from 0 to `owner`. When another number was there, it stores nothing
       for any row. Without this step, a second user of the lane that comes and goes between the producer's stores and
       `Communicator.mark_published` is not found.
    2. Read n = `next` of row t; g = n mod 3.
    3. Store the row, H bf16, with -0 (0x8000) turned into +0, at every address
       slots[r] + g * generation_stride + rank * rank_stride + t * row_stride. Each element once; no rows beyond M;
       visible system-wide when the kernel has ended (plain stores are).

    Then `mark_published` in the same stream does the rest. The addresses hold for the communicator's lifetime; one
    target serves one producer at a time. Source: the C interface's `mhcPublishTarget`.

    Attributes:
        slots: for each rank the address of its mailbox lane as this rank reaches it.
        generation_stride: bytes between generations.
        rank_stride: bytes between the contributions of two ranks.
        row_stride: bytes between rows.
        state: address of this rank's rows' state, 16 bytes a row: uint32 next, ticket, operation, rows. Only `ticket`
            may be written.
        owner: the number under which this producer takes tickets.
        rank: this rank's index in the group.
        capacity: the largest M.
        hidden_size: H.
        lane: the mailbox lane.
    """

    slots: tuple[int, ...]
    generation_stride: int
    rank_stride: int
    row_stride: int
    state: int
    owner: int
    rank: int
    capacity: int
    hidden_size: int
    lane: int


class Communicator:
    """One rank's end of the group. Made by `threads`, `all_gather`, `from_environment` or `from_nccl`."""

    def __init__(self, lib: Library, handle: ctypes.c_void_p, keep_alive: object = None) -> None:
        self._library = lib
        self._handle = handle
        self._keep_alive = keep_alive
        self.info = self._read_info()

    @classmethod
    def threads(
        cls,
        name: str,
        *,
        tp_size: int,
        rank: int,
        device: int,
        hidden_size: int,
        **options: Unpack[CommunicatorOptions],
    ) -> Communicator:
        """Collective. Joins the ranks that are threads of this process and give the same `name`.

        Args:
            name: says which communicators belong together.
            tp_size: 1, 2, 4 or 8.
            rank: index in the group.
            device: CUDA device ordinal; several ranks may share one.
            hidden_size: 4096, 5120 or 7168.
            options: see `CommunicatorOptions`.

        Raises:
            InvalidArgumentError: an argument is out of range, or the ranks disagree.
            CollectiveTimeoutError: a rank did not come.
        """
        lib = library()
        config = _config(tp_size, rank, device, hidden_size, **options)
        handle = ctypes.c_void_p()
        status = lib.mhcCommCreateThreads(ctypes.byref(handle), ctypes.byref(config), name.encode())
        lib.check(status, f"communicator {name!r}, rank {rank} of {tp_size}")
        return cls(lib, handle)

    @classmethod
    def all_gather(
        cls,
        callback: AllGather,
        *,
        tp_size: int,
        rank: int,
        device: int,
        hidden_size: int,
        **options: Unpack[CommunicatorOptions],
    ) -> Communicator:
        """Collective. Joins ranks that meet through the caller's all-gather.

        `trtllm_mhc.runtime.adapters` has those of torch.distributed, mpi4py and multiprocessing.

        The callback is also used by `reset` and `close`. Other arguments and errors are those of `threads`; an
        exception in the callback becomes the cause of the error raised here.
        """
        lib = library()
        config = _config(tp_size, rank, device, hidden_size, **options)
        bridge = _AllGatherBridge(callback, tp_size)
        handle = ctypes.c_void_p()
        status = lib.mhcCommCreateAllGather(ctypes.byref(handle), ctypes.byref(config), bridge.function, None)
        bridge.check(lib, status, f"communicator, rank {rank} of {tp_size}")
        return cls(lib, handle, bridge)

    @classmethod
    def from_nccl(
        cls,
        handle: int,
        *,
        tp_size: int,
        rank: int,
        device: int,
        hidden_size: int,
        **options: Unpack[CommunicatorOptions],
    ) -> Communicator:
        """Collective. Joins ranks that meet through an `ncclComm_t` of exactly the group's ranks, in its order.

        The NCCL communicator carries what the ranks tell each other here, in `reset` and in `close`, and nothing else;
        nobody else may use it meanwhile, and it must live as long as this communicator. All-reduces through NCCL use
        communicators of their own. With torch:

            torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", device))
            handle = trtllm_mhc.runtime.nccl.torch_communicator()

        Where it blocks the host, NCCL's own connecting to its peers is not bounded by `timeout_s`.

        Args:
            handle: the address, as an integer.

        Other arguments and errors are those of `threads`.

        Raises:
            InvalidArgumentError: the NCCL communicator has another size, rank or device.
            NcclError: NCCL reported an error.
            UnsupportedError: NCCL cannot be loaded.
        """
        lib = library()
        config = _config(tp_size, rank, device, hidden_size, **options)
        made = ctypes.c_void_p()
        status = lib.mhcCommCreateNccl(ctypes.byref(made), ctypes.byref(config), handle)
        lib.check(status, f"communicator through NCCL, rank {rank} of {tp_size}")
        return cls(lib, made)

    @classmethod
    def from_environment(
        cls,
        *,
        tp_size: int,
        hidden_size: int,
        rank: int | None = None,
        device: int | None = None,
        **options: Unpack[CommunicatorOptions],
    ) -> Communicator:
        """Collective. Joins processes that a launcher has started (torchrun, mpirun, srun, our own variables).

        docs/ranks.md lists the variables. They also give `capacity`, `timeout_s` and `nccl_rows` where these
        are left out.

        Args:
            tp_size: 1, 2, 4 or 8.
            hidden_size: 4096, 5120 or 7168.
            rank: index in the group; None: where the group has this process's world rank.
            device: CUDA device ordinal; None: TRTLLM_MHC_DEVICE, else the local rank modulo the number of devices.
            options: see `CommunicatorOptions`.

        Raises:
            NotBoundError: no launcher's variables are set.
            InvalidArgumentError: a variable or argument is wrong, the meeting place is not private, or the ranks
                disagree.
            CollectiveTimeoutError: a rank did not come.
            PeerFailedError: a rank has ended, or has another secret.
        """
        lib = library()
        config = _config(
            tp_size, -1 if rank is None else rank, -1 if device is None else device, hidden_size, **options
        )
        if "capacity" not in options:
            config.capacity = 0
        if "timeout_s" not in options:
            config.timeout_ms = 0
        handle = ctypes.c_void_p()
        status = lib.mhcCommCreateEnvironment(ctypes.byref(handle), ctypes.byref(config))
        lib.check(status, f"communicator from the environment, one of {tp_size}")
        return cls(lib, handle)

    @classmethod
    def self_loop(
        cls,
        *,
        tp_size: int,
        device: int,
        hidden_size: int,
        capacity: int = 64,
        wait_mode: WaitMode = "auto",
        timeout_s: float = 60.0,
    ) -> Communicator:
        """One rank that plays its whole group: every peer's contribution is its own.

        For measuring everything but the link, and for sanitizers, under which ranks cannot run side by side.
        """
        lib = library()
        config = _config(tp_size, 0, device, hidden_size, capacity=capacity, wait_mode=wait_mode, timeout_s=timeout_s)
        handle = ctypes.c_void_p()
        lib.check(lib.mhcCommCreateSelfLoop(ctypes.byref(handle), ctypes.byref(config)), "self-loop communicator")
        return cls(lib, handle)

    def group_info(self) -> GroupInfo:
        """Where the group's ranks are and what they decided."""
        info = c_api.CGroupInfo(struct_size=ctypes.sizeof(c_api.CGroupInfo))
        self._check(self._library.mhcCommGetGroupInfo(self.handle, ctypes.byref(info)), "mhcCommGetGroupInfo", None)
        ranks = range(self.info.tp_size)
        return GroupInfo(
            devices=tuple(info.device[rank] for rank in ranks),
            first_in_process=tuple(info.first_in_process[rank] for rank in ranks),
            first_on_device=tuple(info.first_on_device[rank] for rank in ranks),
            reach=tuple(tuple(c_api.Reach(info.reach[rank][peer]) for peer in ranks) for rank in ranks),
            timeout_s=info.timeout_ms / 1000,
            on_error=c_api.OnError(info.on_error).name.lower(),
            wait_mode=c_api.WaitMode(info.wait_mode).name.lower(),
            multicast_reason=info.multicast_reason.decode(errors="replace"),
            sentence=info.sentence.decode(errors="replace"),
        )

    # ---- life ---------------------------------------------------------------------------------------------------

    @property
    def handle(self) -> ctypes.c_void_p:
        """`mhcComm_t`."""
        if not self._handle:
            raise c_api.InvalidArgumentError("the communicator is closed", c_api.Status.INVALID_ARGUMENT)
        return self._handle

    @property
    def library(self) -> Library:
        """The C interface that `handle` belongs to."""
        return self._library

    def close(self) -> None:
        """Collective unless a lane is in error: waits for the device's work, then frees. Later calls do nothing."""
        if self._handle:
            handle, self._handle = self._handle, ctypes.c_void_p()
            self._check(self._library.mhcCommDestroy(handle), "closing the communicator", None)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        # The error that ended the block matters more than what closing without the peers runs into.
        with contextlib.suppress(c_api.MhcError):
            self.close()

    @contextlib.contextmanager
    def bound(self, lane: int = 0) -> Iterator[Communicator]:
        """Makes this communicator the one that contexts created by this thread use, on mailbox `lane`.

        Lanes pair by number on all ranks. Blocks nest; at their end the binding from before is back.
        """
        before: tuple[ctypes.c_void_p, int] = getattr(_current, "binding", (ctypes.c_void_p(), 0))
        self._check(self._library.mhcCommSetCurrent(self.handle, lane), f"binding lane {lane}")
        _current.binding = (self.handle, lane)
        try:
            yield self
        finally:
            _current.binding = before
            self._check(self._library.mhcCommSetCurrent(*before), "unbinding", None)

    def reset(self) -> None:
        """Collective: quiesces, refills every lane and forgets errors, tickets and pending publishes."""
        self._check(self._library.mhcCommReset(self.handle), "resetting the communicator")

    def status(self, lane: int = -1) -> MailboxRecord | None:
        """The error record of `lane` (-1: the first lane in error), or None."""
        return self._library.record(self.handle, lane)

    # ---- operations ---------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: DeviceArray, *, stream: Stream, lane: int = 0, out: DeviceArray | None = None
    ) -> DeviceArray:
        """Sums `x` [M, H] bf16 over the ranks: fp32 in rank order, rounded once.

        Returns `out`, allocated when not given. Ordered in `stream`; nothing is waited for.

        Raises:
            ValueError: a shape or dtype is wrong.
            MailboxError: the lane is in error.
        """
        rows = _rows(x, self.info.hidden_size)
        _expect("x", x, (rows, self.info.hidden_size), _BF16)
        if out is None:
            out = DeviceArray(x.shape, _BF16)
        _expect("out", out, x.shape, _BF16)
        status = self._library.mhcAllReduce(self.handle, lane, x.pointer, out.pointer, rows, stream.handle)
        self._check(status, "all-reduce", lane)
        return out

    def all_reduce_nccl(
        self, x: DeviceArray, *, stream: Stream, lane: int = 0, out: DeviceArray | None = None
    ) -> DeviceArray:
        """`all_reduce` through NCCL whatever M is: NCCL's order of summation.

        With two ranks the bits are those of `all_reduce`, but for -0 where both ranks have -0, and NaN payloads.

        Raises:
            ValueError: a shape or dtype is wrong.
            MailboxError: the lane is in error.
            UnsupportedError: the communicator was made without NCCL.
        """
        rows = _rows(x, self.info.hidden_size)
        _expect("x", x, (rows, self.info.hidden_size), _BF16)
        if out is None:
            out = DeviceArray(x.shape, _BF16)
        _expect("out", out, x.shape, _BF16)
        status = self._library.mhcAllReduceNccl(self.handle, lane, x.pointer, out.pointer, rows, stream.handle)
        self._check(status, "all-reduce through NCCL", lane)
        return out

    def publish(self, x: DeviceArray, *, stream: Stream, lane: int = 0) -> None:
        """Stores `x` [M, H] bf16 into every rank's mailbox, as a producer does for `boundary(published=True)`.

        Raises:
            ValueError: a shape or dtype is wrong.
            InvalidArgumentError: more rows than the capacity.
            MailboxError: the lane is in error.
        """
        rows = _rows(x, self.info.hidden_size)
        _expect("x", x, (rows, self.info.hidden_size), _BF16)
        self._check(self._library.mhcPublish(self.handle, lane, x.pointer, rows, stream.handle), "publish", lane)

    def publish_target(self, lane: int = 0) -> PublishTarget:
        """Where a producer of the caller's own stores its contribution; `PublishTarget` says how.

        Raises:
            InvalidArgumentError: the group has one rank, or there is no such lane.
        """
        target = c_api.CPublishTarget(struct_size=ctypes.sizeof(c_api.CPublishTarget))
        self._check(self._library.mhcCommPublishTarget(self.handle, lane, ctypes.byref(target)), "publish target", lane)
        return PublishTarget(
            slots=tuple(target.slots[: target.tp_size]),
            generation_stride=target.generation_stride,
            rank_stride=target.rank_stride,
            row_stride=target.row_stride,
            state=target.state,
            owner=target.owner,
            rank=target.rank,
            capacity=target.capacity,
            hidden_size=target.hidden_size,
            lane=lane,
        )

    def mark_published(self, target: PublishTarget, rows: int, *, stream: int) -> None:
        """Ends the publish of `rows` rows that a producer has stored through `target`: ticket, headers and the note.

        `stream` is a cudaStream_t; the producer's kernels precede in it. A boundary with `published=True` must be the
        lane's next call.

        Raises:
            InvalidArgumentError: more rows than the capacity.
            MailboxError: the lane is in error.
        """
        status = self._library.mhcMarkPublished(self.handle, target.lane, target.owner, rows, stream)
        self._check(status, "end of a publish", target.lane)

    def publish_linear(
        self,
        activation: DeviceArray,
        weight: DeviceArray,
        scales: DeviceArray | None = None,
        *,
        stream: Stream,
        lane: int = 0,
        out: DeviceArray | None = None,
    ) -> DeviceArray:
        """A linear layer whose output is also stored into every rank's mailbox, for `boundary(published=True)`.

        Weights may be read before earlier work of the stream has ended: they are constants.

        Args:
            activation: [M, K] bf16, this rank's share of the input features; K is a multiple of 128.
            weight: [H, K] bf16, or float8_e4m3fn with `scales`.
            scales: uint8 [H/32, K/32], UE8M0, one for each block of 32 x 32 weights.
            stream: everything is ordered in it; nothing is waited for.
            lane: mailbox lane; `boundary(published=True)` must be its next call.
            out: [M, H] bf16; allocated when not given.

        Returns:
            `out`. With tp_size 1 it is computed and nothing is published.

        Raises:
            ValueError: a shape or dtype is wrong.
            InvalidArgumentError: more rows than the capacity, or K is out of range.
            MailboxError: the lane is in error.
        """
        args, out = publish_linear_arguments(activation, weight, scales, out, self.info.hidden_size)
        status = self._library.mhcPublishLinear(self.handle, lane, ctypes.byref(args), stream.handle)
        self._check(status, "publishing linear layer", lane)
        return out

    def boundary(
        self,
        x: DeviceArray | Finalize | None,
        residual: DeviceArray,
        post: DeviceArray,
        comb: DeviceArray,
        pre: DeviceArray | None = None,
        gamma: DeviceArray | None = None,
        *,
        stream: Stream,
        norm_eps: float = 0.0,
        lane: int = 0,
        residual_out: DeviceArray | None = None,
        layer_input: DeviceArray | None = None,
        mxfp8: tuple[DeviceArray, DeviceArray] | None = None,
        published: bool = False,
    ) -> BoundaryOutputs:
        """All-reduce, mHC post, delayed collapse and RMSNorm in one pass.

        Args:
            x: this rank's partial [M, H] bf16, a `Finalize`, or None for a published boundary.
            residual: [M, hc, H] bf16.
            post: [M, hc] float32.
            comb: [M, hc, hc] float32, [source, target].
            pre: [M, hc] float32; None together with `gamma`: residual-only.
            gamma: [H] bf16.
            stream: everything is ordered in it; nothing is waited for.
            norm_eps: of the RMSNorm.
            lane: mailbox lane.
            residual_out: [M, hc, H] bf16, allocated when not given; must not overlap `residual`.
            layer_input: [M, H] bf16, allocated when not given.
            mxfp8: (data [M, H] FP8 E4M3, scales, 4-byte words or bytes of the 128x4 layout) to be written as well.
            published: the contribution is in the mailbox already. Where M goes through NCCL (`info.nccl_rows`) it is
                taken from `x`, which must then be given.

        Raises:
            ValueError: a shape or dtype is wrong.
            MailboxError: the lane is in error.
        """
        hidden = self.info.hidden_size
        rows = _rows(residual, c_api.STREAMS, hidden)
        if (pre is None) != (gamma is None):
            raise ValueError("pre and gamma belong together: give both, or neither for a residual-only boundary")
        arrays = {
            "residual": (residual, (rows, c_api.STREAMS, hidden), _BF16),
            "post": (post, (rows, c_api.STREAMS), _F32),
            "comb": (comb, (rows, c_api.STREAMS, c_api.STREAMS), _F32),
        }
        if residual_out is None:
            residual_out = DeviceArray(residual.shape, _BF16)
        arrays["residual_out"] = (residual_out, (rows, c_api.STREAMS, hidden), _BF16)
        if pre is not None and gamma is not None:
            if layer_input is None:
                layer_input = DeviceArray((rows, hidden), _BF16)
            arrays["pre"] = (pre, (rows, c_api.STREAMS), _F32)
            arrays["gamma"] = (gamma, (hidden,), _BF16)
            arrays["layer_input"] = (layer_input, (rows, hidden), _BF16)
        elif layer_input is not None:
            raise ValueError("a residual-only boundary has no layer_input")

        args = c_api.CBoundaryArgs(
            struct_size=ctypes.sizeof(c_api.CBoundaryArgs), rows=rows, norm_eps=norm_eps, published=int(published)
        )
        if isinstance(x, Finalize):
            top_k = x.expert_weights.shape[-1]
            args.top_k = top_k
            args.permuted_rows = _rows(x.gemm2_permuted, hidden)
            arrays["gemm2_permuted"] = (x.gemm2_permuted, (args.permuted_rows, hidden), _BF16)
            arrays["expert_weights"] = (x.expert_weights, (rows, top_k), _F32)
            arrays["expanded_idx_to_permuted_idx"] = (x.expanded_idx_to_permuted_idx, (rows, top_k), _I32)
            arrays["shared_output"] = (x.shared_output, (rows, hidden), _BF16)
        elif x is not None:
            arrays["x"] = (x, (rows, hidden), _BF16)
        elif not published:
            raise ValueError("x is needed unless the boundary is published")
        for name, (array, shape, dtype) in arrays.items():
            _expect(name, array, shape, dtype)
            setattr(args, name, array.pointer)
        if mxfp8 is not None:
            data, scales = mxfp8
            _expect("mxfp8 data", data, (rows, hidden), _FP8)
            needed = int(self._library.mhcMxfp8ScaleBytes(rows, hidden))
            if scales.nbytes < needed:
                raise ValueError(f"mxfp8 scales: expected at least {needed} bytes, got {scales.nbytes}")
            args.mxfp8_data = data.pointer
            args.mxfp8_scales = scales.pointer
        self.enqueue(args, lane=lane, stream=stream.handle)
        return BoundaryOutputs(residual_out, layer_input)

    def enqueue(self, args: c_api.CBoundaryArgs, *, stream: int, lane: int = 0) -> None:
        """A boundary on pointers that the caller has checked; `stream` is a cudaStream_t.

        Raises:
            InvalidArgumentError: what is given does not go together.
            MailboxError: the lane is in error.
        """
        self._check(self._library.mhcBoundary(self.handle, lane, ctypes.byref(args), stream), "boundary", lane)

    # ---- internals ----------------------------------------------------------------------------------------------

    def _check(self, status: int, what: str, lane: int | None = -1) -> None:
        comm = None if lane is None else self._handle
        if isinstance(self._keep_alive, _AllGatherBridge):
            self._keep_alive.check(self._library, status, what, comm, -1 if lane is None else lane)
        else:
            self._library.check(status, what, comm, -1 if lane is None else lane)

    def _read_info(self) -> CommunicatorInfo:
        info = c_api.CCommInfo(struct_size=ctypes.sizeof(c_api.CCommInfo))
        self._library.check(self._library.mhcCommGetInfo(self._handle, ctypes.byref(info)), "mhcCommGetInfo")
        return CommunicatorInfo(
            tp_size=info.tp_size,
            rank=info.rank,
            device=info.device,
            hidden_size=info.hidden_size,
            capacity=info.capacity,
            lanes=info.lanes,
            ranks_per_device=info.ranks_per_device,
            waits_at_gate=bool(info.waits_at_gate),
            exchange_rows=info.exchange_rows,
            multicast=bool(info.multicast),
            mailbox_bytes=info.mailbox_bytes,
            transport=Transport(info.transport),
            transport_reason=info.transport_reason.decode(errors="replace"),
            nccl_rows=info.nccl_rows,
            nccl_workspace_rows=info.nccl_workspace_rows,
            nccl_version=nccl.version_text(info.nccl_version) if info.nccl_version else None,
        )


def publish_linear_arguments(
    activation: DeviceArray, weight: DeviceArray, scales: DeviceArray | None, out: DeviceArray | None, hidden: int
) -> tuple[c_api.CPublishLinearArgs, DeviceArray]:
    """What `mhcPublishLinear` and `mhcPublishLinearLocal` take, checked, and the output, allocated when not given."""
    if len(activation.shape) != 2:
        raise ValueError(f"activation: expected [M, K], got {list(activation.shape)}")
    rows, features = activation.shape
    _expect("activation", activation, (rows, features), _BF16)
    _expect("weight", weight, (hidden, features), _BF16 if scales is None else _FP8)
    if scales is not None:
        _expect("scales", scales, (hidden // 32, features // 32), np.dtype(np.uint8))
    if out is None:
        out = DeviceArray((rows, hidden), _BF16)
    _expect("out", out, (rows, hidden), _BF16)
    kind = c_api.WeightType.BF16 if scales is None else c_api.WeightType.E4M3_BLOCK32
    args = c_api.CPublishLinearArgs(
        struct_size=ctypes.sizeof(c_api.CPublishLinearArgs),
        rows=rows,
        in_features=features,
        weight_type=int(kind),
        activation=activation.pointer,
        weight=weight.pointer,
        weight_scales=None if scales is None else scales.pointer,
        out=out.pointer,
    )
    return args, out


class _AllGatherBridge:
    """A Python all-gather as the C callback. Exceptions cannot cross C: they are kept and raised afterwards."""

    def __init__(self, callback: AllGather, tp_size: int) -> None:
        self._callback = callback
        self._tp_size = tp_size
        self._error: BaseException | None = None
        self.function = c_api.AllGatherFn(self._run)

    def _run(self, context: int | None, send: int | None, receive: int | None, size: int) -> int:
        try:
            parts = list(self._callback(ctypes.string_at(send or 0, size)))
            if len(parts) != self._tp_size or any(len(part) != size for part in parts):
                lengths = [len(part) for part in parts]
                raise ValueError(
                    f"the all-gather callback must return {self._tp_size} parts of {size} bytes, got lengths {lengths}"
                )
            ctypes.memmove(receive or 0, b"".join(parts), size * self._tp_size)
        except BaseException as error:
            self._error = error
            return 1
        return 0

    def check(self, lib: Library, status: int, what: str, comm: ctypes.c_void_p | None = None, lane: int = -1) -> None:
        """`Library.check`, with the callback's exception as the cause."""
        error, self._error = self._error, None
        try:
            lib.check(status, what, comm, lane)
        except c_api.MhcError as raised:
            raise raised from error


def _config(
    tp_size: int,
    rank: int,
    device: int,
    hidden_size: int,
    *,
    capacity: int = 64,
    lanes: int = 1,
    on_error: str = "raise",
    wait_mode: str = "auto",
    timeout_s: float = 60.0,
    group: Sequence[int] = (),
    nccl_rows: int = 0,
    nccl_workspace_rows: int = 0,
) -> c_api.CCommConfig:
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error: expected 'raise' or 'trap', got {on_error!r}")
    if wait_mode not in get_args(WaitMode):
        raise ValueError(f"wait_mode: expected one of {get_args(WaitMode)}, got {wait_mode!r}")
    if not 0.001 <= timeout_s <= 4_000_000:
        raise ValueError(f"timeout_s: expected 0.001 to 4 000 000 seconds, got {timeout_s}")
    world = (ctypes.c_int32 * len(group))(*group) if group else None
    return c_api.CCommConfig(
        struct_size=ctypes.sizeof(c_api.CCommConfig),
        tp_size=tp_size,
        rank=rank,
        device=device,
        hidden_size=hidden_size,
        capacity=capacity,
        lanes=lanes,
        on_error=int(c_api.OnError[on_error.upper()]),
        wait_mode=int(c_api.WaitMode[wait_mode.upper()]),
        timeout_ms=round(timeout_s * 1000),
        group_size=len(group),
        group=world,
        nccl_rows=nccl_rows,
        nccl_workspace_rows=nccl_workspace_rows,
    )


def _rows(array: DeviceArray, *rest: int) -> int:
    if array.shape[1:] != rest:
        raise ValueError(f"expected shape [M, {', '.join(map(str, rest))}], got {list(array.shape)}")
    return array.shape[0]


def _expect(name: str, array: DeviceArray, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name}: expected {dtype} {list(shape)}, got {array.dtype} {list(array.shape)}")
