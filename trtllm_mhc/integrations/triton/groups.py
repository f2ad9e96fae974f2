# SPDX-License-Identifier: Apache-2.0
"""All ranks of one tensor-parallel group in one process, as something that requests can be run on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trtllm_mhc.integrations.triton.settings import Settings
from trtllm_mhc.integrations.triton.tensors import InputRange
from trtllm_mhc.runtime.threads import ThreadGroup

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]
Outputs = dict[str, Array]


class RankGroup(Protocol):
    """What `runner.GroupRunner` drives. No method waits longer than the group was opened for."""

    @property
    def tp_size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def inputs(self) -> Mapping[str, InputRange]:
        """What the group takes, the same on all ranks."""
        ...

    @property
    def outputs(self) -> Sequence[str]:
        """Names of its outputs."""
        ...

    def prepare(self, feeds: Sequence[Feeds]) -> None:
        """Takes the inputs of every rank. No rank waits for another, so a failure leaves the group usable.

        Raises:
            ValueError: the inputs do not fit.
        """
        ...

    def run(self) -> list[Outputs]:
        """Runs all ranks on what was prepared; the outputs of every rank. After a failure the group is not used."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


class EngineRanks:
    """TensorRT engines, with a thread, a stream, a context and a communicator for each rank."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """Loads `rank0.engine`, ... of `folder`.

        Raises:
            FileNotFoundError: an engine is missing.
            EngineError, MhcError: see `EngineGroup` and `Communicator`.
        """
        from trtllm_mhc.runtime.build import Plan, require_device
        from trtllm_mhc.runtime.engine import EngineGroup, communicators

        require_device()
        self.tp_size = settings.tp_size
        plans = [Plan(path.read_bytes(), 0.0) for path in engine_paths(folder, settings.tp_size)]
        threads = (
            ThreadGroup(settings.tp_size, list(settings.devices))
            if settings.devices
            else ThreadGroup.on_devices(settings.tp_size)
        )
        with contextlib.ExitStack() as stack:
            comms = stack.enter_context(
                communicators(
                    threads,
                    f"triton {os.getpid()}",
                    hidden_size=settings.hidden_size,
                    capacity=settings.capacity,
                    timeout_s=settings.deadline_s / 2,
                )
            )
            self._engines = stack.enter_context(EngineGroup(plans, comms, threads, timeout_s=settings.deadline_s))
            self._close = stack.pop_all().close
        self.inputs = {
            name: InputRange(np.dtype(dtype), smallest, largest)
            for name, (dtype, smallest, largest) in self._engines.input_ranges.items()
        }
        self.outputs = self._engines.output_names

    def prepare(self, feeds: Sequence[Feeds]) -> None:
        """See `RankGroup`."""
        self._engines.prepare(feeds)

    def run(self) -> list[Outputs]:
        """See `RankGroup`."""
        return self._engines.run_prepared()

    def close(self) -> None:
        """See `RankGroup`."""
        self._close()


def engine_paths(folder: Path, tp_size: int) -> list[Path]:
    """`rank0.engine`, ... of a version folder.

    Raises:
        FileNotFoundError: one is missing.
    """
    paths = [folder / f"rank{rank}.engine" for rank in range(tp_size)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{folder}: expected an engine for each of {tp_size} ranks, missing {missing}")
    return paths


def open_engines(settings: Settings, folder: Path) -> RankGroup:
    """The group of a model whose ranks are engines (`Settings.group`'s default)."""
    return EngineRanks(settings, folder)
