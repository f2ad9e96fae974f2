# SPDX-License-Identifier: Apache-2.0
"""The view of a TensorRT network.

``INetworkDefinition`` can only be asked for a layer's inputs, so following a tensor to its consumers means scanning all
layers. `TensorRTGraph` does that once. Tensors are compared by identity: the view keeps every ``ITensor`` object alive,
and the bindings hand out one object per tensor as long as it lives.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import tensorrt as trt

from trtllm_mhc.network import layers, plugins
from trtllm_mhc.network.collectives import read_collective
from trtllm_mhc.rewrite.graph import MAX_CONSTANT, AllReduce, Array, Graph, Known, Node, Op, Slicing, Value
from trtllm_mhc.rewrite.shapes import elements

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
    "SELECT": Op.SELECT,
    "SOFTMAX": Op.SOFTMAX,
    "PLUGIN_V2": Op.PLUGIN_V2,
    "PLUGIN_V3": Op.PLUGIN_V3,
    "DIST_COLLECTIVE": Op.DIST_COLLECTIVE,
}
_ELEMENTWISE_OPS = {
    "SUM": Op.ADD,
    "SUB": Op.SUB,
    "PROD": Op.MUL,
    "DIV": Op.DIV,
    "POW": Op.POW,
    "MAX": Op.MAX,
    "MIN": Op.MIN,
    "GREATER": Op.GREATER,
    "LESS": Op.LESS,
    "EQUAL": Op.EQUAL,
    "AND": Op.AND,
    "OR": Op.OR,
}
_UNARY_OPS = {"SQRT": Op.SQRT, "RECIP": Op.RECIP, "NOT": Op.NOT}
_REDUCE_OPS = {"SUM": Op.SUM, "AVG": Op.MEAN}


class TensorRTValue(Value):
    """An ``ITensor``."""

    @property
    def name(self) -> str:
        return str(self.tensor.name)

    @cached_property
    def dtype(self) -> Any:
        return self.tensor.dtype

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return layers.tensor_shape(self.tensor) or ()

    @property
    def is_output(self) -> bool:
        return bool(self.tensor.is_network_output)


class TensorRTNode(Node):
    """An ``ILayer``."""

    @property
    def name(self) -> str:
        return str(self.layer.name)

    @cached_property
    def kind(self) -> str:
        return str(layers.layer_type(self.layer).name)

    @cached_property
    def op(self) -> Op:
        if self.kind == "ELEMENTWISE":
            return _ELEMENTWISE_OPS.get(self.layer.op.name, Op.OTHER)
        if self.kind == "UNARY":
            return _UNARY_OPS.get(self.layer.op.name, Op.OTHER)
        if self.kind == "ACTIVATION":
            return Op.SIGMOID if self.layer.type.name == "SIGMOID" else Op.OTHER
        if self.kind == "REDUCE":
            return _REDUCE_OPS.get(self.layer.op.name, Op.OTHER)
        return _LAYER_OPS.get(self.kind, Op.OTHER)

    def elements(self, *, all_of_them: bool = False) -> Array | None:
        if not all_of_them and np.prod(self.output.shape, dtype=np.int64) > MAX_CONSTANT:
            return None
        try:
            return layers.constant_array(self.layer)
        except (NotImplementedError, RuntimeError):
            return None

    @cached_property
    def transposes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first, second = tuple(range(len(self.operands[0].shape))), tuple(range(len(self.output.shape)))
        if self.kind == "SHUFFLE":
            first = tuple(self.layer.first_transpose)[: len(first)]
            second = tuple(self.layer.second_transpose)[: len(second)]
        return first, second

    @property
    def reduced_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(len(self.operands[0].shape)) if self.layer.axes >> axis & 1)

    @property
    def keeps_axes(self) -> bool:
        return bool(self.layer.keep_dims)

    @property
    def matrix_operations(self) -> tuple[str, str]:
        return self.layer.op0.name, self.layer.op1.name

    @property
    def equation(self) -> str:
        return str(self.layer.equation)

    @property
    def slicing(self) -> Slicing | None:
        layer = self.layer
        if layer.mode.name not in ("STRICT_BOUNDS", "DEFAULT"):
            return None
        axes = self._argument(4, layer.axes) or list(range(len(self.output.shape)))
        numbers = [axis for axis in axes if isinstance(axis, int)]
        start, size, stride = (
            self._argument(1, layer.start),
            self._argument(2, layer.shape),
            self._argument(3, layer.stride),
        )
        if start is None or stride is None or len(numbers) != len(axes):
            return None
        return Slicing(numbers, start, stride, size)

    def _argument(self, slot: int, static: object) -> list[Known] | None:
        """Start, size, stride or axes of a slice: from an input tensor if there is one, else from the layer."""
        tensor = self.inputs[slot] if slot < len(self.inputs) else None
        if tensor is not None:
            return elements(tensor)
        found = _dims(static)
        return None if found is None else list(found)

    @property
    def gather_axis(self) -> int | None:
        layer = self.layer
        if layer.mode.name != "DEFAULT" or layer.num_elementwise_dims:
            return None
        return int(layer.axis) % len(self.operands[0].shape)

    @property
    def concat_axis(self) -> int:
        return int(self.layer.axis)

    @property
    def epsilon(self) -> float:
        return float(self.layer.epsilon)

    @property
    def quantizes_mxfp8(self) -> bool:
        if self.kind != "DYNAMIC_QUANTIZE" or len(self.outputs) != 2:
            return False
        return (self.outputs[0].dtype, getattr(self.outputs[1].dtype, "name", "")) == (trt.fp8, "E8M0")

    def all_reduce(self) -> AllReduce | None:
        if self.op is Op.PLUGIN_V3:
            names = (plugins.ALL_REDUCE, plugins.BOUNDARY, plugins.PUBLISH_LINEAR)
            name = next((name for name in names if plugins.is_plugin_layer(self.layer, name)), None)
            if name is None:
                return None
            fields = plugins.read_fields(self.layer)
            group = tuple(fields["group"]) or tuple(range(fields["tp_size"]))
            return AllReduce(self, name, fields["tp_size"], fields["rank"], group)
        if self.op is Op.PLUGIN_V2:
            # The plugin's attributes are unreadable here; one output means that nothing is fused into it already, and
            # the second input is its workspace.
            plugin = self.layer.plugin
            if (plugin.plugin_type, plugin.plugin_namespace) != ("AllReduce", "tensorrt_llm"):
                return None
            if len(self.outputs) != 1 or len(self.operands) not in (1, 2):
                return None
            return AllReduce(self, "AllReduce", None)
        if self.op is Op.DIST_COLLECTIVE:
            collective = read_collective(self.layer)
            if collective is not None and not collective.is_all_reduce_sum:
                return None
            ranks = int(self.layer.num_ranks)
            members = collective.group if collective is not None else None
            tp_size = ranks if ranks > 1 else (len(members) if members else None)
            return AllReduce(self, "DistCollective", tp_size, -1, members, collective is not None)
        return None


class TensorRTGraph(Graph):
    """The layers and tensors of ``network``, an ``INetworkDefinition``, as they are now.

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
        self._values: dict[Any, TensorRTValue] = {}
        nodes: list[Node] = []
        for index in range(network.num_layers):
            layer = layers.downcast(network.get_layer(index))
            node = TensorRTNode(index, layer)
            node.outputs = tuple(self._value(layer.get_output(k)) for k in range(layer.num_outputs))
            tensors = [layer.get_input(k) for k in range(layer.num_inputs)]
            node.inputs = tuple(None if tensor is None else self._value(tensor) for tensor in tensors)
            nodes.append(node)
        for value in self._values.values():
            value.is_debug = network.is_debug_tensor(value.tensor)
        outputs = [self._value(network.get_output(k)) for k in range(network.num_outputs)]
        super().__init__(nodes, self._values.values(), list(outputs))

    def _value(self, tensor: Any) -> TensorRTValue:
        value = self._values.get(tensor)
        if value is None:
            value = self._values[tensor] = TensorRTValue(tensor)
        return value


def _is_strongly_typed(network: Any) -> bool:
    """Always so in TensorRT 11, which has no flag for it or ignores it."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return flag is None or int(trt.__version__.split(".")[0]) >= 11 or bool(network.get_flag(flag))


def _dims(value: Any) -> tuple[int, ...] | None:
    """A ``trt.Dims`` as a tuple; None where it is not set, which in the bindings of TensorRT 10 is a length of -1."""
    if value is None:
        return None
    try:
        return tuple(value)
    except ValueError:
        return None
