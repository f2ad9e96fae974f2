# SPDX-License-Identifier: Apache-2.0
"""Many execution contexts and groups in one process: nothing leaks, and each finds its own communicator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu.loopback import DeviceInputs, make_inputs
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.threads import ThreadGroup

HIDDEN = 5120
EPS = float(np.float32(1e-20))
ROOT = Path(__file__).parents[2]
CONTEXTS = 1000
# What Python and the driver may keep; a context of this engine takes 1 MiB of the device and a leaked one of a
# thousand would show on either side. Device memory is given out in pages of 2 MiB.
HOST_BYTES = 8 << 20
DEVICE_BYTES = 4 << 20


def host_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def device_bytes() -> int:
    free, total = cuda.call("cudaMemGetInfo")
    return int(total - free)


def test_a_thousand_contexts_leave_nothing(trt: Any) -> None:
    """Made, enqueued (each hundredth) and destroyed on both ranks; host and device memory before and after."""
    from trtllm_mhc import plugin_control
    from trtllm_mhc.runtime import build
    from trtllm_mhc.runtime.engine import communicators
    from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs

    job = SingleBoundaryJobs(HIDDEN, 2, EPS).fused()
    plan = build.build_engine(lambda network: job.populate(network, 0), rows=build.RowRange(1, 2, 4))
    inputs = make_inputs(np.random.default_rng(6), 2, 2, HIDDEN)
    assert inputs.pre is not None
    assert inputs.gamma is not None
    group = ThreadGroup(2, [0, 0])
    with communicators(group, "a thousand", hidden_size=HIDDEN, timeout_s=20) as comms:
        cuda.set_device(0)
        runtimes = [trt.Runtime(build.logger()) for _ in comms]
        engines = [runtime.deserialize_cuda_engine(plan.data) for runtime in runtimes]
        streams = [Stream() for _ in comms]
        on_device = [DeviceInputs(inputs, rank) for rank in range(2)]
        scratch = [DeviceArray((4, 4, HIDDEN), inputs.residual.dtype) for _ in range(4)]

        def once(enqueued: bool) -> None:
            contexts = []
            for rank, communicator in enumerate(comms):
                with communicator.bound():
                    contexts.append(engines[rank].create_execution_context())
            if not enqueued:
                return
            for rank, context in enumerate(contexts):
                given = on_device[rank]
                for name in ("x", "residual", "post", "comb", "pre", "gamma"):
                    array = getattr(given, name)
                    context.set_input_shape(name, array.shape)
                    context.set_tensor_address(name, array.pointer)
                context.set_tensor_address("residual_out", scratch[2 * rank].pointer)
                context.set_tensor_address("layer_input", scratch[2 * rank + 1].pointer)
                with plugin_control.warmup():
                    assert context.execute_async_v3(streams[rank].handle), plugin_control.take_error()
            for stream in streams:
                stream.synchronize(20)
            for rank, context in enumerate(contexts):
                assert context.execute_async_v3(streams[rank].handle), plugin_control.take_error()
            for stream in streams:
                stream.synchronize(20)

        for index in range(100):
            once(index % 10 == 0)
        before = host_bytes(), device_bytes()
        for index in range(CONTEXTS // 2):
            once(index % 100 == 0)
        after = host_bytes(), device_bytes()
        assert all(communicator.status() is None for communicator in comms)
        engines.clear()
        runtimes.clear()
    print(f"{CONTEXTS} contexts: host {after[0] - before[0]:+} bytes, device {after[1] - before[1]:+} bytes")
    assert after[0] - before[0] < HOST_BYTES
    assert after[1] - before[1] < DEVICE_BYTES


def test_communicators_leave_nothing() -> None:
    def once(rank: int, turn: int) -> None:
        Communicator.threads(f"turn {turn}", tp_size=2, rank=rank, device=0, hidden_size=HIDDEN).close()

    group = ThreadGroup(2, [0, 0])

    def turns(first: int, last: int) -> None:
        group.run(lambda rank: [once(rank, turn) for turn in range(first, last)], timeout_s=60)

    turns(0, 10)
    before = host_bytes(), device_bytes()
    turns(10, 110)
    assert host_bytes() - before[0] < HOST_BYTES
    assert device_bytes() - before[1] < DEVICE_BYTES


def test_two_groups_at_once() -> None:
    """World ranks 0, 1 and 2, 3: each group with other values, all four at work at the same time."""
    group = ThreadGroup.on_devices(4)
    calls = [make_inputs(np.random.default_rng(seed), 2, 7, HIDDEN) for seed in range(2)]
    assert group.devices is not None
    devices = group.devices

    def work(world_rank: int) -> None:
        number, rank = divmod(world_rank, 2)
        with Communicator.threads(
            f"group {number}",
            tp_size=2,
            rank=rank,
            device=devices[world_rank],
            hidden_size=HIDDEN,
            timeout_s=20,
            wait_mode="gate",
            group=(2 * number, 2 * number + 1),
        ) as communicator:
            stream = Stream()
            on_device = DeviceInputs(calls[number], rank)
            expected = calls[number].expected()
            group.barrier()
            for turn in range(50):
                on_device.poison()
                on_device.boundary(communicator, stream)
                on_device.check(expected, stream, f" of world rank {world_rank}, turn {turn}")
            group.barrier()

    group.run(work, timeout_s=100)


@pytest.fixture(scope="module")
def embedded(trt: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedded") / "with_library.engine"
    run_script("build", path)
    return path


def run_script(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.embedded_library", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("order", ["package", "engine"])
def test_a_library_that_is_in_the_engine_too_sees_the_same_communicators(embedded: Path, order: str) -> None:
    report = json.loads(run_script(order, embedded).splitlines()[-1])
    assert report["copies"] >= 2  # otherwise TensorRT has unpacked none, and nothing was tested
