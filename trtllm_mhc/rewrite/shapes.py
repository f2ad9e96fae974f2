# SPDX-License-Identifier: Apache-2.0
"""The values of the small integer tensors that a TensorRT network's slices and reshapes take their sizes from.

Exporters compute such sizes at run time even where they are known: TensorRT's ONNX parser clamps the start of every
slice by a chain of elementwise layers. What can be told without running the network is told here: numbers, and sizes
of other tensors by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtllm_mhc.rewrite.graph import Known, Node, Op, Size, Value

_MAX_DEPTH = 32


def elements(value: Value, depth: int = 0) -> list[Known] | None:
    """The elements of a 1-D (or scalar) integer tensor, None for each that cannot be told; None if nothing can."""
    node = value.producer
    if node is None or depth > _MAX_DEPTH or len(value.shape) > 1:
        return None
    if node.op is Op.CONSTANT:
        return None if value.constant is None else [int(each) for each in value.constant.reshape(-1)]
    kind = node.kind
    if kind == "SHAPE":
        source = node.operands[0]
        return [size if size >= 0 else Size(source, axis) for axis, size in enumerate(source.shape)]
    operands = [elements(operand, depth + 1) for operand in node.operands]
    known = [each for each in operands if each is not None]
    if len(known) != len(operands):
        return None
    if node.op in (Op.CAST, Op.IDENTITY, Op.RESHAPE):
        return known[0]
    if node.op is Op.CONCAT:
        return [each for operand in known for each in operand]
    if node.op is Op.GATHER:
        return [known[0][at] if isinstance(at, int) and at < len(known[0]) else None for at in known[1]]
    if kind == "SLICE" and len(node.operands) == 1:
        return _slice(node, known[0])
    if kind == "ELEMENTWISE":
        return _elementwise(node.layer.op.name, known[0], known[1])
    return None


def _slice(node: Node, whole: list[Known]) -> list[Known] | None:
    start, count, stride = (tuple(dims) for dims in (node.layer.start, node.layer.shape, node.layer.stride))
    picked = range(start[0], start[0] + count[0] * stride[0], stride[0])
    return [whole[at] for at in picked] if all(0 <= at < len(whole) for at in picked) else None


def _elementwise(operation: str, a: Sequence[Known], b: Sequence[Known]) -> list[Known] | None:
    length = max(len(a), len(b))
    if length % len(a) or length % len(b):
        return None
    pairs = ((a[k % len(a)], b[k % len(b)]) for k in range(length))
    return [_combine(operation, x, y) for x, y in pairs]


def _combine(operation: str, x: Known, y: Known) -> Known:
    if isinstance(x, int) and isinstance(y, int):
        functions = {"SUM": x + y, "SUB": x - y, "PROD": x * y, "MAX": max(x, y), "MIN": min(x, y)}
        return functions.get(operation)
    if operation == "PROD" and 0 in (x, y):
        return 0
    # What leaves a size, which is no less than 0, as it is.
    neutral = {"SUM": 0, "SUB": 0, "PROD": 1, "MAX": 0}.get(operation)
    if neutral is None:
        return None
    if y == neutral:
        return x
    return y if x == neutral and operation != "SUB" else None
