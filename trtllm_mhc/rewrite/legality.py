# SPDX-License-Identifier: Apache-2.0
"""Whether a boundary that was recognised may be fused, and as what.

Every refusal has a stable code, says what was found and what to change. Nothing here changes a network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import tensorrt as trt

from trtllm_mhc.network import plugins
from trtllm_mhc.reference.compare import agreement_factor
from trtllm_mhc.rewrite.graph import Graph, Node, Value
from trtllm_mhc.rewrite.match import AllReduce, Boundary, Collapse, Norm
from trtllm_mhc.rewrite.report import Reason, Status


@dataclass(frozen=True)
class FuseOptions:
    """What a network does not say itself.

    Attributes:
        tp_size: ranks that an all-reduce sums over, where the layer does not tell; checked against it where it does.
        rank: this engine's index in the group, where the layer does not tell; -1 leaves it to the communicator.
        group: world ranks of the group in order; empty means 0 .. tp_size - 1 where the layer does not tell.
        unlabelled_collectives: what a DIST_COLLECTIVE layer is that `label_all_reduce_sum` was not called on. TensorRT
            does not give its operation back, so it is refused unless the caller vouches for it.
        separate_collapse: what to do with a collapse whose products are added one by one by elementwise layers. That
            is the arithmetic of the collapse after the last layer, in which every product and sum is rounded:
            ``"keep"`` fuses such a boundary up to its streams, ``"fuse"`` takes it for a delayed collapse.
    """

    tp_size: int | None = None
    rank: int = -1
    group: tuple[int, ...] = ()
    unlabelled_collectives: Literal["refuse", "all_reduce_sum"] = "refuse"
    separate_collapse: Literal["keep", "fuse"] = "keep"

    def __post_init__(self) -> None:
        if self.tp_size is not None and self.tp_size not in plugins.TP_SIZES:
            raise ValueError(f"FuseOptions: tp_size: expected one of {list(plugins.TP_SIZES)}, got {self.tp_size}")
        if self.group and self.tp_size is not None and len(self.group) != self.tp_size:
            raise ValueError(f"FuseOptions: group: expected {self.tp_size} ranks as in tp_size, got {self.group}")
        if len(set(self.group)) != len(self.group):
            raise ValueError(f"FuseOptions: group: expected distinct ranks, got {self.group}")
        if self.rank < -1 or (self.tp_size is not None and self.rank >= self.tp_size):
            raise ValueError(
                f"FuseOptions: rank: expected -1 (the communicator's) or an index in the group, got {self.rank}"
            )
        if self.unlabelled_collectives not in ("refuse", "all_reduce_sum"):
            raise ValueError(
                "FuseOptions: unlabelled_collectives: expected 'refuse' or 'all_reduce_sum', "
                f"got {self.unlabelled_collectives!r}"
            )
        if self.separate_collapse not in ("keep", "fuse"):
            raise ValueError(
                f"FuseOptions: separate_collapse: expected 'keep' or 'fuse', got {self.separate_collapse!r}"
            )


@dataclass
class Plan:
    """A boundary, and what is to be done with it."""

    boundary: Boundary
    tp_size: int | None
    rank: int
    group: tuple[int, ...]
    reasons: list[Reason] = field(default_factory=list)
    notes: list[Reason] = field(default_factory=list)
    exactness: list[str] = field(default_factory=list)
    collapse: Collapse | None = None
    norm: Norm | None = None

    @property
    def status(self) -> Status:
        """What is to be done."""
        if self.reasons:
            return "refused"
        return "full" if self.norm is not None else "residual_only"


def plan_boundaries(
    graph: Graph, boundaries: list[Boundary], others: list[AllReduce], options: FuseOptions
) -> list[Plan]:
    """A plan for each boundary, in which every replacement is legal by itself and all are together."""
    plans = [_plan(graph, boundary, options) for boundary in boundaries]
    _refuse_cycles(graph, plans)
    _refuse_unordered(graph, plans, others)
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
    if not plan.reasons:
        plan.exactness = list(_exactness(plan))
    return plan


def _check_communicator(all_reduce: AllReduce, plan: Plan, options: FuseOptions) -> Iterator[Reason]:
    name = all_reduce.node.name
    if (
        all_reduce.form == "DistCollective"
        and all_reduce.collective is None
        and options.unlabelled_collectives == "refuse"
    ):
        yield Reason(
            "collective_unknown",
            f"TensorRT does not tell which collective {name!r} is.",
            "Label it with label_all_reduce_sum, or pass FuseOptions(unlabelled_collectives='all_reduce_sum').",
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
    if len(boundary.posts) > 1:
        names = ", ".join(repr(each.streams.name) for each in boundary.posts)
        yield Reason(
            "two_posts",
            f"The result of {all_reduce.node.name!r} is mixed into {len(boundary.posts)} sets of streams ({names}).",
            "Give each its own all-reduce.",
        )
    else:
        yield from _check_reduced(post.path, post.streams)
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
    if any(node.depth >= len(graph.nodes) for node in post.path):
        yield Reason("loop", "The boundary is inside a loop.", "Unroll the loop over the layers.")
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
    return None


def _check_norm(graph: Graph, boundary: Boundary, collapse: Collapse, norm: Norm) -> Iterator[Reason]:
    streams = boundary.post.streams
    assert norm.gamma is not None
    assert streams.producer is not None
    yield from _check_rows({"pre": collapse.pre}, streams, 1)
    yield from _check_dtypes({"pre": (collapse.pre, trt.float32), "gamma": (norm.gamma, trt.bfloat16)})
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
            want, got = getattr(dtype, "name", dtype), value.dtype.name
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


def _refuse_cycles(graph: Graph, plans: list[Plan]) -> None:
    """A fused layer's streams wait for its pre-mix, which unfused they do not: several may then wait in a ring."""
    full = {plan.boundary.post.streams.producer: plan for plan in plans if plan.status == "full"}
    while full:
        extra: dict[Node, list[Node]] = {}
        for node, plan in full.items():
            assert node is not None
            carried = [plan.collapse.pre] if plan.collapse is not None else []
            for value in carried + ([plan.norm.gamma] if plan.norm is not None and plan.norm.gamma else []):
                if value.producer is not None:
                    extra.setdefault(value.producer, []).append(node)
        stuck = _stuck(graph, extra)
        ring = [node for node in full if node in stuck]
        if not ring:
            return
        for node in ring:
            plan = full.pop(node)
            plan.collapse = plan.norm = None
            plan.reasons.append(
                Reason(
                    "cycle",
                    f"Fused together with its neighbours, {plan.boundary.post.streams.name!r} would depend on itself: "
                    "their pre-mixes are computed from each other's streams.",
                    "Compute each pre-mix from streams that come before both.",
                )
            )


def _stuck(graph: Graph, extra: dict[Node, list[Node]]) -> set[Node]:
    """Layers on a ring of dependences with the ``extra`` ones, without those of loops."""
    in_loops = {node for node in graph.nodes if node.depth >= len(graph.nodes)}
    successors = {
        node: [c for value in node.outputs for c, _ in value.consumers] + extra.get(node, []) for node in graph.nodes
    }
    predecessors: dict[Node, list[Node]] = {node: [] for node in graph.nodes}
    for node, after in successors.items():
        for each in after:
            predecessors[each].append(node)
    left = set(graph.nodes) - in_loops
    for before, behind in ((predecessors, successors), (successors, predecessors)):
        # What is not on a ring, nor between two, runs dry from one end or the other.
        missing = {node: sum(each in left for each in before[node]) for node in graph.nodes if node in left}
        ready = [node for node, count in missing.items() if count == 0]
        for node in ready:
            left.discard(node)
            for each in behind[node]:
                if each in missing and each in left:
                    missing[each] -= 1
                    if missing[each] == 0:
                        ready.append(each)
    return left


def _refuse_unordered(graph: Graph, plans: list[Plan], others: list[AllReduce]) -> None:
    """All users of one group's mailbox must follow each other by data."""
    planned = {plan.boundary.all_reduce.node: plan for plan in plans}
    users = [plan.boundary.all_reduce for plan in plans]
    users += [each for each in others if each.form in ("MhcAllReduce", "MhcBoundary")]
    users.sort(key=lambda each: (each.node.depth, each.node.index))
    last: dict[tuple[int, ...], AllReduce] = {}
    for user in users:
        plan = planned.get(user.node)
        if plan is not None and plan.status == "refused" and user.form != "MhcAllReduce":
            continue  # communicates by other means
        group = plan.group if plan is not None else tuple(user.group or ())
        before = last.get(group)
        if before is not None and not graph.depends_on(user.reduced, before.node):
            for each, other in ((user, before), (before, user)):
                mine = planned.get(each.node)
                if mine is not None and mine.status != "refused":
                    mine.reasons.append(
                        Reason(
                            "unordered",
                            f"{each.node.name!r} and {other.node.name!r} sum over the same ranks, and neither waits "
                            "for the other: the ranks might take them in different orders.",
                            "Make one depend on the other, or give them different groups.",
                        )
                    )
                    mine.collapse = mine.norm = None
                    break
            continue
        last[group] = user


def _exactness(plan: Plan) -> Iterator[str]:
    """How the fused values may differ from the unfused network's on the same inputs."""
    hc = plan.boundary.post.hc
    yield (
        "streams: the same sum in another order; equal, one bfloat16 ulp apart, or within "
        f"{agreement_factor(hc + 1):.0f} * 2^-24 * sum of |terms| before rounding"
    )
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
