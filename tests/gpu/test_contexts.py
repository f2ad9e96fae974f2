# SPDX-License-Identifier: Apache-2.0
"""Several engines, contexts, graphs and groups in one process."""

from __future__ import annotations

import gc
import os
import resource
import threading
from typing import Any

import numpy as np
import pytest

from tests.gpu.loopback import DeviceInputs, Loopback, make_inputs
from tests.gpu.test_engines import HIDDEN, TIMEOUT_S, Array, Plans, check, feeds_of, plans
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import Stream
from trtllm_mhc.runtime.threads import ThreadGroup

__all__ = ["plans"]  # the fixture


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_engines_with_a_lane_each_run_at_once(trt: Any, plans: Plans) -> None:
    """Two engines, each with a context and a graph on its own lane of the same communicators, driven by two threads."""
    from trtllm_mhc.runtime.engine import EngineGroup, communicators

    rng = np.random.default_rng(5)
    both = [[make_inputs(rng, 2, rows, HIDDEN) for _ in range(3)] for rows in (4, 7)]
    both[1] = [inputs.residual_only() for inputs in both[1]]
    ranks = ThreadGroup.on_devices(2)
    failures: list[BaseException] = []

    def drive(engines: EngineGroup, sets: list[Any]) -> None:
        try:
            for replay in range(50):
                inputs = sets[replay % len(sets)]
                check(engines.replay(feeds_of(inputs)), inputs, f"replay {replay}")
        except BaseException as error:
            failures.append(error)

    with (
        communicators(ranks, "engines at once", hidden_size=HIDDEN, lanes=2, timeout_s=TIMEOUT_S) as comms,
        EngineGroup(plans(2, "fused"), comms, ThreadGroup.on_devices(2), lane=0) as one,
        EngineGroup(plans(2, "residual-only"), comms, ThreadGroup.on_devices(2), lane=1) as two,
    ):
        for engines, sets in zip((one, two), both, strict=True):
            check(engines.run(feeds_of(sets[0])), sets[0], "alone")
            engines.capture(passes=2)
        threads = [
            threading.Thread(target=drive, args=(engines, sets), daemon=True)
            for engines, sets in zip((one, two), both, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_a_thousand_contexts_leave_nothing_behind(trt: Any, plans: Plans) -> None:
    """Contexts bind to the communicator when they are made and let go of it when they end: memory of host and device
    stays where it was, and the communicator can be closed and its memory freed."""
    from trtllm_mhc.runtime import build

    data = plans(2, "fused")[0].data
    inputs = make_inputs(np.random.default_rng(3), 2, 4, HIDDEN)
    expected = inputs.expected()
    grown: list[tuple[int, int]] = []

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        if rank == 0:
            runtime = trt.Runtime(build.logger())
            engine = runtime.deserialize_cuda_engine(data)
            with communicator.bound():
                for count in range(1000):
                    context = engine.create_execution_context()
                    assert context is not None
                    del context
                    if count == 100:  # pools and caches are filled by now
                        gc.collect()
                        free, resident = cuda.call("cudaMemGetInfo")[0], resident_bytes()
            gc.collect()
            grown.append((free - cuda.call("cudaMemGetInfo")[0], resident_bytes() - resident))
            del engine, runtime
        group.barrier()
        call.boundary(communicator, stream)
        call.check(expected, stream, f" on rank {rank}")

    with Loopback(2) as group:
        group.run(work)
        size = group.ranks[0][0].info.mailbox_bytes
        free = cuda.call("cudaMemGetInfo")[0]
    device, host = grown[0]
    assert device <= 4 << 20
    assert host < 8 << 20  # 900 contexts of 10 KB would already be more
    assert cuda.call("cudaMemGetInfo")[0] - free >= size  # a context that held on to it would keep it


def test_two_groups_in_one_process() -> None:
    """Their ranks run at once, and never meet."""
    rng = np.random.default_rng(6)
    inputs = [make_inputs(rng, tp, rows, HIDDEN) for tp, rows in ((2, 3), (4, 6))]
    expected = [each.expected() for each in inputs]
    failures: list[BaseException] = []

    def drive(which: int, group: Loopback) -> None:
        def work(rank: int, communicator: Communicator, stream: Stream) -> None:
            call = DeviceInputs(inputs[which], rank)
            group.barrier()
            for _ in range(200):
                call.poison()
                call.boundary(communicator, stream)
                call.check(expected[which], stream, f" of group {which}, rank {rank}")

        try:
            group.run(work)
        except BaseException as error:
            failures.append(error)

    with Loopback(2) as small, Loopback(4) as large:
        threads = [
            threading.Thread(target=drive, args=(which, group), daemon=True)
            for which, group in enumerate((small, large))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    if failures:
        raise failures[0]


def test_a_plan_that_carries_the_library(trt: Any) -> None:
    """TensorRT can store the plugin library in a plan. Where the library is loaded already, plugins of the plan use the
    same communicators."""
    from trtllm_mhc import plugin
    from trtllm_mhc.runtime import build
    from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs

    if not hasattr(trt.IBuilderConfig, "plugins_to_serialize"):
        pytest.skip("this TensorRT does not store libraries in plans")
    job = SingleBoundaryJobs(HIDDEN, 2, float(np.float32(1e-20))).fused()
    recorder = build.ErrorRecorder()
    builder = build.make_builder(recorder)
    network = build.make_network(builder)
    keep = job.populate(network, 0)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    config.plugins_to_serialize = [os.fspath(plugin.library_path())]
    optimization = builder.create_optimization_profile()
    for name, shapes in build.profile_shapes(network, build.RowRange(1, 4, 8), {}).items():
        optimization.set_shape(name, *shapes)
    config.add_optimization_profile(optimization)
    data = builder.build_serialized_network(network, config)
    assert data is not None, build.explain("build", recorder, any_thread=True)
    del keep
    inputs = make_inputs(np.random.default_rng(8), 2, 4, HIDDEN)

    def work(rank: int, communicator: Communicator, stream: Stream) -> dict[str, Array]:
        from trtllm_mhc import plugin_control

        recorder = build.ErrorRecorder()
        runtime = trt.Runtime(build.logger())
        runtime.error_recorder = recorder
        runtime.engine_host_code_allowed = True  # libraries in plans are code
        engine = runtime.deserialize_cuda_engine(data)
        assert engine is not None, build.explain("deserialise", recorder)
        with communicator.bound():
            context = engine.create_execution_context()
        call = DeviceInputs(inputs, rank)
        tensors = {name: getattr(call, name) for name in ("x", "residual", "post", "comb", "pre", "gamma")}
        for name, array in tensors.items():
            context.set_input_shape(name, array.shape)
        tensors |= {"residual_out": call.residual_out, "layer_input": call.layer_input}
        for name, array in tensors.items():
            context.set_tensor_address(name, array.pointer)
        with plugin_control.warmup():
            assert context.execute_async_v3(stream.handle), build.explain("warm-up", recorder)
        stream.synchronize(TIMEOUT_S)
        call.poison()
        group.barrier()
        assert context.execute_async_v3(stream.handle), build.explain("execution", recorder)
        call.check(inputs.expected(), stream, f" on rank {rank}")
        return {}

    with Loopback(2) as group:
        group.run(work)
