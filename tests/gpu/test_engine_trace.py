# SPDX-License-Identifier: Apache-2.0
"""What TensorRT makes of the plugins: nothing is put around them, and enqueueing costs what the launches cost.

Everything runs on one rank that plays its group, so that nothing has to be run side by side.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from tests.gpu.graph_nodes import captured_nodes
from tests.gpu.loopback import DeviceInputs, make_inputs
from trtllm_mhc import plugin_control
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.library import CBoundaryArgs, library

TP, HIDDEN, EPS, ROWS = 2, 5120, float(np.float32(1e-20)), 8
LAYERS = 4
TIMEOUT_S = 20.0
# Launches that fit behind a blocked stream without the driver's queue filling up.
SHORT, LONG = 8, 72


@pytest.fixture
def communicator() -> Iterator[Communicator]:
    with Communicator.self_loop(tp_size=TP, device=0, hidden_size=HIDDEN, timeout_s=TIMEOUT_S) as made:
        yield made


class Running:
    """An engine's context over zeroed inputs, warmed up."""

    def __init__(self, trt: Any, plan: Any, communicator: Communicator, stream: Stream) -> None:
        from trtllm_mhc.network.layers import numpy_dtype
        from trtllm_mhc.runtime import build

        self._runtime = trt.Runtime(build.logger())
        self.engine = self._runtime.deserialize_cuda_engine(plan.data)
        with communicator.bound():
            self.context = self.engine.create_execution_context()
        self.arrays: dict[str, DeviceArray] = {}
        self.stream = stream
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            if self.engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
                shape = tuple(ROWS if size == -1 else size for size in self.engine.get_tensor_shape(name))
                self.context.set_input_shape(name, shape)
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            dtype = numpy_dtype(self.engine.get_tensor_dtype(name))
            self.arrays[name] = DeviceArray(tuple(self.context.get_tensor_shape(name)), dtype)
            self.arrays[name].fill_bytes(0)
            self.context.set_tensor_address(name, self.arrays[name].pointer)
        with plugin_control.warmup():
            self.enqueue()
        self.enqueue()
        stream.synchronize(TIMEOUT_S)

    def enqueue(self) -> None:
        assert self.context.execute_async_v3(self.stream.handle), plugin_control.take_error()


def build(populate: Callable[[Any], object]) -> Any:
    from trtllm_mhc.runtime.build import RowRange, build_engine

    return build_engine(populate, rows=RowRange(ROWS, ROWS, ROWS))


def populate_chain(count: int) -> Callable[[Any], object]:
    """Boundaries one after another, each fed by the one before: nothing else is in the network."""

    def populate(network: Any) -> None:
        import tensorrt as trt

        from trtllm_mhc.network import plugins

        bf16, f32 = trt.bfloat16, trt.float32
        x = network.add_input("x", bf16, (ROWS, HIDDEN))
        residual = network.add_input("residual", bf16, (ROWS, 4, HIDDEN))
        post = network.add_input("post", f32, (ROWS, 4))
        comb = network.add_input("comb", f32, (ROWS, 4, 4))
        pre = network.add_input("pre", f32, (ROWS, 4))
        gamma = network.add_input("gamma", bf16, (HIDDEN,))
        for _ in range(count):
            residual, x = plugins.add_boundary(network, x, residual, post, comb, pre, gamma, tp_size=TP, norm_eps=EPS)
        for name, tensor in (("residual_out", residual), ("layer_input", x)):
            tensor.name = name
            network.mark_output(tensor)

    return populate


def populate_stack(form: str) -> Callable[[Any], object]:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
    from trtllm_mhc.verification.boundary_stack import StackJobs

    config = DeepseekV41Config(num_hidden_layers=LAYERS, engram_layers=(1,))
    jobs = StackJobs(config, ModelWeights(config, 0), TP, "none", coefficients="plugin")
    job = jobs.fused() if form == "fused" else jobs.unfused()
    return lambda network: job.populate(network, 0)


@pytest.fixture(scope="module")
def stack_plan(trt: Any) -> Any:
    return build(populate_stack("fused"))


# ---- nothing around the plugins -------------------------------------------------------------------------------------


def test_no_reformat_or_copy_around_a_plugin(trt: Any, stack_plan: Any, communicator: Communicator) -> None:
    with Stream() as stream:
        running = Running(trt, stack_plan, communicator, stream)
        inspector = running.engine.create_engine_inspector()
        layers = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))["Layers"]
    plugins = [layer for layer in layers if "plugin" in layer["LayerType"].lower()]
    assert len(plugins) == 4 * LAYERS  # a boundary and its coefficients for each of two sublayers

    def names(layer: dict[str, Any], key: str) -> set[str]:
        return {tensor["Name"] for tensor in layer[key]}

    touching = set().union(*(names(layer, key) for layer in plugins for key in ("Inputs", "Outputs")))
    added = [
        f"{layer['LayerType']}: {layer['Name']}"
        for layer in layers
        if layer["LayerType"].lower() in ("reformat", "copy", "memcpy", "noop", "shuffle", "cast")
        and touching & (names(layer, "Inputs") | names(layer, "Outputs"))
    ]
    assert added == []


def test_engine_of_one_boundary_is_the_bare_launch(trt: Any, communicator: Communicator) -> None:
    inputs = make_inputs(np.random.default_rng(1), TP, ROWS, HIDDEN)
    bare = DeviceInputs(inputs, 0)
    with Stream() as stream:
        running = Running(trt, build(populate_chain(1)), communicator, stream)
        bare.boundary(communicator, stream)
        stream.synchronize(TIMEOUT_S)
        in_engine = captured_nodes(stream, running.enqueue)
        alone = captured_nodes(stream, lambda: bare.boundary(communicator, stream) and None)
    assert in_engine == alone
    assert len(alone) == 1


def test_step_of_the_stack_is_one_graph_of_kernels(trt: Any, stack_plan: Any, communicator: Communicator) -> None:
    with Stream() as stream:
        running = Running(trt, stack_plan, communicator, stream)
        nodes = captured_nodes(stream, running.enqueue)
    print("\n".join(nodes))
    assert [node for node in nodes if node.startswith("cudaGraphNodeType")] == []
    boundaries = [node for node in nodes if "boundaryKernel" in node]
    assert len(boundaries) == 2 * LAYERS
    assert len([node for node in nodes if "projectKernel" in node]) == 2 * LAYERS


# ---- the host's side ------------------------------------------------------------------------------------------------


@contextmanager
def blocked(stream: Stream) -> Iterator[None]:
    """The device does nothing of what is enqueued inside until the end of the block."""
    word = DeviceArray((1,), np.uint32)
    word.fill_bytes(0)
    flag = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    (status,) = driver.cuStreamWaitValue32(stream.handle, word.pointer, 1, int(flag))
    assert status == driver.CUresult.CUDA_SUCCESS, status
    try:
        yield
    finally:
        with Stream() as other:
            (status,) = driver.cuStreamWriteValue32(other.handle, word.pointer, 1, 0)
            assert status == driver.CUresult.CUDA_SUCCESS, status
            other.synchronize(TIMEOUT_S)
        stream.synchronize(TIMEOUT_S)


def host_us(stream: Stream, work: Callable[[], object], repeats: int = 15) -> float:
    """Median host time of `work` while the device stands still."""
    times = []
    for _ in range(repeats):
        with blocked(stream):
            begin = time.perf_counter_ns()
            work()
            times.append((time.perf_counter_ns() - begin) / 1000)
    return statistics.median(times)


def test_enqueue_waits_for_nothing(trt: Any, stack_plan: Any, communicator: Communicator) -> None:
    with Stream() as stream:
        running = Running(trt, stack_plan, communicator, stream)
        with blocked(stream):
            begin = time.monotonic()
            running.enqueue()
            assert time.monotonic() - begin < 1.0
            assert driver.cuStreamQuery(stream.handle)[0] == driver.CUresult.CUDA_ERROR_NOT_READY


def test_enqueue_costs_the_host_what_the_launches_cost(trt: Any, communicator: Communicator) -> None:
    """Within 1 us a boundary, TensorRT's own work for a layer included.

    Boundaries are added to an engine and to bare calls alike, and the difference is counted, so that what a pass costs
    whatever is in it drops out; what a call from Python costs is measured on a function that does nothing.
    """
    bare = DeviceInputs(make_inputs(np.random.default_rng(1), TP, ROWS, HIDDEN), 0)
    pointers = ("x", "residual", "post", "comb", "pre", "gamma", "residual_out", "layer_input")
    args = CBoundaryArgs(
        struct_size=ctypes.sizeof(CBoundaryArgs),
        rows=ROWS,
        norm_eps=EPS,
        **{name: getattr(bare, name).pointer for name in pointers},
    )
    lib = library()
    with Stream() as stream:
        bare.boundary(communicator, stream)
        stream.synchronize(TIMEOUT_S)
        given = communicator.handle, 0, ctypes.byref(args), stream.handle
        nothing, nothing_args = lib.mhcMxfp8ScaleBytes, (ROWS, HIDDEN)

        def call(count: int) -> None:
            for _ in range(count):
                assert lib.mhcBoundary(*given) == 0

        def call_nothing(count: int) -> None:
            for _ in range(count):
                assert nothing(*nothing_args) > 0

        step = LONG - SHORT
        engines = {count: Running(trt, build(populate_chain(count)), communicator, stream) for count in (SHORT, LONG)}
        in_engine = (host_us(stream, engines[LONG].enqueue) - host_us(stream, engines[SHORT].enqueue)) / step
        python = (host_us(stream, lambda: call_nothing(LONG)) - host_us(stream, lambda: call_nothing(SHORT))) / step
        launches = (host_us(stream, lambda: call(LONG)) - host_us(stream, lambda: call(SHORT))) / step - python
    print(f"host us per boundary: in the engine {in_engine:.2f}, bare {launches:.2f} (Python's {python:.2f} taken off)")
    _record({"in_engine_us": in_engine, "bare_us": launches, "python_us": python})
    assert in_engine - launches <= 1.0


def _record(values: dict[str, float]) -> None:
    folder = os.environ.get("TRTLLM_MHC_RESULTS")
    if folder:
        text = json.dumps({key: round(value, 3) for key, value in values.items()}, indent=2)
        Path(folder, "enqueue_host_time.json").write_text(text + "\n")
