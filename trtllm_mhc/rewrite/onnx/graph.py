# SPDX-License-Identifier: Apache-2.0
"""The view of an ONNX model."""

from __future__ import annotations

import onnx_ir as ir

from trtllm_mhc.rewrite.graph import Graph, Value
from trtllm_mhc.rewrite.onnx.lower import lower
from trtllm_mhc.rewrite.onnx.view import View


class OnnxGraph(Graph):
    """The layers and tensors of a model's main graph as they are now.

    Graphs inside of nodes (of ``If``, ``Loop`` and ``Scan``) are not looked into; what they read counts as read.

    Args:
        graph: its tensors have their types and shapes (`trtllm_mhc.rewrite.onnx.shapes`).

    Raises:
        ValueError: the graph has no outputs.
    """

    def __init__(self, graph: ir.Graph) -> None:
        if not graph.outputs:
            raise ValueError("fuse_boundaries: expected a model with outputs, got none")
        view = View(graph)
        for node in graph:
            lower(view, node)
        outputs: list[Value] = []
        for value in graph.outputs:
            output = view.value(value)
            output.is_graph_output = True
            outputs.append(output)
        super().__init__(view.nodes, view.values, outputs)
