# SPDX-License-Identifier: Apache-2.0
"""An element of an integer (or truth) tensor as a function of one element of another tensor.

Indices are clamped, compared and chosen before they index anything, in many spellings. What such a chain of layers
computes is decided by its values: it is constant or the identity between the constants that it compares with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tensorrt as trt

from trtllm_mhc.rewrite.expand import names_of
from trtllm_mhc.rewrite.graph import Op, Value
from trtllm_mhc.rewrite.indexing import Index, broadcast

_LARGEST = 2**31 - 1
_MAX_DEPTH = 16

_BINARY: dict[Op, Callable[[int, int], int]] = {
    Op.MAX: max,
    Op.MIN: min,
    Op.GREATER: lambda a, b: int(a > b),
    Op.GREATER_EQUAL: lambda a, b: int(a >= b),
    Op.LESS: lambda a, b: int(a < b),
    Op.LESS_EQUAL: lambda a, b: int(a <= b),
    Op.EQUAL: lambda a, b: int(a == b),
    Op.AND: lambda a, b: int(bool(a) and bool(b)),
    Op.OR: lambda a, b: int(bool(a) or bool(b)),
}
#: Casts that keep every value (an index that int32 cannot hold is none).
_CASTS = {
    *((a, b) for a in (trt.int32, trt.int64) for b in (trt.int32, trt.int64)),
    *((trt.bool, number) for number in (trt.int32, trt.int64, trt.float32)),
}


@dataclass(frozen=True)
class IntegerFunction:
    """A function of an element.

    Attributes:
        names: the element, under every name it has.
        evaluate: the function.
        constants: the numbers at which it may change its course.
    """

    names: tuple[tuple[Value, Index], ...]
    evaluate: Callable[[int], int]
    constants: frozenset[int]

    def equals(self, expected: Callable[[int], int], lowest: int) -> bool:
        """Whether it is ``expected``, another function of this kind with constants -1 and 0, from ``lowest`` on."""
        # Two points of every interval between constants: one function of this kind is known by its values there.
        near = {number + step for number in self.constants | {-1, 0} for step in (-1, 0, 1)}
        points = {lowest, lowest + 1, _LARGEST - 1, _LARGEST} | {p for p in near if lowest <= p <= _LARGEST}
        return all(self.evaluate(point) == expected(point) for point in points)


def integer_function(value: Value, index: Index, depth: int = 0) -> IntegerFunction | None:
    """Element ``index`` of ``value`` as a function of an element; None where it is one of several, or of none."""
    names = names_of(value, index)
    value, index = names[-1]
    node = value.producer
    known = _constant(value, index)
    if known is not None:
        return IntegerFunction((), lambda _, number=known: number, frozenset({known}))  # type: ignore[misc]
    leaf = IntegerFunction(names, lambda number: number, frozenset())
    if node is None or depth > _MAX_DEPTH:
        return leaf
    if node.op is Op.CAST and (node.operands[0].dtype, value.dtype) in _CASTS:
        return integer_function(node.operands[0], index, depth + 1)
    if node.op not in _BINARY and node.op not in (Op.SELECT, Op.NOT):
        return leaf
    parts = []
    for operand in node.operands:
        at = broadcast(operand, index)
        part = None if at is None else integer_function(operand, at, depth + 1)
        if part is None:
            return None
        parts.append(part)
    elements = [part.names for part in parts if part.names]
    # The names of one element may begin at different tensors, but they end at the same.
    if any(each[-1] != elements[0][-1] for each in elements):
        return None
    names = max(elements, key=len) if elements else ()
    return IntegerFunction(names, _applied(node.op, parts), frozenset().union(*(part.constants for part in parts)))


def _applied(op: Op, parts: list[IntegerFunction]) -> Callable[[int], int]:
    a = parts[0].evaluate
    if op is Op.NOT:
        return lambda n: int(not a(n))
    b = parts[1].evaluate
    if op is Op.SELECT:
        c = parts[2].evaluate
        return lambda n: b(n) if a(n) else c(n)
    combine = _BINARY[op]
    return lambda n: combine(a(n), b(n))


def _constant(value: Value, index: Index) -> int | None:
    elements = value.constant
    at = tuple(axis for axis in index if isinstance(axis, int))
    if elements is None or len(at) != len(index) or elements.dtype.kind not in "iub":
        return None
    return int(elements[at])
