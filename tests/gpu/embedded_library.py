# SPDX-License-Identifier: Apache-2.0
"""A process of its own for test_embedded_library.py: an engine that carries the library, beside the library.

embedded_library.py build FILE     builds one boundary with the library in it
embedded_library.py run FILE       runs it on two ranks; the library itself is loaded after the engine
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt as trt

from tests.gpu.loopback import make_inputs
from trtllm_mhc import plugin, plugin_control, reference
from trtllm_mhc.runtime import build
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.engine import communicators
from trtllm_mhc.runtime.threads import ThreadGroup

HIDDEN = 5120
EPS = float(np.float32(1e-20))
TP = 2


def build_engine(path: Path) -> None:
    from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs

    recorder = build.ErrorRecorder()
    builder = build.make_builder(recorder)
    network = build.make_network(builder)
    keep_alive = SingleBoundaryJobs(HIDDEN, TP, EPS).fused().populate(network, 0)
    config = builder.create_builder_config()
    config.plugins_to_serialize = [os.fspath(plugin.library_path())]
    profile = builder.create_optimization_profile()
    for name, shapes in build.profile_shapes(network, build.RowRange(1, 8, 64), {}).items():
        profile.set_shape(name, *shapes)
    config.add_optimization_profile(profile)
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise RuntimeError(build.explain("the build failed", recorder))
    del keep_alive
    path.write_bytes(bytes(data))


def load(path: Path) -> tuple[Any, Any]:
    runtime = trt.Runtime(build.logger())
    runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    assert engine is not None
    return runtime, engine


def run(path: Path) -> dict[str, Any]:
    """A runtime for each rank: TensorRT registers a library once a runtime."""
    loaded = [load(path) for _ in range(TP)]
    plugin.load()
    with open("/proc/self/maps") as maps:
        copies = {line.split(maxsplit=5)[5].strip() for line in maps if "pluginLibrary" in line or "trtllm_mhc" in line}
    inputs = make_inputs(np.random.default_rng(3), TP, 5, HIDDEN)
    expected = inputs.expected()
    group = ThreadGroup.on_devices(TP)

    def work(rank: int) -> None:
        with comms[rank].bound():
            context = loaded[rank][1].create_execution_context()
        assert inputs.pre is not None
        assert inputs.gamma is not None
        feeds = {"x": inputs.xs[rank], "residual": inputs.residual, "post": inputs.post, "comb": inputs.comb}
        feeds |= {"pre": inputs.pre, "gamma": inputs.gamma}
        arrays = {name: DeviceArray.from_numpy(array) for name, array in feeds.items()}
        for name, array in arrays.items():
            context.set_input_shape(name, array.shape)
        arrays["residual_out"] = DeviceArray(inputs.residual.shape, inputs.residual.dtype)
        arrays["layer_input"] = DeviceArray(inputs.xs[rank].shape, inputs.residual.dtype)
        for name, array in arrays.items():
            context.set_tensor_address(name, array.pointer)
        stream = Stream()
        with plugin_control.warmup():
            assert context.execute_async_v3(stream.handle), plugin_control.take_error()
        stream.synchronize(20)
        group.barrier()
        assert context.execute_async_v3(stream.handle), plugin_control.take_error()
        stream.synchronize(20)
        reference.assert_bits_equal(arrays["residual_out"].to_numpy(stream), expected[0], f"rank {rank}")
        assert expected[1] is not None
        reference.assert_bits_equal(arrays["layer_input"].to_numpy(stream), expected[1], f"rank {rank}")

    with communicators(group, "embedded", hidden_size=HIDDEN, timeout_s=20) as comms:
        group.run(work, timeout_s=60)
    return {"copies": len(copies)}


def main() -> None:
    what, path = sys.argv[1], Path(sys.argv[2])
    if what == "build":
        build_engine(path)
    else:
        print(json.dumps(run(path)), flush=True)


if __name__ == "__main__":
    main()
