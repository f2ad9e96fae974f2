# SPDX-License-Identifier: Apache-2.0
"""Layers that sum, or otherwise reduce, over elements of their inputs.

Operands are widened first, everything inside a layer is computed and accumulated in that type (fp32, or float64), and
the caller rounds the result once: a bf16 matrix product is an fp32 accumulation rounded to bf16. The order of the sums
is numpy's; TensorRT does not define its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trtllm_mhc.reference._arrays import AnyArray

from .rules import Operation, axes_of_mask, rule

# Elements of a weight matrix that are widened at a time. Copies of whole matrices, which no cache holds, would take
# longer than the products of the few rows that decoding has.
_BLOCK = 1 << 21


@rule("MATRIX_MULTIPLY")
def _matrix_multiply(op: Operation) -> AnyArray:
    layer = op.layer
    a, b = op.operand(0), op.raw(1)
    operations = layer.op0.name, layer.op1.name
    if operations[0] == "TRANSPOSE":
        a = np.swapaxes(a, -1, -2)
    if operations[1] == "TRANSPOSE":
        b = np.swapaxes(b, -1, -2)
    if b.ndim == 2 and b.size > _BLOCK and "VECTOR" not in operations:
        return _times_large_matrix(op, a, b)
    b = op.arithmetic.widen(b)
    # A vector is a row on the left and a column on the right, and that axis of 1 is no axis of the output.
    product: AnyArray = np.matmul(
        a[..., None, :] if operations[0] == "VECTOR" else a, b[..., None] if operations[1] == "VECTOR" else b
    )
    if operations[1] == "VECTOR":
        product = product[..., 0]
    if operations[0] == "VECTOR":
        product = product[..., 0] if operations[1] == "VECTOR" else product[..., 0, :]
    return product


def _times_large_matrix(op: Operation, a: AnyArray, b: AnyArray) -> AnyArray:
    """``a @ b`` for ``b`` [K, N], of which only some columns are widened at a time."""
    step = max(1, _BLOCK // b.shape[0])
    return np.concatenate([a @ op.arithmetic.widen(b[:, i : i + step]) for i in range(0, b.shape[1], step)], axis=-1)


@rule("EINSUM")
def _einsum(op: Operation) -> AnyArray:
    operands = [op.operand(i) for i in range(len(op.inputs))]
    result: AnyArray = np.einsum(op.layer.equation.replace(" ", ""), *operands, optimize=True)
    return result


_REDUCTIONS: dict[str, Callable[..., AnyArray]] = {
    "SUM": np.sum,
    "PROD": np.prod,
    "MAX": np.max,
    "MIN": np.min,
    "AVG": np.mean,
}


@rule("REDUCE")
def _reduce(op: Operation) -> AnyArray:
    layer, x = op.layer, op.operand(0)
    axes, name = axes_of_mask(layer.axes), layer.op.name
    if name == "AVG" and x.dtype.kind in "iu":
        raise op.unsupported("the average of integers")
    if name not in _REDUCTIONS:
        raise op.unsupported(f"reduction {name}")
    # numpy would widen the sum of small integers.
    kept = {} if name in ("MAX", "MIN") else {"dtype": x.dtype}
    return _REDUCTIONS[name](x, axis=axes, keepdims=layer.keep_dims, **kept)


@rule("SOFTMAX")
def _softmax(op: Operation) -> AnyArray:
    x, axes = op.operand(0), axes_of_mask(op.layer.axes)
    exponentials = np.exp(x - x.max(axis=axes, keepdims=True))
    result: AnyArray = exponentials / exponentials.sum(axis=axes, keepdims=True)
    return result


@rule("NORMALIZATION")
def _normalization(op: Operation) -> AnyArray:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias; it always subtracts the mean, so it is no RMSNorm."""
    layer, x = op.layer, op.operand(0)
    if layer.num_groups != 1:
        raise op.unsupported(f"a normalization of {layer.num_groups} groups")
    axes = axes_of_mask(layer.axes)
    centred = x - x.mean(axis=axes, keepdims=True)
    variance = np.square(centred).mean(axis=axes, keepdims=True)
    result: AnyArray = centred / np.sqrt(variance + layer.epsilon) * op.operand(1) + op.operand(2)
    return result


@rule("TOPK")
def _top_k(op: Operation) -> tuple[AnyArray, AnyArray]:
    """The k first in order, equal values by ascending index, and their indices."""
    layer, x = op.layer, op.value(0)
    (axis,) = axes_of_mask(layer.axes)
    dynamic = op.integers(1)
    k = layer.k if dynamic is None else dynamic[0]
    keys = op.operand(0)
    if layer.op.name == "MAX":
        # The stable ascending order of the reversed keys, read backwards, is the stable descending order.
        order = keys.shape[axis] - 1 - np.flip(np.argsort(np.flip(keys, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(keys, axis, kind="stable")
    indices = np.take(order, range(k), axis)
    return np.take_along_axis(x, indices, axis), indices
