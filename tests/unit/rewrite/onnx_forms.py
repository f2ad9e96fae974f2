# SPDX-License-Identifier: Apache-2.0
"""Boundaries written with the ONNX operators that exporters use, for the tests of the rewrite pass."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

HIDDEN = 4096
TOP_K = 6
OPSET = 23


class Model:
    """Writes one boundary with ONNX operators."""

    def __init__(self, lead):
        self.lead = lead
        self.nodes = []
        self.initializers = []

    def __call__(self, op, *inputs, domain="", parts=0, **attributes):
        """A node; arrays among the inputs become initializers. Returns its output's name, or those of ``parts``."""
        names = []
        for each in inputs:
            if not isinstance(each, str):
                self.initializers.append(numpy_helper.from_array(np.asarray(each), f"c{len(self.initializers)}"))
                each = self.initializers[-1].name
            names.append(each)
        output = f"t{len(self.nodes)}"
        outputs = [f"{output}_{part}" for part in range(parts)] or [output]
        self.nodes.append(helper.make_node(op, names, outputs, domain=domain, **attributes))
        return outputs if parts else output

    def ints(self, *values):
        return np.array(values, np.int64)

    def wide(self, x):
        return self("Cast", x, to=TensorProto.FLOAT)

    def narrow(self, x):
        return self("Cast", x, to=TensorProto.BFLOAT16)

    def all_reduce(self, x):
        shape = None
        if len(self.lead) == 2:
            shape, x = self("Shape", x), self("Reshape", x, self.ints(-1, HIDDEN))
        x = self("MhcAllReduce", x, domain="trtllm_mhc", tp_size=2, plugin_version="1", plugin_namespace="trtllm_mhc")
        return x if shape is None else self("Reshape", x, shape)

    def build(self, outputs, opset=OPSET, moe=False):
        m = list(self.lead)
        bf16, f32 = TensorProto.BFLOAT16, TensorProto.FLOAT
        shapes = {
            "x": (bf16, [*m, HIDDEN]),
            "residual": (bf16, [*m, 4, HIDDEN]),
            "post": (f32, [*m, 4]),
            "comb": (f32, [*m, 4, 4]),
            "pre": (f32, [*m, 4]),
            "gamma": (bf16, [HIDDEN]),
        }
        if moe:
            del shapes["x"]
            shapes |= {
                "gemm2_permuted": (bf16, ["P", HIDDEN]),
                "expert_weights": (f32, [*m, TOP_K]),
                "index": (TensorProto.INT32, [*m, TOP_K]),
                "shared_output": (bf16, [*m, HIDDEN]),
            }
        streams = {"streams": [*m, 4, HIDDEN]}  # all other results are [.., H]
        for name, output in outputs.items():
            self.nodes.append(helper.make_node("Identity", [output], [name]))
        graph = helper.make_graph(
            self.nodes,
            "boundary",
            [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in shapes.items()],
            [helper.make_tensor_value_info(name, bf16, streams.get(name, [*m, HIDDEN])) for name in outputs],
            self.initializers,
        )
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("trtllm_mhc", 1)]
        return helper.make_model(graph, opset_imports=imports)


def post(m, form, reduced, residual="residual"):
    axis = len(m.lead)
    last, first = m.ints(-1), m.ints(axis)
    own = m("Mul", m("Unsqueeze", "post", last), m("Unsqueeze", m.wide(reduced), first))
    streams = m.wide(residual)
    if form == "multiply":
        products = m("Mul", m("Unsqueeze", "comb", last), m("Unsqueeze", streams, m.ints(axis + 1)))
        mixed = m("ReduceSum", products, m.ints(axis), keepdims=0)
    elif form == "matmul":
        order = [*range(axis), axis + 1, axis]
        mixed = m("MatMul", m("Transpose", "comb", perm=order), streams)
    elif form == "matmul_target_source":
        mixed = m("MatMul", "comb", streams)
    elif form == "expand":
        repeats = m.ints(*[1] * axis, 4, 4, 1)
        repeated = m("Expand", m("Unsqueeze", streams, m.ints(axis + 1)), repeats)
        mixed = m("ReduceSum", m("Mul", m("Unsqueeze", "comb", last), repeated), m.ints(axis), keepdims=0)
    elif form == "einsum":
        letters = "ab"[:axis]
        mixed = m("Einsum", "comb", streams, equation=f"{letters}ji,{letters}jh->{letters}ih")
    else:
        mixed = None
        halves = m("Split", streams, m.ints(1, 3), axis=axis, parts=2) if form == "split" else []
        for k in range(4):
            if form in ("slice", "split"):
                if form == "slice":
                    stream = m("Slice", streams, m.ints(k - 4), m.ints(k - 3 or 2**62), m.ints(axis))
                elif k == 0:
                    stream = halves[0]
                else:
                    stream = m("Slice", halves[1], m.ints(k - 1), m.ints(k), m.ints(axis))
                weight = m("Slice", "comb", m.ints(k), m.ints(k + 1), m.ints(axis))
                weight = m("Transpose", weight, perm=[*range(axis), axis + 1, axis])
            else:
                stream = m("Unsqueeze", m("Gather", streams, np.array(k, np.int64), axis=axis), first)
                weight = m("Unsqueeze", m("Gather", "comb", np.array(k, np.int64), axis=axis), last)
            product = m("Mul", weight, stream)
            mixed = product if mixed is None else m("Add", mixed, product)
    return m.narrow(m("Add", own, mixed))


def finalize(m, form):
    """The end of a MoE: routed rows weighted and summed, plus the shared experts' output."""
    axis = len(m.lead)
    index = m("Cast", "index", to=TensorProto.INT64) if form == "where_int64" else "index"
    zero = np.array(0, np.int64 if form == "where_int64" else np.int32)
    held = m("Unsqueeze", m("GreaterOrEqual", index, zero), m.ints(-1))
    rows = m.wide(m("Gather", "gemm2_permuted", m("Max", index, zero), axis=0))
    if form == "mask":
        rows = m("Mul", rows, m("Unsqueeze", "expert_weights", m.ints(-1)))
        routed = m("Mul", rows, m.wide(held))
    else:
        rows = m("Where", held, rows, np.array(0, np.float32))
        routed = m("Mul", rows, m("Unsqueeze", "expert_weights", m.ints(-1)))
    return m.narrow(m("Add", m("ReduceSum", routed, m.ints(axis), keepdims=0), m.wide("shared_output")))


def collapse(m, form, streams):
    axis = len(m.lead)
    wide = m.wide(streams)
    if form == "matmul":
        return m.narrow(m("Squeeze", m("MatMul", m("Unsqueeze", "pre", m.ints(axis)), wide), m.ints(axis)))
    if form == "einsum":
        letters = "ab"[:axis]
        return m.narrow(m("Einsum", "pre", wide, equation=f"{letters}i,{letters}ih->{letters}h"))
    product = m("Mul", m("Unsqueeze", "pre", m.ints(-1)), wide)
    return m.narrow(m("ReduceSum", product, m.ints(axis), keepdims=0))


def norm(m, form, x):
    wide = m.wide(x)
    if form == "operator_narrow":
        return m("RMSNormalization", x, "gamma", axis=-1, epsilon=1e-20)
    if form == "operator":
        return m.narrow(m("RMSNormalization", wide, m.wide("gamma"), axis=-1, epsilon=1e-20))
    square = m("Mul", wide, wide) if form == "divide" else m("Pow", wide, np.array(2.0, np.float32))
    shifted = m("Add", m("ReduceMean", square, m.ints(-1), keepdims=1), np.array(1e-20, np.float32))
    root = m("Sqrt", shifted)
    normed = m("Div", wide, root) if form == "divide" else m("Mul", wide, m("Reciprocal", root))
    return m.narrow(m("Mul", normed, m.wide("gamma")))


#: Post, collapse and norm.
FORMS = [
    ("multiply", "multiply", "reciprocal"),
    ("matmul", "matmul", "divide"),
    ("einsum", "einsum", "operator"),
    ("slice", "multiply", "operator"),
    ("gather", "matmul", "reciprocal"),
    ("matmul_target_source", "einsum", "operator_narrow"),
    ("split", "multiply", "divide"),
    ("expand", "multiply", "divide"),
]
