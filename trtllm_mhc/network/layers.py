# SPDX-License-Identifier: Apache-2.0
"""Typed access to the layers of a TensorRT network.

``INetworkDefinition`` hands layers out as plain ``ILayer`` objects, which lack the attributes of their kind (the
operation of an elementwise layer, the axes of a reduction, ...). :func:`downcast` gives them back, and
:func:`constant_array` reads what the bindings cannot show: bf16 and FP8 constants.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import tensorrt as trt

# The layer types whose class is not named after them.
_IRREGULAR = {
    "CONDITIONAL_INPUT": "IIfConditionalInputLayer",
    "CONDITIONAL_OUTPUT": "IIfConditionalOutputLayer",
}


@cache
def _layer_classes() -> dict[Any, type]:
    """Layer type to Python class, for every pair that the loaded TensorRT has.

    The set grows with each TensorRT release, so it is read from the module: ``MATRIX_MULTIPLY`` belongs to
    ``IMatrixMultiplyLayer`` because the two names agree but for case, underscores and affixes.
    """
    by_name = {
        name[1:].removesuffix("Layer").upper(): value
        for name, value in vars(trt).items()
        if isinstance(value, type) and issubclass(value, trt.ILayer) and value is not trt.ILayer
    }
    classes = {}
    for name, layer_type in trt.LayerType.__members__.items():
        irregular = _IRREGULAR.get(name)
        found = getattr(trt, irregular, None) if irregular else by_name.get(name.replace("_", ""))
        if found is not None:
            classes[layer_type] = found
    return classes


def downcast(layer: Any) -> Any:
    """Give ``layer`` the class of its layer type, for example ``IElementWiseLayer``, and return it.

    The same object is returned: the bindings' layer classes are views of one C++ pointer, so changing the Python class
    reveals the attributes and changes nothing in the network. A layer that already has its class, or whose type has
    none in the loaded TensorRT (``LayerType.PLUGIN``), is returned as it is.

    Ask :func:`layer_type`, not ``layer.type``, for the type of the result: an activation's ``type`` is its function.
    """
    if type(layer) is trt.ILayer:
        found = _layer_classes().get(layer.type)
        if found is not None:
            layer.__class__ = found
    return layer


def layer_type(layer: Any) -> Any:
    """The ``LayerType`` of a layer, downcast or not.

    ``IActivationLayer`` and ``IPoolingLayer`` hide it behind an attribute of the same name.
    """
    return trt.ILayer.type.fget(layer)


@cache
def _numpy_dtypes() -> dict[Any, np.dtype[Any]]:
    return {
        trt.float32: np.dtype(np.float32),
        trt.float16: np.dtype(np.float16),
        trt.bfloat16: np.dtype(ml_dtypes.bfloat16),
        trt.fp8: np.dtype(ml_dtypes.float8_e4m3fn),
        trt.int8: np.dtype(np.int8),
        trt.uint8: np.dtype(np.uint8),
        trt.int32: np.dtype(np.int32),
        trt.int64: np.dtype(np.int64),
        trt.bool: np.dtype(np.bool_),
    }


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """The numpy dtype (of ml_dtypes for bf16 and FP8) with the bits of a TensorRT ``DataType``.

    Raises:
        NotImplementedError: the type packs several elements into a byte, or numpy has nothing like it.
    """
    found = _numpy_dtypes().get(dtype)
    if found is None:
        raise NotImplementedError(f"expected a data type of whole bytes that numpy can hold, got {dtype}")
    return found


def tensor_shape(tensor: Any) -> tuple[int, ...] | None:
    """The dimensions of an ``ITensor``, -1 where they are dynamic; None where TensorRT cannot tell the rank."""
    # Where shape inference fails, 11.x raises from `shape` and 10.x gives dimensions of negative length.
    try:
        return tuple(tensor.shape)
    except (RuntimeError, TypeError, ValueError):
        return None


def constant_array(layer: Any, *, copy: bool = True) -> npt.NDArray[Any]:
    """The value of an ``IConstantLayer`` in the shape and dtype of its output.

    Args:
        layer: the constant layer.
        copy: False gives a read-only view of the memory that the network refers to, for large weights; it must not
            be used once that memory's owner (the network, or whoever made the weights) is gone.

    Raises:
        NotImplementedError: numpy cannot hold the constant's data type.
        RuntimeError: the loaded bindings are laid out in a way this function does not know.
    """
    layer = downcast(layer)
    shape = tuple(layer.shape)
    weights = layer.weights
    dtype = numpy_dtype(layer.get_output(0).dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if weights.size != count:
        raise RuntimeError(f"constant {layer.name!r}: expected {count} elements for shape {shape}, got {weights.size}")
    # Never through the array's elements: bindings older than numpy 2 give them a stride of zero.
    address = weights.ctypes.data if isinstance(weights, np.ndarray) else _weights_address(weights)
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    view: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=memoryview(memory))
    if copy:
        return view.copy()
    view.flags.writeable = False
    return view


class _Weights(ctypes.Structure):
    """``nvinfer1::Weights``."""

    _fields_ = (("type", ctypes.c_int32), ("values", ctypes.c_void_p), ("count", ctypes.c_int64))


def _weights_address(weights: Any) -> int:
    """Where the elements of a ``trt.Weights`` lie.

    The bindings do not say: ``numpy()`` refuses the types that numpy lacks. Their objects hold, right behind Python's
    object header, a pointer to the C++ struct. Its type and count are compared with what the bindings do say before
    its pointer is used.
    """
    address = ctypes.c_void_p.from_address(id(weights) + object.__basicsize__).value
    struct = _Weights.from_address(address) if address else _Weights()
    if struct.type != int(weights.dtype) or struct.count != weights.size or not struct.values:
        raise RuntimeError(f"the bindings of TensorRT {trt.__version__} do not show where {weights.dtype} weights lie")
    return int(struct.values)
