# SPDX-License-Identifier: Apache-2.0
"""Boundaries written in the ways that people and exporters write them, for the tests of the rewrite pass.

`Writer` appends one boundary to a network, each of its parts in a chosen form. All forms of a part compute the same
sum; they differ in layers, in the order of additions and in where a reshape or a cast stands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import tensorrt as trt

from trtllm_mhc.network import ops

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN = 4096
TOP_K = 6

POSTS = ("reduce", "einsum", "matmul", "matmul_wide", "adds", "per_target", "squeeze", "repeat")
COLLAPSES = ("reduce", "einsum", "matmul", "matmul_column", "matmul_vector", "mean", "adds")
NORMS = ("recip_sqrt", "pow", "div_sqrt", "one_over", "sum_div", "sum_mul", "pow_square", "gamma_first", "scale_after")
FINALIZES = (
    *("adds", "reduce", "einsum", "matmul", "shared_first", "reversed", "rows_masked", "rows_masked_narrow"),
    *("weights_masked", "weights_multiplied", "columns", "not_less", "not_equal", "chosen_index"),
)
LINEARS = ("transposed", "columns", "reshaped_weight")
BATCHES = ("rows", "batch_sequence", "one_batch", "static")


@dataclass(frozen=True)
class Form:
    """How a boundary is written."""

    all_reduce: str = "plugin"
    post: str = "reduce"
    collapse: str = "reduce"
    norm: str = "recip_sqrt"
    batch: str = "rows"
    comb: str = "source_target"
    hidden: int = HIDDEN
    hc: int = 4
    eps: float = 1e-20
    tp_size: int = 2
    finalize: str | None = None
    linear: str | None = None
    features: int = 128

    def with_(self, **changes: object) -> Form:
        """The form with something changed."""
        return replace(self, **changes)

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes before the last ones."""
        return {"rows": (-1,), "batch_sequence": (-1, -1), "one_batch": (1, -1), "static": (6,)}[self.batch]

    def runtime_lead(self) -> tuple[int, ...]:
        """The same with numbers in the place of dynamic sizes: 6 tokens in every form."""
        return {"rows": (6,), "batch_sequence": (2, 3), "one_batch": (1, 6), "static": (6,)}[self.batch]


class Writer:
    """Appends the parts of a boundary to ``network``."""

    def __init__(self, network, form: Form) -> None:
        self.network = network
        self.form = form

    # Small layers, named for what they do to the last axes.

    def wide(self, x):
        return ops.cast(self.network, x, trt.float32)

    def narrow(self, x):
        return ops.cast(self.network, x, trt.bfloat16)

    def mul(self, a, b):
        return ops.mul(self.network, a, b)

    def add(self, a, b):
        return ops.add(self.network, a, b)

    def div(self, a, b):
        return ops.elementwise(self.network, a, b, trt.ElementWiseOperation.DIV)

    def sum(self, x, axis, keep=False, operation=trt.ReduceOperation.SUM):
        return ops.reduce(self.network, x, operation, axis % len(x.shape), keep=keep)

    def unsqueeze(self, x, axis):
        axes = ops.constant(self.network, np.array([axis], np.int32))
        return ops.output(self.network.add_unsqueeze(x, ops.cast(self.network, axes, trt.int64)), "unsqueeze")

    def squeeze(self, x, axis):
        axes = ops.constant(self.network, np.array([axis], np.int32))
        return ops.output(self.network.add_squeeze(x, ops.cast(self.network, axes, trt.int64)), "squeeze")

    def reshape_last(self, x, kept: int, *last: int):
        """Reshape all but the first ``kept`` axes, which are at most two; a 0 copies a size."""
        layer = self.network.add_shuffle(x)
        layer.reshape_dims = (*[0] * kept, *last)
        return ops.output(layer, "reshape")

    def transpose(self, x):
        """Swap the last two axes."""
        rank = len(x.shape)
        layer = self.network.add_shuffle(x)
        layer.first_transpose = (*range(rank - 2), rank - 1, rank - 2)
        return ops.output(layer, "transpose")

    def pick(self, x, axis, index, keep=True):
        axis %= len(x.shape)
        indices = np.array([index] if keep else index, np.int32)
        return ops.gather(self.network, x, indices, axis)

    def scalar(self, value, rank):
        return ops.constant(self.network, np.full((1,) * rank, value, np.float32))

    def matmul(self, a, op_a, b, op_b):
        operations = trt.MatrixOperation
        layer = self.network.add_matrix_multiply(a, getattr(operations, op_a), b, getattr(operations, op_b))
        return ops.output(layer, "matmul")

    def einsum(self, equation, *operands):
        return ops.output(self.network.add_einsum(list(operands), equation), "einsum")

    @property
    def lead(self) -> int:
        return len(self.form.lead)

    # The parts.

    def inputs(self) -> dict[str, object]:
        form, network = self.form, self.network
        shapes = {
            "x": (trt.bfloat16, (*form.lead, form.hidden)),
            "residual": (trt.bfloat16, (*form.lead, form.hc, form.hidden)),
            "post": (trt.float32, (*form.lead, form.hc)),
            "comb": (trt.float32, (*form.lead, form.hc, form.hc)),
            "pre": (trt.float32, (*form.lead, form.hc)),
            "gamma": (trt.bfloat16, (form.hidden,)),
        }
        if form.linear is not None:
            del shapes["x"]
            shapes["activation"] = (trt.bfloat16, (*form.lead, form.features))
        if form.finalize is not None:
            del shapes["x"]
            shapes |= {
                "gemm2_permuted": (trt.bfloat16, (-1, form.hidden)),
                "expert_weights": (trt.float32, (*form.lead, TOP_K)),
                "index": (trt.int32, (*form.lead, TOP_K)),
                "shared_output": (trt.bfloat16, (*form.lead, form.hidden)),
            }
        return {name: network.add_input(name, dtype, shape) for name, (dtype, shape) in shapes.items()}

    def linear(self, activation, weight=None):
        """The row-parallel linear layer that ends a sublayer."""
        form, lead = self.form, self.lead
        weight = linear_weight(form) if weight is None else weight
        if form.linear == "columns":
            weight = np.ascontiguousarray(weight.T)
        if form.linear == "reshaped_weight":
            made = ops.reshape(self.network, ops.constant(self.network, weight), (1,) * (lead - 1) + weight.shape)
        else:
            made = ops.constant(self.network, weight.reshape((1,) * (lead - 1) + weight.shape))
        return self.matmul(activation, "NONE", made, "NONE" if form.linear == "columns" else "TRANSPOSE")

    def compare(self, a, b, operation):
        return ops.elementwise(self.network, a, b, getattr(trt.ElementWiseOperation, operation))

    def number(self, value, rank):
        return ops.constant(self.network, np.full((1,) * rank, value, np.int32))

    def finalize(self, gemm2_permuted, expert_weights, index, shared_output):
        """The end of a MoE: routed rows weighted and summed, plus the shared experts' output."""
        form, lead, network = self.form, self.lead, self.network
        rank = lead + 1
        zero = self.number(0, rank)
        clamped = self.compare(index, zero, "MAX")
        if form.finalize == "not_less":
            held = ops.unary(network, self.compare(index, zero, "LESS"), trt.UnaryOperation.NOT)
        elif form.finalize == "not_equal":
            absent = self.compare(index, self.number(-1, rank), "EQUAL")
            held = ops.unary(network, absent, trt.UnaryOperation.NOT)
        else:
            held = self.compare(index, self.number(-1, rank), "GREATER")
        if form.finalize == "chosen_index":
            clamped = ops.select(network, held, index, zero)
        nothing = self.scalar(0.0, lead + 2)
        mask, weights = self.unsqueeze(held, lead + 1), expert_weights
        if form.finalize == "weights_masked":
            weights = ops.select(network, held, weights, self.scalar(0.0, rank))
        elif form.finalize == "weights_multiplied":
            weights = self.mul(weights, self.wide(held))
        if form.finalize == "columns":
            return self.finalize_by_columns(gemm2_permuted, weights, clamped, held, shared_output)
        rows = ops.output(network.add_gather(gemm2_permuted, clamped, axis=0), "gather")
        if form.finalize == "rows_masked_narrow":
            rows = ops.select(network, mask, rows, ops.cast(network, nothing, trt.bfloat16))
        rows = self.wide(rows)
        if form.finalize in ("rows_masked", "einsum", "matmul"):
            rows = ops.select(network, mask, rows, nothing)
        shared = self.wide(shared_output)
        if form.finalize == "einsum":
            routed = self.einsum("mk,mkh->mh" if lead == 1 else "bsk,bskh->bsh", weights, rows)
            return self.narrow(self.add(routed, shared))
        if form.finalize == "matmul":
            routed = self.matmul(self.unsqueeze(weights, lead), "NONE", rows, "NONE")
            return self.narrow(self.add(self.squeeze(routed, lead), shared))
        products = self.mul(rows, self.unsqueeze(weights, lead + 1))
        if form.finalize not in ("rows_masked", "rows_masked_narrow", "weights_masked", "weights_multiplied"):
            if form.finalize == "not_less":
                absent = self.unsqueeze(self.compare(index, zero, "LESS"), lead + 1)
                products = ops.select(network, absent, nothing, products)
            else:
                products = ops.select(network, mask, products, nothing)
        if form.finalize == "reduce":
            return self.narrow(self.add(self.sum(products, lead), shared))
        routes = list(range(TOP_K))
        total = shared if form.finalize == "shared_first" else None
        for route in reversed(routes) if form.finalize == "reversed" else routes:
            product = self.pick(products, lead, route, keep=False)
            total = product if total is None else self.add(total, product)
        return self.narrow(total if form.finalize == "shared_first" else self.add(shared, total))

    def finalize_by_columns(self, gemm2_permuted, weights, clamped, held, shared_output):
        """Route by route, each with a gather of its own."""
        network, lead = self.network, self.lead
        total = self.wide(shared_output)
        for route in range(TOP_K):
            column = self.pick(clamped, lead, route, keep=False)
            rows = self.wide(ops.output(network.add_gather(gemm2_permuted, column, axis=0), "gather"))
            product = self.mul(rows, self.pick(weights, lead, route))
            product = ops.select(network, self.pick(held, lead, route), product, self.scalar(0.0, lead + 1))
            total = self.add(total, product)
        return self.narrow(total)

    def all_reduce(self, x):
        from trtllm_mhc.network import collectives, plugins

        form = self.form
        if form.all_reduce == "plugin":
            if len(x.shape) == 2:
                return plugins.add_all_reduce(self.network, x, tp_size=form.tp_size)
            flat = ops.reshape(self.network, x, (-1, form.hidden))
            reduced = plugins.add_all_reduce(self.network, flat, tp_size=form.tp_size)
            return self.like(reduced, x)
        ranks = np.arange(form.tp_size, dtype=np.int64)
        layer = self.network.add_dist_collective(
            x, trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM, -1, ranks
        )
        layer.num_ranks = form.tp_size
        if form.all_reduce == "dist_collective":
            collectives.label_all_reduce_sum(layer, ranks)
        return ops.output(layer, "all_reduce")

    def like(self, flat, x):
        """[M, H] in the shape of ``x`` [..., H]."""
        layer = self.network.add_shuffle(flat)
        layer.set_input(1, self.network.add_shape(x).get_output(0))
        return ops.output(layer, "like")

    def post(self, reduced, residual, post, comb):
        form, lead, hc = self.form, self.lead, self.form.hc
        equation = {1: ("mji,mjh->mih", "mij,mjh->mih"), 2: ("bsji,bsjh->bsih", "bsij,bsjh->bsih")}[lead]
        transposed = form.comb == "target_source"
        x, streams = self.wide(reduced), self.wide(residual)
        if form.post == "einsum":
            mixed = self.einsum(equation[transposed], comb, streams)
            output = self.mul(self.unsqueeze(post, lead + 1), self.unsqueeze(x, lead))
            return self.narrow(self.add(mixed, output))
        if form.post == "matmul":
            mixed = self.matmul(comb, "NONE" if transposed else "TRANSPOSE", streams, "NONE")
            output = self.matmul(self.unsqueeze(post, lead + 1), "NONE", self.unsqueeze(x, lead), "NONE")
            return self.narrow(self.add(mixed, output))
        if form.post == "matmul_wide":
            # [.., H, hc] @ [.., hc, hc], as with the streams last
            mixed = self.matmul(streams, "TRANSPOSE", comb, "TRANSPOSE" if transposed else "NONE")
            output = self.mul(self.unsqueeze(x, lead + 1), self.unsqueeze(post, lead))
            return self.narrow(self.transpose(self.add(output, mixed)))
        if form.post in ("adds", "per_target"):
            targets = range(hc) if form.post == "per_target" else [None]
            return self.post_by_adds(x, streams, post, comb, list(targets), transposed)
        output = self.mul(self.unsqueeze(x, lead), self.unsqueeze(post, lead + 1))
        if transposed:
            weights, sources, axis = self.unsqueeze(comb, lead + 2), self.unsqueeze(streams, lead), lead + 1
        else:
            weights, sources, axis = self.unsqueeze(comb, lead + 2), self.unsqueeze(streams, lead + 1), lead
        mixed = self.mul(weights, sources)
        if form.post == "squeeze":
            return self.narrow(self.add(self.squeeze(self.sum(mixed, axis, keep=True), axis), output))
        if form.post == "repeat":
            # every target's streams spelled out before the products
            repeated = self.network.add_concatenation([sources] * hc)
            repeated.axis = lead if transposed else lead + 1
            mixed = self.mul(ops.output(repeated, "repeat"), weights)
        return self.narrow(self.add(output, self.sum(mixed, axis)))

    def post_by_adds(self, x, streams, post, comb, targets, transposed):
        lead, hc = self.lead, self.form.hc
        results = []
        for target in targets:
            if target is None:
                weights = self.unsqueeze(post, lead + 1)
            else:
                weights = self.unsqueeze(self.pick(post, lead, target), lead + 1)
            total = self.mul(weights, self.unsqueeze(x, lead))
            for source in range(hc):
                across = self.pick(comb, lead + 1 if transposed else lead, source)
                if target is not None:
                    across = self.pick(across, lead if transposed else lead + 1, target)
                column = across if transposed else self.transpose(across)
                total = self.add(total, self.mul(column, self.pick(streams, lead, source)))
            results.append(total)
        if len(results) == 1:
            return self.narrow(results[0])
        joined = self.network.add_concatenation(results)
        joined.axis = lead
        return self.narrow(ops.output(joined, "join"))

    def collapse(self, streams, pre):
        form, lead = self.form, self.lead
        wide = self.wide(streams)
        if form.collapse == "einsum":
            return self.narrow(self.einsum("mi,mih->mh" if lead == 1 else "bsi,bsih->bsh", pre, wide))
        if form.collapse == "matmul":
            row = self.matmul(self.unsqueeze(pre, lead), "NONE", wide, "NONE")
            return self.narrow(self.squeeze(row, lead))
        if form.collapse == "matmul_column":
            column = self.matmul(wide, "TRANSPOSE", self.unsqueeze(pre, lead + 1), "NONE")
            return self.narrow(self.squeeze(column, lead + 1))
        if form.collapse == "matmul_vector":
            return self.narrow(self.matmul(wide, "TRANSPOSE", pre, "VECTOR"))
        if form.collapse == "adds":
            total = None
            for index in range(form.hc):
                product = self.mul(self.pick(wide, lead, index, keep=False), self.pick(pre, lead, index))
                total = product if total is None else self.add(total, product)
            return self.narrow(total)
        product = self.mul(wide, self.unsqueeze(pre, lead + 1))
        if form.collapse == "mean":
            mean = self.sum(product, lead, operation=trt.ReduceOperation.AVG)
            return self.narrow(self.mul(mean, self.scalar(float(form.hc), lead + 1)))
        return self.narrow(self.sum(product, lead))

    def mean_square(self, wide):
        form = self.form
        if form.norm == "pow_square":
            square = ops.elementwise(
                self.network, wide, self.scalar(2.0, len(wide.shape)), trt.ElementWiseOperation.POW
            )
        else:
            square = self.mul(wide, wide)
        if form.norm in ("sum_div", "sum_mul"):
            total = self.sum(square, -1, keep=True)
            if form.norm == "sum_div":
                return self.div(total, self.scalar(float(form.hidden), len(wide.shape)))
            return self.mul(total, self.scalar(1.0 / form.hidden, len(wide.shape)))
        return self.sum(square, -1, keep=True, operation=trt.ReduceOperation.AVG)

    def norm(self, collapsed, gamma):
        form, rank = self.form, len(collapsed.shape)
        wide = self.wide(collapsed)
        shifted = self.add(self.mean_square(wide), self.scalar(form.eps, rank))
        weight = ops.reshape(self.network, gamma, (1,) * (rank - 1) + (form.hidden,))
        if form.norm == "pow":
            exponent = self.scalar(-0.5, rank)
            inverse = ops.elementwise(self.network, shifted, exponent, trt.ElementWiseOperation.POW)
            return self.narrow(self.mul(self.mul(wide, inverse), self.wide(weight)))
        root = ops.unary(self.network, shifted, trt.UnaryOperation.SQRT)
        if form.norm == "div_sqrt":
            return self.narrow(self.mul(self.div(wide, root), self.wide(weight)))
        if form.norm == "one_over":
            return self.narrow(self.mul(self.mul(wide, self.div(self.scalar(1.0, rank), root)), self.wide(weight)))
        inverse = ops.unary(self.network, root, trt.UnaryOperation.RECIP)
        if form.norm == "gamma_first":
            return self.narrow(self.mul(self.wide(weight), self.mul(inverse, wide)))
        if form.norm == "scale_after":
            return self.mul(self.narrow(self.mul(wide, inverse)), weight)
        return self.narrow(self.mul(self.mul(wide, inverse), self.wide(weight)))

    def boundary(self, residual, post, comb, pre, gamma, x=None, activation=None, **moe):
        """The whole boundary: streams and layer input. Without ``x`` the sublayer's end before it, too."""
        if activation is not None:
            x = self.linear(activation)
        elif moe:
            x = self.finalize(**moe)
        streams = self.post(self.all_reduce(x), residual, post, comb)
        return streams, self.norm(self.collapse(streams, pre), gamma)

    def output(self, **tensors) -> None:
        for name, tensor in tensors.items():
            tensor.name = name
            self.network.mark_output(tensor)


def write_boundary(network, form: Form) -> dict[str, object]:
    """A network of one boundary in ``form``, its streams and layer input as outputs; returns the inputs."""
    writer = Writer(network, form)
    inputs = writer.inputs()
    streams, layer_input = writer.boundary(**inputs)
    writer.output(streams=streams, layer_input=layer_input)
    return inputs


def feeds(form: Form, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Inputs for each rank, of small integers times powers of two: every order of a sum gives the same float32."""
    rng = np.random.default_rng(seed)
    lead = form.runtime_lead()

    def integers(*shape, bound=15, unit=1.0, dtype=np.float32):
        return (rng.integers(-bound, bound + 1, shape) * unit).astype(dtype)

    shared = {
        "residual": integers(*lead, form.hc, form.hidden, dtype=BFLOAT16),
        "post": integers(*lead, form.hc, bound=3, unit=1 / 4),
        "comb": integers(*lead, form.hc, form.hc, bound=3, unit=1 / 4),
        "pre": integers(*lead, form.hc, bound=3, unit=1 / 4),
        "gamma": integers(form.hidden, unit=1 / 8, dtype=BFLOAT16),
    }
    if form.linear is not None:
        shape = (*lead, form.features)
        return [{"activation": integers(*shape, dtype=BFLOAT16), **shared} for _ in range(form.tp_size)]
    if form.finalize is None:
        return [{"x": integers(*lead, form.hidden, dtype=BFLOAT16), **shared} for _ in range(form.tp_size)]

    def moe():
        index = rng.integers(-1, 9, (*lead, TOP_K)).astype(np.int32)
        return {
            "gemm2_permuted": integers(9, form.hidden, dtype=BFLOAT16),
            "expert_weights": integers(*lead, TOP_K, bound=3, unit=1 / 4),
            "index": index,
            "shared_output": integers(*lead, form.hidden, dtype=BFLOAT16),
        }

    return [moe() | shared for _ in range(form.tp_size)]


def linear_weight(form: Form) -> np.ndarray:
    """[H, K] bfloat16; a number of E4M3 times a power of two for each block of 32 x 32."""
    rng = np.random.default_rng(9)
    blocks = rng.integers(-3, 4, (form.hidden // 32, 32, form.features // 32, 32)).astype(np.float32)
    powers = rng.integers(-2, 3, (form.hidden // 32, 1, form.features // 32, 1))
    return np.ldexp(blocks, powers).reshape(form.hidden, form.features).astype(BFLOAT16)


def snapshot(network) -> list[object]:
    """Everything that the pass could change."""
    layers = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        inputs = [layer.get_input(k) for k in range(layer.num_inputs)]
        outputs = [layer.get_output(k) for k in range(layer.num_outputs)]
        layers.append(
            (
                layer.name,
                layer.metadata,
                [tensor and tensor.name for tensor in inputs],
                [(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in outputs],
            )
        )
    names = [network.get_input(k).name for k in range(network.num_inputs)]
    outputs = [network.get_output(k).name for k in range(network.num_outputs)]
    return [layers, names, outputs]


def live_layers(network) -> list[object]:
    """The layers that an output depends on, by position."""
    producer = {}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for k in range(layer.num_outputs):
            producer[layer.get_output(k).name] = index
    todo = [network.get_output(k).name for k in range(network.num_outputs)]
    found = set()
    while todo:
        index = producer.get(todo.pop())
        if index is not None and index not in found:
            found.add(index)
            layer = network.get_layer(index)
            inputs = [layer.get_input(k) for k in range(layer.num_inputs)]
            todo += [tensor.name for tensor in inputs if tensor is not None]
    return [network.get_layer(index) for index in sorted(found)]
