# SPDX-License-Identifier: Apache-2.0
"""One element of a tensor as a sum of products of elements of other tensors.

The post-mix and the collapse are sums of a few products, and a network can write such a sum in many ways: products
and a reduction, an einsum, a matrix product, sums of slices. `expand` gives all of them one form, a list of `Term`.

It follows wide tensors (indexed along the hidden axis) through arithmetic until it meets a bfloat16 tensor or a layer
of another kind, and coefficients (not so indexed) only through layers that move elements: what a coefficient is
computed from does not matter.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import tensorrt as trt

from trtllm_mhc.rewrite.graph import Node, Op, Value, scalar_constant
from trtllm_mhc.rewrite.indexing import HIDDEN, Axis, Index, broadcast, source

#: Sums over more elements than this are no sums over streams or routes.
MAX_STREAMS = 8
MAX_ROUTES = 16
_MAX_TERMS = 2 * MAX_ROUTES
_MAX_STEPS = 1024


@dataclass(frozen=True)
class Factor:
    """An element, under every name it has: the tensor used, then the tensors it was moved from.

    Attributes:
        names: tensors and indices.
        reciprocal: whether one over it is meant.
        guard: of a condition, for which truth the rest of the product counts; else it is zero, whatever the rest is.
    """

    names: tuple[tuple[Value, Index], ...]
    reciprocal: bool = False
    guard: bool | None = None

    @property
    def is_wide(self) -> bool:
        """Whether it is indexed along the hidden axis."""
        return HIDDEN in self.names[0][1]

    def index_in(self, value: Value) -> Index | None:
        """Its index in ``value``, or None if it is no element of it."""
        return next((index for other, index in self.names if other is value), None)


@dataclass(frozen=True)
class Term:
    """``scale`` times the product of ``factors``."""

    scale: float
    factors: tuple[Factor, ...] = ()

    def times(self, other: Term) -> Term:
        """The product of two terms."""
        return Term(self.scale * other.scale, self.factors + other.factors)


@dataclass
class Expansion:
    """A sum of terms, and how the network computes it.

    Attributes:
        terms: the summands.
        adds: whether some of them are added by elementwise layers, and not by a reduction or contraction.
        extra_roundings: the bfloat16 tensors between the terms and the result.
        bf16_arithmetic: whether some products or sums are themselves taken in bfloat16.
    """

    terms: list[Term]
    adds: bool = False
    extra_roundings: list[Value] = field(default_factory=list)
    bf16_arithmetic: bool = False

    def joined(self, other: Expansion) -> Expansion:
        """The terms of both, and how either is computed."""
        roundings = list(dict.fromkeys(self.extra_roundings + other.extra_roundings))
        bf16_arithmetic = self.bf16_arithmetic or other.bf16_arithmetic
        return Expansion(self.terms + other.terms, self.adds or other.adds, roundings, bf16_arithmetic)


class _TooComplexError(Exception):
    pass


def expand(
    root: Value,
    index: Index,
    origin: Value | None,
    inside: Container[Value],
    *,
    guards: bool = False,
    partial_sums: bool = True,
) -> Expansion | None:
    """Element ``index`` of ``root`` as a sum of products, or None if it is none of at most a few terms.

    Args:
        root: the tensor; where a cast makes it, that rounding is the result's own.
        index: one index per axis of it.
        origin: a tensor to take as it is, whatever computes it.
        inside: bfloat16 tensors to look into as well, as roundings inside the sum.
        guards: whether to look into a choice between a tensor and zero, as a product with a guard.
        partial_sums: whether to look into bfloat16 summands, which may be sums that were rounded.
    """
    expander = _Expander(origin, inside, guards, partial_sums)
    start = root
    if root.producer is not None and root.producer.op is Op.CAST:
        start = root.producer.operands[0]
    try:
        terms = expander.arithmetic(start, index) if start is not root else expander.wide(start, index, root=True)
    except _TooComplexError:
        return None
    return Expansion(terms, expander.adds, expander.extra_roundings, expander.bf16_arithmetic)


class _Expander:
    def __init__(self, origin: Value | None, inside: Container[Value], guards: bool, partial_sums: bool) -> None:
        self.origin = origin
        self.inside = inside
        self.guards = guards
        self.partial_sums = partial_sums
        self.steps = 0
        self.adds = False
        self.bf16_arithmetic = False
        self.extra_roundings: list[Value] = []

    def wide(self, value: Value, index: Index, *, root: bool = False, summand: bool = False) -> list[Term]:
        """Terms of an operand. A bfloat16 summand is looked into: it may be a partial sum that was rounded."""
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise _TooComplexError
        if HIDDEN not in index:
            return [_coefficient(value, index)]
        node = value.producer
        if node is None or value is self.origin:
            return [_leaf(value, index)]
        if value.dtype != trt.float32 and not root:
            if value not in self.inside and not (summand and self.partial_sums):
                return [_leaf(value, index)]
            if node.op is Op.CAST:
                if value not in self.extra_roundings:
                    self.extra_roundings.append(value)
                return self.arithmetic(node.operands[0], index)
        if node.op is Op.CAST:
            return self.wide(node.operands[0], index, summand=summand)
        return self.arithmetic(value, index)

    def arithmetic(self, value: Value, index: Index) -> list[Term]:
        """Terms of a tensor by the layer that computes it."""
        node = value.producer
        if node is None or value is self.origin or HIDDEN not in index:
            return self.wide(value, index)
        moved = source(value, index)
        if moved is not None:
            return self.wide(*moved)
        terms = self._combine(node, index)
        if terms is None:
            return [_leaf(value, index)]
        if value.dtype != trt.float32:
            self.bf16_arithmetic = True
        if len(terms) > _MAX_TERMS:
            raise _TooComplexError
        return terms

    def _combine(self, node: Node, index: Index) -> list[Term] | None:
        if node.op is Op.CAST:
            return self.wide(node.operands[0], index)
        if node.op in (Op.ADD, Op.MUL, Op.DIV):
            return self._elementwise(node, index)
        if node.op in (Op.SUM, Op.MEAN):
            return self._reduce(node, index)
        if node.op is Op.MATMUL:
            return self._matmul(node, index)
        if node.op is Op.EINSUM:
            return self._einsum(node, index)
        if node.op is Op.SELECT and self.guards:
            return self._select(node, index)
        return None

    def _elementwise(self, node: Node, index: Index) -> list[Term] | None:
        a, b = node.operands
        index_a, index_b = broadcast(a, index), broadcast(b, index)
        if index_a is None or index_b is None:
            return None
        if node.op is Op.DIV:
            if HIDDEN in index_b:
                return None
            divisor = Term(1.0, (Factor(names_of(b, index_b), reciprocal=True),))
            return [term.times(divisor) for term in self.wide(a, index_a)]
        if node.op is Op.ADD:
            self.adds = True
            return self.wide(a, index_a, summand=True) + self.wide(b, index_b, summand=True)
        return [x.times(y) for x in self.wide(a, index_a) for y in self.wide(b, index_b)]

    def _select(self, node: Node, index: Index) -> list[Term] | None:
        guarded = guard_of(node, index)
        if guarded is None:
            return None
        guard, kept, kept_index = guarded
        return [term.times(Term(1.0, (guard,))) for term in self.wide(kept, kept_index)]

    def _reduce(self, node: Node, index: Index) -> list[Term] | None:
        value, reduced = node.operands[0], node.reduced_axes
        sizes = [value.shape[axis] for axis in reduced]
        if len(reduced) != 1 or not 0 < sizes[0] <= MAX_ROUTES:
            return None
        axis, size = reduced[0], sizes[0]
        rest = index[axis + 1 :] if node.keeps_axes else index[axis:]
        scale = 1.0 / size if node.op is Op.MEAN else 1.0
        terms = [term for k in range(size) for term in self.wide(value, (*index[:axis], k, *rest), summand=True)]
        return [Term(term.scale * scale, term.factors) for term in terms]

    def _matmul(self, node: Node, index: Index) -> list[Term] | None:
        a, b = node.operands
        op_a, op_b = node.matrix_operations
        tail = 2 - (op_a == "VECTOR") - (op_b == "VECTOR")
        batch, last = index[: len(index) - tail], list(index[len(index) - tail :])
        row = None if op_a == "VECTOR" else last.pop(0)
        column = None if op_b == "VECTOR" else last.pop(0)
        size = a.shape[-2] if op_a == "TRANSPOSE" else a.shape[-1]
        if not 0 < size <= MAX_ROUTES:
            return None
        terms = []
        for k in range(size):
            tail_a: Index = (k,) if row is None else ((k, row) if op_a == "TRANSPOSE" else (row, k))
            tail_b: Index = (k,) if column is None else ((column, k) if op_b == "TRANSPOSE" else (k, column))
            index_a, index_b = broadcast(a, batch + tail_a), broadcast(b, batch + tail_b)
            if index_a is None or index_b is None:
                return None
            terms += [x.times(y) for x in self.wide(a, index_a) for y in self.wide(b, index_b)]
        return terms

    def _einsum(self, node: Node, index: Index) -> list[Term] | None:
        equation = node.equation.replace(" ", "")
        if "->" not in equation or "." in equation:
            return None
        inputs, output = equation.split("->")
        letters = inputs.split(",")
        if len(letters) != len(node.operands) or len(output) != len(index):
            return None
        at: dict[str, Axis] = dict(zip(output, index, strict=True))
        sizes = {
            letter: size
            for names, value in zip(letters, node.operands, strict=True)
            for letter, size in zip(names, value.shape, strict=True)
        }
        summed = [letter for letter in sizes if letter not in at]
        if len(summed) > 1 or any(not 0 < sizes[letter] <= MAX_ROUTES for letter in summed):
            return None
        terms = []
        for k in range(sizes[summed[0]] if summed else 1):
            bound = {**at, **dict.fromkeys(summed, k)}
            product = [Term(1.0)]
            for names, value in zip(letters, node.operands, strict=True):
                operand_index = broadcast(value, tuple(bound[letter] for letter in names))
                if operand_index is None:
                    return None
                product = [x.times(y) for x in product for y in self.wide(value, operand_index)]
            terms += product
        return terms


def guard_of(node: Node, index: Index) -> tuple[Factor, Value, Index] | None:
    """An `Op.SELECT` between a tensor and zero: its condition as a factor, and the tensor's element; else None."""
    condition, chosen, other = node.operands
    for kept, zero, truth in ((chosen, other, True), (other, chosen, False)):
        at, kept_at = broadcast(condition, index), broadcast(kept, index)
        if scalar_constant(zero) == 0.0 and at is not None and kept_at is not None:
            return Factor(names_of(condition, at), guard=truth), kept, kept_at
    return None


def names_of(value: Value, index: Index) -> tuple[tuple[Value, Index], ...]:
    """The element and where it was moved from, as far as nothing computes or rounds it."""
    names = [(value, index)]
    while True:
        value, index = names[-1]
        moved = source(value, index)
        if moved is None and value.producer is not None and value.producer.op is Op.CAST:
            operand = value.producer.operands[0]
            if value.dtype == operand.dtype or is_widening(value.producer):
                moved = operand, index
        if moved is None:
            return tuple(names)
        names.append(moved)


def is_widening(node: Node) -> bool:
    """Whether a cast keeps every value: from a 16-bit float to float32."""
    return node.output.dtype == trt.float32 and node.operands[0].dtype in (trt.bfloat16, trt.float16)


def _leaf(value: Value, index: Index) -> Term:
    return Term(1.0, (Factor(names_of(value, index)),))


def _coefficient(value: Value, index: Index) -> Term:
    """A coefficient, or its number where it is a constant."""
    elements = value.constant
    at = tuple(axis for axis in index if isinstance(axis, int))
    if elements is not None and len(at) == len(index):
        return Term(float(elements[at]))
    return _leaf(value, index)
