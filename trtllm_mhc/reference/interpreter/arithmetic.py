# SPDX-License-Identifier: Apache-2.0
"""The two ways in which the interpreter computes: as the network says, or in float64 throughout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from trtllm_mhc.network.layers import numpy_dtype
from trtllm_mhc.reference._arrays import BFLOAT16, FLOAT8, AnyArray

Precision = Literal["network", "float64"]


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a floating-point one, bf16 and FP8 included."""
    return dtype.kind == "f" or dtype in (BFLOAT16, FLOAT8)


@dataclass(frozen=True)
class Arithmetic:
    """In which dtype values are kept between layers and computed with inside a layer.

    With ``"network"`` a tensor has the dtype that it has in the network. A layer widens floating-point operands to
    fp32, computes in fp32 and rounds its result once, to nearest even, to the dtype of its output.

    With ``"float64"`` every floating-point tensor is float64 whatever its dtype in the network: nothing is rounded
    between layers and a cast between floating-point types does nothing.

    Integers and booleans are the network's in both.
    """

    precision: Precision

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision: expected one of {get_args(Precision)}, got {self.precision!r}")

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded below float64."""
        return self.precision == "float64"

    def load(self, array: AnyArray) -> AnyArray:
        """A constant as a tensor is kept between layers; anything else is so already."""
        return array.astype(np.float64, copy=False) if self.exact and is_float(array.dtype) else array

    def widen(self, array: AnyArray) -> AnyArray:
        """An operand as it is computed with: fp32 or float64; integers and booleans as they are."""
        if not is_float(array.dtype):
            return array
        return array.astype(np.float64 if self.exact else np.float32, copy=False)

    def stored_dtype(self, dtype: Any) -> np.dtype[Any]:
        """The numpy dtype in which a tensor of a TensorRT dtype is kept."""
        found = numpy_dtype(dtype)
        return np.dtype(np.float64) if self.exact and is_float(found) else found

    def store(self, array: AnyArray, dtype: Any) -> AnyArray:
        """A result as the tensor of the TensorRT ``dtype`` that keeps it; floats become integers by truncation."""
        return np.asarray(array).astype(self.stored_dtype(dtype), copy=False)
