# SPDX-License-Identifier: Apache-2.0
"""Following one element of a tensor back through layers that only move elements.

An element of a tensor is named by one index per axis. An index is an integer, `HIDDEN` for any position along the
hidden axis, or a `Row`: one of the axes that together number the tokens. ``[M, ...]`` has one row axis and
``[B, S, ...]`` two; all row axes in order are the same token whatever the number of axes, so a reshape between the two
is followed without knowing B or S. Axes of size 1 always have index 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_mhc.rewrite.graph import Node, Op, Size, Value


@dataclass(frozen=True)
class Hidden:
    """Any position along the hidden axis."""


@dataclass(frozen=True)
class Row:
    """Axis ``part`` of the ``of`` axes that number the tokens."""

    part: int
    of: int


HIDDEN = Hidden()
Axis = int | Hidden | Row
Index = tuple[Axis, ...]


def rows(shape: tuple[int, ...]) -> Index:
    """The index of any token, given the sizes of the row axes."""
    count = sum(size != 1 for size in shape)
    parts = iter(range(count))
    return tuple(0 if size == 1 else Row(next(parts), count) for size in shape)


def is_rows(index: list[Axis] | Index) -> bool:
    """Whether the indices are all row axes of a token, in order (none at all: a single row)."""
    return list(index) == [Row(k, len(index)) for k in range(len(index))]


def is_element(value: Value, index: Index, *last: Axis) -> bool:
    """Whether ``index`` is the token's element ``last`` of ``value``, rows first, not counting axes of size 1."""
    wide = [axis for size, axis in zip(value.shape, index, strict=True) if size != 1]
    want = list(last)
    return len(wide) >= len(want) and wide[len(wide) - len(want) :] == want and is_rows(wide[: len(wide) - len(want)])


def broadcast(value: Value, index: Index) -> Index | None:
    """The element of an elementwise operand that goes into the result's element ``index``."""
    if len(value.shape) != len(index):
        return None
    return tuple(0 if size == 1 else axis for size, axis in zip(value.shape, index, strict=True))


def source(value: Value, index: Index) -> tuple[Value, Index] | None:
    """The element that ``value``'s layer copies into element ``index``, or None if the layer computes something."""
    node = value.producer
    if node is None:
        return None
    if node.op is Op.IDENTITY:
        return node.operands[0], index
    if node.op is Op.RESHAPE:
        found = _reshape(node, index)
    elif node.op is Op.SLICE:
        found = _slice(node, index)
    elif node.op is Op.GATHER:
        found = _gather(node, index)
    elif node.op is Op.CONCAT:
        return _concat(node, index)
    else:
        return None
    return None if found is None else (node.operands[0], found)


def reshape_index(out: tuple[int, ...], into: tuple[int, ...], index: Index) -> Index | None:
    """The index into shape ``into`` of element ``index`` of its reshape to ``out``; None where that takes arithmetic.

    Equal static sizes, or products of sizes whose indices are numbers, are paired from the last axis on. What then is
    left must be the token's row axes: both sides number as many tokens in the same order, however many axes they take.
    """
    left = [(size, axis) for size, axis in zip(out, index, strict=True) if size != 1]
    free = [position for position, size in enumerate(into) if size != 1]
    result: list[Axis] = [0] * len(into)
    while left and free:
        if left[-1][0] == into[free[-1]] and left[-1][0] >= 0:
            result[free.pop()] = left.pop()[1]
        elif not _pair_numbers(left, free, into, result):
            break
    if len(left) == len(free) == 1:
        result[free[0]] = left[0][1]
        return tuple(result)
    if not left and not free:
        return tuple(result)
    if not left or not free or not is_rows([axis for _, axis in left]):
        return None
    for part, position in enumerate(free):
        result[position] = Row(part, len(free))
    return tuple(result)


def _pair_numbers(left: list[tuple[int, Axis]], free: list[int], into: tuple[int, ...], result: list[Axis]) -> bool:
    """Pair the last axes of both sides that have as many elements, where the indices on the left are numbers."""
    number, size_out, size_in, taken, given = 0, 1, 1, 0, 0
    while taken == 0 or size_out != size_in:
        if size_out <= size_in:
            size, axis = left[-1 - taken] if taken < len(left) else (-1, HIDDEN)
            if size < 0 or not isinstance(axis, int):
                return False
            number, size_out, taken = number + axis * size_out, size_out * size, taken + 1
        else:
            if given == len(free) or into[free[-1 - given]] < 0:
                return False
            size_in, given = size_in * into[free[-1 - given]], given + 1
    del left[len(left) - taken :]
    for _ in range(given):
        position = free.pop()
        number, result[position] = divmod(number, into[position])
    return True


def _reshape(node: Node, index: Index) -> Index | None:
    into, out = node.operands[0].shape, node.output.shape
    first, second = node.transposes
    middle_out, middle_index = list(out), list(index)
    for position, axis in enumerate(second):
        middle_out[axis], middle_index[axis] = out[position], index[position]
    middle_in = tuple(into[axis] for axis in first)
    if tuple(middle_out) == middle_in and middle_in.count(-1) <= 1:
        found: Index | None = tuple(middle_index)
    else:
        found = reshape_index(tuple(middle_out), middle_in, tuple(middle_index))
    if found is None:
        return None
    result = list(found)
    for position, axis in enumerate(first):
        result[axis] = found[position]
    return tuple(result)


def _slice(node: Node, index: Index) -> Index | None:
    slicing = node.slicing
    if slicing is None:
        return None
    into, out = node.operands[0], node.output
    result = list(index)
    for position, axis in enumerate(slicing.axes):
        at, begin, step = index[axis], slicing.start[position], slicing.stride[position]
        if not isinstance(begin, int) or not isinstance(step, int):
            return None
        if step == 0:
            result[axis] = begin
            continue
        if isinstance(at, int):
            result[axis] = begin + at * step
            continue
        size = None if slicing.size is None else slicing.size[position]
        whole = out.shape[axis] == into.shape[axis] >= 0 or size == Size(into, axis)
        if (begin, step) != (0, 1) or not whole:
            return None
    return tuple(result)


def _gather(node: Node, index: Index) -> Index | None:
    picked, axis = node.operands[1].constant, node.gather_axis
    if axis is None or picked is None or picked.ndim > 1:
        return None
    if picked.ndim == 0:
        chosen = int(picked)
        return (*index[:axis], _wrap(chosen, node, axis), *index[axis:])
    at = index[axis]
    if not isinstance(at, int):
        return None
    return (*index[:axis], _wrap(int(picked[at]), node, axis), *index[axis + 1 :])


def _wrap(chosen: int, node: Node, axis: int) -> int:
    return chosen if chosen >= 0 else chosen + node.operands[0].shape[axis]


def _concat(node: Node, index: Index) -> tuple[Value, Index] | None:
    axis = node.concat_axis
    at = index[axis]
    if not isinstance(at, int):
        return None
    for operand in node.operands:
        size = operand.shape[axis]
        if size < 0:
            return None
        if at < size:
            return operand, (*index[:axis], at, *index[axis + 1 :])
        at -= size
    return None
