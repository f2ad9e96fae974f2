# SPDX-License-Identifier: Apache-2.0
"""Boundaries of an ONNX model become `MhcBoundary` nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import tensorrt as trt
from onnx_ir.passes.common import InlinePass

from trtllm_mhc import plugin
from trtllm_mhc.network import plugins
from trtllm_mhc.rewrite.analysis import analyse
from trtllm_mhc.rewrite.coefficients import CoefficientsMatch
from trtllm_mhc.rewrite.graph import Array, Value
from trtllm_mhc.rewrite.legality import lead_source
from trtllm_mhc.rewrite.onnx.graph import OnnxGraph
from trtllm_mhc.rewrite.onnx.shapes import complete
from trtllm_mhc.rewrite.plan import FuseOptions, Plan
from trtllm_mhc.rewrite.report import Report

#: The oldest opset: its Shape, Split and ReduceMean are those of all later ones.
MIN_OPSET = 18


@dataclass(frozen=True)
class _Replacement:
    old: ir.Value
    new: ir.Value


def view(model: ir.Model) -> OnnxGraph:
    """The view of a model, whose function calls are inlined and missing shapes filled in.

    Raises:
        ValueError: the model has no outputs, or an older opset.
    """
    version = model.graph.opset_imports.get("", 0)
    if version < MIN_OPSET:
        raise ValueError(
            f"expected a model of opset {MIN_OPSET} or later, got {version}; convert it with onnx.version_converter"
        )
    if model.functions:
        InlinePass()(model)
    complete(model)
    return OnnxGraph(model.graph)


def fuse_model(model: ir.Model, options: FuseOptions | None = None) -> Report:
    """Replace the boundaries of ``model`` by nodes of the plugin, and report on each.

    The same as :func:`trtllm_mhc.rewrite.fuse_boundaries`, for a model of onnx-ir. The all-reduce is a ``MhcAllReduce``
    node of the domain ``trtllm_mhc`` or TensorRT's ``DistCollective``. The new nodes' outputs have the names of the
    tensors that they replace. Replaced nodes, and initializers that nothing else reads, are removed. Function calls are
    inlined.

    Args:
        model: of opset 18 or later; weights may be external and are not read.
        options: what the model does not say itself.

    Raises:
        ValueError: the model has no outputs, or an older opset; or the options ask for publishing linear layers, which
            only networks of TensorRT can get: an exporter's weights would have to be read and turned.
    """
    options = options or FuseOptions()
    if options.publish_linear != "off":
        raise ValueError(
            f"fuse_model: publish_linear: expected 'off' for an ONNX model, got {options.publish_linear!r}"
        )
    analysis = analyse(view(model), options)
    replacements: list[_Replacement] = []
    for name, what in analysis.steps:
        writer = _Writer(model.graph, name)
        replacements += writer.boundary(what) if isinstance(what, Plan) else writer.coefficients(what)
    if replacements:
        _rewire(model.graph, replacements)
        model.graph.opset_imports.setdefault(plugin.NAMESPACE, 1)
    return analysis.report()


class _Writer:
    """Appends the nodes of one boundary to a graph; nothing reads them yet."""

    def __init__(self, graph: ir.Graph, name: str) -> None:
        self.graph = graph
        self.name = name

    def boundary(self, plan: Plan) -> list[_Replacement]:
        found, post = plan.boundary, plan.boundary.post
        hidden, hc = post.streams.shape[-1], post.hc
        inputs = [
            *self.contribution(plan),
            self.flat(post.residual, "residual", (hc, hidden)),
            self.flat(post.post, "post", (hc,)),
            self.flat(post.comb, "comb", (hc, hc), transpose=post.comb_transposed),
        ]
        attributes: dict[str, Any] = {
            "tp_size": plan.tp_size,
            "collapse": int(plan.norm is not None),
            "plugin_version": plugin.VERSION,
            "plugin_namespace": plugin.NAMESPACE,
        }
        if plan.finalize is not None:
            attributes["top_k"] = plan.finalize.top_k
        if plan.rank >= 0:
            attributes["rank"] = plan.rank
        if plan.group_field:
            attributes["group"] = list(plan.group_field)
        wanted = [("residual_out", post.streams)]
        if plan.norm is not None and plan.collapse is not None and plan.norm.gamma is not None:
            inputs += [self.flat(plan.collapse.pre, "pre", (hc,)), self.vector(plan.norm.gamma)]
            attributes["norm_eps"] = plan.norm.eps
            wanted.append(("layer_input", plan.norm.layer_input))
        outputs = self.add(plugins.BOUNDARY, inputs, [role for role, _ in wanted], plugin.NAMESPACE, **attributes)
        replacements = []
        for (role, old), made in zip(wanted, outputs, strict=True):
            made.dtype = ir.DataType.BFLOAT16
            made.shape = ir.Shape([None, *old.shape[-2:]] if role == "residual_out" else [None, hidden])
            replacements.append(_Replacement(old.tensor, self.restore(made, old, role, lead_source(found, old))))
        return replacements

    def coefficients(self, match: CoefficientsMatch) -> list[_Replacement]:
        """The node of a sublayer's mixes."""
        streams, behind = match.streams, 1 if match.is_broadcast else 2
        fn = match.fn.tensor
        if match.fn_transposed:
            fn = self.add("Transpose", [fn], ["fn"], perm=[1, 0])[0]
        inputs = [
            self.flat(streams, "streams", streams.shape[-behind:]),
            fn,
            self.constant("scale", match.scale),
            self.constant("base", match.base),
        ]
        attributes = {
            "rms_norm_eps": match.rms_norm_eps,
            "hc_eps": match.hc_eps,
            "post_alpha": match.post_alpha,
            "sinkhorn_iters": match.sinkhorn_iters,
            "broadcast": int(match.is_broadcast),
            "plugin_version": plugin.VERSION,
            "plugin_namespace": plugin.NAMESPACE,
        }
        roles = ("post", "comb", "pre")
        outputs = self.add(plugins.COEFFICIENTS, inputs, list(roles), plugin.NAMESPACE, **attributes)
        replacements = []
        for role, old, made in zip(roles, (match.post, match.comb, match.pre), outputs, strict=True):
            made.dtype = ir.DataType.FLOAT
            made.shape = ir.Shape([None, *old.shape[len(streams.shape) - behind :]])
            lead = streams, len(streams.shape) - behind
            replacements.append(_Replacement(old.tensor, self.restore(made, old, role, lead)))
        return replacements

    def contribution(self, plan: Plan) -> list[ir.Value]:
        """What the node takes from this rank."""
        found, finalize = plan.boundary, plan.finalize
        hidden = found.post.streams.shape[-1]
        if finalize is None or finalize.shared is None:
            return [self.flat(found.all_reduce.partial, "x", (hidden,))]
        index = self.flat(finalize.index, "index", (finalize.top_k,))
        if finalize.index.dtype != trt.int32:
            index = self.add("Cast", [index], ["index/narrow"], to=int(ir.DataType.INT32))[0]
        return [
            finalize.rows.tensor,
            self.flat(finalize.weights, "expert_weights", (finalize.top_k,)),
            index,
            self.flat(finalize.shared, "shared_output", (hidden,)),
        ]

    def flat(self, value: Value, role: str, trailing: tuple[int, ...], *, transpose: bool = False) -> ir.Value:
        """``value`` as [M, *trailing]."""
        tensor: ir.Value = value.tensor
        is_models_own = tensor.shape is not None and len(tensor.shape) == len(value.shape)
        if not is_models_own or len(value.shape) != 1 + len(trailing) or value.shape[1:] != trailing:
            tensor = self.add("Reshape", [tensor, self.integers(f"{role}/to", [-1, *trailing])], [role])[0]
        if transpose:
            tensor = self.add("Transpose", [tensor], [f"{role}/transposed"], perm=[0, 2, 1])[0]
        return tensor

    def vector(self, gamma: Value) -> ir.Value:
        """The weight of the norm as [H] in bfloat16, which holds its values (`legality`)."""
        tensor: ir.Value = gamma.tensor
        if tensor.shape is None or len(tensor.shape) != 1:
            tensor = self.add("Reshape", [tensor, self.integers("gamma/to", [-1])], ["gamma"])[0]
        if gamma.tensor.dtype != ir.DataType.BFLOAT16:
            tensor = self.add("Cast", [tensor], ["gamma/narrow"], to=int(ir.DataType.BFLOAT16))[0]
        return tensor

    def restore(self, made: ir.Value, like: Value, role: str, lead: tuple[Value, int] | None) -> ir.Value:
        """The plugin's output in the shape of the tensor that it replaces."""
        assert made.shape is not None
        if len(made.shape) == len(like.shape):
            return made
        if like.shape.count(-1) <= 1:
            return self.add("Reshape", [made, self.integers(f"{role}/to", like.shape)], [f"{role}/shaped"])[0]
        assert lead is not None
        source, count = lead
        sizes = self.add("Shape", [source.tensor], [f"{role}/lead"], start=0, end=count)[0]
        trailing = self.integers(f"{role}/trailing", like.shape[count:])
        target = self.add("Concat", [sizes, trailing], [f"{role}/to"], axis=0)[0]
        return self.add("Reshape", [made, target], [f"{role}/shaped"])[0]

    def integers(self, role: str, numbers: Any) -> ir.Value:
        """A constant of int64."""
        return self.constant(role, np.array(numbers, np.int64))

    def constant(self, role: str, array: Array) -> ir.Value:
        """A constant."""
        tensor = ir.tensor(array)
        made = self.add("Constant", [], [role], value=tensor)[0]
        made.dtype, made.shape = tensor.dtype, ir.Shape(list(array.shape))
        return made

    def add(
        self, op_type: str, inputs: list[ir.Value], roles: list[str], domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        """A node and its outputs. That of the boundary itself has the boundary's name."""
        name = self.name if domain else f"{self.name}/{roles[0]}"
        node = ir.node(op_type, inputs, attributes, domain=domain, num_outputs=len(roles), name=name)
        for output, role in zip(node.outputs, roles, strict=True):
            output.name = f"{self.name}/{role}"
        self.graph.append(node)
        return list(node.outputs)


def _rewire(graph: ir.Graph, replacements: list[_Replacement]) -> None:
    """Let everything that reads an old tensor read the new one, under the old one's name, and drop what is left."""
    for replacement in replacements:
        old, new = replacement.old, replacement.new
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        name, old.name = old.name, f"{old.name}/unfused"
        new.name = name
    _remove_unused(graph, [r.old.producer() for r in replacements])
    graph.sort()


def _remove_unused(graph: ir.Graph, candidates: list[ir.Node | None]) -> None:
    """Remove those of the nodes, and of the nodes and initializers before them, that nothing reads any more."""
    stack = [node for node in candidates if node is not None]
    initializers: dict[ir.Value, None] = {}
    while stack:
        node = stack.pop()
        if node.graph is not graph or any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        inputs = [value for value in node.inputs if value is not None]
        graph.remove(node, safe=True)
        for value in inputs:
            producer = value.producer()
            if producer is not None:
                stack.append(producer)
            elif value.is_initializer():
                initializers[value] = None
    kept = {*graph.inputs, *graph.outputs}
    for value in initializers:
        if value not in kept and not value.uses() and value.name is not None:
            graph.initializers.pop(value.name, None)
