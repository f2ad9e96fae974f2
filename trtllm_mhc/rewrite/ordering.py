# SPDX-License-Identifier: Apache-2.0
"""Whether replacements that are legal one by one are legal together."""

from __future__ import annotations

from trtllm_mhc.rewrite.graph import PLUGIN_FORMS, AllReduce, Graph, Node
from trtllm_mhc.rewrite.plan import Plan
from trtllm_mhc.rewrite.report import Reason


def refuse_cycles(graph: Graph, plans: list[Plan]) -> None:
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


def refuse_unordered(graph: Graph, plans: list[Plan], others: list[AllReduce]) -> None:
    """All users of one group's mailbox must follow each other by data."""
    planned = _planned(plans)
    last: dict[tuple[int, ...], AllReduce] = {}
    for group, user in _mailbox_users(plans, others):
        before = last.get(group)
        if before is not None and not _follows(graph, user, before):
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


def keep_unordered_linears(graph: Graph, plans: list[Plan], others: list[AllReduce]) -> None:
    """Between a linear layer that publishes and its boundary nobody else may use the mailbox.

    A group's users follow each other by data (`refuse_unordered`). So it is enough that the activation waits for the
    user before: then so does it for all before that one, and all others wait for the boundary.
    """
    planned = _planned(plans)
    last: dict[tuple[int, ...], AllReduce] = {}
    broken: dict[tuple[int, ...], AllReduce] = {}
    users = list(_mailbox_users(plans, others))
    for group, user in users:
        before = last.get(group)
        if before is not None and not _follows(graph, user, before):
            broken.setdefault(group, user)
        last[group] = user
    last.clear()
    for group, user in users:
        plan, before = planned.get(user.node), last.get(group)
        last[group] = user
        if plan is None or plan.linear is None:
            continue
        stranger = broken.get(group)
        if stranger is None and before is not None:
            activation = plan.linear.linear.activation
            stranger = None if graph.depends_on(activation, before.node) else before
        if stranger is not None:
            plan.linear = None
            plan.notes.append(
                Reason(
                    "publish_unordered",
                    f"It is not proven that {stranger.node.name!r}, which uses the same mailbox, stays out of the time "
                    f"between the linear layer before {user.node.name!r} and its boundary.",
                    "Compute the layer's activation from the result of the boundary before.",
                )
            )


def _planned(plans: list[Plan]) -> dict[Node, Plan]:
    return {plan.boundary.all_reduce.node: plan for plan in plans}


def _mailbox_users(plans: list[Plan], others: list[AllReduce]) -> list[tuple[tuple[int, ...], AllReduce]]:
    """The layers that use a mailbox once the plans are carried out, with their groups, by depth."""
    planned = _planned(plans)
    users = [plan.boundary.all_reduce for plan in plans]
    users += [each for each in others if each.form == "MhcAllReduce" or each.form in PLUGIN_FORMS]
    users.sort(key=lambda each: (each.node.depth, each.node.index))
    found = []
    for user in users:
        plan = planned.get(user.node)
        if plan is not None and plan.status == "refused" and user.form != "MhcAllReduce":
            continue  # communicates by other means
        found.append((plan.group if plan is not None else tuple(user.group or ()), user))
    return found


def _follows(graph: Graph, user: AllReduce, before: AllReduce) -> bool:
    """Whether ``user`` waits for ``before`` and may come next: after a publishing layer only its boundary may."""
    if before.form == "MhcPublishLinear" and user.partial is not before.reduced:
        return False
    return graph.depends_on(user.reduced, before.node)
