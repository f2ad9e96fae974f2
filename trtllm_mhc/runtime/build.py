# SPDX-License-Identifier: Apache-2.0
"""Building engines that the ranks of a group can run together.

Engines of one group may differ in nothing but weights: they are built with one `TimingCache`, so that later builds take
the tactics that the first one measured, and `inspection.require_same_layers` compares what came out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorrt as trt

from trtllm_mhc import plugin, plugin_control
from trtllm_mhc.network.layers import tensor_shape
from trtllm_mhc.runtime import cuda

Shape = tuple[int, ...]
Populate = Callable[[trt.INetworkDefinition], object]
"""Fills an empty network. What it returns is kept alive until the build is done (TensorRT refers to weights)."""


class EngineError(RuntimeError):
    """TensorRT could not build, load or run an engine. The message has what TensorRT and the plugins said."""


@dataclass(frozen=True)
class RowRange:
    """The numbers of rows M that an engine accepts, and the one that it is tuned for."""

    minimum: int
    optimum: int
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.optimum <= self.maximum:
            raise ValueError(f"RowRange: expected 1 <= minimum <= optimum <= maximum, got {self}")


@dataclass(frozen=True)
class Plan:
    """A serialised engine.

    Attributes:
        data: the plan, a buffer.
        seconds: wall clock of definition and build.
    """

    data: Any
    seconds: float

    @property
    def nbytes(self) -> int:
        """Size of the plan."""
        return int(memoryview(self.data).nbytes)


class TimingCache:
    """Measured tactics and compiled kernels, carried from one build to the next. Safe to use from several threads."""

    def __init__(self, path: Path | None = None) -> None:
        """Starts empty, or with what `path` holds; after every build `path` is written anew.

        TensorRT takes a file that it cannot use for an empty one, and says so in its log.
        """
        self._path = path
        self._data = path.read_bytes() if path is not None and path.exists() else b""
        self._lock = threading.Lock()

    @property
    def data(self) -> bytes:
        """The serialised cache, empty before the first build."""
        with self._lock:
            return self._data

    def attach(self, config: trt.IBuilderConfig) -> trt.ITimingCache:
        """Gives a build what is known so far."""
        with self._lock:
            cache = config.create_timing_cache(self._data)
            usable = bytes(cache.serialize())
            if len(usable) < len(self._data):  # TensorRT began an empty one
                self._data = usable
        if not config.set_timing_cache(cache, False):
            raise EngineError("TensorRT refused the timing cache: it comes from another version or device")
        return cache

    def keep(self, cache: trt.ITimingCache) -> None:
        """Takes over what a build has measured; it began with what `attach` gave it.

        Of builds that ran at the same time the one that knows most stays.
        """
        data = bytes(cache.serialize())
        with self._lock:
            if len(data) < len(self._data):
                return
            self._data = data
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                partial = self._path.with_name(f"{self._path.name}.partial")
                partial.write_bytes(self._data)
                partial.replace(self._path)


_recorders: list[trt.IErrorRecorder] = []


class ErrorRecorder(trt.IErrorRecorder):  # type: ignore[misc]
    """Collects what TensorRT reports, from whatever thread."""

    def __init__(self) -> None:
        super().__init__()
        self._errors: list[tuple[Any, str]] = []
        # TensorRT's objects tell their recorder when they go, and Python may let go of a builder, and with it of the
        # recorder, before it lets go of a network: so recorders stay.
        _recorders.append(self)

    def num_errors(self) -> int:
        """Called by TensorRT."""
        return len(self._errors)

    def get_error_code(self, index: int) -> Any:
        """Called by TensorRT."""
        return self._errors[index][0]

    def get_error_desc(self, index: int) -> str:
        """Called by TensorRT."""
        return self._errors[index][1]

    def has_overflowed(self) -> bool:
        """Called by TensorRT."""
        return False

    def clear(self) -> None:
        """Forgets the errors."""
        self._errors.clear()

    def report_error(self, code: Any, description: str) -> bool:
        """Called by TensorRT; False: the error is not fatal for the process."""
        self._errors.append((code, description))
        return False

    def take(self) -> list[str]:
        """Returns and forgets the errors, each once."""
        texts = list(dict.fromkeys(text for _, text in self._errors))
        self._errors.clear()
        return texts


_logger_lock = threading.Lock()
_loggers: list[trt.Logger] = []


def logger() -> trt.Logger:
    """The process's logger (TensorRT wants one): prints internal errors; others go to the error recorders."""
    with _logger_lock:
        if not _loggers:
            _loggers.append(trt.Logger(trt.Logger.ERROR))
        return _loggers[0]


def explain(what: str, recorder: ErrorRecorder, *, any_thread: bool = False) -> str:
    """A message of `what` failed, what the plugins said and what TensorRT reported."""
    lines = [what]
    said = plugin_control.take_error(any_thread=any_thread)
    if said:
        lines.append(f"plugin: {said}")
    lines += [f"TensorRT: {text}" for text in recorder.take()]
    if len(lines) == 1:
        lines.append("TensorRT gave no reason")
    return "\n  ".join(lines)


def require_device() -> None:
    """Raises EngineError where there is no GPU: TensorRT 10.6 would hand out invalid objects."""
    if cuda.device_count() == 0:
        raise EngineError("building and running engines needs a CUDA device; this machine has none that is usable")


def make_builder(recorder: ErrorRecorder) -> trt.Builder:
    """A Builder that reports to `recorder`; also without a GPU where TensorRT's CPU-only mode is on.

    Raises:
        EngineError: TensorRT cannot make one.
    """
    plugin.load()
    try:
        builder = trt.Builder(logger())
    except (TypeError, RuntimeError) as error:
        raise EngineError(explain(f"TensorRT {trt.__version__} makes no Builder: {error}", recorder)) from None
    builder.error_recorder = recorder
    return builder


def make_network(builder: trt.Builder) -> trt.INetworkDefinition:
    """An empty, strongly typed network."""
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):  # TensorRT 11 knows no other networks
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return builder.create_network(flags)


def build_engine(
    populate: Populate,
    *,
    rows: RowRange | None = None,
    profile: Mapping[str, tuple[Shape, Shape, Shape]] | None = None,
    timing_cache: TimingCache | None = None,
    max_aux_streams: int = 0,
    workspace_bytes: int | None = None,
) -> Plan:
    """Builds one engine: strongly typed, TF32 off, one optimisation profile, layers described in detail.

    Args:
        populate: fills the network.
        rows: for every dynamic input whose first dimension only is dynamic: the range of M.
        profile: name of an input to its (minimum, optimum, maximum) shape; wins over `rows`.
        timing_cache: shared by the builds of one group; takes what this build measures.
        max_aux_streams: streams beside the caller's that the engine may use.
        workspace_bytes: limit of the scratch memory; None is TensorRT's default, the device's memory.

    Raises:
        EngineError: no GPU, or the build fails; the message has TensorRT's and the plugins' reasons.
        ValueError: an input's range is not given.
    """
    require_device()
    begin = time.perf_counter()
    recorder = ErrorRecorder()
    builder = make_builder(recorder)
    network = make_network(builder)
    keep_alive = populate(network)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.max_aux_streams = max_aux_streams
    if workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    ranges = profile_shapes(network, rows, profile or {})
    if ranges:
        optimization = builder.create_optimization_profile()
        for name, (minimum, optimum, maximum) in ranges.items():
            optimization.set_shape(name, minimum, optimum, maximum)
        config.add_optimization_profile(optimization)
    cache = timing_cache.attach(config) if timing_cache is not None else None
    plugin_control.take_error(any_thread=True)  # an old one would be blamed for this build
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise EngineError(explain("the build of the engine failed", recorder, any_thread=True))
    if timing_cache is not None and cache is not None:
        timing_cache.keep(cache)
    # In the reverse of the order in which they were made: Python's own order is the other one.
    del cache, config, keep_alive, network, builder
    return Plan(data, time.perf_counter() - begin)


def why_no_engines() -> str | None:
    """None where engines can be built and loaded, found out by doing so with a tiny one; else the reason."""

    def populate(network: trt.INetworkDefinition) -> None:
        x = network.add_input("x", trt.bfloat16, (16, 16))
        network.mark_output(network.add_elementwise(x, x, trt.ElementWiseOperation.SUM).get_output(0))

    recorder = ErrorRecorder()
    try:
        plan = build_engine(populate)
        runtime = trt.Runtime(logger())
        runtime.error_recorder = recorder
        if runtime.deserialize_cuda_engine(plan.data) is None:
            return explain("a test engine cannot be deserialised", recorder)
    except (EngineError, cuda.CudaError) as error:
        return str(error)
    return None


def profile_shapes(
    network: trt.INetworkDefinition, rows: RowRange | None, given: Mapping[str, tuple[Shape, Shape, Shape]]
) -> dict[str, tuple[Shape, Shape, Shape]]:
    """The optimisation profile of every dynamic input. See `build_engine`.

    Raises:
        ValueError: an input's range is not given, or a name is no dynamic input.
    """
    result = {}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = tensor_shape(tensor) or ()
        if -1 not in shape:
            continue
        if tensor.name in given:
            result[tensor.name] = given[tensor.name]
        elif rows is not None and -1 not in shape[1:]:
            result[tensor.name] = _row_shapes(shape[1:], rows)
        else:
            raise ValueError(f"input {tensor.name!r} has dynamic dimensions {shape}: its range is needed")
    unknown = sorted(set(given) - set(result))
    if unknown:
        raise ValueError(f"profile: no dynamic inputs of the names {unknown}")
    return result


def _row_shapes(rest: Sequence[int], rows: RowRange) -> tuple[Shape, Shape, Shape]:
    minimum, optimum, maximum = ((count, *rest) for count in (rows.minimum, rows.optimum, rows.maximum))
    return minimum, optimum, maximum
