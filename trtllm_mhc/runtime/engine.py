# SPDX-License-Identifier: Apache-2.0
"""Running the engines of a tensor-parallel group: one thread, one stream and one context for each rank."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Unpack

import ml_dtypes
import numpy.typing as npt
import tensorrt as trt

from trtllm_mhc import plugin_control
from trtllm_mhc.network.layers import numpy_dtype
from trtllm_mhc.runtime import inspection
from trtllm_mhc.runtime.build import EngineError, ErrorRecorder, Plan, explain, logger, require_device
from trtllm_mhc.runtime.communicator import Communicator, CommunicatorOptions
from trtllm_mhc.runtime.cuda import CudaError, DeviceArray, Event, Graph, Stream
from trtllm_mhc.runtime.library import MailboxError
from trtllm_mhc.runtime.threads import ThreadGroup

Feeds = Mapping[str, npt.NDArray[Any]]
Outputs = dict[str, npt.NDArray[Any]]


@contextlib.contextmanager
def communicators(
    group: ThreadGroup,
    name: str,
    /,
    *,
    hidden_size: int,
    **options: Unpack[CommunicatorOptions],
) -> Iterator[list[Communicator]]:
    """The communicators of all ranks of `group`, which has devices; made and closed collectively.

    Args: see `Communicator.threads`.
    """
    devices = group.devices
    if devices is None:
        raise ValueError("the group's ranks need devices: ThreadGroup.on_devices")

    def create(rank: int) -> Communicator:
        return Communicator.threads(
            name,
            tp_size=group.size,
            rank=rank,
            device=devices[rank],
            hidden_size=hidden_size,
            **options,
        )

    timeout_s = options.get("timeout_s", 60.0)
    made = group.run(create, timeout_s=2 * timeout_s)
    try:
        yield made
    except BaseException:
        # The error that ended the block matters more than what closing runs into.
        with contextlib.suppress(Exception):
            group.run(lambda rank: made[rank].close(), timeout_s=2 * timeout_s)
        raise
    group.run(lambda rank: made[rank].close(), timeout_s=2 * timeout_s)


@dataclass(frozen=True)
class Timing:
    """Durations of graph replays.

    Attributes:
        median_us: median over the replays of the slowest rank's time, per pass through the engine.
        samples_us: the slowest rank's time of each replay, per pass.
        passes: passes captured in one graph.
    """

    median_us: float
    samples_us: tuple[float, ...]
    passes: int


@dataclass
class _Rank:
    """What one rank's thread works with."""

    recorder: ErrorRecorder
    runtime: Any
    engine: Any
    context: Any
    stream: Stream
    buffers: dict[str, DeviceArray]
    inputs: list[str]
    outputs: list[str]
    layers: list[inspection.EngineLayer]
    barrier: tuple[DeviceArray, DeviceArray]
    warm: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    loaded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    graph: Graph | None = None


class EngineGroup:
    """The engines of all ranks, ready to run.

    Device buffers are allocated once, for the profile's largest shapes. Before the first pass with new shapes every
    rank runs alone with its plugins' gate closed, so that no kernel is left to be loaded while a peer waits.
    Not for concurrent use; several groups need a lane each.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        communicators: Sequence[Communicator] | None,
        group: ThreadGroup,
        *,
        lane: int = 0,
        timeout_s: float = 120.0,
    ) -> None:
        """Deserialises the plans and makes the contexts, all ranks at once.

        Args:
            plans: one for each rank; the same object may stand for several.
            communicators: one for each rank; None for engines without communicating plugins.
            group: the ranks, with devices.
            lane: mailbox lane of the contexts.
            timeout_s: seconds that any one call may take.

        Raises:
            EngineError: a plan cannot be loaded.
            EngineMismatchError: the ranks' engines differ in layers or tactics.
        """
        require_device()
        if len(plans) != group.size or (communicators is not None and len(communicators) != group.size):
            raise ValueError(f"expected a plan and a communicator for each of {group.size} ranks")
        self._plans = plans
        self._communicators = communicators
        self._group = group
        self._lane = lane
        self._timeout_s = timeout_s
        self._ranks = group.run(self._load, timeout_s=timeout_s)
        inspection.require_same_layers([rank.layers for rank in self._ranks])

    @property
    def layers(self) -> list[inspection.EngineLayer]:
        """The engines' layers, the same on all ranks."""
        return self._ranks[0].layers

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs, in the engine's order."""
        return list(self._ranks[0].inputs)

    @property
    def input_ranges(self) -> dict[str, tuple[npt.DTypeLike, tuple[int, ...], tuple[int, ...]]]:
        """Each input's dtype, and the smallest and the largest shape that the engine takes."""
        engine = self._ranks[0].engine
        return {
            name: (self._ranks[0].buffers[name].dtype, _smallest_shape(engine, name), _largest_shape(engine, name))
            for name in self._ranks[0].inputs
        }

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in the engine's order."""
        return list(self._ranks[0].outputs)

    # ---- running ----------------------------------------------------------------------------------------------------

    def run(self, feeds: Sequence[Feeds]) -> list[Outputs]:
        """One pass: copies the inputs, runs all ranks, copies the outputs.

        Args:
            feeds: for each rank, every input by name, in the engine's dtypes and within its profile.

        Raises:
            ValueError: an input is missing, or has a wrong dtype or shape.
            MailboxError: a plugin's kernel gave up; the outputs were NaN.
            EngineError: TensorRT failed otherwise.
        """
        self.prepare(feeds)
        return self.run_prepared()

    def prepare(self, feeds: Sequence[Feeds]) -> None:
        """The first half of `run`, in which no rank waits for another: a failure leaves the group as it was.

        Copies the inputs and sets their shapes; with shapes that are new, runs every rank alone.

        Raises: as `run`.
        """
        if len(feeds) != self._group.size:
            raise ValueError(f"expected feeds for {self._group.size} ranks, got {len(feeds)}")
        self._group.run(lambda rank: self._prepare(rank, feeds[rank]), timeout_s=self._timeout_s)

    def run_prepared(self) -> list[Outputs]:
        """The second half of `run`: all ranks over the inputs that `prepare` took.

        Raises: as `run`. After an error the ranks may be at different places: close the group.
        """
        return self._group.run(self._pass, timeout_s=self._timeout_s)

    def poison_outputs(self) -> None:
        """Fills the outputs' memory with NaN, so that what the next pass does not write shows."""

        def work(index: int) -> None:
            rank = self._ranks[index]
            for name in rank.outputs:
                rank.buffers[name].fill_bytes(0xFF, rank.stream)
            self._synchronize(rank)

        self._group.run(work, timeout_s=self._timeout_s)

    def capture(self, passes: int = 1) -> None:
        """Captures `passes` passes over the inputs of the last `run` into one graph on every rank."""
        if passes < 1:
            raise ValueError(f"passes: expected 1 or more, got {passes}")

        def work(index: int) -> None:
            rank = self._ranks[index]
            if not rank.loaded:
                raise EngineError("run the engines once before capturing: TensorRT prepares new shapes in that pass")
            self._drop_graph(rank)
            with rank.stream.capture() as graph:
                for _ in range(passes):
                    self._enqueue(index)
            rank.graph = graph
            self._synchronize(rank)

        self._group.run(work, timeout_s=self._timeout_s)

    def replay(self, feeds: Sequence[Feeds] | None = None) -> list[Outputs]:
        """Replays the captured graph once, with fresh inputs of the same shapes when given, and copies the outputs."""

        def work(index: int) -> Outputs:
            rank = self._ranks[index]
            graph = _captured(rank)
            if feeds is not None:
                self._copy_inputs(rank, feeds[index])
            self._group.barrier(self._timeout_s)
            graph.launch(rank.stream)
            return self._finish(index)

        return self._group.run(work, timeout_s=self._timeout_s)

    def time_replays(self, replays: int = 50, warm_up: int = 5, passes: int = 1) -> Timing:
        """Times replays of the captured graph by events; `passes` is the number that `capture` was given.

        Before each timed replay a small all-reduce on the device lines the ranks up.
        """

        def work(index: int) -> list[float]:
            rank = self._ranks[index]
            graph = _captured(rank)
            begin, end = Event(), Event()
            samples = []
            for sample in range(-warm_up, replays):
                self._group.barrier(self._timeout_s)
                self._line_up(index)
                begin.record(rank.stream)
                graph.launch(rank.stream)
                end.record(rank.stream)
                end.synchronize(self._timeout_s)
                if sample >= 0:
                    samples.append(1000 * end.elapsed_ms(begin) / passes)
            self._raise_mailbox_error(index)
            begin.close()
            end.close()
            return samples

        slowest = [max(ranks) for ranks in zip(*self._group.run(work, timeout_s=self._timeout_s), strict=True)]
        return Timing(statistics.median(slowest), tuple(slowest), passes)

    def close(self) -> None:
        """Frees contexts, engines and buffers. Later calls do nothing."""

        def work(index: int) -> None:
            rank = ranks[index]
            self._drop_graph(rank)
            rank.context = None
            rank.engine = None
            rank.runtime = None
            for buffer in [*rank.buffers.values(), *rank.barrier]:
                buffer.close()
            rank.stream.close()

        ranks, self._ranks = self._ranks, []
        if ranks:
            self._group.run(work, timeout_s=self._timeout_s)

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):
            self.close()

    # ---- one rank, in its thread ------------------------------------------------------------------------------------

    def _load(self, index: int) -> _Rank:
        recorder = ErrorRecorder()
        runtime = trt.Runtime(logger())
        runtime.error_recorder = recorder
        engine = runtime.deserialize_cuda_engine(self._plans[index].data)
        if engine is None:
            raise EngineError(explain(f"rank {index}: the plan cannot be deserialised", recorder))
        with contextlib.ExitStack() as stack:
            if self._communicators is not None:
                stack.enter_context(self._communicators[index].bound(self._lane))
            context = engine.create_execution_context()
        if context is None:
            raise EngineError(explain(f"rank {index}: no execution context can be made", recorder))
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
        outputs = [name for name in names if name not in inputs]
        for name in inputs:
            context.set_input_shape(name, _largest_shape(engine, name))
        buffers = {}
        for name in names:
            buffers[name] = DeviceArray(
                tuple(context.get_tensor_shape(name)), numpy_dtype(engine.get_tensor_dtype(name))
            )
            context.set_tensor_address(name, buffers[name].pointer)
        hidden = self._communicators[index].info.hidden_size if self._communicators is not None else 0
        barrier = DeviceArray((1, hidden), ml_dtypes.bfloat16), DeviceArray((1, hidden), ml_dtypes.bfloat16)
        barrier[0].fill_bytes(0)
        layers = inspection.inspect(engine)
        return _Rank(recorder, runtime, engine, context, Stream(), buffers, inputs, outputs, layers, barrier)

    def _prepare(self, index: int, feeds: Feeds) -> None:
        rank = self._ranks[index]
        self._copy_inputs(rank, feeds)
        for name, shape in rank.loaded.items():
            if not rank.context.set_input_shape(name, shape):
                raise ValueError(explain(f"input {name!r}: shape {list(shape)} is outside the profile", rank.recorder))
        signature = tuple(rank.loaded.values())
        if signature not in rank.warm:
            with plugin_control.warmup():
                self._enqueue(index)
                self._synchronize(rank)
            rank.warm.add(signature)

    def _copy_inputs(self, rank: _Rank, feeds: Feeds) -> None:
        unknown = sorted(set(feeds) - set(rank.inputs))
        missing = sorted(set(rank.inputs) - set(feeds))
        if unknown or missing:
            raise ValueError(f"expected the inputs {rank.inputs}; missing {missing}, unknown {unknown}")
        for name in rank.inputs:
            array, buffer = feeds[name], rank.buffers[name]
            if array.dtype != buffer.dtype:
                raise ValueError(f"input {name!r}: expected {buffer.dtype}, got {array.dtype}")
            if array.ndim != len(buffer.shape) or any(a > b for a, b in zip(array.shape, buffer.shape, strict=True)):
                raise ValueError(f"input {name!r}: expected at most {list(buffer.shape)}, got {list(array.shape)}")
            buffer.view(array.shape).copy_from(array, rank.stream)
        rank.loaded = {name: tuple(feeds[name].shape) for name in rank.inputs}

    def _pass(self, index: int) -> Outputs:
        self._enqueue(index)
        return self._finish(index)

    def _enqueue(self, index: int) -> None:
        rank = self._ranks[index]
        if not rank.context.execute_async_v3(rank.stream.handle):
            self._raise_mailbox_error(index)
            raise EngineError(explain(f"rank {index}: the engine cannot be enqueued", rank.recorder))

    def _finish(self, index: int) -> Outputs:
        rank = self._ranks[index]
        self._synchronize(rank)
        self._raise_mailbox_error(index)
        outputs = {}
        for name in rank.outputs:
            shape = tuple(rank.context.get_tensor_shape(name))
            outputs[name] = rank.buffers[name].view(shape).to_numpy(rank.stream)
        return outputs

    def _synchronize(self, rank: _Rank) -> None:
        try:
            rank.stream.synchronize(self._timeout_s)
        except CudaError as error:
            reported = rank.recorder.take()
            raise EngineError("\n  ".join([str(error), *(f"TensorRT: {text}" for text in reported)])) from error

    def _raise_mailbox_error(self, index: int) -> None:
        if self._communicators is not None:
            record = self._communicators[index].status(self._lane)
            if record is not None:
                raise MailboxError(f"rank {index}, lane {self._lane}", record)

    def _line_up(self, index: int) -> None:
        if self._communicators is None:
            return
        rank, communicator = self._ranks[index], self._communicators[index]
        row, total = rank.barrier
        communicator.all_reduce(row, out=total, lane=self._lane, stream=rank.stream)

    @staticmethod
    def _drop_graph(rank: _Rank) -> None:
        if rank.graph is not None:
            rank.graph.close()
            rank.graph = None


def _captured(rank: _Rank) -> Graph:
    if rank.graph is None:
        raise EngineError("nothing is captured: call capture() first")
    return rank.graph


def _smallest_shape(engine: Any, name: str) -> tuple[int, ...]:
    shape = tuple(engine.get_tensor_shape(name))
    if -1 not in shape:
        return shape
    return tuple(engine.get_tensor_profile_shape(name, 0)[0])


def _largest_shape(engine: Any, name: str) -> tuple[int, ...]:
    shape = tuple(engine.get_tensor_shape(name))
    if -1 not in shape:
        return shape
    return tuple(engine.get_tensor_profile_shape(name, 0)[2])
