# SPDX-License-Identifier: Apache-2.0
"""The table of what each layer type computes, filled by the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_mhc.network.layers import layer_type
from trtllm_mhc.reference._arrays import AnyArray

from .arithmetic import Arithmetic


@dataclass(frozen=True)
class Operation:
    """One layer with the values of its inputs.

    Attributes:
        layer: the layer, downcast to its own class.
        inputs: values as kept between layers, constants as they are in the network; None for an optional input that
            is not connected.
        arithmetic: how to compute.
    """

    layer: Any
    inputs: Sequence[AnyArray | None]
    arithmetic: Arithmetic

    def value(self, index: int) -> AnyArray:
        """Input ``index`` as tensors are kept between layers, for layers that only move data."""
        return self.arithmetic.load(self.raw(index))

    def operand(self, index: int) -> AnyArray:
        """Input ``index`` as it is computed with: fp32 or float64; integers and booleans as they are."""
        return self.arithmetic.widen(self.raw(index))

    def raw(self, index: int) -> AnyArray:
        """Input ``index``, a constant in its own dtype."""
        found = self.inputs[index]
        if found is None:
            raise ValueError(f"layer {self.layer.name!r}: input {index} is not connected")
        return found

    def integers(self, index: int) -> tuple[int, ...] | None:
        """Input ``index`` as a list of integers (a shape, axes, ...); None when it is not connected."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return None if found is None else tuple(int(element) for element in found.reshape(-1))

    def unsupported(self, what: str) -> NotImplementedError:
        """The error to raise where this layer is of a form that the interpreter does not know."""
        return NotImplementedError(
            f"layer {self.layer.name!r} of type {layer_type(self.layer).name}: {what} is not supported"
        )


Rule = Callable[[Operation], AnyArray | tuple[AnyArray, ...]]

RULES: dict[str, Rule] = {}


def rule(layer_type: str) -> Callable[[Rule], Rule]:
    """Register the rule of a layer type, by the type's name: which types exist depends on the TensorRT."""

    def register(function: Rule) -> Rule:
        RULES[layer_type] = function
        return function

    return register


def axes_of_mask(mask: int) -> tuple[int, ...]:
    """The axes whose bits are set in a TensorRT axes mask."""
    return tuple(axis for axis in range(mask.bit_length()) if mask >> axis & 1)


def truncated(a: AnyArray, b: AnyArray) -> AnyArray:
    """Integer division towards zero, as C's."""
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient)
