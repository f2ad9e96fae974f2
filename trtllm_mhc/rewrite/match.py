# SPDX-License-Identifier: Apache-2.0
"""The patterns: all-reduce, mHC post, collapse and RMSNorm, recognised by what they compute.

Nothing here changes or judges a network. A match says which tensors play which role; `legality` says whether the
boundary may be fused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import tensorrt as trt

from trtllm_mhc.network import plugins
from trtllm_mhc.network.collectives import Collective, read_collective
from trtllm_mhc.rewrite.expand import MAX_STREAMS, Expansion, Factor, Term, expand, is_widening
from trtllm_mhc.rewrite.graph import Graph, Node, Op, Value, scalar_constant
from trtllm_mhc.rewrite.indexing import HIDDEN, Axis, Index, is_element, rows, source

_Key = TypeVar("_Key")

#: Layers that may lie between an all-reduce and the streams, or between the streams and a sublayer's input.
_PATH = {
    *(Op.CAST, Op.IDENTITY, Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.POW, Op.SQRT, Op.RECIP, Op.SUM, Op.MEAN),
    *(Op.EINSUM, Op.MATMUL, Op.RESHAPE, Op.SLICE, Op.GATHER, Op.CONCAT, Op.NORMALIZATION),
}
#: Tensors looked at from one start; a boundary written out stream by stream has about 60.
_MAX_REACH = 160


@dataclass(frozen=True)
class AllReduce:
    """A layer that sums over the ranks.

    Attributes:
        node: the layer.
        form: ``"MhcAllReduce"``, ``"DistCollective"``, ``"AllReduce"`` (TensorRT-LLM's plugin); or ``"MhcBoundary"``
            for a layer that does more than that.
        tp_size: ranks in its group; None where the layer does not tell.
        rank: this engine's index in the group; -1 where that is known at run time only.
        group: world ranks; None where the layer does not tell.
        collective: what a DIST_COLLECTIVE layer says it does; None for the other forms, or if it says nothing.
    """

    node: Node
    form: str
    tp_size: int | None
    rank: int = -1
    group: tuple[int, ...] | None = None
    collective: Collective | None = None

    @property
    def partial(self) -> Value:
        """This rank's summand."""
        return self.node.operands[0]

    @property
    def reduced(self) -> Value:
        """The sum."""
        return self.node.output


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


@dataclass(frozen=True)
class Norm:
    """``layer_input = collapsed / sqrt(mean(collapsed ** 2) + eps) * gamma``.

    Attributes:
        eps: None where it is not a constant.
        eps_value: the tensor it is read from; None where nothing is added to the mean.
        subtracts_mean: whether it is a layer norm.
        reads_unrounded: whether the mean square is that of the collapse before its rounding.
        scale_after_rounding: whether the normalised value is rounded before it is multiplied with ``gamma``.
    """

    layer_input: Value
    gamma: Value | None
    eps: float | None
    eps_value: Value | None = None
    subtracts_mean: bool = False
    reads_unrounded: bool = False
    scale_after_rounding: bool = False


@dataclass
class Boundary:
    """A boundary as found."""

    all_reduce: AllReduce
    posts: list[Post] = field(default_factory=list)
    collapse: Collapse | None = None
    norm: Norm | None = None

    @property
    def post(self) -> Post:
        """The only post, or the first."""
        return self.posts[0]


def find_boundaries(graph: Graph) -> tuple[list[Boundary], list[AllReduce]]:
    """The boundaries that outputs depend on, by depth; and the layers that sum over ranks outside of them."""
    found, others = [], []
    for node in graph.nodes:
        all_reduce = match_all_reduce(node) if node.live else None
        if all_reduce is None:
            continue
        posts = match_posts(all_reduce.reduced) if all_reduce.form != "MhcBoundary" else []
        if not posts:
            others.append(all_reduce)
            continue
        boundary = Boundary(all_reduce, posts)
        boundary.collapse, boundary.norm = match_entry(boundary.post)
        found.append(boundary)
    found.sort(key=lambda b: (b.all_reduce.node.depth, b.all_reduce.node.index))
    return found, others


def match_all_reduce(node: Node) -> AllReduce | None:
    """The all-reduce that ``node`` is, or may be: a collective that does not say what it does counts."""
    if node.op is Op.PLUGIN_V3:
        names = (plugins.ALL_REDUCE, plugins.BOUNDARY)
        name = next((name for name in names if plugins.is_plugin_layer(node.layer, name)), None)
        if name is None:
            return None
        fields = plugins.read_fields(node.layer)
        group = tuple(fields["group"]) or tuple(range(fields["tp_size"]))
        return AllReduce(node, name, fields["tp_size"], fields["rank"], group)
    if node.op is Op.PLUGIN_V2:
        # The plugin's attributes are unreadable here; one output means that nothing is fused into it already, and the
        # second input is its workspace.
        plugin = node.layer.plugin
        if (plugin.plugin_type, plugin.plugin_namespace) != ("AllReduce", "tensorrt_llm"):
            return None
        if len(node.outputs) != 1 or len(node.operands) not in (1, 2):
            return None
        return AllReduce(node, "AllReduce", None)
    if node.op is Op.DIST_COLLECTIVE:
        collective = read_collective(node.layer)
        if collective is not None and not collective.is_all_reduce_sum:
            return None
        ranks = int(node.layer.num_ranks)
        members = collective.group if collective is not None else None
        tp_size = ranks if ranks > 1 else (len(members) if members else None)
        return AllReduce(node, "DistCollective", tp_size, -1, members, collective)
    return None


def match_posts(reduced: Value) -> list[Post]:
    """The mHC posts of an all-reduce's result."""
    # The sum before it is rounded to bfloat16 has the form of a post as well.
    for dtypes in ((trt.bfloat16,), (trt.float16, trt.float32)):
        reach = _Reach(reduced)
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
        reach = _Reach(streams)
        for value in reach.values():
            if len(value.shape) < 2 or value.shape[-1] != hidden or value.dtype != dtype:
                continue
            collapse = _match_collapse(value, post, reach.seen)
            if collapse is None:
                continue
            norm = _match_norm(collapse)
            if norm is not None:
                return collapse, norm
            best = best or collapse
    return best, None


class _Reach:
    """The tensors that a tensor is on the way to, nearest first."""

    def __init__(self, start: Value) -> None:
        self.start = start
        self.seen: dict[Value, None] = {start: None}
        self._stopped: set[Value] = set()

    def values(self) -> Iterator[Value]:
        """The tensors, without the start."""
        queue = [self.start]
        for value in queue:
            if value is not self.start:
                yield value
            if value in self._stopped:
                continue
            for node, _ in value.live_consumers():
                if node.op not in _PATH:
                    continue
                for output in node.outputs:
                    if output not in self.seen and len(self.seen) < _MAX_REACH:
                        self.seen[output] = None
                        queue.append(output)

    def stop_at(self, value: Value) -> None:
        """Do not look beyond ``value``."""
        self._stopped.add(value)


def _match_post(streams: Value, reduced: Value, inside: Collection[Value]) -> Post | None:
    *lead, hc, _ = streams.shape
    tokens = rows(tuple(lead))
    posts: dict[int, Factor] = {}
    combs: dict[tuple[int, int], Factor] = {}
    residuals: dict[tuple[int, int], Factor] = {}
    addends: dict[Value, None] = {}
    first: Expansion | None = None
    for target in range(hc):
        expansion = expand(streams, (*tokens, target, HIDDEN), reduced, inside)
        if expansion is None or len(expansion.terms) <= hc:
            return None
        first = first or expansion
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
    return _assemble_post(streams, inside, posts, combs, residuals, first, tuple(addends))


def _assemble_post(
    streams: Value,
    inside: Collection[Value],
    posts: dict[int, Factor],
    combs: dict[tuple[int, int], Factor],
    residuals: dict[tuple[int, int], Factor],
    expansion: Expansion | None,
    addends: tuple[Value, ...],
) -> Post | None:
    """The post, if the factors are the elements of one tensor each."""
    assert expansion is not None
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


def _match_norm(collapse: Collapse) -> Norm | None:
    collapsed = collapse.collapsed
    hidden = collapsed.shape[-1]
    reach = _Reach(collapsed)
    for value in reach.values():
        node = value.producer
        if node is not None and node.op is Op.NORMALIZATION and _moved_from(node.operands[0], collapsed):
            return Norm(value, None, float(node.layer.epsilon), subtracts_mean=True)
        if len(value.shape) < 2 or value.shape[-1] != hidden or value.dtype != trt.bfloat16:
            continue
        index: Index = (*rows(value.shape[:-1]), HIDDEN)
        expansion = expand(value, index, collapsed, reach.seen)
        if expansion is None or len(expansion.terms) != 1 or expansion.terms[0].scale != 1.0:
            continue
        norm = _norm_of(value, expansion, collapsed)
        if norm is not None:
            return norm
    return None


def _norm_of(value: Value, expansion: Expansion, collapsed: Value) -> Norm | None:
    factors = expansion.terms[0].factors
    wide = [factor for factor in factors if factor.is_wide]
    inverse = [factor for factor in factors if not factor.is_wide]
    if len(wide) != 2 or len(inverse) != 1 or not is_element(*inverse[0].names[0]):
        return None
    own = [factor for factor in wide if factor.index_in(collapsed) is not None]
    weights = [factor for factor in wide if factor.index_in(collapsed) is None]
    if len(own) != 1 or len(weights) != 1:
        return None
    gamma = next((v for v, index in reversed(weights[0].names) if is_weight(v, index)), None)
    mean_square = _under_inverse_root(inverse[0])
    if gamma is None or mean_square is None:
        return None
    mean, eps_value = _split_eps(mean_square)
    if mean is None:
        return None
    squared = _squared(mean, collapsed.shape[-1])
    if squared is None:
        return None
    rounded = _moved_from(squared, collapsed)
    producer = collapsed.producer
    unrounded = not rounded and producer is not None and producer.op is Op.CAST
    if not rounded and not (unrounded and producer and _moved_from(squared, producer.operands[0])):
        return None
    return Norm(
        value,
        gamma,
        0.0 if eps_value is None else scalar_constant(eps_value),
        eps_value,
        reads_unrounded=not rounded,
        scale_after_rounding=bool(expansion.extra_roundings) or expansion.bf16_arithmetic,
    )


def is_weight(value: Value, index: Index) -> bool:
    """Whether the element of ``value`` depends on the hidden axis alone."""
    return [axis for size, axis in zip(value.shape, index, strict=True) if size != 1] == [HIDDEN]


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
    """The tensor of which every factor is the expected element of the same token."""
    key, factor = next(iter(factors.items()))
    rank = 1 + len(expected(key))
    for value in _plainest(factor, rank):
        if all(
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


def _moved_from(value: Value, origin: Value) -> bool:
    """Whether ``value`` holds the elements of ``origin``, each token's in its row, at most widened."""
    index: Index = (*rows(value.shape[:-1]), HIDDEN)
    while value is not origin:
        found = source(value, index)
        if (
            found is None
            and value.producer is not None
            and value.producer.op is Op.CAST
            and is_widening(value.producer)
        ):
            found = value.producer.operands[0], index
        if found is None:
            return False
        value, index = found
    return is_element(value, index, HIDDEN)


def _strip(value: Value) -> Value:
    """The tensor that a per-token scalar is, under casts that do not round, reshapes and identities."""
    while (node := value.producer) is not None and (
        node.op is Op.IDENTITY
        or (node.op is Op.RESHAPE and all(order == tuple(sorted(order)) for order in node.transposes))
        or (node.op is Op.CAST and node.operands[0].dtype == value.dtype)
    ):
        value = node.operands[0]
    return value


def _under_inverse_root(factor: Factor) -> Value | None:
    """``a`` where the factor is ``1 / sqrt(a)``, in any of its spellings."""
    value, inverted, rooted = _strip(factor.names[0][0]), factor.reciprocal, False
    for _ in range(4):
        node = value.producer
        if node is None:
            return None
        if node.op is Op.RECIP and not inverted:
            value, inverted = _strip(node.operands[0]), True
        elif node.op is Op.DIV and not inverted and scalar_constant(node.operands[0]) == 1.0:
            value, inverted = _strip(node.operands[1]), True
        elif node.op is Op.SQRT and not rooted:
            value, rooted = _strip(node.operands[0]), True
        elif node.op is Op.POW and not rooted:
            exponent = scalar_constant(node.operands[1])
            if exponent == -0.5 and not inverted:
                inverted = True
            elif exponent != 0.5:
                return None
            value, rooted = _strip(node.operands[0]), True
        else:
            return None
        if inverted and rooted:
            return value
    return None


def _split_eps(value: Value) -> tuple[Value | None, Value | None]:
    """``mean + eps`` as its parts; no eps where ``value`` is a mean itself."""
    node = value.producer
    if node is not None and node.op is Op.ADD:
        for mean, eps in (node.operands, node.operands[::-1]):
            if _mean(_strip(mean)) is not None:
                return _strip(mean), eps
        return None, None
    return value, None


def _mean(value: Value) -> tuple[Value, float, Node] | None:
    """What ``value`` averages: the tensor under the reduction, the factor beside it, and the reduction."""
    node = value.producer
    if node is None:
        return None
    if node.op is Op.MEAN:
        return node.operands[0], 1.0, node
    if node.op is Op.SUM:
        return node.operands[0], float("nan"), node
    if node.op in (Op.MUL, Op.DIV):
        for total, count in (node.operands, node.operands[::-1]):
            reduced, number = _strip(total).producer, scalar_constant(count)
            if reduced is not None and reduced.op is Op.SUM and number:
                return reduced.operands[0], number if node.op is Op.MUL else 1.0 / number, reduced
            if node.op is Op.DIV:
                break
    return None


def _squared(mean: Value, hidden: int) -> Value | None:
    """``v`` where ``mean`` is the mean of ``v ** 2`` over the hidden axis."""
    found = _mean(mean)
    if found is None:
        return None
    squares, factor, reduction = found
    if len(squares.shape) < 2 or squares.shape[-1] != hidden or reduction.layer.axes != 1 << (len(squares.shape) - 1):
        return None
    if reduction.op is Op.SUM and abs(factor * hidden - 1.0) > 2**-20:
        return None
    node = squares.producer
    if node is None:
        return None
    if node.op is Op.MUL and node.operands[0] is node.operands[1]:
        return node.operands[0]
    if node.op is Op.POW and scalar_constant(node.operands[1]) == 2.0:
        return node.operands[0]
    return None
