# SPDX-License-Identifier: Apache-2.0
"""How something is timed: ours and a peer's side by side, in CUDA graphs.

A graph holds a number of calls one after another, which is what a decode step looks like to them. Replays are queued,
so that the device does not wait for the host, except where ranks share one; each begins at an all-reduce on the device
that lines the ranks up. A sample is the slowest rank's time divided by the calls, a result the median of the samples.
Cases of one operation and M are measured in the order A B C C B A, so that a drift of the clocks counts for all of
them; the two halves of a case's samples are the run of A against A that says what noise is.

Warm: nothing happens between calls, and the L2 cache holds what fits into it. Cold: before each call twice the cache's
size is overwritten, and the time of that alone is subtracted; what is left includes the launch, which warm calls
overlap with the call before.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_mhc import reference
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator, WaitMode
from trtllm_mhc.runtime.cuda import DeviceArray, Event, Graph, Stream
from trtllm_mhc.runtime.threads import ThreadGroup

Array = npt.NDArray[Any]
Mode = Literal["single", "self_loop", "loopback", "nvlink"]
Cache = Literal["warm", "cold"]
T = TypeVar("T")

HIDDEN = 5120
CAPACITY = 64
NORM_EPS = 1e-6
CALLS, COLD_CALLS = 50, 10
WARM_UP, REPLAYS = 8, 30  # of each half
TIMEOUT_S = 30.0

_names = itertools.count()


class CheckError(AssertionError):
    """What was measured computes something else than it should."""


class OnDevice(Protocol):
    """Something that can be copied to the host."""

    def to_numpy(self) -> Array:
        """A copy."""


class Subject(Protocol):
    """One rank's side of what is measured."""

    def enqueue(self, stream: Stream) -> None:
        """One call."""

    def check(self) -> None:
        """Compares the outputs of the last call, which is done, with what they should be.

        Raises:
            CheckError: they differ.
        """


@dataclass(frozen=True)
class Case:
    """What to measure.

    Attributes:
        op: the operation.
        implementation: whose.
        rows: M.
        make: makes a rank's subject; called by all ranks at once, each in its thread.
        calls: in one graph.
        cache: the L2 cache before a call.
        details: further fields of the record.
    """

    op: str
    implementation: str
    rows: int
    make: Callable[[Rank], Subject]
    calls: int = CALLS
    cache: Cache = "warm"
    details: tuple[tuple[str, Any], ...] = ()

    @property
    def cold(self) -> Case:
        """The same with a cold cache."""
        return replace(self, calls=COLD_CALLS, cache="cold")


@dataclass(frozen=True)
class Result:
    """Microseconds per call.

    Attributes:
        case: what was measured.
        us: median over the samples.
        p10, p90: percentiles.
        noise: relative difference of the medians of the samples' two halves.
        failure: why there are no numbers, or None.
    """

    case: Case
    us: float = 0.0
    p10: float = 0.0
    p90: float = 0.0
    noise: float = 0.0
    failure: str | None = None


class BoundaryTensors:
    """One rank's inputs of a boundary of M rows, which all implementations share, and what must come out."""

    def __init__(self, rows: int, rank: int, tp_size: int, mode: Mode) -> None:
        # A rank that plays all of them contributes the same from each.
        sources = [0] * tp_size if mode == "self_loop" else list(range(tp_size))
        self._xs = [_bf16(np.random.default_rng([rows, source]), rows, HIDDEN) for source in sources]
        rng = np.random.default_rng(rows)
        self._host = {
            "residual": _bf16(rng, rows, 4, HIDDEN),
            "post": rng.random((rows, 4), np.float32),
            "comb": rng.random((rows, 4, 4), np.float32),
            "pre": rng.random((rows, 4), np.float32),
            "gamma": _bf16(rng, HIDDEN),
        }
        self.inputs = {name: DeviceArray.from_numpy(array) for name, array in self._host.items()}
        self.inputs["x"] = DeviceArray.from_numpy(self._xs[rank])
        self._expected: tuple[Array, Array] | None = None

    def __getattr__(self, name: str) -> DeviceArray:
        try:
            return cast(dict[str, DeviceArray], self.__dict__["inputs"])[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def expected(self) -> tuple[Array, Array]:
        """residual_out and layer_input, of the reference."""
        if self._expected is None:
            streams, layer_input = reference.boundary(self._xs, eps=NORM_EPS, **self._host)
            assert layer_input is not None
            self._expected = streams, layer_input
        return self._expected

    def new_outputs(self) -> tuple[DeviceArray, DeviceArray]:
        """residual_out and layer_input, to be written."""
        rows = self.inputs["x"].shape[0]
        bf16 = ml_dtypes.bfloat16
        outputs = DeviceArray((rows, 4, HIDDEN), bf16), DeviceArray((rows, HIDDEN), bf16)
        for output in outputs:
            output.fill_bytes(0xFF)
        return outputs

    def check_bits(self, residual_out: DeviceArray, layer_input: DeviceArray) -> None:
        """Raises CheckError unless both have the reference's bits."""
        for name, got, want in zip(
            ("residual_out", "layer_input"), (residual_out, layer_input), self.expected, strict=True
        ):
            different = ~reference.bits_equal(got.to_numpy(), want)
            if different.any():
                raise CheckError(f"{name}: {different.sum()} of {different.size} elements have other bits")

    def check_close(self, residual_out: OnDevice, layer_input: OnDevice) -> None:
        """Raises CheckError unless both are the reference's up to the order of additions.

        Another order moves an fp32 sum by a few parts in 2^24 of its terms and then a rounding to bf16 (2^-9) by one
        step, once before and once after the norm: 2^-6 of the largest magnitude is far more, and far less than any
        wrong operand makes.
        """
        for name, got, want in zip(
            ("residual_out", "layer_input"), (residual_out, layer_input), self.expected, strict=True
        ):
            ours, theirs = want.astype(np.float32), got.to_numpy().astype(np.float32)
            worst, bound = float(np.abs(ours - theirs).max()), float(np.abs(ours).max()) / 64
            if not worst <= bound:
                raise CheckError(f"{name}: off by {worst:g}, expected at most {bound:g}")


class Rank:
    """One rank of a measurement, in its thread: its place, its stream, and what its subjects share."""

    def __init__(self, index: int, tp_size: int, mode: Mode, group: ThreadGroup, board: dict[Any, Any]) -> None:
        self.index = index
        self.tp_size = tp_size
        self.mode = mode
        self.device = cuda.current_device()
        self.stream = Stream()
        self._group = group
        self._board = board
        self._turn = itertools.count()
        self._shared: dict[Hashable, Any] = {}

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to wait for."""
        return self._group.size == 1

    def barrier(self) -> None:
        """Waits for the other ranks' threads."""
        self._group.barrier(TIMEOUT_S)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order; of a rank that plays all of them, its own alone."""
        turn = next(self._turn)
        self._board[turn, self.index] = value
        self.barrier()
        return [self._board[turn, rank] for rank in range(self._group.size)]

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned the first time; its `close`, if it has one, is called at the end."""
        if key not in self._shared:
            self._shared[key] = make()
        return cast(T, self._shared[key])

    def tensors(self, rows: int) -> BoundaryTensors:
        """The inputs of M rows."""
        return self.shared(("tensors", rows), lambda: BoundaryTensors(rows, self.index, self.tp_size, self.mode))

    def communicator(self, wait_mode: WaitMode = "auto", name: str = "bench") -> Communicator:
        """Collective at its first use."""
        common: dict[str, Any] = {
            "tp_size": self.tp_size,
            "device": self.device,
            "hidden_size": HIDDEN,
            "capacity": CAPACITY,
            "wait_mode": wait_mode,
            "timeout_s": TIMEOUT_S,
        }

        def make() -> Communicator:
            if self.mode == "self_loop":
                return Communicator.self_loop(**common)
            return Communicator.threads(f"{name} {wait_mode} {self._board['name']}", rank=self.index, **common)

        return self.shared(("communicator", name, wait_mode), make)

    def close(self) -> None:
        """Collective. Closes what is shared, the newest first."""
        for made in reversed(self._shared.values()):
            if hasattr(made, "close"):
                made.close()
        self.stream.close()


@dataclass
class _Prepared:
    case: Case
    subject: Subject
    graph: Graph
    empty: Graph | None  # the flushes of a cold case alone


class _Timer:
    """Measures the prepared cases of one rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._events = [(Event(), Event()) for _ in range(WARM_UP + REPLAYS)]
        token = np.zeros((1, HIDDEN), ml_dtypes.bfloat16)
        self._token = DeviceArray.from_numpy(token), DeviceArray.from_numpy(token)
        self._flushed: DeviceArray | None = None
        # Made before any peer's, and by all ranks: it also opens the way to the peers' memory.
        self._barrier = None if rank.alone else rank.communicator(name="barrier")

    def prepare(self, case: Case) -> _Prepared:
        """Runs a subject outside a graph, then captures it."""
        rank = self._rank
        subject = case.make(rank)
        rank.barrier()
        for _ in range(2):
            subject.enqueue(rank.stream)
            rank.stream.synchronize(TIMEOUT_S)
        rank.barrier()
        if case.cache == "cold":
            return _Prepared(case, subject, self._capture(subject, case), self._capture(None, case))
        return _Prepared(case, subject, self._capture(subject, case), None)

    def _capture(self, subject: Subject | None, case: Case) -> Graph:
        with self._rank.stream.capture() as graph:
            for _ in range(case.calls):
                if case.cache == "cold":
                    self._flush()
                if subject is not None:
                    subject.enqueue(self._rank.stream)
        self._rank.barrier()
        return graph

    def _flush(self) -> None:
        if self._flushed is None:
            size = 2 * int(cuda.call("cudaGetDeviceProperties", self._rank.device).l2CacheSize)
            self._flushed = DeviceArray((size,), np.uint8)
        cuda.call("cudaMemsetAsync", self._flushed.pointer, 0, self._flushed.nbytes, self._rank.stream.handle)

    def spin_up(self) -> None:
        """Keeps the device busy for a moment, so that the clocks are up."""
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            for _ in range(100):
                self._flush()
            self._rank.stream.synchronize(TIMEOUT_S)

    def sample(self, prepared: _Prepared) -> list[float]:
        """Microseconds of each replay, per call."""
        calls = prepared.case.calls
        taken = [us / calls for us in self._replay(prepared.graph)]
        if prepared.empty is not None:
            flushes = statistics.median(self._replay(prepared.empty)) / calls
            taken = [us - flushes for us in taken]
        return taken

    def _replay(self, graph: Graph) -> list[float]:
        stream = self._rank.stream
        self._rank.barrier()
        for begin, end in self._events:
            if self._barrier is not None:
                self._barrier.all_reduce(self._token[0], out=self._token[1], stream=stream)
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            if self._rank.mode == "loopback":
                # A launch that waits for room in a queue can keep the other rank's thread from launching what this
                # one's kernels wait for.
                end.synchronize(TIMEOUT_S)
        stream.synchronize(TIMEOUT_S)
        return [1000 * end.elapsed_ms(begin) for begin, end in self._events[WARM_UP:]]


def measure(cases: Sequence[Case], tp_size: int, mode: Mode) -> list[Result]:
    """Measures all cases; see the module's docstring. A case that fails has a result that says why.

    Args:
        cases: what to measure. Those of one operation, M and cache state that follow each other are measured in turns.
        tp_size: ranks of the group.
        mode: "single": tp 1; "self_loop": one rank plays all; "loopback": all ranks on one GPU; "nvlink": a GPU each.

    Raises:
        ValueError: tp_size and mode do not go together.
    """
    if (tp_size == 1) != (mode == "single"):
        raise ValueError(f"expected mode 'single' with tp 1 and another with more, got {mode!r} with tp {tp_size}")
    alone = mode in ("single", "self_loop")
    devices = [0] if alone else [0] * tp_size if mode == "loopback" else list(range(tp_size))
    group = ThreadGroup(len(devices), devices)
    board: dict[Any, Any] = {"name": next(_names)}

    def work(index: int) -> list[list[float] | str]:
        rank = Rank(index, tp_size, mode, group, board)
        timer = _Timer(rank)
        timer.spin_up()
        outcomes: list[list[float] | str] = []
        for _, several in itertools.groupby(cases, key=lambda case: (case.op, case.rows, case.cache, case.details)):
            outcomes += _in_turns(rank, timer, list(several))
        rank.barrier()
        rank.close()
        return outcomes

    ranks = group.run(work, timeout_s=600)
    return [_result(case, [rank[index] for rank in ranks]) for index, case in enumerate(cases)]


def _in_turns(rank: Rank, timer: _Timer, cases: Sequence[Case]) -> list[list[float] | str]:
    outcomes: list[list[float] | str] = [[] for _ in cases]
    prepared: list[_Prepared | None] = []
    for index, case in enumerate(cases):
        one, failure = _try(rank, lambda case=case: timer.prepare(case))  # type: ignore[misc]
        prepared.append(one)
        if failure is not None:
            outcomes[index] = failure
    live = [(index, one) for index, one in enumerate(prepared) if one is not None]
    for index, one in live + live[::-1]:
        taken = outcomes[index]
        assert isinstance(taken, list)
        taken += timer.sample(one)
    for index, one in live:
        _, failure = _try(rank, one.subject.check)
        if failure is not None:
            outcomes[index] = failure
        one.graph.close()
        if one.empty is not None:
            one.empty.close()
    return outcomes


def _try(rank: Rank, work: Callable[[], T]) -> tuple[T | None, str | None]:
    """Its result, unless a rank failed: then the first failure, the same on every rank."""
    value, failure = None, None
    try:
        value = work()
    except Exception as error:
        # A rank that fails keeps the others from waiting for it in `work` only where they do not wait for it there.
        failure = f"{type(error).__name__}: {error}"
    failures = [each for each in rank.all_gather(failure) if each is not None]
    return (None, failures[0]) if failures else (value, None)


def _result(case: Case, ranks: Sequence[list[float] | str]) -> Result:
    if isinstance(ranks[0], str):
        return Result(case, failure=ranks[0])
    slowest = [max(sample) for sample in zip(*(cast(list[float], rank) for rank in ranks), strict=True)]
    halves = statistics.median(slowest[:REPLAYS]), statistics.median(slowest[REPLAYS:])
    ordered = sorted(slowest)
    us = statistics.median(ordered)
    noise = abs(halves[0] - halves[1]) / us
    return Result(case, us, ordered[len(ordered) // 10], ordered[9 * len(ordered) // 10], noise)


def _bf16(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
