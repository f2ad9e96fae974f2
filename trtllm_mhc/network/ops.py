# SPDX-License-Identifier: Apache-2.0
"""One native TensorRT layer per function, returning its output tensor, and the checks of the layers made of them.

Checks raise ``TypeError`` (dtype) or ``ValueError`` (rank or size), naming expected and got.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import tensorrt as trt

from trtllm_mhc.network.layers import tensor_shape

Array = npt.NDArray[Any]

TRT_DTYPES = {
    np.dtype(np.float32): trt.float32,
    np.dtype(np.int32): trt.int32,
    np.dtype(ml_dtypes.bfloat16): trt.bfloat16,
    np.dtype(ml_dtypes.float8_e4m3fn): trt.fp8,
}


class _OwnedWeights(trt.Weights):  # type: ignore[misc]
    """``trt.Weights`` that owns the array it points into.

    TensorRT copies weights only when it builds, and its bindings keep the ``Weights`` object of a constant alive as
    long as the network. A bare (dtype, pointer, count) would leave the array itself to the caller.
    """

    def __init__(self, array: Array) -> None:
        super().__init__(TRT_DTYPES[array.dtype], array.ctypes.data, array.size)
        self.array = array


def constant(network: trt.INetworkDefinition, value: Array) -> trt.ITensor:
    """A constant of the shape and dtype of ``value`` (float32, int32, bfloat16 or float8_e4m3fn).

    A contiguous array is not copied: the network refers to its memory and keeps it alive as long as it lives itself.
    """
    if value.dtype not in TRT_DTYPES:
        raise TypeError(f"constant: expected float32, int32, bfloat16 or float8_e4m3fn, got {value.dtype}")
    return output(network.add_constant(value.shape, _OwnedWeights(np.ascontiguousarray(value))), "constant")


def cast(network: trt.INetworkDefinition, x: trt.ITensor, dtype: trt.DataType) -> trt.ITensor:
    """``x`` as ``dtype``, rounded to nearest even; ``x`` itself where it already is."""
    return x if x.dtype == dtype else output(network.add_cast(x, dtype), "cast")


def elementwise(
    network: trt.INetworkDefinition, a: trt.ITensor, b: trt.ITensor, operation: trt.ElementWiseOperation
) -> trt.ITensor:
    """``a operation b``, broadcast where a dimension is 1."""
    return output(network.add_elementwise(a, b, operation), "elementwise")


def mul(network: trt.INetworkDefinition, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
    """``a * b``, broadcast where a dimension is 1."""
    return elementwise(network, a, b, trt.ElementWiseOperation.PROD)


def add(network: trt.INetworkDefinition, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
    """``a + b``, broadcast where a dimension is 1."""
    return elementwise(network, a, b, trt.ElementWiseOperation.SUM)


def unary(network: trt.INetworkDefinition, x: trt.ITensor, operation: trt.UnaryOperation) -> trt.ITensor:
    """``operation`` of every element."""
    return output(network.add_unary(x, operation), "unary")


def activation(network: trt.INetworkDefinition, x: trt.ITensor, kind: trt.ActivationType) -> trt.ITensor:
    """The activation ``kind`` of every element."""
    return output(network.add_activation(x, kind), "activation")


def reduce(
    network: trt.INetworkDefinition, x: trt.ITensor, operation: trt.ReduceOperation, axis: int, *, keep: bool
) -> trt.ITensor:
    """``operation`` over one axis, which stays as a 1 with ``keep``."""
    return output(network.add_reduce(x, operation, 1 << axis, keep), "reduce")


def gather(network: trt.INetworkDefinition, x: trt.ITensor, indices: Array, axis: int) -> trt.ITensor:
    """The elements of ``x`` at ``indices`` (int32; a scalar removes the axis) along ``axis``."""
    return output(network.add_gather(x, constant(network, indices), axis), "gather")


def select(network: trt.INetworkDefinition, condition: trt.ITensor, a: trt.ITensor, b: trt.ITensor) -> trt.ITensor:
    """``a`` where ``condition`` (bool) holds, else ``b``; broadcast where a dimension is 1."""
    return output(network.add_select(condition, a, b), "select")


def reshape(network: trt.INetworkDefinition, x: trt.ITensor, shape: tuple[int, ...]) -> trt.ITensor:
    """``x`` as ``shape``, in which a leading 0 copies the (dynamic) first dimension."""
    layer = network.add_shuffle(x)
    layer.reshape_dims = shape
    return output(layer, "reshape")


def output(layer: Any, what: str) -> trt.ITensor:
    """The first output of a layer that TensorRT may have refused to add."""
    if layer is None:
        raise ValueError(f"{what}: TensorRT {trt.__version__} refused the layer; its log says why")
    return layer.get_output(0)


def check(x: trt.ITensor, what: str, dtype: trt.DataType | None, shape: tuple[int | None, ...]) -> None:
    """Compares a tensor with its expected dtype (None: any) and shape (None: any size; only the first dynamic)."""
    if dtype is not None and x.dtype != dtype:
        raise TypeError(f"{what}: expected {dtype}, got {x.dtype}")
    got = tensor_shape(x)
    known = got is not None and len(got) == len(shape) and all(size >= 0 for size in got[1:])
    if (
        got is None
        or not known
        or any(want is not None and want != size for want, size in zip(shape, got, strict=True))
    ):
        expected = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{what}: expected shape [{expected}] with at most the first dimension dynamic, got {got}")


def check_array(array: Array, what: str, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
    """Compares an array with its expected dtype and shape."""
    if array.dtype != dtype:
        raise TypeError(f"{what}: expected {np.dtype(dtype)}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{what}: expected shape {shape}, got {array.shape}")
