# SPDX-License-Identifier: Apache-2.0
"""ONNX operators as layers of the view.

An operator does more than a layer: it broadcasts tensors of unlike rank, makes several outputs, or is a whole norm. It
becomes the layers that TensorRT's parser would make of it. What cannot be told, or no pattern asks for, becomes a layer
that computes something unknown (`Op.OTHER`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir
import tensorrt as trt

from trtllm_mhc import plugin
from trtllm_mhc.network import plugins
from trtllm_mhc.rewrite.graph import Op, Slicing
from trtllm_mhc.rewrite.onnx.view import Dims, OnnxValue, View

#: Slices that end here or later go to the end, whatever the size.
_TO_THE_END = 2**31 - 1

_ELEMENTWISE = {
    "Add": Op.ADD,
    "Sub": Op.SUB,
    "Mul": Op.MUL,
    "Div": Op.DIV,
    "Pow": Op.POW,
    "Sum": Op.ADD,
    "Max": Op.MAX,
    "Min": Op.MIN,
    "Greater": Op.GREATER,
    "GreaterOrEqual": Op.GREATER_EQUAL,
    "Less": Op.LESS,
    "LessOrEqual": Op.LESS_EQUAL,
    "Equal": Op.EQUAL,
    "And": Op.AND,
    "Or": Op.OR,
}
_UNARY = {
    "Identity": Op.IDENTITY,
    "Cast": Op.CAST,
    "CastLike": Op.CAST,
    "Sqrt": Op.SQRT,
    "Reciprocal": Op.RECIP,
    "Not": Op.NOT,
    "Sigmoid": Op.SIGMOID,
}
_RESHAPES = {"Reshape", "Squeeze", "Unsqueeze", "Flatten"}


def lower(view: View, node: ir.Node) -> None:
    """Add the layers of ``node`` to ``view``."""
    inputs = [None if value is None else view.value(value) for value in node.inputs]
    outputs = [view.value(value) for value in node.outputs]
    if not outputs:
        return
    if _is_collective(node):
        view.add(node, Op.PLUGIN_V3 if node.op_type in _PLUGINS else Op.DIST_COLLECTIVE, [*inputs], outputs)
        return
    rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    ranks_known = all(value is None or value.dims is not None for value in (*inputs, *outputs))
    if rule is None or not ranks_known or not rule(view, node, inputs, outputs):
        outer = [view.value(value) for value in _read_inside(node)]
        view.add(node, Op.OTHER, [*inputs, *outer], outputs)


_PLUGINS = (plugins.ALL_REDUCE, plugins.BOUNDARY, plugins.PUBLISH_LINEAR)


def _is_collective(node: ir.Node) -> bool:
    """Whether it is one of this project's plugins, or TensorRT's collective (which is in no ONNX domain)."""
    if node.op_type in _PLUGINS:
        return plugin.NAMESPACE in (node.domain, node.attributes.get_string("plugin_namespace", ""))
    return node.op_type == "DistCollective"


def _read_inside(node: ir.Node) -> Iterator[ir.Value]:
    """What the graphs inside of a node read from outside of them."""
    graphs = [
        graph for each in node.attributes.values() if each.type == ir.AttributeType.GRAPH for graph in [each.value]
    ]
    for graph in graphs:
        for inner in ir.traversal.RecursiveGraphIterator(graph):
            for value in inner.inputs:
                if value is not None and value.graph is node.graph:
                    yield value
        yield from (value for value in graph.outputs if value.graph is node.graph)


# A rule adds the layers of one operator and returns True; or adds none and returns False. All ranks are known to it.
_Rule = Callable[[View, ir.Node, list[OnnxValue | None], list[OnnxValue]], bool]


def _dims(value: OnnxValue) -> Dims:
    assert value.dims is not None
    return value.dims


def _same(a: int | ir.SymbolicDim, b: int | ir.SymbolicDim) -> bool:
    """Whether two sizes are known to be equal."""
    if isinstance(a, ir.SymbolicDim) or isinstance(b, ir.SymbolicDim):
        return isinstance(a, ir.SymbolicDim) and isinstance(b, ir.SymbolicDim) and a.value is not None and a == b
    return a == b


def _present(inputs: Sequence[OnnxValue | None]) -> list[OnnxValue]:
    return [value for value in inputs if value is not None]


def _to_rank(view: View, node: ir.Node, value: OnnxValue, rank: int) -> OnnxValue:
    """``value`` with axes of size 1 in front."""
    missing = rank - len(_dims(value))
    if missing <= 0:
        return value
    result = view.part(node, value.dtype, (*[1] * missing, *_dims(value)), value.tensor)
    view.add(node, Op.RESHAPE, [value], [result])
    return result


def _numbers(inputs: Sequence[OnnxValue | None], slot: int) -> list[int] | None:
    """The elements of a constant input of integers; None if it is none, or absent."""
    value = inputs[slot] if slot < len(inputs) else None
    # The view's tensors are not joined to their layers yet, but an ONNX value has its constant with it.
    if value is None or value.tensor is None:
        return None
    tensor = ir.convenience.get_const_tensor(value.tensor)
    return None if tensor is None else [int(each) for each in np.array(tensor.numpy()).reshape(-1)]


def _elementwise(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    op, rank = _ELEMENTWISE[node.op_type], len(_dims(outputs[0]))
    operands = _present(inputs)
    if len(operands) != 2:
        return False
    wide = [_to_rank(view, node, each, rank) for each in operands]
    view.add(node, op, [*wide], outputs)
    return True


def _where(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    rank = len(_dims(outputs[0]))
    view.add(node, Op.SELECT, [_to_rank(view, node, each, rank) for each in _present(inputs)], outputs)
    return True


def _unary(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    view.add(node, _UNARY[node.op_type], inputs[:1], outputs)
    return True


def _reshape(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    view.add(node, Op.RESHAPE, inputs[:1], outputs)
    return True


def _transpose(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    order = node.attributes.get_ints("perm", tuple(reversed(range(len(_dims(outputs[0]))))))
    view.add(node, Op.RESHAPE, inputs[:1], outputs, transpose=tuple(order))
    return True


def _constant(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    view.add(node, Op.CONSTANT, [], outputs, tensor=ir.convenience.get_const_tensor(node.outputs[0]))
    return True


def _reduce(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    operand = _present(inputs)[0]
    rank = len(_dims(operand))
    axes = list(node.attributes.get_ints("axes", ())) or _numbers(inputs, 1)
    if axes is None and _present(inputs[1:]):
        return False
    if not axes:
        if node.attributes.get_int("noop_with_empty_axes", 0):
            return False
        axes = list(range(rank))
    op = Op.SUM if node.op_type == "ReduceSum" else Op.MEAN
    reduced = tuple(sorted(axis % rank for axis in axes))
    view.add(node, op, [operand], outputs, reduced_axes=reduced, keeps_axes=node.attributes.get_int("keepdims", 1))
    return True


def _softmax(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    operand = _present(inputs)[0]
    axis = node.attributes.get_int("axis", -1) % len(_dims(operand))
    view.add(node, Op.SOFTMAX, [operand], outputs, reduced_axes=(axis,))
    return True


def _einsum(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    view.add(node, Op.EINSUM, inputs, outputs, equation=node.attributes.get_string("equation", ""))
    return True


def _matmul(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    operands = _present(inputs)
    ranks = [len(_dims(each)) for each in operands]
    if min(ranks) < 2:  # a vector is the same for all tokens
        return False
    wide = [_to_rank(view, node, each, max(ranks)) for each in operands]
    view.add(node, Op.MATMUL, [*wide], outputs, matrix_operations=("NONE", "NONE"))
    return True


def _expand(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    target = _dims(outputs[0])
    operand = _present(inputs)[0]
    sizes = (*[1] * (len(target) - len(_dims(operand))), *_dims(operand))
    repeated = [axis for axis, size in enumerate(sizes) if not _same(size, target[axis])]
    if any(sizes[axis] != 1 for axis in repeated):
        return False
    zeros = [0] * len(repeated)
    wide = _to_rank(view, node, operand, len(target))
    view.add(node, Op.SLICE, [wide], outputs, slicing=Slicing(repeated, zeros, zeros))
    return True


def _slice(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    operand = _present(inputs)[0]
    dims, target = _dims(operand), _dims(outputs[0])
    starts, ends = _numbers(inputs, 1), _numbers(inputs, 2)
    if starts is None or any(len(inputs) > slot and inputs[slot] and _numbers(inputs, slot) is None for slot in (3, 4)):
        return False
    axes = _numbers(inputs, 3) or list(range(len(starts)))
    steps = _numbers(inputs, 4) or [1] * len(starts)
    picked: list[tuple[int, int, int]] = []
    for position, (axis, start, step) in enumerate(zip(axes, starts, steps, strict=True)):
        axis %= len(dims)
        size = dims[axis]
        to_the_end = ends is not None and ends[position] >= _TO_THE_END
        if (start, step) == (0, 1) and (to_the_end or _same(size, target[axis])):
            continue
        if step < 1 or not isinstance(size, int):
            return False
        picked.append((axis, min(start, size) if start >= 0 else max(start + size, 0), step))
    columns = [list(column) for column in zip(*picked, strict=True)] or [[], [], []]
    view.add(node, Op.SLICE, [operand], outputs, slicing=Slicing(*columns))
    return True


def _split(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    operand = _present(inputs)[0]
    axis = node.attributes.get_int("axis", 0) % len(_dims(operand))
    sizes = [_dims(output)[axis] for output in outputs]
    begin = 0
    begins = []
    for size in sizes:
        if not isinstance(size, int):
            return False
        begins.append(begin)
        begin += size
    for output, at in zip(outputs, begins, strict=True):
        view.add(node, Op.SLICE, [operand], [output], slicing=Slicing([axis], [at], [1]))
    return True


def _gather(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    axis = node.attributes.get_int("axis", 0) % len(_dims(_present(inputs)[0]))
    view.add(node, Op.GATHER, inputs, outputs, axis=axis)
    return True


def _concat(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    axis = node.attributes.get_int("axis", 0) % len(_dims(outputs[0]))
    view.add(node, Op.CONCAT, inputs, outputs, axis=axis)
    return True


def _layer_norm(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    view.add(node, Op.NORMALIZATION, inputs, outputs, epsilon=node.attributes.get_float("epsilon", 1e-5))
    return True


def _rms_norm(view: View, node: ir.Node, inputs: list[OnnxValue | None], outputs: list[OnnxValue]) -> bool:
    """As ONNX defines it: x / sqrt(mean(x * x) + eps) in float32, cast to the type of x, times the scale."""
    x, scale = _present(inputs)[:2]
    dims, rank = _dims(x), len(_dims(x))
    axis = node.attributes.get_int("axis", -1) % rank
    if axis != rank - 1 or node.attributes.get_int("stash_type", 1) != ir.DataType.FLOAT:
        return False
    row: Dims = (*dims[:-1], 1)

    def layer(op: Op, operands: list[OnnxValue], dims: Dims, **facts: object) -> OnnxValue:
        result = view.part(node, trt.float32, dims)
        view.add(node, op, [*operands], [result], **facts)
        return result

    wide = x if x.dtype == trt.float32 else layer(Op.CAST, [x], dims)
    square = layer(Op.MUL, [wide, wide], dims)
    mean = layer(Op.MEAN, [square], row, reduced_axes=(axis,), keeps_axes=True)
    number = np.full((1,) * rank, node.attributes.get_float("epsilon", 1e-5), np.float32)
    eps = layer(Op.CONSTANT, [], (1,) * rank, tensor=ir.tensor(number))
    root = layer(Op.SQRT, [layer(Op.ADD, [mean, eps], row)], row)
    normed = layer(Op.DIV, [wide, root], dims)
    if x.dtype != trt.float32:
        narrow = view.part(node, x.dtype, dims)
        view.add(node, Op.CAST, [normed], [narrow])
        normed = narrow
    view.add(node, Op.MUL, [normed, _to_rank(view, node, scale, rank)], outputs[:1])
    return True


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_RESHAPES, _reshape),
    "Where": _where,
    "Transpose": _transpose,
    "Constant": _constant,
    "ReduceSum": _reduce,
    "ReduceMean": _reduce,
    "Softmax": _softmax,
    "Einsum": _einsum,
    "MatMul": _matmul,
    "Expand": _expand,
    "Slice": _slice,
    "Split": _split,
    "Gather": _gather,
    "Concat": _concat,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
}
