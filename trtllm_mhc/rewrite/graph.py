# SPDX-License-Identifier: Apache-2.0
"""A read-only view of a TensorRT network: who makes a tensor, who reads it, and what each layer computes.

``INetworkDefinition`` can only be asked for a layer's inputs, so following a tensor to its consumers means scanning all
layers. `Graph` does that once. Tensors are compared by identity: the view keeps every ``ITensor`` object alive, and
the bindings hand out one object per tensor as long as it lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorrt as trt

from trtllm_mhc.network import layers

Array = npt.NDArray[Any]

#: Constants with more elements than this are weights, whose values no pattern needs.
_MAX_CONSTANT = 64


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
    PLUGIN_V2 = auto()
    PLUGIN_V3 = auto()
    DIST_COLLECTIVE = auto()
    OTHER = auto()


_LAYER_OPS = {
    "CAST": Op.CAST,
    "IDENTITY": Op.IDENTITY,
    "EINSUM": Op.EINSUM,
    "MATRIX_MULTIPLY": Op.MATMUL,
    "SHUFFLE": Op.RESHAPE,
    "SQUEEZE": Op.RESHAPE,
    "UNSQUEEZE": Op.RESHAPE,
    "SLICE": Op.SLICE,
    "GATHER": Op.GATHER,
    "CONCATENATION": Op.CONCAT,
    "CONSTANT": Op.CONSTANT,
    "NORMALIZATION": Op.NORMALIZATION,
    "PLUGIN_V2": Op.PLUGIN_V2,
    "PLUGIN_V3": Op.PLUGIN_V3,
    "DIST_COLLECTIVE": Op.DIST_COLLECTIVE,
}
_ELEMENTWISE_OPS = {"SUM": Op.ADD, "SUB": Op.SUB, "PROD": Op.MUL, "DIV": Op.DIV, "POW": Op.POW}
_UNARY_OPS = {"SQRT": Op.SQRT, "RECIP": Op.RECIP}
_REDUCE_OPS = {"SUM": Op.SUM, "AVG": Op.MEAN}


@dataclass(eq=False)
class Value:
    """A tensor of the network.

    Attributes:
        tensor: the ``ITensor``.
        producer: the layer that makes it; None for a network input.
        consumers: layers that read it, with the input's position, in network order.
    """

    tensor: Any
    producer: Node | None = None
    consumers: list[tuple[Node, int]] = field(default_factory=list)
    is_debug: bool = False

    @property
    def name(self) -> str:
        """The tensor's name, unique in its network."""
        return str(self.tensor.name)

    @cached_property
    def dtype(self) -> Any:
        """The ``trt.DataType``."""
        return self.tensor.dtype

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes, -1 where dynamic. Empty also for a tensor whose rank TensorRT does not know."""
        return layers.tensor_shape(self.tensor) or ()

    @cached_property
    def constant(self) -> Array | None:
        """Its elements where they are those of a small constant, under casts, reshapes and identities; else None."""
        node = self.producer
        while node is not None and node.op in (Op.CAST, Op.IDENTITY, Op.RESHAPE):
            if node.op is Op.RESHAPE and any(order != tuple(sorted(order)) for order in node.transposes):
                return None
            node = node.operands[0].producer
        if node is None or node.op is not Op.CONSTANT or -1 in self.shape:
            return None
        if np.prod(node.output.shape, dtype=np.int64) > _MAX_CONSTANT:
            return None
        try:
            elements = layers.constant_array(node.layer)
        except (NotImplementedError, RuntimeError):
            return None  # an element type of no interest here
        if self.dtype == trt.float32:
            elements = elements.astype(np.float32)
        return elements.reshape(self.shape)

    @property
    def is_output(self) -> bool:
        """Whether the network returns it."""
        return bool(self.tensor.is_network_output)

    def live_consumers(self) -> Iterator[tuple[Node, int]]:
        """The consumers that something depends on."""
        return ((node, slot) for node, slot in self.consumers if node.live)


@dataclass(eq=False)
class Node:
    """A layer of the network.

    Attributes:
        index: position in the network.
        layer: the layer, with the class of its type.
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
    def name(self) -> str:
        """The layer's name, unique in its network."""
        return str(self.layer.name)

    @property
    def output(self) -> Value:
        """The first output."""
        return self.outputs[0]

    @cached_property
    def op(self) -> Op:
        """What the layer computes."""
        kind = layers.layer_type(self.layer).name
        if kind == "ELEMENTWISE":
            return _ELEMENTWISE_OPS.get(self.layer.op.name, Op.OTHER)
        if kind == "UNARY":
            return _UNARY_OPS.get(self.layer.op.name, Op.OTHER)
        if kind == "REDUCE":
            return _REDUCE_OPS.get(self.layer.op.name, Op.OTHER)
        return _LAYER_OPS.get(kind, Op.OTHER)

    @cached_property
    def transposes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The permutations of a layer of `Op.RESHAPE` before and after its reshape."""
        first, second = tuple(range(len(self.operands[0].shape))), tuple(range(len(self.output.shape)))
        if layers.layer_type(self.layer) == trt.LayerType.SHUFFLE:
            first = tuple(self.layer.first_transpose)[: len(first)]
            second = tuple(self.layer.second_transpose)[: len(second)]
        return first, second

    @property
    def operands(self) -> tuple[Value, ...]:
        """The inputs that are there."""
        return tuple(value for value in self.inputs if value is not None)


class Graph:
    """The layers and tensors of ``network`` as they are now.

    Raises:
        ValueError: the network has no outputs, so nothing in it is needed by anything; or it is weakly typed, so that
            TensorRT may round where the network does not say so.
    """

    def __init__(self, network: Any) -> None:
        if network.num_outputs == 0:
            raise ValueError("fuse_boundaries: the network has no outputs; mark its outputs before rewriting it")
        if not _is_strongly_typed(network):
            raise ValueError("fuse_boundaries: expected a strongly typed network, got a weakly typed one")
        self.network = network
        self.nodes: list[Node] = []
        self._values: dict[Any, Value] = {}
        for index in range(network.num_layers):
            layer = layers.downcast(network.get_layer(index))
            node = Node(index, layer)
            node.outputs = tuple(self._value(layer.get_output(k)) for k in range(layer.num_outputs))
            tensors = [layer.get_input(k) for k in range(layer.num_inputs)]
            node.inputs = tuple(None if tensor is None else self._value(tensor) for tensor in tensors)
            for output in node.outputs:
                output.producer = node
            for slot, value in enumerate(node.inputs):
                if value is not None:
                    value.consumers.append((node, slot))
            self.nodes.append(node)
        for value in self._values.values():
            value.is_debug = network.is_debug_tensor(value.tensor)
        self._mark_live()
        self._measure_depth()

    @property
    def outputs(self) -> list[Value]:
        """The network's outputs in order."""
        return [self._value(self.network.get_output(k)) for k in range(self.network.num_outputs)]

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

    def _value(self, tensor: Any) -> Value:
        value = self._values.get(tensor)
        if value is None:
            value = self._values[tensor] = Value(tensor)
        return value

    def _mark_live(self) -> None:
        debug = [value for value in self._values.values() if value.is_debug]
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


def _is_strongly_typed(network: Any) -> bool:
    """Always so in TensorRT 11, which has no flag for it or ignores it."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return flag is None or int(trt.__version__.split(".")[0]) >= 11 or bool(network.get_flag(flag))


def dims(value: Any) -> tuple[int, ...] | None:
    """A ``trt.Dims`` as a tuple; None where it is not set, which in the bindings of TensorRT 10 is a length of -1."""
    if value is None:
        return None
    try:
        return tuple(value)
    except ValueError:
        return None


def scalar_constant(value: Value) -> float | None:
    """The value of a constant whose elements are all equal, or None."""
    elements = value.constant
    if elements is None or elements.size == 0 or len(np.unique(elements)) != 1:
        return None
    return float(elements.flat[0])
