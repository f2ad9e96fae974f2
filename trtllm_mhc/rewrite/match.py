# SPDX-License-Identifier: Apache-2.0
"""The patterns of a boundary: all-reduce, mHC post and collapse, recognised by what they compute.

Nothing here changes or judges a network. A match says which tensors play which role; `legality` says whether the
boundary may be fused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeVar

import tensorrt as trt

from trtllm_mhc.rewrite.expand import MAX_STREAMS, Expansion, Factor, Term, expand
from trtllm_mhc.rewrite.finalize import Finalize, match_finalize
from trtllm_mhc.rewrite.graph import PLUGIN_FORMS, AllReduce, Graph, Node, Value
from trtllm_mhc.rewrite.indexing import HIDDEN, Axis, is_element, rows
from trtllm_mhc.rewrite.linear import Linear, match_linear
from trtllm_mhc.rewrite.norm import Norm, match_norm
from trtllm_mhc.rewrite.reach import Reach

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Post:
    """``streams[i] = reduced * post[i] + sum over j of residual[j] * comb[j, i]``.

    Attributes:
        comb_transposed: whether ``comb`` is stored [target, source].
        addends: what is added to the all-reduce's result before it is mixed in.
        path: the layers that compute ``streams`` from the all-reduce's result.
    """

    streams: Value
    residual: Value
    post: Value
    comb: Value
    comb_transposed: bool
    path: frozenset[Node]
    expansion: Expansion
    addends: tuple[Value, ...] = ()

    @property
    def hc(self) -> int:
        """Number of streams."""
        return self.streams.shape[-2]


@dataclass(frozen=True)
class Collapse:
    """``collapsed = sum over i of streams[i] * pre[i]``.

    Attributes:
        by_adds: whether the products are added one by one by elementwise layers.
        rounded: whether the sum is rounded to bfloat16.
    """

    collapsed: Value
    pre: Value
    by_adds: bool
    rounded: bool
    expansion: Expansion


@dataclass
class Boundary:
    """A boundary as found.

    Attributes:
        finalize: what makes the all-reduce's summand, where that is the end of a MoE.
        linear: the same, where it is a linear layer.
    """

    all_reduce: AllReduce
    posts: list[Post] = field(default_factory=list)
    collapse: Collapse | None = None
    norm: Norm | None = None
    finalize: Finalize | None = None
    linear: Linear | None = None

    @property
    def post(self) -> Post:
        """The only post, or the first."""
        return self.posts[0]


def find_boundaries(graph: Graph) -> tuple[list[Boundary], list[AllReduce]]:
    """The boundaries that outputs depend on, by depth; and the layers that sum over ranks outside of them."""
    found, others = [], []
    for node in graph.nodes:
        all_reduce = node.all_reduce() if node.live else None
        if all_reduce is None:
            continue
        posts = match_posts(all_reduce.reduced) if all_reduce.form not in PLUGIN_FORMS else []
        if not posts:
            others.append(all_reduce)
            continue
        boundary = Boundary(all_reduce, posts)
        boundary.collapse, boundary.norm = match_entry(boundary.post)
        boundary.linear = match_linear(all_reduce.partial)
        boundary.finalize = match_finalize(all_reduce.partial) if boundary.linear is None else None
        found.append(boundary)
    found.sort(key=lambda b: (b.all_reduce.node.depth, b.all_reduce.node.index))
    return found, others


def match_posts(reduced: Value) -> list[Post]:
    """The mHC posts of an all-reduce's result."""
    # The sum before it is rounded to bfloat16 has the form of a post as well.
    for dtypes in ((trt.bfloat16,), (trt.float16, trt.float32)):
        reach = Reach(reduced)
        posts: list[Post] = []
        for value in reach.values():
            shape = value.shape
            if value.dtype not in dtypes or len(shape) < 3 or not 2 <= shape[-2] <= MAX_STREAMS or shape[-1] < 2:
                continue
            post = _match_post(value, reduced, reach.seen)
            if post is not None:
                posts.append(post)
                reach.stop_at(value)
        if posts:
            return posts
    return []


def match_entry(post: Post) -> tuple[Collapse | None, Norm | None]:
    """The collapse and norm of a post's streams, as far as they are there."""
    streams, hidden = post.streams, post.streams.shape[-1]
    best: Collapse | None = None
    for dtype in (trt.bfloat16, trt.float32):
        reach = Reach(streams)
        for value in reach.values():
            if len(value.shape) < 2 or value.shape[-1] != hidden or value.dtype != dtype:
                continue
            collapse = _match_collapse(value, post, reach.seen)
            if collapse is None:
                continue
            norm = match_norm(collapse.collapsed)
            if norm is not None:
                return collapse, norm
            best = best or collapse
    return best, None


def _match_post(streams: Value, reduced: Value, inside: Collection[Value]) -> Post | None:
    *lead, hc, _ = streams.shape
    tokens = rows(tuple(lead))
    posts: dict[int, Factor] = {}
    combs: dict[tuple[int, int], Factor] = {}
    residuals: dict[tuple[int, int], Factor] = {}
    addends: dict[Value, None] = {}
    whole = Expansion([])
    for target in range(hc):
        expansion = expand(streams, (*tokens, target, HIDDEN), reduced, inside)
        if expansion is None or len(expansion.terms) <= hc:
            return None
        whole = whole.joined(expansion)
        pairs = [pair for term in expansion.terms if (pair := _product(term)) is not None]
        own = [pair for pair in pairs if pair[0].index_in(reduced) is not None]
        if len(pairs) < len(expansion.terms) or len(own) != 1 or not _is_token(reduced, own[0][0]):
            return None
        posts[target] = own[0][1]
        # What has the weight of the all-reduce's result was added to it.
        added = [pair for pair in pairs if pair[1] == posts[target] and pair is not own[0]]
        addends |= dict.fromkeys(wide.names[0][0] for wide, _ in added)
        mixed = [pair for pair in pairs if pair[1] != posts[target]]
        if len(mixed) != hc:
            return None
        for position, (wide, coefficient) in enumerate(mixed):
            residuals[position, target] = wide
            combs[position, target] = coefficient
    return _assemble_post(streams, inside, posts, combs, residuals, whole, tuple(addends))


def _assemble_post(
    streams: Value,
    inside: Collection[Value],
    posts: dict[int, Factor],
    combs: dict[tuple[int, int], Factor],
    residuals: dict[tuple[int, int], Factor],
    expansion: Expansion,
    addends: tuple[Value, ...],
) -> Post | None:
    """The post, if the factors are the elements of one tensor each."""
    hc = len(posts)
    for residual in _plainest(residuals[0, 0], 3):
        # The terms of a sum have no order: which stream a term is of, its index says.
        where = {key: _stream(residual, factor, HIDDEN) for key, factor in residuals.items()}
        if any(stream is None for stream in where.values()):
            continue
        order = {(where[key], key[1]): key for key in where}
        if len(order) != hc * hc:
            continue
        matrix = {(j, i): combs[order[j, i]] for j in range(hc) for i in range(hc) if (j, i) in order}
        if len(matrix) != hc * hc:
            continue
        post = _common(posts, lambda key: (key,))
        comb = _common(matrix, lambda key: key)
        transposed = comb is None
        if comb is None:
            comb = _common(matrix, lambda key: (key[1], key[0]))
        if post is None or comb is None:
            continue
        path = _path(streams, inside)
        return Post(streams, residual, post, comb, transposed, path, expansion, addends)
    return None


def _match_collapse(value: Value, post: Post, inside: Collection[Value]) -> Collapse | None:
    streams = post.streams
    expansion = expand(value, (*rows(value.shape[:-1]), HIDDEN), streams, inside)
    if expansion is None or len(expansion.terms) != post.hc:
        return None
    weights: dict[int, Factor] = {}
    for term in expansion.terms:
        pair = _product(term)
        if pair is None:
            return None
        stream = _stream(streams, pair[0], HIDDEN)
        if stream is None or stream in weights:
            return None
        weights[stream] = pair[1]
    pre = _common(weights, lambda key: (key,)) if len(weights) == post.hc else None
    if pre is None:
        return None
    return Collapse(value, pre, expansion.adds, value.dtype == trt.bfloat16, expansion)


def _product(term: Term) -> tuple[Factor, Factor] | None:
    """A wide factor and a coefficient, if the term is the product of the two and nothing else."""
    if term.scale != 1.0 or len(term.factors) != 2 or any(factor.reciprocal for factor in term.factors):
        return None
    a, b = term.factors
    if a.is_wide == b.is_wide:
        return None
    return (a, b) if a.is_wide else (b, a)


def _is_token(value: Value, factor: Factor) -> bool:
    """Whether a wide factor is the token's element of ``value``."""
    index = factor.index_in(value)
    return index is not None and is_element(value, index, HIDDEN)


def _stream(streams: Value, factor: Factor, *last: Axis) -> int | None:
    """The stream of ``streams`` that a wide factor is."""
    index = factor.index_in(streams)
    if index is None or len(index) < 2:
        return None
    stream = index[-2]
    return stream if isinstance(stream, int) and is_element(streams, index, stream, *last) else None


def _common(factors: Mapping[_Key, Factor], expected: Callable[[_Key], tuple[Axis, ...]]) -> Value | None:
    """The tensor of which the factors are the expected elements of the same token, and all that it has."""
    key, factor = next(iter(factors.items()))
    rank = 1 + len(expected(key))
    for value in _plainest(factor, rank):
        if len(factors) == prod(value.shape[len(value.shape) - rank + 1 :]) and all(
            (index := factor.index_in(value)) is not None and is_element(value, index, *expected(key))
            for key, factor in factors.items()
        ):
            return value
    return None


def _plainest(factor: Factor, rank: int) -> list[Value]:
    """The tensors that a factor is an element of; first one of the rank that the plugin takes, then few axes."""
    return sorted((value for value, _ in factor.names), key=lambda value: (len(value.shape) != rank, len(value.shape)))


def _path(streams: Value, inside: Collection[Value]) -> frozenset[Node]:
    """The layers on the ways to ``streams`` through the tensors ``inside``."""
    nodes: set[Node] = set()
    stack = [streams]
    while stack:
        node = stack.pop().producer
        if node is not None and node not in nodes:
            nodes.add(node)
            stack.extend(operand for operand in node.operands if operand in inside)
    return frozenset(nodes)
