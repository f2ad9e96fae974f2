# SPDX-License-Identifier: Apache-2.0
"""What a stress run does: which boundaries, in which order, with which delays. A function of the seed alone, so that
all ranks make the same plan, and a failure can be had again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tests.gpu.loopback import Array

VARIANTS = (
    "plain",
    "plain mxfp8",
    "residual-only",
    "finalize",
    "finalize mxfp8",
    "finalize residual-only",
    "published",
    "published mxfp8",
    "published residual-only",
    "all-reduce",
)
SLOTS = 6  # calls of a burst follow each other without anything between them


class Call(NamedTuple):
    """One boundary."""

    variant: str
    rows: int


@dataclass(frozen=True)
class Step:
    """Calls that are enqueued together.

    Attributes:
        kind: "graph": replay of `graphs[graph]`; "eager": its calls are enqueued one by one; "reset": collective.
        graph: index of the graph.
        calls: of an eager step.
    """

    kind: str
    graph: int = -1
    calls: tuple[Call, ...] = ()


@dataclass
class Plan:
    """Attributes:
    graphs: the calls of each graph.
    steps: in this order.
    """

    graphs: list[list[Call]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def calls(self) -> list[Call]:
        """Every boundary of the run."""
        result: list[Call] = []
        for step in self.steps:
            result += self.graphs[step.graph] if step.kind == "graph" else step.calls
        return result


def bursts(calls: list[Call], rng: np.random.Generator) -> list[list[Call]]:
    """The calls in groups of 1 to SLOTS."""
    result, begin = [], 0
    while begin < len(calls):
        size = int(rng.integers(1, SLOTS + 1))
        result.append(calls[begin : begin + size])
        begin += size
    return result


def _call(rng: np.random.Generator, capacity: int, largest: int) -> Call:
    variant = VARIANTS[rng.integers(len(VARIANTS))]
    if not variant.startswith("published") and rng.random() < 0.12:
        return Call(variant, int(rng.integers(capacity + 1, largest + 1)))
    # Small M are what decoding has; the capacity itself is an edge.
    rows = capacity if rng.random() < 0.1 else int(rng.integers(1, min(capacity, 9)))
    return Call(variant, rows)


def make_plan(
    rng: np.random.Generator, boundaries: int, capacity: int, largest: int, *, graphs: int = 8, graph_calls: int = 128
) -> Plan:
    """At least `boundaries` boundaries, a few per cent of them eager; a collective reset now and then."""
    plan = Plan()
    graph_calls = max(4, min(graph_calls, boundaries // 8))
    for _ in range(graphs):
        plan.graphs.append([_call(rng, capacity, largest) for _ in range(graph_calls)])
    done = 0
    while done < boundaries:
        plan.steps.append(Step("graph", int(rng.integers(graphs))))
        done += graph_calls
        if rng.random() < 0.6:
            eager = tuple(_call(rng, capacity, largest) for _ in range(int(rng.integers(1, 2 + graph_calls // 10))))
            plan.steps.append(Step("eager", calls=eager))
            done += len(eager)
        if rng.random() < 0.01:
            plan.steps.append(Step("reset"))
    return plan


def schedule(rng: np.random.Generator, delays: np.random.Generator, shape: tuple[int, int], pool_rows: int) -> Array:
    """For each call of a step {first row in the pool, nanoseconds to sleep}, uint32 [*shape, 2].

    Args:
        rng: the same on all ranks.
        delays: of this rank.
        shape: (steps, calls of each).
        pool_rows: rows of the pool.
    """
    result = np.zeros((*shape, 2), np.uint32)
    result[..., 0] = rng.integers(0, pool_rows, shape)
    kind = delays.random(shape)
    short, long = delays.integers(1_000, 30_000, shape), delays.integers(50_000, 400_000, shape)
    result[..., 1] = np.where(kind < 0.003, long, np.where(kind < 0.08, short, 0))
    return result
