# SPDX-License-Identifier: Apache-2.0
"""What is to be done with the boundaries of a network, of whatever kind it is; nothing here changes it."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_mhc.rewrite.coefficients import CoefficientsMatch, find_coefficients
from trtllm_mhc.rewrite.graph import PLUGIN_FORMS, AllReduce, Graph
from trtllm_mhc.rewrite.legality import plan_boundaries
from trtllm_mhc.rewrite.match import find_boundaries
from trtllm_mhc.rewrite.plan import FuseOptions, Plan
from trtllm_mhc.rewrite.report import BoundaryEntry, Report


@dataclass(frozen=True)
class Analysis:
    """The boundaries of a network.

    Attributes:
        names: the new layers' names, one for each plan.
        plans: what is to be done with each boundary, in the order of the layer loop.
        others: the layers that sum over ranks outside of them.
        coefficients: the new layers' names and what computes a sublayer's mixes, by depth.
    """

    names: tuple[str, ...]
    plans: tuple[Plan, ...]
    others: tuple[AllReduce, ...]
    coefficients: tuple[tuple[str, CoefficientsMatch], ...] = ()

    @property
    def fused(self) -> list[tuple[str, Plan]]:
        """Names and plans of the boundaries to be replaced."""
        pairs = zip(self.names, self.plans, strict=True)
        return [(name, plan) for name, plan in pairs if plan.status != "refused"]

    @property
    def steps(self) -> list[tuple[str, Plan | CoefficientsMatch]]:
        """Names and what is to be replaced: what goes into a step is made by steps before it."""
        steps: list[tuple[str, Plan | CoefficientsMatch]] = [*self.fused]
        steps += [(name, each) for name, each in self.coefficients if not each.reasons()]
        return sorted(steps, key=lambda step: step[1].depth)

    def report(self) -> Report:
        """The report once the plans are carried out."""
        return Report(
            found=tuple(_entry(name, plan) for name, plan in zip(self.names, self.plans, strict=True)),
            other_all_reduces=tuple(each.node.name for each in self.others if each.form not in PLUGIN_FORMS),
            already_fused=sum(each.form == "MhcBoundary" for each in self.others),
            coefficients=tuple(each.entry(name) for name, each in self.coefficients),
        )


def analyse(graph: Graph, options: FuseOptions) -> Analysis:
    """Find the boundaries and decide on each."""
    boundaries, others = find_boundaries(graph)
    plans = plan_boundaries(graph, boundaries, others, options)
    mixes = find_coefficients(graph) if options.coefficients else []
    return Analysis(
        tuple(_names(graph, "mhc_boundary", len(plans))),
        tuple(plans),
        tuple(others),
        tuple(zip(_names(graph, "mhc_coefficients", len(mixes)), mixes, strict=True)),
    )


def _names(graph: Graph, kind: str, count: int) -> list[str]:
    """Names for new layers in order, not taken by layers of the network."""
    taken = {node.name for node in graph.nodes}
    numbers = (f"{kind}_{k}" for k in range(count + len(taken)))
    free = (name for name in numbers if name not in taken)
    return [next(free) for _ in range(count)]


def _entry(name: str, plan: Plan) -> BoundaryEntry:
    boundary, post = plan.boundary, plan.boundary.post
    norm = plan.norm or boundary.norm
    return BoundaryEntry(
        name=name,
        status=plan.status,
        all_reduce=boundary.all_reduce.node.name,
        form=boundary.all_reduce.form,
        streams=post.streams.name,
        layer_input=None if norm is None else norm.layer_input.name,
        hidden=post.streams.shape[-1],
        hc=post.hc,
        tp_size=plan.tp_size,
        contribution="plain" if plan.status == "refused" else plan.contribution,
        reasons=tuple(plan.reasons),
        notes=tuple(plan.notes),
        exactness=() if plan.status == "refused" else tuple(plan.exactness),
    )
