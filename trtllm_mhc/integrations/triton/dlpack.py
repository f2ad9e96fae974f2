# SPDX-License-Identifier: Apache-2.0
"""Numpy arrays to and from the DLPack capsules of Triton's python backend.

Its own way to numpy, ``Tensor.as_numpy``, knows no bf16, and with numpy 2 the stubs of older servers return zeros from
it without an error. DLPack is plain C memory and works with any numpy.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from trtllm_mhc.integrations.triton import tensors

_CPU = 1
_CPU_PINNED = 3  # cudaHostAlloc'ed memory, which the host reads like any other
# DLPack's type codes: signed, unsigned, IEEE floating point, bfloat, bool.
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, _Destructor]
# The same functions for destructors, which get the dying capsule as an address: a reference must not be taken to it.
_is_valid_at = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_get_pointer_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_KINDS = {"i": _INT, "u": _UINT, "f": _FLOAT, "b": _BOOL, "V": _BFLOAT}
_CODES = {dtype: (_KINDS[dtype.kind], 8 * dtype.itemsize) for dtype in tensors.DTYPES.values()}

_NAME = b"dltensor"  # a consumer that takes the memory over renames the capsule
_exported: dict[int, tuple[Any, ...]] = {}


def to_numpy(capsule: Any) -> npt.NDArray[Any]:
    """A copy of a tensor in host memory. The capsule is left as it is and frees its tensor when it dies.

    Raises:
        ValueError: no DLPack capsule, memory of a GPU, a layout with gaps, or a type that numpy does not have.
    """
    try:
        address = _get_pointer(capsule, _NAME)
    except (ValueError, ctypes.ArgumentError):
        raise ValueError(f"expected an unused DLPack capsule, got {capsule!r}") from None
    tensor = ctypes.cast(address, ctypes.POINTER(_ManagedTensor)).contents.tensor
    if tensor.device.type not in (_CPU, _CPU_PINNED):
        raise ValueError(f"expected a tensor in host memory, got one on DLPack device type {tensor.device.type}")
    dtype = _numpy_dtype(tensor.dtype)
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides and not _is_contiguous(shape, tuple(tensor.strides[axis] for axis in range(tensor.ndim))):
        raise ValueError("expected a contiguous tensor, got one with strides")
    array = np.empty(shape, dtype)
    if array.nbytes:
        ctypes.memmove(array.ctypes.data, tensor.data + tensor.byte_offset, array.nbytes)
    return array


def from_numpy(array: npt.NDArray[Any]) -> Any:
    """A capsule over an array, which it keeps alive until the consumer is done with it.

    Raises:
        ValueError: a dtype that DLPack does not have.
    """
    array = np.ascontiguousarray(array).reshape(array.shape)  # ascontiguousarray turns scalars into vectors
    shape = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
    managed = _ManagedTensor()
    managed.tensor.data = array.ctypes.data
    managed.tensor.device = _Device(_CPU, 0)
    managed.tensor.ndim = array.ndim
    managed.tensor.dtype = _dlpack_dtype(array.dtype)
    managed.tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _delete_callback
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, array)
    return _new_capsule(address, _NAME, _destroy_callback)


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _destroy(capsule: int) -> None:
    if _is_valid_at(capsule, _NAME):  # nobody took the tensor over
        _forget(_get_pointer_at(capsule, _NAME))


# Kept for ever: C code calls them whenever the last tensor dies.
_delete_callback = _Deleter(lambda managed: _forget(ctypes.addressof(managed.contents)))
_destroy_callback = _Destructor(_destroy)


def _numpy_dtype(dtype: _DataType) -> np.dtype[Any]:
    if dtype.lanes == 1:
        for known, (code, bits) in _CODES.items():
            if (code, bits) == (dtype.code, dtype.bits):
                return known
    raise ValueError(
        f"expected a plain numeric type, got DLPack code {dtype.code}, {dtype.bits} bits, {dtype.lanes} lanes"
    )


def _dlpack_dtype(dtype: np.dtype[Any]) -> _DataType:
    found = _CODES.get(dtype)
    if found is None:
        raise ValueError(f"expected a dtype that Triton and DLPack have, got {dtype}")
    return _DataType(*found, 1)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride != expected:
            return False
        expected *= extent
    return True
