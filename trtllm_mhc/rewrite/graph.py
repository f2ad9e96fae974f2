# SPDX-License-Identifier: Apache-2.0
"""A read-only view of a network: who makes a tensor, who reads it, and what each layer computes.

The patterns know only this view. `trtllm_mhc.rewrite.tensorrt_graph` makes it of a TensorRT network and
`trtllm_mhc.rewrite.onnx` of an ONNX model. Both speak of dtypes as ``tensorrt.DataType`` and of layers by the names of
``tensorrt.LayerType``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorrt as trt

Array = npt.NDArray[Any]

#: Constants with more elements than this are weights, whose values no pattern needs.
MAX_CONSTANT = 64


class Op(Enum):
    """What a layer computes, as far as a pattern can ask for it."""

    CAST = auto()
    IDENTITY = auto()
    ADD = auto()
    SUB = auto()
    MUL = auto()
    DIV = auto()
    POW = auto()
    SQRT = auto()
    RECIP = auto()
    SUM = auto()
    MEAN = auto()
    EINSUM = auto()
    MATMUL = auto()
    RESHAPE = auto()
    SLICE = auto()
    GATHER = auto()
    CONCAT = auto()
    CONSTANT = auto()
    NORMALIZATION = auto()
    SIGMOID = auto()
    SOFTMAX = auto()
    SELECT = auto()
    MAX = auto()
    MIN = auto()
    GREATER = auto()
    GREATER_EQUAL = auto()
    LESS = auto()
    LESS_EQUAL = auto()
    EQUAL = auto()
    NOT = auto()
    AND = auto()
    OR = auto()
    PLUGIN_V2 = auto()
    PLUGIN_V3 = auto()
    DIST_COLLECTIVE = auto()
    OTHER = auto()


@dataclass(frozen=True)
class Size:
    """The dynamic size of ``value`` along ``axis``."""

    value: Value
    axis: int


#: An integer of a shape or an index: a number, a tensor's size, or unknown.
Known = int | Size | None


@dataclass(frozen=True)
class Slicing:
    """What a layer of `Op.SLICE` picks: ``start[k] + i * stride[k]`` for ``i < size[k]`` along ``axes[k]``.

    Axes that are not named are copied. ``size`` is None where nothing is known of it.
    """

    axes: Sequence[int]
    start: Sequence[Known]
    stride: Sequence[Known]
    size: Sequence[Known] | None = None


@dataclass(eq=False)
class Value:
    """A tensor of the network; each kind of network has a subclass.

    Attributes:
        tensor: what it is in the network: an ``ITensor`` or an ONNX value.
        producer: the layer that makes it; None for a network input.
        consumers: layers that read it, with the input's position, in network order.
        is_debug: whether TensorRT keeps it for a debugger.
    """

    tensor: Any
    producer: Node | None = None
    consumers: list[tuple[Node, int]] = field(default_factory=list)
    is_debug: bool = False

    @property
    def name(self) -> str:
        """The tensor's name, unique in its network."""
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """The ``trt.DataType``; None if unknown."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, -1 where dynamic. Empty also for a tensor whose rank is not known."""
        raise NotImplementedError

    @property
    def is_output(self) -> bool:
        """Whether the network returns it."""
        raise NotImplementedError

    @cached_property
    def constant(self) -> Array | None:
        """Its elements where they are those of a small constant, under casts, reshapes and identities; else None."""
        return self._constant(all_of_them=False)

    @cached_property
    def holds_bfloat16(self) -> bool:
        """Whether it is a float32 constant of any size that casting to bfloat16 does not change.

        Exporters fold the widening cast of a bfloat16 weight into the weight.
        """
        if self.dtype != trt.float32:
            return False
        elements = self._constant(all_of_them=True)
        return elements is not None and not (elements.view(np.uint32) & 0xFFFF).any()

    def _constant(self, *, all_of_them: bool) -> Array | None:
        node = self.producer
        while node is not None and node.op in (Op.CAST, Op.IDENTITY, Op.RESHAPE):
            if node.op is Op.RESHAPE and any(order != tuple(sorted(order)) for order in node.transposes):
                return None
            node = node.operands[0].producer
        if node is None or node.op is not Op.CONSTANT or -1 in self.shape:
            return None
        elements = node.elements(all_of_them=all_of_them)
        if elements is None:
            return None
        if self.dtype == trt.float32:
            elements = elements.astype(np.float32)
        return elements.reshape(self.shape)

    def live_consumers(self) -> Iterator[tuple[Node, int]]:
        """The consumers that something depends on."""
        return ((node, slot) for node, slot in self.consumers if node.live)


@dataclass(eq=False)
class Node:
    """A layer of the network; each kind of network has a subclass.

    Attributes:
        index: position in the network.
        layer: what it is in the network: an ``ILayer`` with the class of its type, or an ONNX node.
        inputs: its input tensors; None where an optional one is absent.
        outputs: its output tensors.
        live: whether a network output, a debug tensor or a layer without outputs depends on it.
        depth: length of the longest path of layers from a network input or constant.
    """

    index: int
    layer: Any
    inputs: tuple[Value | None, ...] = ()
    outputs: tuple[Value, ...] = ()
    live: bool = False
    depth: int = -1

    @property
    def output(self) -> Value:
        """The first output."""
        return self.outputs[0]

    @property
    def operands(self) -> tuple[Value, ...]:
        """The inputs that are there."""
        return tuple(value for value in self.inputs if value is not None)

    @property
    def name(self) -> str:
        """The layer's name, unique in its network."""
        raise NotImplementedError

    @property
    def op(self) -> Op:
        """What the layer computes."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """The name of its type, for people."""
        raise NotImplementedError

    # What layers of one op have; not to be asked of others.

    def elements(self, *, all_of_them: bool = False) -> Array | None:
        """The elements of an `Op.CONSTANT`; None if of a type of no interest, or more than `MAX_CONSTANT`.

        Args:
            all_of_them: whatever their number.
        """
        raise NotImplementedError

    @property
    def transposes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The permutations of an `Op.RESHAPE` before and after its reshape."""
        raise NotImplementedError

    @property
    def reduced_axes(self) -> tuple[int, ...]:
        """The axes that an `Op.SUM` or `Op.MEAN` takes together, or an `Op.SOFTMAX` normalises over."""
        raise NotImplementedError

    @property
    def keeps_axes(self) -> bool:
        """Whether a reduction leaves axes of size 1."""
        raise NotImplementedError

    @property
    def matrix_operations(self) -> tuple[str, str]:
        """Of an `Op.MATMUL`, for each operand ``"NONE"``, ``"TRANSPOSE"`` or ``"VECTOR"``."""
        raise NotImplementedError

    @property
    def equation(self) -> str:
        """The equation of an `Op.EINSUM`."""
        raise NotImplementedError

    @property
    def slicing(self) -> Slicing | None:
        """What an `Op.SLICE` picks; None if that cannot be told."""
        raise NotImplementedError

    @property
    def gather_axis(self) -> int | None:
        """The axis of an `Op.GATHER`, 0 or more; None if it is not the simple kind."""
        raise NotImplementedError

    @property
    def concat_axis(self) -> int:
        """The axis of an `Op.CONCAT`, 0 or more."""
        raise NotImplementedError

    @property
    def epsilon(self) -> float:
        """The epsilon of an `Op.NORMALIZATION`."""
        raise NotImplementedError

    @property
    def quantizes_mxfp8(self) -> bool:
        """Whether the layer quantises its input to MXFP8 at run time; can be asked of every layer."""
        raise NotImplementedError

    def all_reduce(self) -> AllReduce | None:
        """The all-reduce that the layer is, or may be: a collective that does not say what it does counts."""
        raise NotImplementedError


#: What this pass makes, and finds in networks that it has been through.
PLUGIN_FORMS = ("MhcBoundary", "MhcPublishLinear")


@dataclass(frozen=True)
class AllReduce:
    """A layer that sums over the ranks.

    Attributes:
        node: the layer.
        form: ``"MhcAllReduce"``, ``"DistCollective"``, ``"AllReduce"`` (TensorRT-LLM's plugin); or one of
            `PLUGIN_FORMS` for a layer that does more than that, or a part of it.
        tp_size: ranks in its group; None where the layer does not tell.
        rank: this engine's index in the group; -1 where that is known at run time only.
        group: world ranks; None where the layer does not tell.
        is_labelled: whether a DIST_COLLECTIVE layer says that it is an all-reduce; so in the other forms.
    """

    node: Node
    form: str
    tp_size: int | None
    rank: int = -1
    group: tuple[int, ...] | None = None
    is_labelled: bool = True

    @property
    def partial(self) -> Value:
        """This rank's summand."""
        return self.node.operands[0]

    @property
    def reduced(self) -> Value:
        """The sum."""
        return self.node.output


class Graph:
    """The layers and tensors of a network as they are now.

    Args:
        nodes: the layers in network order, joined to their tensors.
        values: the tensors.
        outputs: the network's outputs in order.
    """

    def __init__(self, nodes: list[Node], values: Iterable[Value], outputs: list[Value]) -> None:
        self.nodes = nodes
        self.outputs = outputs
        for node in nodes:
            for output in node.outputs:
                output.producer = node
            for slot, value in enumerate(node.inputs):
                if value is not None:
                    value.consumers.append((node, slot))
        self._mark_live([value for value in values if value.is_debug])
        self._measure_depth()

    def depends_on(self, value: Value, ancestor: Node) -> bool:
        """Whether ``value`` is computed from an output of ``ancestor``.

        Costs no more than the layers between the two: a layer that is not deeper than the ancestor cannot use it.
        """
        seen: set[Node] = set()
        stack = [value.producer]
        while stack:
            node = stack.pop()
            if node is ancestor:
                return True
            if node is not None and node not in seen and node.depth > ancestor.depth:
                seen.add(node)
                stack.extend(operand.producer for operand in node.operands)
        return False

    def _mark_live(self, debug: list[Value]) -> None:
        stack = [value.producer for value in [*self.outputs, *debug]]
        stack += [node for node in self.nodes if not node.outputs]
        while stack:
            node = stack.pop()
            if node is not None and not node.live:
                node.live = True
                stack.extend(operand.producer for operand in node.operands)

    def _measure_depth(self) -> None:
        """Kahn's order; layers of a loop's recurrence never become ready and stay as deep as anything can be."""
        missing = {node: sum(v.producer is not None for v in node.operands) for node in self.nodes}
        ready = [node for node in self.nodes if missing[node] == 0]
        for node in ready:
            node.depth = 0
        for node in ready:  # grows while it is read
            for output in node.outputs:
                for consumer, _ in output.consumers:
                    consumer.depth = max(consumer.depth, node.depth + 1)
                    missing[consumer] -= 1
                    if missing[consumer] == 0:
                        ready.append(consumer)
        for node, count in missing.items():
            if count:
                node.depth = len(self.nodes)


def scalar_constant(value: Value) -> float | None:
    """The value of a constant whose elements are all equal, or None."""
    elements = value.constant
    if elements is None or elements.size == 0 or len(np.unique(elements)) != 1:
        return None
    return float(elements.flat[0])
