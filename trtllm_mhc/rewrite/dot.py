# SPDX-License-Identifier: Apache-2.0
"""The layers around one layer, as Graphviz text."""

from __future__ import annotations

from typing import Any

from trtllm_mhc.rewrite.graph import Graph, Node, Value
from trtllm_mhc.rewrite.tensorrt_graph import TensorRTGraph


def neighbourhood_dot(network: Any, layer_name: str, radius: int = 4) -> str:
    """The layers within ``radius`` tensors of a layer, for looking at a boundary that was refused.

    Args:
        network: an ``INetworkDefinition`` with its outputs marked, or the `Graph` of any network.
        layer_name: for example the ``all_reduce`` of a report's entry.
        radius: how many tensors to follow, in both directions.

    Returns:
        A ``digraph``. The layer is bold; layers that no output depends on are dashed; outputs are double ellipses.

    Raises:
        ValueError: the network has no such layer, or no outputs.
    """
    graph = network if isinstance(network, Graph) else TensorRTGraph(network)
    start = next((node for node in graph.nodes if node.name == layer_name), None)
    if start is None:
        raise ValueError(f"neighbourhood_dot: expected the name of a layer of the network, got {layer_name!r}")
    near = _within(start, radius)
    lines = ["digraph boundary {", "  node [shape=box, fontname=monospace];"]
    for node in sorted(near, key=lambda node: node.index):
        style = "bold" if node is start else "solid" if node.live else "dashed"
        text = f"{node.kind}\\n{_escape(node.name)}"
        lines.append(f'  l{node.index} [label="{text}", style={style}];')
        for output in node.outputs:
            lines += [
                f"  l{node.index} -> l{each.index} [{_label(output)}];" for each, _ in output.consumers if each in near
            ]
            if output.is_output:
                lines.append(f'  "{_escape(output.name)}" [shape=ellipse, peripheries=2];')
                lines.append(f'  l{node.index} -> "{_escape(output.name)}" [{_label(output)}];')
        for operand in node.operands:
            if operand.producer is None:
                lines.append(f'  "{_escape(operand.name)}" [shape=ellipse];')
                lines.append(f'  "{_escape(operand.name)}" -> l{node.index} [{_label(operand)}];')
    return "\n".join([*lines, "}", ""])


def _within(start: Node, radius: int) -> set[Node]:
    near, edge = {start}, {start}
    for _ in range(radius):
        after = {each for node in edge for output in node.outputs for each, _ in output.consumers}
        before = {operand.producer for node in edge for operand in node.operands if operand.producer is not None}
        edge = (after | before) - near
        near |= edge
    return near


def _label(value: Value) -> str:
    return f'label="{value.dtype.name if value.dtype is not None else "?"} {list(value.shape)}"'


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
