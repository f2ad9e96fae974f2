# SPDX-License-Identifier: Apache-2.0
"""TensorRT engines as subjects of measurements: the boundary as TensorRT runs it by itself, and the boundary stack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import ml_dtypes
import numpy as np
import tensorrt as trt

from trtllm_mhc import plugin_control
from trtllm_mhc.benchmarks.harness import HIDDEN, NORM_EPS, TIMEOUT_S, Case, CheckError, Rank
from trtllm_mhc.benchmarks.peers import nccl
from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
from trtllm_mhc.models.deepseek_v41.stack import Sublayers
from trtllm_mhc.network import functional
from trtllm_mhc.network.layers import numpy_dtype
from trtllm_mhc.runtime import build
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.verification.backends import Job
from trtllm_mhc.verification.boundary_stack import INPUT, SingleBoundaryJobs, StackJobs

STACK_CALLS = 4
_INPUTS = ("x", "residual", "post", "comb", "pre", "gamma")


class Engine:
    """One rank's engine over given inputs."""

    def __init__(self, rank: Rank, plan: build.Plan, inputs: Mapping[str, DeviceArray]) -> None:
        self._recorder = build.ErrorRecorder()
        self._runtime = trt.Runtime(build.logger())
        self._runtime.error_recorder = self._recorder
        self._engine = self._runtime.deserialize_cuda_engine(plan.data)
        if self._engine is None:
            raise build.EngineError(build.explain("the plan cannot be deserialised", self._recorder))
        with rank.communicator().bound() if rank.tp_size > 1 else contextlib.nullcontext():
            self._context = self._engine.create_execution_context()
        self.arrays = dict(inputs)
        for name, array in inputs.items():
            self._context.set_input_shape(name, array.shape)
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            if name not in self.arrays:
                shape, dtype = self._context.get_tensor_shape(name), self._engine.get_tensor_dtype(name)
                self.arrays[name] = DeviceArray(tuple(shape), numpy_dtype(dtype))
            self._context.set_tensor_address(name, self.arrays[name].pointer)
        with plugin_control.warmup():
            self.enqueue(rank.stream)
            rank.stream.synchronize(TIMEOUT_S)

    def enqueue(self, stream: Stream) -> None:
        """See `Subject`."""
        if not self._context.execute_async_v3(stream.handle):
            raise build.EngineError(build.explain("the engine cannot be enqueued", self._recorder))

    def check(self) -> None:
        """See `Subject`."""


class BoundaryEngine(Engine):
    """A boundary of TensorRT's own layers, and between ranks the one-shot all-reduce of this project."""

    def __init__(self, rank: Rank, rows: int, x: DeviceArray | None = None, *, plan: build.Plan) -> None:
        self._tensors = rank.tensors(rows)
        inputs = {**self._tensors.inputs, "x": x or self._tensors.x}
        super().__init__(rank, plan, {name: inputs[name] for name in _INPUTS})

    def check(self) -> None:
        """See `Subject`."""
        self._tensors.check_close(self.arrays["residual_out"], self.arrays["layer_input"])


class StackEngine(Engine):
    """The boundary stack."""

    def __init__(self, rank: Rank, rows: int, plans: Sequence[build.Plan]) -> None:
        x = np.random.default_rng(rows).standard_normal((rows, HIDDEN), np.float32).astype(ml_dtypes.bfloat16)
        super().__init__(rank, plans[rank.index], {INPUT: DeviceArray.from_numpy(x)})

    def check(self) -> None:
        """See `Subject`; `trtllm-mhc demo` compares the results."""
        for name, array in self.arrays.items():
            if not np.isfinite(array.to_numpy().astype(np.float32)).all():
                raise CheckError(f"{name} is not finite")


def boundary_cases(rows: Sequence[int], tp_size: int, wanted: Sequence[str], cache: build.TimingCache) -> list[Case]:
    """Builds and returns TensorRT's own form of the boundary for every M; with tp 1 there is no reduction in it.

    Args:
        rows: values of M, an engine each.
        tp_size: ranks.
        wanted: "tensorrt", with the one-shot all-reduce of this project, and "tensorrt_nccl".
        cache: shared by the builds.
    """
    cases = []
    for m in rows:
        local = Job("local", partial(_populate_local, rows=m))
        whole = SingleBoundaryJobs(HIDDEN, tp_size, NORM_EPS).unfused()
        if "tensorrt" in wanted:
            plan = _build(whole if tp_size > 1 else local, 0, build.RowRange(m, m, m), cache)
            make = partial(_make_boundary, rows=m, plan=plan)
            cases.append(Case("boundary" if tp_size > 1 else "local", "tensorrt", m, make))
        if "tensorrt_nccl" in wanted:
            after = partial(BoundaryEngine, plan=_build(local, 0, build.RowRange(m, m, m), cache))
            cases.append(Case("boundary", "tensorrt_nccl", m, partial(_make_chain, rows=m, local=after)))
    return cases


def stack_cases(
    rows: Sequence[int], tp_size: int, ranks: int, sublayers: Sequence[Sublayers], layers: int, cache: build.TimingCache
) -> list[Case]:
    """Builds and returns the boundary stack, fused and unfused, with the coefficients as a plugin in both.

    Args:
        rows: values of M; one engine serves them all.
        tp_size: ranks of the network.
        ranks: how many of them need an engine.
        sublayers: "none" leaves the boundaries and a few elementwise layers, "matmul" has the matrices as well.
        layers: of the model.
        cache: shared by the builds.
    """
    config = DeepseekV41Config(num_hidden_layers=layers)
    weights = ModelWeights(config, 0)
    made: dict[tuple[int, str], list[Case]] = {}
    for kind in sublayers:
        jobs = StackJobs(config, weights, tp_size, kind, coefficients="plugin")
        for name, job in (("trtllm_mhc", jobs.fused()), ("tensorrt", jobs.unfused())):
            span = build.RowRange(min(rows), max(rows), max(rows))
            plans = [_build(job, rank, span, cache) for rank in range(ranks)]
            details = (("sublayers", kind), ("boundaries", config.boundaries))
            for m in rows:
                make = partial(_make_stack, rows=m, plans=plans)
                case = Case("stack", name, m, make, calls=STACK_CALLS, details=details)
                made.setdefault((m, kind), []).append(case)
    return [case for cases in made.values() for case in cases]


def _build(job: Job, rank: int, rows: build.RowRange, cache: build.TimingCache) -> build.Plan:
    return build.build_engine(lambda network: job.populate(network, rank), rows=rows, timing_cache=cache)


def _make_boundary(rank: Rank, rows: int, plan: build.Plan) -> Engine:
    return BoundaryEngine(rank, rows, plan=plan)


def _make_chain(rank: Rank, rows: int, local: Callable[[Rank, int, DeviceArray], Engine]) -> nccl.Chain:
    return nccl.Chain(rank, rows, local)


def _make_stack(rank: Rank, rows: int, plans: Sequence[build.Plan]) -> Engine:
    return StackEngine(rank, rows, plans)


def _populate_local(network: trt.INetworkDefinition, rank: int, *, rows: int) -> None:
    """Post, collapse and norm, without a reduction."""
    bf16, f32 = trt.bfloat16, trt.float32
    shapes = {
        "x": (bf16, (rows, HIDDEN)),
        "residual": (bf16, (rows, 4, HIDDEN)),
        "post": (f32, (rows, 4)),
        "comb": (f32, (rows, 4, 4)),
        "pre": (f32, (rows, 4)),
        "gamma": (bf16, (HIDDEN,)),
    }
    x, residual, post, comb, pre, gamma = (network.add_input(name, *shapes[name]) for name in _INPUTS)
    streams = functional.mhc_post(network, x, residual, post, comb)
    layer_input = functional.mhc_pre_delayed(network, streams, pre, gamma, NORM_EPS)
    for name, tensor in (("residual_out", streams), ("layer_input", layer_input)):
        tensor.name = name
        network.mark_output(tensor)
