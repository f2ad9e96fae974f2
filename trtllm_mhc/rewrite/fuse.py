# SPDX-License-Identifier: Apache-2.0
"""The rewrite pass: boundaries written as native layers become `MhcBoundary` plugin layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorrt as trt

from trtllm_mhc.network import layers, plugins
from trtllm_mhc.network.ops import cast, constant
from trtllm_mhc.reference.publish_linear import pack_weight_scales
from trtllm_mhc.rewrite.analysis import analyse
from trtllm_mhc.rewrite.coefficients import CoefficientsMatch
from trtllm_mhc.rewrite.graph import Value
from trtllm_mhc.rewrite.legality import lead_source
from trtllm_mhc.rewrite.plan import FuseOptions, Plan, PublishedLinear
from trtllm_mhc.rewrite.report import Report
from trtllm_mhc.rewrite.tensorrt_graph import TensorRTGraph


@dataclass(frozen=True)
class _Replacement:
    old: Value
    new: Any


def fuse_boundaries(network: Any, options: FuseOptions | None = None) -> Report:
    """Replace the boundaries of ``network`` by fused plugin layers, and report on each.

    A boundary is an all-reduce of a sublayer's partial output (``MhcAllReduce``, TensorRT's ``DIST_COLLECTIVE`` or
    TensorRT-LLM's ``AllReduce`` plugin) whose result is mixed into residual streams (mHC post), and usually the
    collapse of the streams with carried weights and the RMSNorm after it (delayed mHC pre). They are recognised by
    what they compute, whatever layers they are written with and whatever these are called. The end of a MoE before the
    all-reduce becomes part of its boundary; linear layers publish, and coefficients are replaced, where the options ask
    for them.

    All replacements are checked before the first is made. A boundary that is refused stays as it is. The replaced
    layers stay in the definition, where nothing uses them, and TensorRT drops them when it builds. Tensors of the same
    name and format take the place of replaced network outputs. Running the pass again changes nothing.

    Args:
        network: a strongly typed ``INetworkDefinition`` with its outputs marked.
        options: what the network does not say itself.

    Raises:
        ValueError: the network has no outputs.
        RuntimeError: TensorRT refused a layer that should have been legal; the network computes what it did before.
    """
    graph = TensorRTGraph(network)
    analysis = analyse(graph, options or FuseOptions())
    report = analysis.report()  # while the tensors have their names
    _rewire(graph, _add_layers(network, analysis.steps))
    return report


def _add_layers(network: Any, steps: list[tuple[str, Plan | CoefficientsMatch]]) -> list[_Replacement]:
    """Add the plugin layers beside the old ones; nothing reads them yet."""
    replacements: list[_Replacement] = []
    new: dict[Value, Any] = {}
    for name, what in steps:
        adapter = _Adapter(network, name, new)
        made = _add_boundary(adapter, what) if isinstance(what, Plan) else _add_coefficients(adapter, what)
        for role, old, tensor, lead in made:
            tensor.name = f"{name}/{role}"
            shaped = adapter.restore(tensor, old, role, lead)
            if shaped.dtype != old.dtype or (layers.tensor_shape(shaped) or ()) != old.shape:
                got = f"{shaped.dtype} {layers.tensor_shape(shaped)}"
                raise RuntimeError(f"{name}: {role}: expected {old.dtype} {old.shape} as {old.name!r}, got {got}")
            new[old] = shaped
            replacements.append(_Replacement(old, shaped))
    return replacements


#: Of each output of a new layer: its role, the tensor that it replaces, itself, and whence its leading sizes.
_Made = list[tuple[str, Value, Any, tuple[Value, int] | None]]


def _add_boundary(adapter: _Adapter, plan: Plan) -> _Made:
    boundary, post, network = plan.boundary, plan.boundary.post, adapter.network
    hidden, hc = post.streams.shape[-1], post.hc
    residual_out, layer_input = plugins.add_boundary(
        network,
        adapter.contribution(plan),
        adapter.flat(post.residual, "residual", (hc, hidden)),
        adapter.flat(post.post, "post", (hc,)),
        adapter.flat(post.comb, "comb", (hc, hc), transpose=post.comb_transposed),
        None if plan.collapse is None else adapter.flat(plan.collapse.pre, "pre", (hc,)),
        None if plan.norm is None or plan.norm.gamma is None else adapter.vector(plan.norm.gamma, "gamma"),
        tp_size=plan.tp_size or 0,
        norm_eps=None if plan.norm is None else plan.norm.eps,
        rank=plan.rank,
        group=plan.group_field,
        published=plan.linear is not None,
    )
    network.get_layer(network.num_layers - 1).name = adapter.name
    made: _Made = [("residual_out", post.streams, residual_out, lead_source(boundary, post.streams))]
    if plan.norm is not None:
        old = plan.norm.layer_input
        made.append(("layer_input", old, layer_input, lead_source(boundary, old)))
    return made


def _add_coefficients(adapter: _Adapter, match: CoefficientsMatch) -> _Made:
    network, streams = adapter.network, match.streams
    behind = 1 if match.is_broadcast else 2
    mixes = plugins.add_coefficients(
        network,
        adapter.flat(streams, "streams", streams.shape[-behind:]),
        adapter.transposed(match.fn, "fn") if match.fn_transposed else match.fn.tensor,
        constant(network, match.scale),
        constant(network, match.base),
        rms_norm_eps=match.rms_norm_eps,
        hc_eps=match.hc_eps,
        post_alpha=match.post_alpha,
        sinkhorn_iters=match.sinkhorn_iters,
    )
    network.get_layer(network.num_layers - 1).name = adapter.name
    lead = streams, len(streams.shape) - behind
    olds = (match.post, match.comb, match.pre)
    return [(role, old, made, lead) for role, old, made in zip(("post", "comb", "pre"), olds, mixes, strict=True)]


class _Adapter:
    """Reshapes around one plugin layer."""

    def __init__(self, network: Any, name: str, replaced: dict[Value, Any]) -> None:
        self.network = network
        self.name = name
        self.replaced = replaced

    def contribution(self, plan: Plan) -> Any:
        """What the layer takes from this rank."""
        boundary, finalize = plan.boundary, plan.finalize
        hidden = boundary.post.streams.shape[-1]
        if plan.linear is not None:
            return self.published(plan, plan.linear)
        if finalize is None or finalize.shared is None:
            return self.flat(boundary.all_reduce.partial, "x", (hidden,))
        top_k = (finalize.top_k,)
        return plugins.FinalizeInputs(
            gemm2_permuted=self._tensor(finalize.rows),
            expert_weights=self.flat(finalize.weights, "expert_weights", top_k),
            expanded_idx_to_permuted_idx=cast(self.network, self.flat(finalize.index, "index", top_k), trt.int32),
            shared_output=self.flat(finalize.shared, "shared_output", (hidden,)),
        )

    def published(self, plan: Plan, planned: PublishedLinear) -> Any:
        """The output of a linear layer that publishes."""
        linear, weight, scales = planned.linear, planned.weight, planned.scales
        x = plugins.add_publish_linear(
            self.network,
            self.flat(linear.activation, "activation", (linear.features,)),
            linear.constant.output.tensor if weight is None else constant(self.network, weight),
            None if scales is None else constant(self.network, pack_weight_scales(scales)),
            tp_size=plan.tp_size or 0,
            rank=plan.rank,
            group=plan.group_field,
        )
        self.network.get_layer(self.network.num_layers - 1).name = f"{self.name}/linear"
        return x

    def flat(self, value: Value, role: str, trailing: tuple[int, ...], *, transpose: bool = False) -> Any:
        """``value`` as [M, *trailing]."""
        tensor = self._tensor(value)
        if len(value.shape) == 1 + len(trailing) and value.shape[1:] == trailing and not transpose:
            return tensor
        layer = self._shuffle(tensor, role)
        layer.reshape_dims = (-1, *trailing)
        if transpose:
            layer.second_transpose = (0, 2, 1)
        return layer.get_output(0)

    def transposed(self, value: Value, role: str) -> Any:
        """``value`` with its two axes swapped."""
        layer = self._shuffle(self._tensor(value), role)
        layer.second_transpose = (1, 0)
        return layer.get_output(0)

    def vector(self, value: Value, role: str) -> Any:
        """``value`` as [H] in bfloat16, which holds its values (`legality`)."""
        tensor = self._tensor(value)
        if len(value.shape) != 1:
            layer = self._shuffle(tensor, role)
            layer.reshape_dims = (-1,)
            tensor = layer.get_output(0)
        return tensor if tensor.dtype == trt.bfloat16 else cast(self.network, tensor, trt.bfloat16)

    def restore(self, made: Any, like: Value, role: str, lead: tuple[Value, int] | None) -> Any:
        """The plugin's output in the shape of the tensor that it replaces."""
        if layers.tensor_shape(made) == like.shape:
            return made
        assert lead is not None
        layer = self._shuffle(made, f"{role}/shape")
        if like.shape.count(-1) <= 1:
            layer.reshape_dims = like.shape
            return layer.get_output(0)
        source, count = lead
        sizes = self.network.add_shape(self._tensor(source)).get_output(0)
        leading = self.network.add_slice(sizes, (0,), (count,), (1,)).get_output(0)
        trailing = constant(self.network, np.array(like.shape[count:], np.int32))
        trailing = cast(self.network, trailing, sizes.dtype)
        joined = self.network.add_concatenation([leading, trailing])
        layer.set_input(1, joined.get_output(0))
        return layer.get_output(0)

    def _tensor(self, value: Value) -> Any:
        return self.replaced.get(value, value.tensor)

    def _shuffle(self, tensor: Any, role: str) -> Any:
        layer = self.network.add_shuffle(tensor)
        layer.name = f"{self.name}/{role}"
        return layer


def _rewire(graph: TensorRTGraph, replacements: list[_Replacement]) -> None:
    """Let everything that reads an old tensor read the new one, network outputs included."""
    for replacement in replacements:
        for node, slot in replacement.old.consumers:
            node.layer.set_input(slot, replacement.new)
            if node.layer.get_input(slot) is not replacement.new:
                raise RuntimeError(f"TensorRT did not take {replacement.new.name!r} as input {slot} of {node.name!r}")
    for replacement in replacements:
        if replacement.old.is_output or replacement.old.is_debug:
            name = replacement.old.name
            replacement.old.tensor.name = f"{name}/unfused"
            replacement.new.name = name
        if replacement.old.is_debug:
            graph.network.unmark_debug(replacement.old.tensor)
            graph.network.mark_debug(replacement.new)
    outputs = {r.old.tensor: r.new for r in replacements if r.old.is_output}
    if outputs:
        _swap_outputs(graph.network, outputs)


def _swap_outputs(network: Any, outputs: dict[Any, Any]) -> None:
    """Give the new tensors the old ones' places among the network's outputs."""
    tensors = [network.get_output(k) for k in range(network.num_outputs)]
    first = next(k for k, tensor in enumerate(tensors) if tensor in outputs)
    for tensor in tensors[first:]:
        network.unmark_output(tensor)
    for tensor in tensors[first:]:
        new = outputs.get(tensor, tensor)
        formats = tensor.allowed_formats
        network.mark_output(new)
        # Set at all, even to what it is, TensorRT 10.6 refuses it for bfloat16.
        if new is not tensor and new.allowed_formats != formats:
            new.allowed_formats = formats
