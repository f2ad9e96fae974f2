# SPDX-License-Identifier: Apache-2.0
"""Layers that choose and arrange elements without computing on them, and constants. They round nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trtllm_mhc.network.layers import constant_array
from trtllm_mhc.reference._arrays import AnyArray

from .rules import Operation, rule


@rule("CONSTANT")
def _constant(op: Operation) -> AnyArray:
    # A view: `evaluate` holds the networks while it runs, and returns copies.
    return constant_array(op.layer, copy=False)


@rule("SHAPE")
def _shape(op: Operation) -> AnyArray:
    return np.array(op.value(0).shape, np.int64)


@rule("CONCATENATION")
def _concatenation(op: Operation) -> AnyArray:
    return np.concatenate([op.value(i) for i in range(len(op.inputs))], axis=op.layer.axis)


@rule("SQUEEZE")
def _squeeze(op: Operation) -> AnyArray:
    return np.squeeze(op.value(0), axis=op.integers(1))


@rule("UNSQUEEZE")
def _unsqueeze(op: Operation) -> AnyArray:
    return np.expand_dims(op.value(0), axis=op.integers(1) or ())


@rule("SHUFFLE")
def _shuffle(op: Operation) -> AnyArray:
    """Transpose, reshape, transpose. A 0 in the new shape copies an extent of the tensor after the first transpose."""
    layer, x = op.layer, op.value(0)
    x = x.transpose(tuple(layer.first_transpose)[: x.ndim])
    dimensions = op.integers(1)
    if dimensions is None:
        dimensions = _static_dimensions(layer.reshape_dims)
    if dimensions is not None:
        if layer.zero_is_placeholder:
            dimensions = tuple(x.shape[axis] if extent == 0 else extent for axis, extent in enumerate(dimensions))
        x = x.reshape(dimensions)
    return x.transpose(tuple(layer.second_transpose)[: x.ndim])


@rule("SLICE")
def _slice(op: Operation) -> AnyArray:
    layer, x = op.layer, op.value(0)
    start = _given(op, 1, layer.start)
    size = _given(op, 2, layer.shape)
    stride = _given(op, 3, layer.stride)
    axes = op.integers(5)
    if axes is None:
        axes = _static_dimensions(getattr(layer, "axes", None))
    if axes is None:
        axes = tuple(range(x.ndim))
    mode = layer.mode.name
    outside = np.zeros((1,) * x.ndim, np.bool_)
    result = x
    for axis, first, count, step in zip(axes, start, size, stride, strict=True):
        extent = x.shape[axis]
        wanted = first + step * np.arange(count)
        result = np.take(result, _within(op, mode, wanted, extent), axis)
        columns = (wanted < 0) | (wanted >= extent)
        outside = outside | columns.reshape([-1 if axis == other else 1 for other in range(x.ndim)])
    if mode == "FILL":
        fill = op.inputs[4] if len(op.inputs) > 4 else None
        result = np.where(outside, x.dtype.type(0) if fill is None else fill.reshape(()), result)
    return result


def _within(op: Operation, mode: str, wanted: AnyArray, extent: int) -> AnyArray:
    """The indices that a slice's mode reads where it wants ``wanted`` of an axis of ``extent``."""
    if mode == "STRICT_BOUNDS":
        if wanted.size and (wanted.min() < 0 or wanted.max() >= extent):
            raise ValueError(f"layer {op.layer.name!r}: expected indices in [0, {extent}), got {wanted.tolist()}")
        return wanted
    if mode == "WRAP":
        return wanted % extent
    if mode in ("CLAMP", "FILL"):
        return np.clip(wanted, 0, extent - 1)
    if mode == "REFLECT":
        # The edges are not repeated: -1 reads 1.
        period = max(2 * (extent - 1), 1)
        folded = wanted % period
        return np.minimum(folded, period - folded) if extent > 1 else np.zeros_like(wanted)
    raise op.unsupported(f"slice mode {mode}")


@rule("GATHER")
def _gather(op: Operation) -> AnyArray:
    layer, data, indices = op.layer, op.value(0), op.value(1)
    batch, mode = layer.num_elementwise_dims, layer.mode.name
    if mode == "ELEMENT":
        return np.take_along_axis(data, indices, layer.axis)
    if mode == "ND":
        return _batched(lambda d, i: d[tuple(np.moveaxis(i, -1, 0))], data, indices, batch)
    return _batched(lambda d, i: np.take(d, i, layer.axis - batch), data, indices, batch)


def _batched(function: Callable[[AnyArray, AnyArray], AnyArray], a: AnyArray, b: AnyArray, batch: int) -> AnyArray:
    """``function`` of each pair of slices of ``a`` and ``b`` along their first ``batch`` axes."""
    if batch == 0:
        return function(a, b)
    lead = a.shape[:batch]
    parts = [function(a[index], b[index]) for index in np.ndindex(*lead)]
    return np.stack(parts).reshape(*lead, *parts[0].shape)


def _given(op: Operation, index: int, static: Any) -> tuple[int, ...]:
    """Dimensions from input ``index`` where it is connected, else the layer's own."""
    dynamic = op.integers(index)
    found = _static_dimensions(static) if dynamic is None else dynamic
    if found is None:
        raise op.unsupported(f"no value for input {index}")
    return found


def _static_dimensions(dimensions: Any) -> tuple[int, ...] | None:
    """``Dims`` as a tuple; None where they are not set, which the bindings say by None or by a negative length."""
    if dimensions is None:
        return None
    try:
        return tuple(dimensions)
    except ValueError:
        return None
