# SPDX-License-Identifier: Apache-2.0
"""Array types of the reference and the checks of what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)

# numpy's type parameters do not know the types of ml_dtypes; the names say what a function takes or gives.
BFloat16Array = npt.NDArray[Any]
Float8Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[Any]


def require(name: str, array: AnyArray, shape: Sequence[int | None], dtype: npt.DTypeLike | None = None) -> None:
    """Checks that `array` has `shape` (None: any extent) and, when given, `dtype`.

    Raises TypeError for another dtype or something that is no array, ValueError for another shape.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: expected a numpy array, got {type(array).__name__}")
    if dtype is not None and array.dtype != np.dtype(dtype):
        raise TypeError(f"{name}: expected dtype {np.dtype(dtype)}, got {array.dtype}")
    fits = array.ndim == len(shape) and all(
        want is None or want == got for want, got in zip(shape, array.shape, strict=True)
    )
    if not fits:
        expected = "[" + ", ".join("any" if extent is None else str(extent) for extent in shape) + "]"
        raise ValueError(f"{name}: expected shape {expected}, got {list(array.shape)}")
