# SPDX-License-Identifier: Apache-2.0
"""Whether a boundary that was recognised may be fused, and as what.

Every refusal has a stable code, says what was found and what to change. Nothing here changes a network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import tensorrt as trt

from trtllm_mhc.network import plugins
from trtllm_mhc.reference.compare import agreement_factor
from trtllm_mhc.rewrite.finalize import Finalize
from trtllm_mhc.rewrite.graph import AllReduce, Graph, Node, Value
from trtllm_mhc.rewrite.linear import Linear, block_scaled
from trtllm_mhc.rewrite.match import Boundary, Collapse
from trtllm_mhc.rewrite.norm import Norm
from trtllm_mhc.rewrite.ordering import keep_unordered_linears, refuse_cycles, refuse_unordered
from trtllm_mhc.rewrite.plan import FuseOptions, Plan, PublishedLinear
from trtllm_mhc.rewrite.report import Reason

# How TensorRT-LLM names the outputs that it binds to user buffers.
_USER_BUFFER = "allreduce_ub_"


def plan_boundaries(
    graph: Graph, boundaries: list[Boundary], others: list[AllReduce], options: FuseOptions
) -> list[Plan]:
    """A plan for each boundary, in which every replacement is legal by itself and all are together."""
    plans = [_plan(graph, boundary, options) for boundary in boundaries]
    refuse_cycles(graph, plans)
    refuse_unordered(graph, plans, others)
    keep_unordered_linears(graph, plans, others)
    return plans


def _plan(graph: Graph, boundary: Boundary, options: FuseOptions) -> Plan:
    all_reduce = boundary.all_reduce
    group = all_reduce.group if all_reduce.group is not None else options.group
    tp_size = all_reduce.tp_size or options.tp_size or (len(group) or None)
    rank = all_reduce.rank if all_reduce.form == "MhcAllReduce" else options.rank
    plan = Plan(boundary, tp_size, rank, tuple(group) or tuple(range(tp_size or 0)))
    plan.reasons += _check_communicator(all_reduce, plan, options)
    plan.reasons += _check_post(graph, boundary)
    if boundary.collapse is not None:
        _plan_entry(graph, plan, boundary.collapse, boundary.norm, options)
    if boundary.finalize is not None and options.finalize:
        _plan_finalize(plan, boundary.finalize)
    if options.publish_linear != "off" and plan.finalize is None:
        _plan_linear(plan, boundary.linear, options)
    if not plan.reasons:
        plan.exactness = list(_exactness(plan))
    return plan


def _check_communicator(all_reduce: AllReduce, plan: Plan, options: FuseOptions) -> Iterator[Reason]:
    name = all_reduce.node.name
    if (
        all_reduce.form == "DistCollective"
        and not all_reduce.is_labelled
        and options.unlabelled_collectives == "refuse"
    ):
        yield Reason(
            "collective_unknown",
            f"TensorRT does not tell which collective {name!r} is.",
            "Label it with label_all_reduce_sum, or pass FuseOptions(unlabelled_collectives='all_reduce_sum').",
        )
    if all_reduce.form == "AllReduce" and all_reduce.partial.is_output and _USER_BUFFER in all_reduce.partial.name:
        yield Reason(
            "user_buffer",
            f"{name!r} reduces in a buffer of the caller's ({all_reduce.partial.name!r} is an output of the network).",
            "Build with --user_buffer disable; the plugin has buffers of its own.",
        )
    if plan.tp_size is None:
        yield Reason(
            "group_unknown", f"{name!r} does not tell how many ranks it sums over.", "Pass FuseOptions(tp_size=...)."
        )
        return
    wanted = options.tp_size
    differs = wanted is not None and plan.tp_size != wanted
    if options.group and all_reduce.group is not None:
        differs = differs or tuple(all_reduce.group) != options.group
    if differs or len(plan.group) != plan.tp_size:
        asked = f"{list(options.group) or ''}{'' if options.group else f'{wanted} ranks'}"
        yield Reason(
            "group_differs",
            f"{name!r} sums over the {plan.tp_size} ranks {list(plan.group)}, the options ask for {asked}.",
            "Pass the group of the layer, or leave it out.",
        )
    elif plan.tp_size not in plugins.TP_SIZES:
        yield Reason(
            "tp_size",
            f"{name!r} sums over {plan.tp_size} ranks.",
            f"The plugin has groups of {_words(plugins.TP_SIZES)}.",
        )
    elif not -1 <= plan.rank < plan.tp_size:
        yield Reason(
            "rank",
            f"The rank {plan.rank} is not in the group of {plan.tp_size} ranks of {name!r}.",
            "Pass an index in the group as FuseOptions(rank=...), or -1.",
        )


def _check_post(graph: Graph, boundary: Boundary) -> Iterator[Reason]:
    all_reduce, post = boundary.all_reduce, boundary.post
    if any(node.depth >= len(graph.nodes) for node in post.path):
        yield Reason("loop", "The boundary is inside a loop.", "Unroll the loop over the layers.")
        return
    if len(boundary.posts) > 1:
        names = ", ".join(repr(each.streams.name) for each in boundary.posts)
        yield Reason(
            "two_posts",
            f"The result of {all_reduce.node.name!r} is mixed into {len(boundary.posts)} sets of streams ({names}).",
            "Give each its own all-reduce.",
        )
    else:
        yield from _check_reduced(post.path, post.streams)
        for role, value in {"residual": post.residual, "post": post.post, "comb": post.comb}.items():
            if graph.depends_on(value, all_reduce.node):
                yield Reason(
                    "own_operand",
                    f"{role} ({value.name!r}) is computed from the result of {all_reduce.node.name!r} that it is mixed "
                    "with.",
                    "Compute it from something else; the fused layer has no all-reduced value to give.",
                )
    expected = {
        "x": (all_reduce.partial, trt.bfloat16),
        "residual": (post.residual, trt.bfloat16),
        "streams": (post.streams, trt.bfloat16),
        "post": (post.post, trt.float32),
        "comb": (post.comb, trt.float32),
    }
    yield from _check_dtypes(expected)
    yield from _check_rows({"residual": post.residual, "comb": post.comb}, post.streams, 2)
    yield from _check_rows({"x": all_reduce.partial, "post": post.post}, post.streams, 1)
    if post.hc != plugins.HC_MULT:
        yield Reason("streams", f"There are {post.hc} residual streams.", f"The plugin has {plugins.HC_MULT}.")
    hidden = post.streams.shape[-1]
    if hidden not in plugins.HIDDEN_SIZES:
        yield Reason("hidden_size", f"The hidden size is {hidden}.", f"The plugin has {_words(plugins.HIDDEN_SIZES)}.")
    if post.addends:
        yield Reason(
            "addend",
            f"{post.addends[0].name!r} is added to the all-reduce's result before it is mixed into the streams.",
            "Add a bias to one rank's summand, before the all-reduce.",
        )
    elif post.expansion.extra_roundings or post.expansion.bf16_arithmetic:
        where = [repr(value.name) for value in post.expansion.extra_roundings] or [repr(post.streams.name)]
        yield Reason(
            "extra_rounding",
            f"The post-mix rounds to bfloat16 before it is complete ({', '.join(where)}); the fused one rounds once.",
            "Take products and sums in float32 and cast the result.",
        )
    if lead_source(boundary, post.streams) is None:
        yield Reason(
            "shape",
            f"The streams have shape {post.streams.shape}, and no tensor tells the sizes before the last two.",
            "Keep the batch dimensions of the residual or of the sublayer's output, or use one dimension of tokens.",
        )


def _check_reduced(path: frozenset[Node], streams: Value) -> Iterator[Reason]:
    """Whatever else uses what is computed from the all-reduce would keep it alive beside the fused one."""
    for node in sorted(path, key=lambda node: node.index):
        for value in node.outputs:
            if value is streams:
                continue
            if value.is_output:
                yield Reason(
                    "network_output",
                    f"{value.name!r}, between the all-reduce and the streams, is an output of the network.",
                    "Do not mark it; the fused layer does not compute it.",
                )
            if value.is_debug:
                yield Reason(
                    "debug_tensor",
                    f"{value.name!r}, between the all-reduce and the streams, is a debug tensor.",
                    "Unmark it; the fused layer does not compute it.",
                )
            others = [consumer.name for consumer, _ in value.live_consumers() if consumer not in path]
            if others:
                yield Reason(
                    "extra_consumer",
                    f"{value.name!r}, between the all-reduce and the streams, is also read by {others[0]!r}.",
                    "Read the streams instead; the fused layer does not compute it.",
                )


def _plan_entry(graph: Graph, plan: Plan, collapse: Collapse, norm: Norm | None, options: FuseOptions) -> None:
    """Decide on the collapse and norm behind the post: fuse, leave out with a note, or refuse the boundary."""
    streams = plan.boundary.post.streams
    assert streams.producer is not None
    if graph.depends_on(collapse.pre, streams.producer):
        plan.reasons.append(
            Reason(
                "newly_computed_pre",
                f"The collapse weighs the streams with {collapse.pre.name!r}, which is computed from these "
                "same streams (the hyper-connections of DeepSeek V4). The fused collapse uses the pre-mix carried from "
                "the sublayer before (V4.1), which is another operation.",
                "Carry the pre-mix if the model is V4.1; a V4 boundary cannot be fused.",
            )
        )
        return
    if norm is None:
        plan.notes.append(Reason("no_norm", f"The collapse {collapse.collapsed.name!r} is followed by no RMSNorm.", ""))
        return
    if norm.subtracts_mean:
        plan.reasons.append(
            Reason(
                "norm_subtracts_mean",
                f"The norm {norm.layer_input.name!r} subtracts the mean (TensorRT's normalization layer does).",
                "Write an RMSNorm out: x / sqrt(mean(x * x) + eps) * gamma.",
            )
        )
        return
    note = _other_arithmetic(collapse, norm, options)
    if note is not None:
        plan.notes.append(note)
        return
    plan.reasons += _check_norm(graph, plan.boundary, collapse, norm)
    plan.collapse, plan.norm = collapse, norm
    note = _quantization_note(norm)
    if note is not None:
        plan.notes.append(note)


def _other_arithmetic(collapse: Collapse, norm: Norm, options: FuseOptions) -> Reason | None:
    """Why a collapse is not the fused one's, where it is a weighted sum of the streams all the same."""
    name = collapse.collapsed.name
    if collapse.by_adds and options.separate_collapse == "keep":
        return Reason(
            "collapse_rounds_separately",
            f"The collapse {name!r} rounds each product and sum by itself, as the one after the last layer does.",
            "If it is a delayed collapse, sum with one reduction, or pass FuseOptions(separate_collapse='fuse').",
        )
    if not collapse.rounded:
        return Reason(
            "collapse_not_rounded",
            f"The collapse {name!r} goes into the norm in float32; the fused one is rounded to bfloat16 first.",
            "Cast it to bfloat16.",
        )
    if collapse.expansion.extra_roundings or collapse.expansion.bf16_arithmetic:
        return Reason(
            "collapse_extra_rounding",
            f"The collapse {name!r} rounds to bfloat16 before it is complete; the fused one rounds once.",
            "Take products and sums in float32 and cast the result.",
        )
    if norm.reads_unrounded:
        return Reason(
            "norm_reads_unrounded",
            f"The norm {norm.layer_input.name!r} takes the mean square of the collapse before its rounding.",
            "Take it of the bfloat16 value.",
        )
    if not norm.in_float32:
        return Reason(
            "norm_not_in_float32",
            f"The norm {norm.layer_input.name!r} takes its mean square or the inverse root of it in bfloat16.",
            "Take them in float32.",
        )
    return None


def _plan_finalize(plan: Plan, finalize: Finalize) -> None:
    """Decide on the end of a MoE before the all-reduce: part of the new layer, or left as it is with a note."""
    notes = list(_check_finalize(plan.boundary, finalize))
    plan.notes += notes
    plan.finalize = None if notes else finalize


def _check_finalize(boundary: Boundary, finalize: Finalize) -> Iterator[Reason]:
    name = finalize.finalized.name
    if finalize.shared is None:
        yield Reason(
            "finalize_without_shared",
            f"The MoE's output {name!r} has no shared experts' output added to it.",
            "Add it before the all-reduce, or leave the finalize to TensorRT.",
        )
        return
    if not finalize.is_masked:
        yield Reason(
            "finalize_unmasked",
            f"In the MoE's output {name!r} it is not proven that an index of -1 in {finalize.index.name!r} adds "
            "nothing and that every other one picks its own row.",
            "Clamp the index by max(index, 0), and choose zero for the product where the index is below 0.",
        )
    if finalize.expansion.extra_roundings or finalize.expansion.bf16_arithmetic:
        yield Reason(
            "finalize_extra_rounding",
            f"The MoE's output {name!r} is rounded to bfloat16 before it is complete; the fused one is rounded once.",
            "Weight, sum and add the shared experts in float32 and cast the result.",
        )
    yield from _check_unread(finalize.between, boundary.all_reduce, "finalize_consumer")
    yield from _check_dtypes(
        {
            "gemm2_permuted": (finalize.rows, trt.bfloat16),
            "expert_weights": (finalize.weights, trt.float32),
            "shared_output": (finalize.shared, trt.bfloat16),
        }
    )
    streams = boundary.post.streams
    yield from _check_rows(
        {"expert_weights": finalize.weights, "index": finalize.index, "shared_output": finalize.shared}, streams, 1
    )


def _plan_linear(plan: Plan, linear: Linear | None, options: FuseOptions) -> None:
    """Decide on the linear layer before the all-reduce: publishing, or left as it is with a note."""
    if linear is None:
        plan.notes.append(
            Reason(
                "publish_no_linear",
                f"{plan.boundary.all_reduce.partial.name!r} is not the product of an activation and a constant weight.",
                "Only such a layer can publish.",
            )
        )
        return
    notes = list(_check_linear(plan.boundary, linear))
    weight = scales = None
    if not notes and (options.publish_linear == "e4m3" or linear.transposed or len(linear.constant.output.shape) != 2):
        weight = linear.weight()
    if not notes and options.publish_linear == "e4m3" and weight is not None:
        found = block_scaled(weight)
        if found is None:
            notes.append(
                Reason(
                    "publish_not_e4m3",
                    f"The weight of {linear.output.name!r} is not E4M3 in blocks of 32 x 32 with a power of two each.",
                    "Pass FuseOptions(publish_linear='bf16').",
                )
            )
        else:
            weight, scales = found
    plan.notes += notes
    plan.linear = None if notes else PublishedLinear(linear, weight, scales)


def _check_linear(boundary: Boundary, linear: Linear) -> Iterator[Reason]:
    name = linear.output.name
    if not 0 < linear.features <= plugins.MAXIMUM_FEATURES or linear.features % plugins.FEATURE_STEP:
        yield Reason(
            "publish_size",
            f"The linear layer of {name!r} has {linear.features} input features.",
            f"The plugin takes a multiple of {plugins.FEATURE_STEP} up to {plugins.MAXIMUM_FEATURES}.",
        )
    yield from _check_dtypes(
        {"activation": (linear.activation, trt.bfloat16), "weight": (linear.constant.output, trt.bfloat16)}
    )
    yield from _check_unread(linear.between, boundary.all_reduce, "publish_consumer")
    yield from _check_rows({"activation": linear.activation}, boundary.post.streams, 1)


def _check_unread(values: Sequence[Value], all_reduce: AllReduce, code: str) -> Iterator[Reason]:
    """A contribution and its reshapes may have no readers but the all-reduce, which then needs them no more."""
    inside = {value.producer for value in values} | {all_reduce.node}
    for value in values:
        # A reader of the shape needs no elements.
        readers = [n.name for n, _ in value.live_consumers() if n not in inside and n.kind.upper() != "SHAPE"]
        if readers or value.is_output or value.is_debug:
            what = f"is also read by {readers[0]!r}" if readers else "is an output or a debug tensor of the network"
            yield Reason(
                code,
                f"{value.name!r}, this rank's contribution, {what}.",
                "Read the streams instead; the fused layers give the contribution to nobody else.",
            )


def _quantization_note(norm: Norm) -> Reason | None:
    """Why a dynamic MXFP8 quantisation of a layer input stays beside the boundary; None where there is none."""
    value, found = norm.layer_input, None
    for node, _ in value.live_consumers():
        found = found or (node if node.quantizes_mxfp8 else None)
    if found is None:
        return None
    return Reason(
        "mxfp8_layout",
        f"{found.name!r} quantises the layer input {value.name!r} to MXFP8. The plugin could, but it writes its scales "
        "128x4-swizzled in words of int32, and no layer of TensorRT reads them so.",
        "Leave it to TensorRT, or give the layer input to a plugin that reads swizzled scales.",
    )


def _check_norm(graph: Graph, boundary: Boundary, collapse: Collapse, norm: Norm) -> Iterator[Reason]:
    streams = boundary.post.streams
    assert norm.gamma is not None
    assert streams.producer is not None
    yield from _check_rows({"pre": collapse.pre}, streams, 1)
    yield from _check_dtypes({"pre": (collapse.pre, trt.float32)})
    if not norm.gamma.holds_bfloat16:
        yield from _check_dtypes({"gamma": (norm.gamma, trt.bfloat16)})
    if graph.depends_on(norm.gamma, streams.producer):
        yield Reason(
            "gamma_depends",
            f"The norm's weight {norm.gamma.name!r} is computed from the streams it is applied to.",
            "Use a constant weight.",
        )
    if norm.eps is None:
        assert norm.eps_value is not None
        yield Reason(
            "eps_not_constant",
            f"The norm's epsilon {norm.eps_value.name!r} is no constant that can be read.",
            "Make it a float32 constant.",
        )
    elif not (math.isfinite(norm.eps) and norm.eps >= 0 and (norm.eps == 0 or np.float32(norm.eps) > 0)):
        yield Reason("eps", f"The norm's epsilon is {norm.eps}.", "Use a finite float32 number of 0 or more.")
    if lead_source(boundary, norm.layer_input) is None:
        yield Reason(
            "shape",
            f"The layer input has shape {norm.layer_input.shape}, and no tensor tells the sizes before the last.",
            "Keep the batch dimensions of the residual or of the sublayer's output, or use one dimension of tokens.",
        )


def _check_dtypes(expected: dict[str, tuple[Value, object]]) -> Iterator[Reason]:
    for role, (value, dtype) in expected.items():
        if value.dtype != dtype:
            want, got = getattr(dtype, "name", dtype), getattr(value.dtype, "name", "of another type")
            yield Reason("dtype", f"{role} ({value.name!r}) is {got}.", f"The plugin takes {want}.")


def _check_rows(values: dict[str, Value], streams: Value, behind: int) -> Iterator[Reason]:
    """Each must have a row for every token; ``behind`` is the number of axes after the tokens'."""
    if all(size == 1 for size in streams.shape[:-2]):
        return
    for role, value in values.items():
        wide = [size for size in value.shape if size != 1]
        if len(wide) <= behind:
            yield Reason(
                "one_row_for_all",
                f"{role} ({value.name!r}) has shape {value.shape}: one row for all tokens.",
                "The plugin takes a row for each token; repeat it.",
            )


def lead_source(boundary: Boundary, target: Value) -> tuple[Value, int] | None:
    """A tensor whose first axes have the sizes of ``target``'s token axes, and how many; None if there is none.

    A single dynamic size needs no such tensor: any source will do.
    """
    trailing = 2 if target is boundary.post.streams else 1
    lead = target.shape[:-trailing]
    for source, behind in ((boundary.post.residual, 2), (boundary.all_reduce.partial, 1)):
        if source.shape[:-behind] == lead:
            return source, len(lead)
    return (boundary.post.residual, len(lead)) if lead.count(-1) <= 1 else None


def _exactness(plan: Plan) -> Iterator[str]:
    """How the fused values may differ from the unfused network's on the same inputs."""
    hc = plan.boundary.post.hc
    yield (
        "streams: the same sum in another order; equal, one bfloat16 ulp apart, or within "
        f"{agreement_factor(hc + 1):.0f} * 2^-24 * sum of |terms| before rounding"
    )
    if plan.finalize is not None:
        yield (
            "MoE output: the same sum in another order; equal, one bfloat16 ulp apart, or within "
            f"{agreement_factor(plan.finalize.top_k + 1):.0f} * 2^-24 * sum of |terms| before rounding"
        )
    if plan.linear is not None:
        yield "linear layer: the same products summed in another order"
    if plan.boundary.all_reduce.form != "MhcAllReduce":
        yield "all-reduce: summed in rank order; the replaced layer has an order of its own"
    if plan.collapse is not None:
        yield (
            "collapse: the same sum in another order; equal, one bfloat16 ulp apart, or within "
            f"{agreement_factor(hc):.0f} * 2^-24 * sum of |terms| before rounding"
        )
    if plan.norm is not None:
        ulps = 2 if plan.norm.scale_after_rounding else 1
        yield f"layer input: within {ulps} bfloat16 ulp for equal collapsed values"


def _words(sizes: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size in sizes[:-1]) + f" or {sizes[-1]}"
