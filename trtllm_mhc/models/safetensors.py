# SPDX-License-Identifier: Apache-2.0
"""Files of named tensors in the safetensors format, read without copying.

A file is eight bytes with the length of a JSON header, the header, and the tensors' bytes. The header names every
tensor's dtype, shape and place. Only the dtypes of this project's checkpoints are read and written.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# What the format allows; a longer one is a file of another kind.
_LONGEST_HEADER = 100_000_000


class FormatError(ValueError):
    """A file is not what its format says."""


def save(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write ``tensors`` (bfloat16, float32 or int32) to ``path``, which appears only when it is complete.

    Raises:
        TypeError: a tensor has another dtype.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name}: expected bfloat16, float32 or int32, got {tensor.dtype}")
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
    os.replace(partial, path)


def load(path: Path) -> dict[str, Array]:
    """The tensors of ``path``, read-only views of the mapped file.

    Raises:
        FileNotFoundError: there is no such file.
        FormatError: the file is cut short, or not in this format, or has a dtype that is not read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST_HEADER + 1
        if length > min(_LONGEST_HEADER, size - 8):
            raise FormatError(f"{path}: expected a safetensors file, got {size} bytes that begin with {start!r}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise FormatError(f"{path}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: expected an object as header, got {type(header).__name__}")
    header.pop("__metadata__", None)
    begin = 8 + length
    data = np.memmap(path, np.uint8, "r", begin) if size > begin else np.zeros(0, np.uint8)
    return {name: _view(path, name, entry, data) for name, entry in header.items()}


def _view(path: Path, name: str, entry: Any, data: Array) -> Array:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sizes = [*shape, first, last]
    except (TypeError, KeyError, ValueError):
        raise FormatError(f"{path}: {name}: expected dtype, shape and data_offsets, got {entry!r}") from None
    if dtype not in _DTYPES:
        raise FormatError(f"{path}: {name}: expected a dtype of {sorted(_DTYPES)}, got {dtype!r}")
    if any(not isinstance(size, int) or size < 0 for size in sizes):
        raise FormatError(f"{path}: {name}: expected sizes and offsets, got {entry!r}")
    if last - first != math.prod(shape) * _DTYPES[dtype].itemsize or last > data.size:
        raise FormatError(f"{path}: {name}: bytes {first} to {last} of {data.size} do not hold {dtype} {list(shape)}")
    # A view of the bytes only where they are aligned, which this module's files are; others' need not be.
    piece = data[first:last]
    if piece.ctypes.data % _DTYPES[dtype].itemsize:
        piece = piece.copy()
    tensor: Array = np.asarray(piece).view(_DTYPES[dtype]).reshape(shape)
    return tensor
