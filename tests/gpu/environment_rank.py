# SPDX-License-Identifier: Apache-2.0
"""One rank of test_environment.py, a process of its own whose group is named by environment variables alone.

environment_rank.py boundaries SIZE         Communicator.from_environment and some boundaries
environment_rank.py join SIZE               Communicator.from_environment, then sleeps
environment_rank.py engine FOLDER           folder/plan.engine over folder/inputs{rank}.npz, then what must be refused;
                                            nothing here makes a communicator
environment_rank.py trap FOLDER             the same, of which rank 1 ends early

Prints one line of JSON. Ends by itself, without closing anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.loopback import DeviceInputs, make_inputs
from tests.gpu.run_plan import pack, unpack
from trtllm_mhc import plugin_control
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import CudaError, DeviceArray, Stream
from trtllm_mhc.runtime.library import MhcError

HIDDEN = 5120


def boundaries(size: int) -> dict[str, Any]:
    with Communicator.from_environment(tp_size=size, hidden_size=HIDDEN) as communicator:
        rank = communicator.info.rank
        cuda.set_device(communicator.info.device)
        rng = np.random.default_rng(0)
        calls = [make_inputs(rng, size, rows, HIDDEN) for rows in (3, 70)]
        inputs = [DeviceInputs(call, rank) for call in calls]
        stream = Stream()
        communicator.reset()  # nobody allocates any more
        for call, on_device in zip(calls, inputs, strict=True):
            on_device.boundary(communicator, stream)
            on_device.check(call.expected(), stream, f" on rank {rank}")
        return {"rank": rank, "ranks_per_device": communicator.info.ranks_per_device}


def join(size: int) -> dict[str, Any]:
    communicator = Communicator.from_environment(tp_size=size, hidden_size=HIDDEN)
    print(json.dumps({"joined": communicator.info.rank}), flush=True)
    time.sleep(60)
    return {}


class Engine:
    """The plan of `folder` on this rank's device, and execution contexts over this rank's inputs."""

    def __init__(self, folder: Path) -> None:
        import tensorrt as trt

        from trtllm_mhc import plugin
        from trtllm_mhc.runtime import build

        rank = int(os.environ["RANK"])
        cuda.set_device(rank % cuda.device_count())
        self.feeds = unpack(np.load(folder / f"inputs{rank}.npz"))
        plugin.load()
        self._runtime = trt.Runtime(build.logger())
        self._engine = self._runtime.deserialize_cuda_engine((folder / "plan.engine").read_bytes())
        self.stream = Stream()

    def make_context(self) -> tuple[Any, dict[str, DeviceArray]]:
        context = self._engine.create_execution_context()
        arrays = {name: DeviceArray.from_numpy(array) for name, array in self.feeds.items()}
        for name, array in arrays.items():
            context.set_input_shape(name, array.shape)
        arrays["residual_out"] = DeviceArray(self.feeds["residual"].shape, self.feeds["residual"].dtype)
        arrays["layer_input"] = DeviceArray(self.feeds["x"].shape, self.feeds["residual"].dtype)
        for name, array in arrays.items():
            context.set_tensor_address(name, array.pointer)
        with plugin_control.warmup():
            self.enqueue(context)
        self.stream.synchronize(20)
        return context, arrays

    def enqueue(self, context: Any) -> None:
        assert context.execute_async_v3(self.stream.handle), plugin_control.take_error()


def engine(folder: Path) -> dict[str, Any]:
    ours = Engine(folder)
    stream = ours.stream
    first, arrays = ours.make_context()
    captured = None
    with contextlib.suppress(CudaError), stream.capture() as graph:  # TensorRT may have spoilt the capture
        captured = first.execute_async_v3(stream.handle)
    graph.close()
    report: dict[str, Any] = {"captured": captured, "capture_error": plugin_control.take_error()}
    for _ in range(3):
        ours.enqueue(first)
    stream.synchronize(20)
    outputs = {name: arrays[name].to_numpy(stream) for name in ("residual_out", "layer_input")}
    np.savez(folder / f"outputs{os.environ['RANK']}.npz", **pack(outputs))  # type: ignore[arg-type]
    second, _ = ours.make_context()
    report["second"] = second.execute_async_v3(stream.handle)
    report["second_error"] = plugin_control.take_error()
    del first
    report["after_the_first"] = second.execute_async_v3(stream.handle)
    report["after_the_first_error"] = plugin_control.take_error()
    stream.synchronize(20)
    return report


def trap(folder: Path) -> dict[str, Any]:
    """Rank 1 ends after the first pass; rank 0 goes on, and its kernel must not end as if all were well."""
    ours = Engine(folder)
    context, _ = ours.make_context()
    ours.enqueue(context)
    ours.stream.synchronize(20)
    if os.environ["RANK"] == "1":
        return {}
    ours.enqueue(context)
    begin = time.monotonic()
    try:
        ours.stream.synchronize(40)
        report: dict[str, Any] = {"error": None}
    except CudaError as error:
        report = {"error": str(error)}
    report["seconds"] = time.monotonic() - begin
    print(json.dumps(report), flush=True)
    os._exit(0)  # the device's context is lost: nothing can be freed


def main() -> None:
    mode, argument = sys.argv[1:]
    on_groups = {"boundaries": boundaries, "join": join}
    on_engines = {"engine": engine, "trap": trap}
    try:
        report = on_groups[mode](int(argument)) if mode in on_groups else on_engines[mode](Path(argument))
    except MhcError as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
