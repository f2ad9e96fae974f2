# SPDX-License-Identifier: Apache-2.0
"""Polygraphy's runners for the ranks of a tensor-parallel group, which are threads of this process.

`GroupRunner` is one runner for the whole group, for `Comparator`. What it runs is anything with the method `run` of
`verification.backends.Runner`: an `EngineGroup`, the numpy interpreter, or `TrtRanks`, which is Polygraphy's own
`TrtRunner` once for each rank.

numpy, which Polygraphy works with, has no bf16: `GroupRunner` takes and gives such tensors as fp32, which loses
nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import tensorrt as trt
from polygraphy import cuda as polygraphy_cuda
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.trt import TrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.cuda import DeviceView

from trtllm_mhc import plugin, plugin_control
from trtllm_mhc.integrations.polygraphy.cuda_runtime import expose_cuda_runtime
from trtllm_mhc.network.layers import numpy_dtype
from trtllm_mhc.runtime.build import EngineError, ErrorRecorder, Plan, explain, logger
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import DeviceArray
from trtllm_mhc.runtime.engine import Feeds, Outputs
from trtllm_mhc.runtime.library import MailboxError
from trtllm_mhc.runtime.threads import ThreadGroup
from trtllm_mhc.verification.backends import Runner

Array = npt.NDArray[Any]

_BF16 = np.dtype(ml_dtypes.bfloat16)
_SEPARATOR = "@rank"


@dataclass(frozen=True)
class Input:
    """An input of a network or an engine.

    Attributes:
        dtype: as the engine has it.
        shape: -1 where it is dynamic.
        largest: the profile's largest shape; `shape` for a network.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    largest: tuple[int, ...]


def network_inputs(network: trt.INetworkDefinition) -> dict[str, Input]:
    """The inputs of `network` by name."""
    tensors = [network.get_input(index) for index in range(network.num_inputs)]
    return {t.name: Input(numpy_dtype(t.dtype), tuple(t.shape), tuple(t.shape)) for t in tensors}


def plan_inputs(plan: Plan) -> dict[str, Input]:
    """The inputs of a serialised engine by name.

    Raises:
        EngineError: the plan cannot be deserialised.
    """
    engine = _deserialize(plan, "the plan")
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    inputs = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    return {
        name: Input(
            numpy_dtype(engine.get_tensor_dtype(name)),
            tuple(engine.get_tensor_shape(name)),
            tuple(engine.get_tensor_profile_shape(name, 0)[2]),
        )
        for name in inputs
    }


def rank_output(name: str, rank: int) -> str:
    """What `GroupRunner` calls an output (or a rank's own input) of one rank: "hidden_states@rank1"."""
    return f"{name}{_SEPARATOR}{rank}"


def split_output(name: str) -> tuple[str, int]:
    """The output and the rank behind a name of `rank_output`."""
    tensor, _, rank = name.rpartition(_SEPARATOR)
    return tensor, int(rank)


class GroupRunner(BaseRunner):  # type: ignore[misc]
    """All ranks of a group as one Polygraphy runner.

    An input has the engine's name and goes to every rank; one named in `per_rank` comes once for each rank, as
    "x@rank0", "x@rank1". Outputs always come so.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], AbstractContextManager[Runner]],
        inputs: Mapping[str, Input],
        ranks: int,
        *,
        per_rank: Sequence[str] = (),
    ) -> None:
        """Does nothing yet: Polygraphy activates its runners when their turn comes.

        Args:
            name: for Polygraphy's messages and results.
            make: called at activation; the result is entered then, and left at deactivation.
            inputs: of one rank.
            ranks: number of ranks.
            per_rank: the inputs that differ from rank to rank.
        """
        super().__init__(name=name, prefix="trtllm-mhc")
        self._make = make
        self._inputs = dict(inputs)
        self._ranks = ranks
        self._per_rank = frozenset(per_rank)

    def activate_impl(self) -> None:
        """Called by Polygraphy."""
        with ExitStack() as stack:
            self._runner = stack.enter_context(self._make())
            self._stack = stack.pop_all()

    def deactivate_impl(self) -> None:
        """Called by Polygraphy."""
        stack = self._stack
        del self._stack, self._runner
        stack.close()

    def get_input_metadata_impl(self) -> TensorMetadata:
        """Called by Polygraphy: names, dtypes and shapes of what `infer` takes."""
        metadata = TensorMetadata()
        for name, spec in self._inputs.items():
            names = [rank_output(name, rank) for rank in range(self._ranks)] if name in self._per_rank else [name]
            for each in names:
                metadata.add(each, np.dtype(np.float32) if spec.dtype == _BF16 else spec.dtype, spec.shape)
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, Array]) -> OrderedDict[str, Array]:
        """Called by Polygraphy: one pass of all ranks."""
        feeds = [
            {
                name: _narrow(feed_dict[rank_output(name, rank) if name in self._per_rank else name], spec.dtype)
                for name, spec in self._inputs.items()
            }
            for rank in range(self._ranks)
        ]
        begin = time.perf_counter()
        outputs = self._runner.run(feeds)
        self.inference_time = time.perf_counter() - begin
        return OrderedDict(
            (rank_output(name, rank), array.astype(np.float32) if array.dtype == _BF16 else array)
            for rank, found in enumerate(outputs)
            for name, array in found.items()
        )


@dataclass
class _Rank:
    runner: Any
    dtypes: dict[str, np.dtype[Any]]
    inputs: dict[str, DeviceArray] = field(default_factory=dict)
    feed: dict[str, Any] = field(default_factory=dict)
    warm: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)


class TrtRanks:
    """Polygraphy's `TrtRunner` once for each rank, a thread each, with the rank's communicator bound to its context.

    For code that uses Polygraphy's runners itself; `EngineGroup` does the same without Polygraphy, and captures graphs.
    Needs a `libcudart.so` that Polygraphy can open: on LD_LIBRARY_PATH, in a CUDA toolkit, or of pip's CUDA packages.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        communicators: Sequence[Communicator],
        group: ThreadGroup,
        *,
        lane: int = 0,
        timeout_s: float = 120.0,
    ) -> None:
        """Loads the plans and activates the runners.

        Args:
            plans: one for each rank; the same object may stand for several.
            communicators: one for each rank.
            group: the ranks, with devices.
            lane: mailbox lane of the contexts.
            timeout_s: seconds that any one call may take.

        Raises:
            EngineError: a plan cannot be loaded.
        """
        self._plans = plans
        self._communicators = communicators
        self._group = group
        self._lane = lane
        self._timeout_s = timeout_s
        expose_cuda_runtime()
        polygraphy_cuda.wrapper()  # made once, before the ranks' threads ask for it
        self._ranks = group.run(self._activate, timeout_s=timeout_s)

    def run(self, feeds: Sequence[Feeds]) -> list[Outputs]:
        """One pass of all ranks at once; arguments and results as those of `EngineGroup.run`.

        Raises:
            MailboxError: a plugin's kernel gave up.
            PolygraphyException: Polygraphy or TensorRT refused.
        """
        # All that may make the driver wait (memory, copies, kernels to load) comes before any rank waits for another.
        self._group.run(lambda index: self._prepare(index, feeds[index]), timeout_s=self._timeout_s)
        return self._group.run(self._infer, timeout_s=self._timeout_s)

    def close(self) -> None:
        """Deactivates the runners. Later calls do nothing."""
        ranks, self._ranks = self._ranks, []
        if ranks:
            self._group.run(lambda index: ranks[index].runner.deactivate(), timeout_s=self._timeout_s)

    def __enter__(self) -> TrtRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        with suppress(Exception):
            self.close()

    def _activate(self, index: int) -> _Rank:
        engine = _deserialize(self._plans[index], f"rank {index}: the plan")

        def context() -> Any:
            with self._communicators[index].bound(self._lane):
                return engine.create_execution_context()

        # Given a context instead of an engine, the runner uses it as it is.
        runner = TrtRunner(context, name=f"rank {index}")
        runner.activate()
        names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
        return _Rank(runner, {name: numpy_dtype(engine.get_tensor_dtype(name)) for name in names})

    def _prepare(self, index: int, feeds: Feeds) -> None:
        rank = self._ranks[index]
        for name, array in feeds.items():
            if array.dtype != rank.dtypes.get(name):
                raise ValueError(
                    f"input {name!r}: expected {rank.dtypes.get(name, 'no such input')}, got {array.dtype}"
                )
            held = rank.inputs.get(name)
            if held is None or held.size < array.size:
                held = rank.inputs[name] = DeviceArray(array.shape, array.dtype)
            held.view(array.shape).copy_from(array)
            # A type that Polygraphy and numpy share; the engine knows what the bytes are.
            rank.feed[name] = DeviceView(held.pointer, array.shape, np.dtype(f"u{array.dtype.itemsize}"))
        signature = tuple(array.shape for array in feeds.values())
        if signature not in rank.warm:
            with plugin_control.warmup():
                self._enqueue(rank)
            rank.warm.add(signature)

    def _infer(self, index: int) -> Outputs:
        rank = self._ranks[index]
        views = self._enqueue(rank)
        record = self._communicators[index].status(self._lane)
        if record is not None:
            raise MailboxError(f"rank {index}, lane {self._lane}", record)
        stream = rank.runner.stream
        outputs = {}
        for name, view in views.items():
            array = np.empty(tuple(view.shape), rank.dtypes[name])
            kind = polygraphy_cuda.MemcpyKind.DeviceToHost
            polygraphy_cuda.wrapper().memcpy(array.ctypes.data, view.ptr, array.nbytes, kind, stream.ptr)
            outputs[name] = array
        stream.synchronize()
        return outputs

    @staticmethod
    def _enqueue(rank: _Rank) -> Any:
        """One pass; outputs stay on the device.

        Copied by the runner itself they would come from pageable memory right behind kernels that wait for a peer: the
        driver then keeps that peer from launching, and neither goes on.
        """
        return rank.runner.infer(rank.feed, check_inputs=False, copy_outputs_to_host=False)


def _narrow(array: Array, dtype: np.dtype[Any]) -> Array:
    return array.astype(dtype) if dtype == _BF16 else array


def _deserialize(plan: Plan, what: str) -> Any:
    plugin.load()
    recorder = ErrorRecorder()
    runtime = trt.Runtime(logger())
    runtime.error_recorder = recorder
    engine = runtime.deserialize_cuda_engine(plan.data)
    if engine is None:
        raise EngineError(explain(f"{what} cannot be deserialised", recorder))
    return engine
