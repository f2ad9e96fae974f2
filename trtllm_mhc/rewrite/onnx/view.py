# SPDX-License-Identifier: Apache-2.0
"""The layers and tensors of the view of an ONNX model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx_ir as ir
import tensorrt as trt

from trtllm_mhc.rewrite.graph import MAX_CONSTANT, AllReduce, Array, Node, Op, Slicing, Value

Dims = tuple[int | ir.SymbolicDim, ...]

_DTYPES = {
    ir.DataType.FLOAT: trt.float32,
    ir.DataType.FLOAT16: trt.float16,
    ir.DataType.BFLOAT16: trt.bfloat16,
    ir.DataType.INT8: trt.int8,
    ir.DataType.INT32: trt.int32,
    ir.DataType.INT64: trt.int64,
    ir.DataType.UINT8: trt.uint8,
    ir.DataType.BOOL: trt.bool,
    ir.DataType.FLOAT8E4M3FN: trt.fp8,
}


@dataclass(eq=False)
class OnnxValue(Value):
    """A tensor of an ONNX model, or one that only the view has.

    Attributes:
        tensor: the `ir.Value`; of a tensor of the view's own the one that it was reshaped from, or None.
        dims: sizes, an `ir.SymbolicDim` where dynamic; None where not even the rank is known.
    """

    label: str = ""
    element_type: Any = None
    dims: Dims | None = None
    is_graph_output: bool = False

    @property
    def name(self) -> str:
        return self.label

    @property
    def dtype(self) -> Any:
        return self.element_type

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(size if isinstance(size, int) else -1 for size in self.dims or ())

    @property
    def is_output(self) -> bool:
        return self.is_graph_output


@dataclass(eq=False)
class OnnxNode(Node):
    """A node of an ONNX model or a part of one, or the constant layer of an initializer.

    Attributes:
        operation: what it computes.
        facts: what a `Node` of this operation has to tell, by the same names.
    """

    operation: Op = Op.OTHER
    label: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.label

    @property
    def op(self) -> Op:
        return self.operation

    @property
    def kind(self) -> str:
        return "initializer" if self.layer is None else str(self.layer.op_type)

    def elements(self, *, all_of_them: bool = False) -> Array | None:
        tensor = self.facts["tensor"]
        if tensor is None or (not all_of_them and tensor.size > MAX_CONSTANT):
            return None
        return np.array(tensor.numpy())

    @property
    def transposes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        first: tuple[int, ...] = self.facts.get("transpose", tuple(range(len(self.operands[0].shape))))
        return first, tuple(range(len(self.output.shape)))

    @property
    def reduced_axes(self) -> tuple[int, ...]:
        return tuple(self.facts["reduced_axes"])

    @property
    def keeps_axes(self) -> bool:
        return bool(self.facts["keeps_axes"])

    @property
    def matrix_operations(self) -> tuple[str, str]:
        a, b = self.facts["matrix_operations"]
        return a, b

    @property
    def equation(self) -> str:
        return str(self.facts["equation"])

    @property
    def slicing(self) -> Slicing | None:
        slicing: Slicing = self.facts["slicing"]
        return slicing

    @property
    def gather_axis(self) -> int | None:
        return int(self.facts["axis"])

    @property
    def concat_axis(self) -> int:
        return int(self.facts["axis"])

    @property
    def epsilon(self) -> float:
        return float(self.facts["epsilon"])

    @property
    def quantizes_mxfp8(self) -> bool:
        return self.layer is not None and self.layer.op_type == "TRT_MXFP8DynamicQuantize"

    def all_reduce(self) -> AllReduce | None:
        if self.op is Op.PLUGIN_V3:
            attributes = self.layer.attributes
            tp_size = attributes.get_int("tp_size")
            group = tuple(attributes.get_ints("group", ())) or None
            if group is None and tp_size is not None:
                group = tuple(range(tp_size))
            return AllReduce(self, self.layer.op_type, tp_size, attributes.get_int("rank", -1), group)
        if self.op is Op.DIST_COLLECTIVE:
            attributes = self.layer.attributes
            operation = attributes.get_string("collective_operation", ""), attributes.get_string("reduce_op", "")
            if operation != ("all_reduce", "sum"):
                return None
            group = tuple(attributes.get_ints("groups", ())) or None
            ranks = attributes.get_int("nb_rank", 1)
            tp_size = ranks if ranks > 1 else (len(group) if group else None)
            return AllReduce(self, "DistCollective", tp_size, -1, group)
        return None


class View:
    """Collects the layers and tensors of the view of ``graph``."""

    def __init__(self, graph: ir.Graph) -> None:
        self.nodes: list[Node] = []
        self._values: dict[ir.Value, OnnxValue] = {}
        self._inputs = set(graph.inputs)

    @property
    def values(self) -> list[OnnxValue]:
        """The model's tensors, as far as they were asked for."""
        return list(self._values.values())

    def value(self, value: ir.Value) -> OnnxValue:
        """A tensor of the model; an initializer comes with a constant layer."""
        found = self._values.get(value)
        if found is None:
            dims = None if value.shape is None else tuple(value.shape)
            dtype = None if value.dtype is None else _DTYPES.get(value.dtype)
            found = self._values[value] = OnnxValue(value, label=value.name or "", element_type=dtype, dims=dims)
            # An initializer that is also an input is only its default.
            if value.is_initializer() and value not in self._inputs:
                self.add(None, Op.CONSTANT, [], [found], tensor=value.const_value)
        return found

    def part(self, node: ir.Node, dtype: Any, dims: Dims, tensor: ir.Value | None = None) -> OnnxValue:
        """A tensor of the view's own, inside of ``node``."""
        label = f"{node.outputs[0].name}#{len(self.nodes)}"
        return OnnxValue(tensor, label=label, element_type=dtype, dims=dims)

    def add(
        self,
        node: ir.Node | None,
        op: Op,
        inputs: list[OnnxValue | None],
        outputs: list[OnnxValue],
        **facts: Any,
    ) -> None:
        """A layer from ``inputs`` to ``outputs``, which is ``node`` or a part of it."""
        label = outputs[0].label if node is None or not node.name else node.name
        self.nodes.append(OnnxNode(len(self.nodes), node, tuple(inputs), tuple(outputs), False, -1, op, label, facts))
