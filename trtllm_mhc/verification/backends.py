# SPDX-License-Identifier: Apache-2.0
"""Two ways to run one network for each rank: as engines, and with the numpy interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorrt as trt

from trtllm_mhc.reference import interpreter
from trtllm_mhc.runtime import build
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.engine import EngineGroup, Feeds, Outputs
from trtllm_mhc.runtime.threads import ThreadGroup

Array = npt.NDArray[Any]
Say = Callable[[str], None]

# Builds that only look up what an earlier one measured are bound by the CPU; more at once would be bound by memory.
_CONCURRENT_BUILDS = 4


@dataclass(frozen=True)
class Job:
    """A network for each rank.

    Attributes:
        name: what it is called in messages.
        populate: fills the network of a rank; what it returns is kept alive until the network is built.
        per_rank: False: the networks of all ranks are the same, and one engine serves them all.
        timed: the engine's speed matters: its tactics are measured while nothing else runs.
    """

    name: str
    populate: Callable[[trt.INetworkDefinition, int], object]
    per_rank: bool = True
    timed: bool = False


class Runner(Protocol):
    """Runs all ranks of one job."""

    def run(self, feeds: Sequence[Feeds]) -> list[Outputs]:
        """One pass; see `EngineGroup.run`."""
        ...


class NumpyRunner:
    """Evaluates one network for each rank in lockstep."""

    def __init__(
        self, networks: Sequence[trt.INetworkDefinition], precision: interpreter.Precision = "network"
    ) -> None:
        self._networks = networks
        self._precision = precision

    def run(self, feeds: Sequence[Feeds]) -> list[Outputs]:
        """One evaluation with any number of rows."""
        return interpreter.evaluate(self._networks, list(feeds), precision=self._precision)


class NetworkMaker:
    """Makes networks that are not built: for evaluation, and to look at. Works without a GPU in CPU-only mode."""

    def __init__(self) -> None:
        self._recorder = build.ErrorRecorder()
        self._builder = build.make_builder(self._recorder)

    def make(self, job: Job, rank: int) -> trt.INetworkDefinition:
        """The network of one rank.

        Raises:
            EngineError: TensorRT makes none; the message says why.
        """
        network = build.make_network(self._builder)
        if network is None:
            raise build.EngineError(build.explain("TensorRT makes no network", self._recorder))
        job.populate(network, rank)
        return network

    def runner(self, job: Job, ranks: int, precision: interpreter.Precision = "network") -> NumpyRunner:
        """A job's networks with the interpreter."""
        return NumpyRunner([self.make(job, rank) for rank in range(ranks)], precision)


def build_jobs(
    jobs: Sequence[Job], ranks: int, rows: build.RowRange, cache: build.TimingCache, say: Say
) -> dict[str, list[build.Plan]]:
    """Builds the engines of all jobs for all ranks with one timing cache; returns the plans of each job by its name.

    Rank 0 of the timed jobs first, one by one. Everything else finds its tactics in the cache and goes in parallel.

    Args:
        jobs: with distinct names.
        ranks: number of ranks.
        rows: M of every engine.
        cache: shared by all builds.
        say: told about every engine that is done.
    """
    plans: dict[tuple[str, int], build.Plan] = {}

    def make(task: tuple[Job, int]) -> None:
        job, rank = task
        plan = build.build_engine(lambda network: job.populate(network, rank), rows=rows, timing_cache=cache)
        plans[job.name, rank] = plan
        which = f"rank {rank}" if job.per_rank else "all ranks"
        say(f"built {job.name}, {which}: {plan.seconds:.1f} s, {plan.nbytes / 2**20:.0f} MiB")

    first = [(job, 0) for job in jobs if job.timed]
    rest = [(job, rank) for job in jobs for rank in range(ranks if job.per_rank else 1)]
    for task in first:
        make(task)
    with ThreadPoolExecutor(_CONCURRENT_BUILDS) as pool:
        for _ in pool.map(make, [task for task in rest if task not in first]):
            pass
    return {job.name: [plans[job.name, rank if job.per_rank else 0] for rank in range(ranks)] for job in jobs}


@contextlib.contextmanager
def open_engines(
    plans: Mapping[str, list[build.Plan]],
    names: Sequence[str],
    communicators: Sequence[Communicator],
    group: ThreadGroup,
) -> Iterator[list[EngineGroup]]:
    """The engines of several jobs loaded side by side, each on a mailbox lane of its own, in order from lane 0."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(EngineGroup(plans[name], communicators, group, lane=lane))
            for lane, name in enumerate(names)
        ]


def split_rows(outputs: Array, rows: int) -> list[Array]:
    """An output of several inputs that were evaluated as one, back in pieces of `rows` rows."""
    return list(np.split(outputs, outputs.shape[0] // rows))
