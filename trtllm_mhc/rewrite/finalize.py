# SPDX-License-Identifier: Apache-2.0
"""The pattern of a MoE finalize: gathered expert rows, weighted and summed over the routes, plus the shared experts."""

from __future__ import annotations

from dataclasses import dataclass

import tensorrt as trt

from trtllm_mhc.rewrite.expand import Expansion, Factor, Term, expand, guard_of, names_of
from trtllm_mhc.rewrite.graph import Op, Value
from trtllm_mhc.rewrite.indexing import HIDDEN, Index, broadcast, is_element, rows, source
from trtllm_mhc.rewrite.integers import IntegerFunction, integer_function

_Names = tuple[tuple[Value, Index], ...]


@dataclass(frozen=True)
class Finalize:
    """``finalized[t] = (sum over k of rows[index[t, k]] * weights[t, k]) + shared[t]``.

    Attributes:
        finalized: the bfloat16 tensor that holds it, [..., H].
        between: that and its reshapes up to the all-reduce.
        rows: [P, H].
        weights: [..., K].
        index: [..., K]; -1 where a route does not count.
        shared: [..., H]; None where nothing is added.
        is_masked: whether an index of -1 is proven to add nothing, and any other to pick its own row.
    """

    finalized: Value
    between: tuple[Value, ...]
    rows: Value
    weights: Value
    index: Value
    shared: Value | None
    is_masked: bool
    expansion: Expansion

    @property
    def top_k(self) -> int:
        """Routes of a token."""
        return self.index.shape[-1]


@dataclass(frozen=True)
class _Route:
    """One routed term."""

    rows: Value
    row: IntegerFunction
    weight: _Names
    guards: tuple[tuple[IntegerFunction | None, bool], ...]

    @property
    def is_masked(self) -> bool:
        """Whether -1 adds nothing, and any other index picks its own row and counts."""

        def counts(number: int) -> int:
            return int(all(guard is not None and bool(guard.evaluate(number)) == truth for guard, truth in self.guards))

        constants = frozenset().union(*(guard.constants for guard, _ in self.guards if guard is not None))
        own = all(guard is not None and guard.names[-1:] == self.row.names[-1:] for guard, _ in self.guards)
        guard = IntegerFunction(self.row.names, counts, constants)
        return own and self.row.equals(lambda n: n, 0) and guard.equals(lambda n: int(n >= 0), -1)


def match_finalize(partial: Value) -> Finalize | None:
    """The finalize that makes a sublayer's partial output [..., H], under reshapes of it."""
    index: Index = (*rows(partial.shape[:-1]), HIDDEN)
    value, moved, between = partial, source(partial, index), [partial]
    while moved is not None:
        value, index = moved
        between.append(value)
        moved = source(value, index)
    if not is_element(value, index, HIDDEN):
        return None
    # The shared experts' output may itself be a sum; only where it cannot be taken whole, a rounding is looked for.
    for partial_sums in (False, True):
        expansion = expand(value, index, None, (), guards=True, partial_sums=partial_sums)
        found = None if expansion is None else _match(value, tuple(between), expansion)
        if found is not None:
            return found
    return None


def _match(value: Value, between: tuple[Value, ...], expansion: Expansion) -> Finalize | None:
    if len(expansion.terms) < 2:
        return None
    routes: list[_Route] = []
    shared: list[Value] = []
    for term in expansion.terms:
        if term.scale != 1.0:
            return None
        route = _route(term)
        own = _shared(term) if route is None else None
        if route is not None:
            routes.append(route)
        elif own is not None:
            shared.append(own)
        else:
            return None
    if not routes or len(shared) > 1 or any(route.rows is not routes[0].rows for route in routes):
        return None
    for candidate, _ in _plainest(routes[0].row.names):
        weights = _weights(candidate, routes)
        if weights is not None:
            is_masked = all(route.is_masked for route in routes)
            return Finalize(
                value,
                between,
                routes[0].rows,
                weights,
                candidate,
                shared[0] if shared else None,
                is_masked,
                expansion,
            )
    return None


def _weights(index: Value, routes: list[_Route]) -> Value | None:
    """The tensor of weights, if the routes are the elements of ``index`` and their weights those of one tensor."""
    places: list[int] = []
    for route in routes:
        at = _index_in(route.row.names, index)
        place = at[-1] if at else None
        if at is None or not isinstance(place, int) or not is_element(index, at, place):
            return None
        places.append(place)
    if sorted(places) != list(range(index.shape[-1])):
        return None
    for weights, _ in _plainest(routes[0].weight):
        if weights.shape[-1:] == index.shape[-1:] and all(
            (at := _index_in(route.weight, weights)) is not None and is_element(weights, at, place)
            for route, place in zip(routes, places, strict=True)
        ):
            return weights
    return None


def _route(term: Term) -> _Route | None:
    """A routed term: an element of a gathered row, a weight, and guards."""
    guards = [factor for factor in term.factors if factor.guard is not None]
    wide = [factor for factor in term.factors if factor.guard is None and factor.is_wide]
    coefficients = [factor for factor in term.factors if factor.guard is None and not factor.is_wide]
    if len(wide) != 1 or not coefficients or any(factor.reciprocal for factor in term.factors):
        return None
    gathered = _gathered(wide[0], guards)
    if gathered is None:
        return None
    # A weight may itself be zero under a mask, and a mask may be a factor of its own.
    weights: list[_Names] = []
    found: list[tuple[IntegerFunction | None, bool]] = []
    for factor in coefficients:
        _split_weight(factor.names, weights, found)
    if len(weights) != 1:
        return None
    found += [(_function(factor.names), bool(factor.guard)) for factor in guards]
    return _Route(gathered[0], gathered[1], weights[0], tuple(found))


def _split_weight(
    names: _Names, weights: list[_Names], guards: list[tuple[IntegerFunction | None, bool]], depth: int = 0
) -> None:
    """Take the masks off a weight."""
    function = _function(names)
    if function is not None and function.constants:
        guards.append((function, True))
        return
    for position, (value, index) in enumerate(names):
        node = value.producer
        guarded = guard_of(node, index) if node is not None and node.op is Op.SELECT else None
        if guarded is not None and depth < 4:
            guard, kept, at = guarded
            guards.append((_function(guard.names), bool(guard.guard)))
            _split_weight(names_of(kept, at), weights, guards, depth + 1)
            return
        if node is not None and node.op is Op.MUL and depth < 4 and len(names) == position + 1:
            parts = [(operand, broadcast(operand, index)) for operand in node.operands]
            if any(_is_mask(operand) for operand, _ in parts) and all(at is not None for _, at in parts):
                for operand, place in parts:
                    assert place is not None
                    _split_weight(names_of(operand, place), weights, guards, depth + 1)
                return
    weights.append(names)


def _is_mask(value: Value) -> bool:
    """Whether it is a cast truth, under reshapes."""
    while (node := value.producer) is not None and node.op in (Op.RESHAPE, Op.IDENTITY):
        value = node.operands[0]
    return node is not None and node.op is Op.CAST and node.operands[0].dtype == trt.bool


def _function(names: _Names) -> IntegerFunction | None:
    value, index = names[0]
    return integer_function(value, index)


def _gathered(factor: Factor, guards: list[Factor]) -> tuple[Value, IntegerFunction] | None:
    """The tensor of rows that a wide factor is gathered from, and by which index; its masks are added to ``guards``."""
    names = list(factor.names)
    for value, index in names:  # grows while it is read
        node = value.producer
        if node is None or index[-1:] != (HIDDEN,):
            continue
        if node.op is Op.SELECT:
            guarded = guard_of(node, index)
            if guarded is not None:
                guards.append(guarded[0])
                names += names_of(guarded[1], guarded[2])
        elif node.op is Op.GATHER and node.gather_axis == 0 and len(node.operands[0].shape) == 2:
            function = integer_function(node.operands[1], index[:-1])
            return None if function is None or not function.names else (node.operands[0], function)
    return None


def _shared(term: Term) -> Value | None:
    """The tensor of which a term is the token's own element."""
    if len(term.factors) != 1 or term.factors[0].reciprocal or not term.factors[0].is_wide:
        return None
    names = [(v, index) for v, index in term.factors[0].names if is_element(v, index, HIDDEN)]
    narrow = [value for value, _ in names if value.dtype == trt.bfloat16]
    return narrow[0] if narrow else (names[0][0] if names else None)


def _index_in(names: _Names, value: Value) -> Index | None:
    return next((index for other, index in names if other is value), None)


def _plainest(names: _Names) -> list[tuple[Value, Index]]:
    """The tensors that an element is of; first those with one axis of tokens and one more, then few axes."""
    return sorted(names, key=lambda name: (len(name[0].shape) != 2, len(name[0].shape)))
