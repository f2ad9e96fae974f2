# SPDX-License-Identifier: Apache-2.0
"""Tensors as Triton's model configurations declare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

_NAMES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": ml_dtypes.bfloat16,
}
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in _NAMES.items()}
"""Types that Triton and numpy have, by Triton's name."""


def triton_name(dtype: npt.DTypeLike) -> str:
    """Triton's name of a dtype, such as "BF16"; "TYPE_" before it makes the one of model configurations.

    Raises:
        ValueError: Triton has no such type (FP8, for instance).
    """
    wanted = np.dtype(dtype)
    for name, known in DTYPES.items():
        if known == wanted:
            return name
    raise ValueError(f"expected a dtype that Triton has, one of {list(DTYPES)}, got {wanted}")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of Triton's name, with or without "TYPE_" before it.

    Raises:
        ValueError: no numeric type of Triton's.
    """
    found = DTYPES.get(name.removeprefix("TYPE_"))
    if found is None:
        raise ValueError(f"expected one of the types {list(DTYPES)}, got {name!r}")
    return found


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a model.

    Attributes:
        name: its name in the engine and in Triton.
        dtype: numpy or ml_dtypes.
        shape: -1 where an extent varies.
    """

    name: str
    dtype: np.dtype[Any]
    shape: Shape

    def accepts(self, shape: Sequence[int]) -> bool:
        """Whether a shape has the same rank and the extents that do not vary."""
        return len(shape) == len(self.shape) and all(
            want in (-1, got) for want, got in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True)
class InputRange:
    """The shapes that a group takes for one input: every extent from `smallest` to `largest`, both included."""

    dtype: np.dtype[Any]
    smallest: Shape
    largest: Shape

    def explain(self, array: Array) -> str | None:
        """None when the array is in the range; else what was expected and what came."""
        if array.dtype != self.dtype:
            return f"expected dtype {self.dtype}, got {array.dtype}"
        bounds = list(zip(self.smallest, self.largest, strict=True))
        if array.ndim == len(bounds) and all(a <= n <= b for n, (a, b) in zip(array.shape, bounds, strict=True)):
            return None
        wanted = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in bounds)
        return f"expected shape [{wanted}], got {list(array.shape)}"


def specs_of_network(network: Any) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Inputs and outputs of an ``INetworkDefinition``."""
    from trtllm_mhc.network import layers

    def spec(tensor: Any) -> TensorSpec:
        shape = layers.tensor_shape(tensor)
        if shape is None:
            raise ValueError(f"tensor {tensor.name!r}: TensorRT cannot tell its shape")
        return TensorSpec(tensor.name, layers.numpy_dtype(tensor.dtype), shape)

    return (
        [spec(network.get_input(index)) for index in range(network.num_inputs)],
        [spec(network.get_output(index)) for index in range(network.num_outputs)],
    )


def specs_of_engine(engine: Any) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Inputs and outputs of an ``ICudaEngine``."""
    import tensorrt as trt

    from trtllm_mhc.network import layers

    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        dtype = layers.numpy_dtype(engine.get_tensor_dtype(name))
        spec = TensorSpec(name, dtype, tuple(engine.get_tensor_shape(name)))
        (inputs if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else outputs).append(spec)
    return inputs, outputs
