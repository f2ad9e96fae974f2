# SPDX-License-Identifier: Apache-2.0
"""The pattern of an RMSNorm over the last axis, in its spellings."""

from __future__ import annotations

from dataclasses import dataclass

import tensorrt as trt

from trtllm_mhc.rewrite.expand import Expansion, Factor, expand, is_widening
from trtllm_mhc.rewrite.graph import Node, Op, Value, scalar_constant
from trtllm_mhc.rewrite.indexing import HIDDEN, Index, is_element, rows, source
from trtllm_mhc.rewrite.reach import Reach


@dataclass(frozen=True)
class Norm:
    """``layer_input = collapsed / sqrt(mean(collapsed ** 2) + eps) * gamma``.

    Attributes:
        eps: None where it is not a constant.
        eps_value: the tensor it is read from; None where nothing is added to the mean.
        subtracts_mean: whether it is a layer norm.
        reads_unrounded: whether the mean square is that of the collapse before its rounding.
        scale_after_rounding: whether one of the two products is rounded before the other is taken.
        in_float32: whether the mean square and its inverse root are.
    """

    layer_input: Value
    gamma: Value | None
    eps: float | None
    eps_value: Value | None = None
    subtracts_mean: bool = False
    reads_unrounded: bool = False
    scale_after_rounding: bool = False
    in_float32: bool = True


def match_norm(collapsed: Value) -> Norm | None:
    """The norm of a collapsed tensor [..., H]."""
    hidden = collapsed.shape[-1]
    reach = Reach(collapsed)
    for value in reach.values():
        node = value.producer
        if node is not None and node.op is Op.NORMALIZATION and _moved_from(node.operands[0], collapsed):
            return Norm(value, None, node.epsilon, subtracts_mean=True)
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
    gamma = next((v for v, index in reversed(weights[0].names) if _is_weight(v, index)), None)
    mean_square = _under_inverse_root(inverse[0])
    if gamma is None or mean_square is None:
        return None
    mean, eps_value = _split_eps(mean_square)
    if mean is None:
        return None
    square = _square(mean, collapsed.shape[-1])
    squared = None if square is None else _squared(square)
    if square is None or squared is None:
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
        in_float32=all(each.dtype == trt.float32 for each in (square, mean, mean_square, inverse[0].names[0][0])),
    )


def mean_square_under(factor: Factor, features: int) -> tuple[Value, float | None] | None:
    """``v`` and ``eps`` where the factor is ``1 / sqrt(mean(v ** 2) + eps)``, all in float32, over ``features``.

    The epsilon is None where it is not a constant.
    """
    mean_square = _under_inverse_root(factor)
    if mean_square is None:
        return None
    mean, eps = _split_eps(mean_square)
    square = None if mean is None else _square(mean, features)
    squared = None if square is None else _squared(square)
    if mean is None or square is None or squared is None:
        return None
    if any(each.dtype != trt.float32 for each in (square, mean, mean_square, factor.names[0][0])):
        return None
    return squared, 0.0 if eps is None else scalar_constant(eps)


def _is_weight(value: Value, index: Index) -> bool:
    """Whether the element of ``value`` depends on the hidden axis alone."""
    return [axis for size, axis in zip(value.shape, index, strict=True) if size != 1] == [HIDDEN]


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
    """What ``value`` averages: the tensor under the reduction, the factor beside it (NaN: none), and the reduction."""
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


def _square(mean: Value, hidden: int) -> Value | None:
    """The tensor of squares that ``mean`` is the mean of over the hidden axis."""
    found = _mean(mean)
    if found is None:
        return None
    square, factor, reduction = found
    if len(square.shape) < 2 or square.shape[-1] != hidden or reduction.reduced_axes != (len(square.shape) - 1,):
        return None
    if reduction.op is Op.SUM and not abs(factor * hidden - 1.0) <= 2**-20:
        return None
    return square


def _squared(square: Value) -> Value | None:
    """``v`` where ``square`` is ``v ** 2``."""
    node = square.producer
    if node is None:
        return None
    if node.op is Op.MUL and node.operands[0] is node.operands[1]:
        return node.operands[0]
    if node.op is Op.POW and scalar_constant(node.operands[1]) == 2.0:
        return node.operands[0]
    return None
