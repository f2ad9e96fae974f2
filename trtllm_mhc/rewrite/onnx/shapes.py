# SPDX-License-Identifier: Apache-2.0
"""Types and shapes of a model's tensors, as far as the model lacks them."""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from trtllm_mhc import plugin
from trtllm_mhc.network import plugins


def complete(model: ir.Model) -> None:
    """Infer what is missing. Exporters write nearly all of it; what can't be inferred stays unknown.

    onnx knows nothing of the collectives. In the model that it is shown (a copy without the weights) they copy.
    """
    if all(_is_known(value) for node in model.graph for value in node.outputs):
        return
    copy = model.clone()
    for node in list(copy.graph):
        if node.op_type in (plugins.ALL_REDUCE, "DistCollective"):
            _copy(copy.graph, node, [node.inputs[0]])
        elif node.op_type == plugins.BOUNDARY and node.domain == plugin.NAMESPACE:
            _copy(copy.graph, node, [node.inputs[1], node.inputs[0]])
    logging.getLogger("onnx_ir.passes.common.shape_inference").setLevel(logging.ERROR)
    ShapeInferencePass(check_type=False, strict_mode=False)(copy)
    inferred = {value.name: value for node in copy.graph for value in node.outputs}
    for node in model.graph:
        for value in node.outputs:
            found = inferred.get(value.name)
            if found is not None and not _is_known(value):
                _merge(value, found)


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
