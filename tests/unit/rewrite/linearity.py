# SPDX-License-Identifier: Apache-2.0
"""How long the rewrite pass takes for networks of 40, 400 and 4 000 layers, each of two boundaries.

    python tests/unit/rewrite/linearity.py --record tests/results/linearity.json

Times are of the pass alone, in the processor time of its thread; the network and the ONNX model are made before.

Where a size is dynamic, TensorRT takes the longer to tell a tensor's shape (`ITensor.shape`) the further from the
inputs it is, so building such a network takes time that grows with the square of its layers, and so does asking for
its shapes. That is why the networks of 4 000 layers have a number of rows, and why of a network with dynamic rows, up
to 400 layers, the time without those questions is recorded as well. ONNX models have dynamic rows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

LAYERS = (40, 400, 4000)
DYNAMIC_LAYERS = (40, 400)
HIDDEN = 4096


def populate(network, layers: int, batch: str = "rows") -> None:
    """A chain of boundaries as `ops` writes them, two for each layer, with carried coefficients as inputs."""
    import rewrite_forms

    writer = rewrite_forms.Writer(network, rewrite_forms.Form(batch=batch))
    tensors = writer.inputs()
    x, streams = tensors["x"], tensors["residual"]
    for _ in range(2 * layers):
        streams = writer.post(writer.all_reduce(x), streams, tensors["post"], tensors["comb"])
        x = writer.norm(writer.collapse(streams, tensors["pre"]), tensors["gamma"])
    network.mark_output(streams)
    network.mark_output(x)


def onnx_model(layers: int):
    """The same as an ONNX model."""
    import onnx_forms

    m = onnx_forms.Model(("M",))
    x, streams = "x", "residual"
    for _ in range(2 * layers):
        streams = onnx_forms.post(m, "multiply", m.all_reduce(x), streams)
        x = onnx_forms.norm(m, "divide", onnx_forms.collapse(m, "multiply", streams))
    return m.build({"streams": streams, "layer_input": x})


def seconds(work) -> float:
    """Processor time of ``work``, without garbage collections, which are the whole process's."""
    gc.collect()
    gc.disable()
    begin = time.thread_time()
    work()
    taken = time.thread_time() - begin
    gc.enable()
    return taken


def time_network(builder, flags: int, layers: int, batch: str = "static") -> float:
    """Of `fuse_boundaries`."""
    from trtllm_mhc.rewrite import fuse_boundaries

    network = builder.create_network(flags)
    populate(network, layers, batch)
    reports = []
    taken = seconds(lambda: reports.append(fuse_boundaries(network)))
    assert reports[0].full == 2 * layers, reports[0].summary()
    return taken


@contextlib.contextmanager
def counted_shapes() -> Iterator[list[float]]:
    """Collects how long each question for a tensor's shape takes."""
    from trtllm_mhc.network import layers

    original, taken = layers.tensor_shape, []

    def timed(tensor):
        begin = time.thread_time()
        try:
            return original(tensor)
        finally:
            taken.append(time.thread_time() - begin)

    layers.tensor_shape = timed
    try:
        yield taken
    finally:
        layers.tensor_shape = original


def time_onnx(layers: int) -> float:
    """Of `fuse_model`, with the inference of all shapes."""
    import onnx_ir as ir

    from trtllm_mhc.rewrite.onnx import fuse_model

    model = ir.from_proto(onnx_model(layers))
    reports = []
    taken = seconds(lambda: reports.append(fuse_model(model)))
    assert reports[0].full == 2 * layers, reports[0].summary()
    return taken


def note(record: dict[str, object], kind: str, layers: Sequence[int], taken: list[float]) -> None:
    """Add the times of networks of so many layers, and by how much the time per layer grows from one to the next."""
    per_layer = [each / count for each, count in zip(taken, layers, strict=True)]
    record[kind] = {
        "layers": list(layers),
        "seconds": [round(each, 3) for each in taken],
        "growth_of_time_per_layer": [round(b / a, 2) for a, b in itertools.pairwise(per_layer)],
    }
    print(kind, record[kind], flush=True)


def main() -> None:
    import tensorrt as trt

    from trtllm_mhc import plugin

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    plugin.load()
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    flags = 0 if flag is None else 1 << int(flag)
    record = {"tensorrt": trt.__version__, "boundaries_per_layer": 2}
    for kind, measure in (("network", lambda n: time_network(builder, flags, n)), ("onnx", time_onnx)):
        measure(LAYERS[0])  # imports, and what is computed once
        note(record, kind, LAYERS, [measure(layers) for layers in LAYERS])
    whole, rest = [], []
    for layers in DYNAMIC_LAYERS:
        with counted_shapes() as questions:
            whole.append(time_network(builder, flags, layers, "rows"))
        rest.append(whole[-1] - sum(questions))
    note(record, "network_with_dynamic_rows", DYNAMIC_LAYERS, whole)
    note(record, "network_with_dynamic_rows_without_shapes", DYNAMIC_LAYERS, rest)
    if arguments.record:
        arguments.record.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
