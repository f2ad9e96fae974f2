# SPDX-License-Identifier: Apache-2.0
"""The pattern of the row-parallel linear layer whose output is a boundary's contribution."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from trtllm_mhc.reference.publish_linear import WEIGHT_BLOCK
from trtllm_mhc.rewrite.graph import Array, Node, Op, Value
from trtllm_mhc.rewrite.indexing import HIDDEN, Index, is_element, rows, source

_E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Linear:
    """``output = activation @ weight^T``.

    Attributes:
        output: [..., H], of which the contribution is a reshape.
        activation: [..., K].
        constant: the layer that holds the weight, its only tensor of more than one row and column.
        transposed: whether the weight is stored [K, H].
        between: the output and its reshapes up to the all-reduce.
    """

    output: Value
    activation: Value
    constant: Node
    transposed: bool
    between: tuple[Value, ...]

    @property
    def features(self) -> int:
        """K."""
        return self.activation.shape[-1]

    def weight(self) -> Array | None:
        """The weight as [H, K]; None where its elements cannot be read."""
        elements = self.constant.elements(all_of_them=True)
        if elements is None:
            return None
        matrix = elements.reshape(elements.shape[-2:])
        return np.ascontiguousarray(matrix.T) if self.transposed else matrix


def match_linear(partial: Value) -> Linear | None:
    """The linear layer that makes a sublayer's partial output [..., H], under reshapes of it."""
    index: Index = (*rows(partial.shape[:-1]), HIDDEN)
    value, between = partial, [partial]
    moved = source(value, index)
    while moved is not None:
        value, index = moved
        between.append(value)
        moved = source(value, index)
    node = value.producer
    if node is None or node.op is not Op.MATMUL or not is_element(value, index, HIDDEN):
        return None
    activation, weight = node.operands
    of_activation, of_weight = node.matrix_operations
    if of_activation != "NONE" or of_weight == "VECTOR" or any(size != 1 for size in weight.shape[:-2]):
        return None
    made = weight.producer
    while made is not None and made.op in (Op.RESHAPE, Op.IDENTITY):
        if made.op is Op.RESHAPE and any(order != tuple(sorted(order)) for order in made.transposes):
            return None
        made = made.operands[0].producer
    if made is None or made.op is not Op.CONSTANT or made.output.shape[-2:] != weight.shape[-2:]:
        return None
    return Linear(value, activation, made, of_weight == "NONE", tuple(between))


def block_scaled(weight: Array) -> tuple[Array, Array] | None:
    """A bfloat16 weight [H, K] as E4M3 and UE8M0 scales uint8 [H / 32, K / 32], if that is exactly what it is.

    A block of 32 x 32 elements that were dequantised has all its elements on the grid of E4M3 times some power of two.
    Of the powers that hold its largest element the smallest has the finest grid, so no other needs to be tried.
    """
    hidden, features = weight.shape
    if hidden % WEIGHT_BLOCK or features % WEIGHT_BLOCK:
        return None
    blocks = weight.astype(np.float32).reshape(hidden // WEIGHT_BLOCK, WEIGHT_BLOCK, features // WEIGHT_BLOCK, -1)
    if not np.isfinite(blocks).all():
        return None
    fraction, exponent = np.frexp(np.abs(blocks).max(axis=(1, 3)))
    # 448 is 0.875 * 2^9.
    power = np.where(fraction > _E4M3_LARGEST / 512, exponent - 8, exponent - 9)
    scales = np.clip(np.where(fraction == 0, 0, power) + 127, 0, 254)
    shift = (scales - 127)[:, None, :, None]
    scaled = np.ldexp(blocks, -shift)
    small = np.clip(scaled, -_E4M3_LARGEST, _E4M3_LARGEST).astype(ml_dtypes.float8_e4m3fn)
    if not (small.astype(np.float32).view(np.uint32) == scaled.view(np.uint32)).all():
        return None
    return small.reshape(hidden, features), scales.astype(np.uint8)
