# SPDX-License-Identifier: Apache-2.0
"""Types and shapes of a model's tensors, as far as the model lacks them."""

from __future__ import annotations

import onnx
import onnx.shape_inference
import onnx_ir as ir

from trtllm_mhc import plugin
from trtllm_mhc.network import plugins
from trtllm_mhc.rewrite.graph import MAX_CONSTANT


def complete(model: ir.Model) -> None:
    """Infer what is missing. Exporters write nearly all of it; what can't be inferred stays unknown.

    onnx knows nothing of the collectives. In the model that it is shown (a copy without the weights) they copy.
    """
    if all(_is_known(value) for node in model.graph for value in node.outputs):
        return
    copy = model.clone().graph
    for node in list(copy):
        if node.op_type in (plugins.ALL_REDUCE, "DistCollective"):
            _copy(copy, node, [node.inputs[0]])
        elif node.op_type == plugins.BOUNDARY and node.domain == plugin.NAMESPACE:
            row = 3 if node.attributes.get_int("top_k", 0) else 0  # what has the shape of the layer input
            _copy(copy, node, [node.inputs[row + 1], node.inputs[row]])
    inferred = _infer(model, copy)
    for node in model.graph:
        for value in node.outputs:
            found = inferred.get(value.name or "")
            if found is not None and not _is_known(value):
                _merge(value, ir.serde.deserialize_value_info_proto(found, None))


def _infer(model: ir.Model, graph: ir.Graph) -> dict[str, onnx.ValueInfoProto]:
    """What onnx can tell of the tensors of ``graph``, in which it gets inputs in the place of the weights."""
    weights = [
        value
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.size > MAX_CONSTANT
    ]
    inputs = set(graph.inputs)
    for weight in weights:
        del graph.initializers[weight.name or ""]
    graph.inputs.extend(weight for weight in weights if weight not in inputs)
    proto = ir.to_proto(ir.Model(graph, ir_version=model.ir_version))
    try:
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except onnx.shape_inference.InferenceError:
        return {}  # of no tensor more than the model says
    return {value.name: value for value in (*proto.graph.value_info, *proto.graph.output)}


def _is_known(value: ir.Value) -> bool:
    """Whether it has a type and shape in which every size has a number or a name."""
    if value.dtype is None or value.shape is None:
        return False
    return all(isinstance(size, int) or size.value is not None for size in value.shape)


def _copy(graph: ir.Graph, node: ir.Node, sources: list[ir.Value | None]) -> None:
    """Put copies of ``sources`` in the place of the outputs of ``node``."""
    for output, source in zip(node.outputs, sources, strict=False):
        made = ir.node("Identity", [source])
        graph.insert_before(node, made)
        output.replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
        name, output.name = output.name, None
        made.outputs[0].name = name
    graph.remove(node, safe=False)


def _merge(value: ir.Value, found: ir.Value) -> None:
    if value.dtype is None and found.dtype is not None:
        value.dtype = found.dtype
    if found.shape is None:
        return
    if value.shape is None:
        value.shape = found.shape
        return
    if len(value.shape) != len(found.shape):
        return
    pairs = zip(value.shape, found.shape, strict=True)
    value.shape = ir.Shape([b if isinstance(a, ir.SymbolicDim) and a.value is None else a for a, b in pairs])
