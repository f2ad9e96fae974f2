# SPDX-License-Identifier: Apache-2.0
"""The interpreter on single layers, against expressions that share no code with it."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

BF16 = ml_dtypes.bfloat16


@pytest.fixture
def evaluate(trt):
    from trtllm_mhc.reference.interpreter import evaluate

    return evaluate


@pytest.fixture
def run(trt, network, evaluate):
    """Evaluates the network, whose inputs are arrays by name, and gives the value of the tensor ``out``."""

    def run(out, precision="network", **feed):
        network.mark_output(out)
        (outputs,) = evaluate([network], [feed], precision=precision)
        return outputs[out.name]

    return run


@pytest.fixture
def add_input(trt, network):
    """An input of an array's dtype and shape; its first extent is dynamic where that is asked for."""
    from trtllm_mhc.network.layers import numpy_dtype

    names = {numpy_dtype(getattr(trt, n)): n for n in ("float32", "float16", "bfloat16", "int32", "int64", "bool")}

    def add_input(name, array, dynamic=False):
        shape = (-1, *array.shape[1:]) if dynamic else array.shape
        return network.add_input(name, getattr(trt, names[array.dtype]), shape)

    return add_input


def random(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def to_bf16(x):
    """fp32 to bf16, to nearest even, in integers."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(BF16)


def assert_bits(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


def assert_ulps(got, want, ulps):
    """fp32 ``got`` within some ulps of the float64 ``want``."""
    assert got.dtype == np.float32
    assert got.shape == want.shape
    assert np.all(np.abs(got - want) <= ulps * np.spacing(np.abs(want).astype(np.float32)))


# Elementwise, unary, activation, select, cast


FLOAT_OPERATIONS = {
    "SUM": lambda a, b: a + b,
    "PROD": lambda a, b: a * b,
    "SUB": lambda a, b: a - b,
    "DIV": lambda a, b: a / b,
    "MAX": lambda a, b: np.where(a > b, a, b),
    "MIN": lambda a, b: np.where(a < b, a, b),
    "FLOOR_DIV": lambda a, b: np.floor(a / b),
}


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FLOAT_OPERATIONS)
def test_elementwise_broadcasts_and_rounds_once(trt, network, add_input, run, name, dtype):
    a, b = random(3, 1, 64, dtype=dtype), random(1, 5, 64, seed=1, dtype=dtype)
    layer = network.add_elementwise(add_input("a", a), add_input("b", b), getattr(trt.ElementWiseOperation, name))
    want = FLOAT_OPERATIONS[name](a.astype(np.float32), b.astype(np.float32))
    assert_bits(run(layer.get_output(0), a=a, b=b), want if dtype == np.float32 else to_bf16(want))


def test_elementwise_power(trt, network, add_input, run):
    a, b = np.abs(random(4, 8)), random(4, 8, seed=1)
    layer = network.add_elementwise(add_input("a", a), add_input("b", b), trt.ElementWiseOperation.POW)
    want = np.array([math.pow(x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)])
    assert_ulps(run(layer.get_output(0), a=a, b=b), want.reshape(4, 8), 2)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("SUM", [9, -5, 5, -9]),
        ("PROD", [14, -14, -14, 14]),
        ("DIV", [3, -3, -3, 3]),
        ("FLOOR_DIV", [3, -4, -4, 3]),
        ("MAX", [7, 2, 7, -2]),
    ],
)
def test_elementwise_of_integers(trt, network, add_input, run, name, want):
    a, b = np.array([7, -7, 7, -7], np.int32), np.array([2, 2, -2, -2], np.int32)
    layer = network.add_elementwise(add_input("a", a), add_input("b", b), getattr(trt.ElementWiseOperation, name))
    got = run(layer.get_output(0), a=a, b=b)
    assert got.dtype == np.int32
    assert got.tolist() == want


@pytest.mark.parametrize(("name", "want"), [("EQUAL", [0, 1, 0]), ("GREATER", [0, 0, 1]), ("LESS", [1, 0, 0])])
def test_comparisons(trt, network, add_input, run, name, want):
    a, b = np.array([1, 2, 3], np.float32), np.array([2, 2, 2], np.float32)
    layer = network.add_elementwise(add_input("a", a), add_input("b", b), getattr(trt.ElementWiseOperation, name))
    got = run(layer.get_output(0), a=a, b=b)
    assert got.dtype == np.bool_
    assert got.tolist() == [bool(w) for w in want]


@pytest.mark.parametrize(("name", "want"), [("AND", [0, 0, 1]), ("OR", [0, 1, 1]), ("XOR", [0, 1, 0])])
def test_logic(trt, network, add_input, run, name, want):
    a, b = np.array([False, True, True]), np.array([False, False, True])
    layer = network.add_elementwise(add_input("a", a), add_input("b", b), getattr(trt.ElementWiseOperation, name))
    assert run(layer.get_output(0), a=a, b=b).tolist() == [bool(w) for w in want]


UNARY_FUNCTIONS = {
    "EXP": math.exp,
    "LOG": math.log,
    "SQRT": math.sqrt,
    "RECIP": lambda x: 1 / x,
    "ABS": abs,
    "NEG": lambda x: -x,
    "SIN": math.sin,
    "COS": math.cos,
    "TAN": math.tan,
    "SINH": math.sinh,
    "COSH": math.cosh,
    "ASIN": math.asin,
    "ACOS": math.acos,
    "ATAN": math.atan,
    "ASINH": math.asinh,
    "ATANH": math.atanh,
    "CEIL": math.ceil,
    "FLOOR": math.floor,
    "ERF": math.erf,
    "SIGN": lambda x: math.copysign(1, x),
    "ROUND": round,
}


def unary_argument(name):
    x = random(4, 8)
    if name in ("LOG", "SQRT"):
        return np.abs(x)
    return np.clip(x, -0.9, 0.9) if name in ("ASIN", "ACOS", "ATANH") else x


@pytest.mark.parametrize("name", UNARY_FUNCTIONS)
def test_unary(trt, network, add_input, run, name):
    x = unary_argument(name)
    layer = network.add_unary(add_input("x", x), getattr(trt.UnaryOperation, name))
    want = np.array([UNARY_FUNCTIONS[name](v) for v in x.ravel().tolist()], np.float64).reshape(x.shape)
    assert_ulps(run(layer.get_output(0), x=x), want, 4)


@pytest.mark.parametrize("name", UNARY_FUNCTIONS)
def test_unary_in_float64(trt, network, add_input, run, name):
    x = unary_argument(name)
    layer = network.add_unary(add_input("x", x), getattr(trt.UnaryOperation, name))
    want = np.array([UNARY_FUNCTIONS[name](v) for v in x.ravel().tolist()], np.float64).reshape(x.shape)
    np.testing.assert_allclose(run(layer.get_output(0), "float64", x=x), want, rtol=1e-14, atol=0)


def test_acosh(trt, network, add_input, run):
    x = np.array([1.5, 2.5, 3.5, 4.25], np.float32)
    layer = network.add_unary(add_input("x", x), trt.UnaryOperation.ACOSH)
    assert_ulps(run(layer.get_output(0), x=x), np.array([math.acosh(v) for v in x.tolist()]), 4)


@pytest.mark.parametrize(
    ("name", "want"), [("ROUND", [2, 2, 4, -2]), ("CEIL", [2, 3, 4, -2]), ("FLOOR", [1, 2, 3, -3])]
)
def test_rounding_to_integers(trt, network, add_input, run, name, want):
    x = np.array([1.5, 2.5, 3.5, -2.5], np.float32)
    layer = network.add_unary(add_input("x", x), getattr(trt.UnaryOperation, name))
    assert run(layer.get_output(0), x=x).tolist() == want


def test_unary_predicates(trt, network, add_input, run):
    x = np.array([1, np.inf, -np.inf, np.nan], np.float32)
    tensor = add_input("x", x)
    infinite = network.add_unary(tensor, trt.UnaryOperation.ISINF).get_output(0)
    nan = network.add_unary(tensor, trt.UnaryOperation.ISNAN).get_output(0)
    either = network.add_elementwise(infinite, nan, trt.ElementWiseOperation.OR).get_output(0)
    finite = network.add_unary(either, trt.UnaryOperation.NOT).get_output(0)
    assert run(finite, x=x).tolist() == [True, False, False, False]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


ALPHA, BETA = 0.75, 1.25
ACTIVATIONS = {
    "RELU": lambda x: max(x, 0.0),
    "SIGMOID": sigmoid,
    "TANH": math.tanh,
    "LEAKY_RELU": lambda x: x if x >= 0 else ALPHA * x,
    "ELU": lambda x: x if x >= 0 else ALPHA * (math.exp(x) - 1),
    "SELU": lambda x: BETA * x if x > 0 else BETA * (ALPHA * math.exp(x) - ALPHA),
    "SOFTSIGN": lambda x: x / (1 + abs(x)),
    "SOFTPLUS": lambda x: ALPHA * math.log(math.exp(BETA * x) + 1),
    "CLIP": lambda x: max(ALPHA, min(BETA, x)),
    "HARD_SIGMOID": lambda x: max(0.0, min(1.0, ALPHA * x + BETA)),
    "SCALED_TANH": lambda x: ALPHA * math.tanh(BETA * x),
    "THRESHOLDED_RELU": lambda x: x if x > ALPHA else 0.0,
    "GELU_ERF": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "GELU_TANH": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def test_every_activation_is_tested(trt):
    assert set(trt.ActivationType.__members__) == set(ACTIVATIONS)


@pytest.mark.parametrize("precision", ["network", "float64"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(trt, network, add_input, run, name, precision):
    x = random(4, 8)
    layer = network.add_activation(add_input("x", x), getattr(trt.ActivationType, name))
    layer.alpha, layer.beta = ALPHA, BETA
    got = run(layer.get_output(0), precision, x=x)
    want = np.array([ACTIVATIONS[name](v) for v in x.ravel().tolist()], np.float64).reshape(x.shape)
    if precision == "network":
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)
    else:
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(("precision", "want"), [("network", 0.0), ("float64", 2.0**-46)])
def test_arithmetic_inside_a_layer(trt, network, add_input, run, precision, want):
    """fp32 rounds the product, 1 + 2^-22 + 2^-46, before it is added to; float64 holds it."""
    x = np.array([1 + 2.0**-23], np.float32)
    layer = network.add_activation(add_input("x", x), trt.ActivationType.HARD_SIGMOID)
    layer.alpha, layer.beta = 1 + 2.0**-23, -(1 + 2.0**-22)
    assert run(layer.get_output(0), precision, x=x).tolist() == [want]


def test_sigmoid_of_large_numbers(trt, network, add_input, run):
    x = np.array([-200, 200], np.float32)
    layer = network.add_activation(add_input("x", x), trt.ActivationType.SIGMOID)
    assert run(layer.get_output(0), x=x).tolist() == [0, 1]


def test_select(trt, network, add_input, run):
    condition, a, b = np.array([[True], [False]]), random(2, 3, dtype=BF16), random(2, 3, seed=1, dtype=BF16)
    layer = network.add_select(*(add_input(n, v) for n, v in zip("cab", (condition, a, b), strict=True)))
    got = run(layer.get_output(0), c=condition, a=a, b=b)
    assert_bits(got, np.stack([a[0], b[1]]))


def test_cast_to_bf16_rounds_ties_to_even(trt, network, add_input, run):
    ulp = 2.0**-7
    x = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2.0**-20, 3e38, 3.4e38, -0.0], np.float32)
    got = run(network.add_cast(add_input("x", x), trt.bfloat16).get_output(0), x=x)
    assert got.dtype == BF16
    assert got.astype(np.float64)[:3].tolist() == [1, 1 + 2 * ulp, 1 + ulp]
    assert_bits(got, to_bf16(x))
    assert np.isinf(got.astype(np.float32)[4])


@pytest.mark.parametrize("source", [np.float32, BF16, np.float16])
def test_cast_to_integers_truncates(trt, network, add_input, run, source):
    x = np.array([1.75, -1.75, 0.5, -3], source)
    got = run(network.add_cast(add_input("x", x), trt.int32).get_output(0), x=x)
    assert got.dtype == np.int32
    assert got.tolist() == [1, -1, 0, -3]


def test_cast_of_integers_and_booleans(trt, network, add_input, run):
    x = np.array([2, 0, -3], np.int32)
    to_bool = network.add_cast(add_input("x", x), trt.bool).get_output(0)
    back = network.add_cast(to_bool, trt.float32).get_output(0)
    assert run(back, x=x).tolist() == [1, 0, 1]


def test_cast_in_float64_keeps_everything(trt, network, add_input, run):
    x = random(5, 7)
    narrow = network.add_cast(add_input("x", x), trt.bfloat16).get_output(0)
    wide = network.add_cast(narrow, trt.float32).get_output(0)
    got = run(wide, "float64", x=x)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, x.astype(np.float64))


def test_identity(trt, network, add_input, run):
    x = random(2, 3, dtype=BF16)
    assert_bits(run(network.add_identity(add_input("x", x)).get_output(0), x=x), x)


# Contractions and reductions


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matrix_multiply(trt, network, add_input, run, transpose_a, transpose_b):
    a, b = random(2, 3, 4, 5), random(1, 3, 5, 6, seed=1)
    want = np.zeros((2, 3, 4, 6))
    for i, j in np.ndindex(4, 6):
        want[:, :, i, j] = (a[:, :, i, :].astype(np.float64) * b[:, :, :, j]).sum(-1)
    a = np.ascontiguousarray(a.swapaxes(-1, -2)) if transpose_a else a
    b = np.ascontiguousarray(b.swapaxes(-1, -2)) if transpose_b else b
    operation = {False: trt.MatrixOperation.NONE, True: trt.MatrixOperation.TRANSPOSE}
    layer = network.add_matrix_multiply(
        add_input("a", a), operation[transpose_a], add_input("b", b), operation[transpose_b]
    )
    np.testing.assert_allclose(run(layer.get_output(0), a=a, b=b), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sides", ["left", "right", "both"])
def test_matrix_multiply_with_vectors(trt, network, add_input, run, sides):
    a = random(3, 4) if sides == "left" else random(3, 2, 4) if sides == "right" else random(3, 4)
    b = random(3, 4, 5, seed=1) if sides == "left" else random(3, 4, seed=1)
    vector, none = trt.MatrixOperation.VECTOR, trt.MatrixOperation.NONE
    layer = network.add_matrix_multiply(
        add_input("a", a), none if sides == "right" else vector, add_input("b", b), none if sides == "left" else vector
    )
    equation = {"left": "bk,bkn->bn", "right": "bmk,bk->bm", "both": "bk,bk->b"}[sides]
    np.testing.assert_allclose(run(layer.get_output(0), a=a, b=b), np.einsum(equation, a, b), rtol=1e-5, atol=1e-6)


def test_bf16_matrix_multiply_accumulates_in_fp32_and_rounds_once(trt, network, add_input, run):
    # In bf16 each of the small terms would vanish beside the 1; together they make 1/8 and a bit.
    a = np.full((1, 65), 2.0**-9, BF16)
    a[0, 0] = 1
    b = np.ones((65, 1), BF16)
    none = trt.MatrixOperation.NONE
    layer = network.add_matrix_multiply(add_input("a", a), none, add_input("b", b), none)
    got = run(layer.get_output(0), a=a, b=b)
    assert got.dtype == BF16
    assert float(got[0, 0]) == 1.125


def test_bf16_matrix_multiply_differs_in_float64(trt, network, add_input, evaluate):
    a, b = random(4, 256, dtype=BF16), random(8, 256, seed=1, dtype=BF16)
    layer = network.add_matrix_multiply(
        add_input("a", a), trt.MatrixOperation.NONE, add_input("b", b), trt.MatrixOperation.TRANSPOSE
    )
    network.mark_output(layer.get_output(0))
    ((rounded,), (exact,)) = (
        evaluate([network], [{"a": a, "b": b}], precision=p)[0].values() for p in ("network", "float64")
    )
    want = np.array([[math.fsum(x * y for x, y in zip(r, c, strict=True)) for c in b.tolist()] for r in a.tolist()])
    np.testing.assert_allclose(exact, want, rtol=1e-12)
    assert (rounded.dtype, exact.dtype) == (BF16, np.float64)
    difference = np.abs(rounded.astype(np.float64) - want)
    assert np.all(difference <= np.abs(want) * 2.0**-8)
    assert np.mean(difference > 0) > 0.9


@pytest.mark.parametrize("precision", ["network", "float64"])
@pytest.mark.parametrize("transpose", [False, True])
def test_large_weights_in_pieces(trt, network, add_input, run, monkeypatch, transpose, precision):
    from trtllm_mhc.reference.interpreter import contraction

    monkeypatch.setattr(contraction, "_BLOCK", 100)
    x, weight = random(3, 16, dtype=BF16), random(16, 21, seed=1, dtype=BF16)
    kept = np.ascontiguousarray(weight.T) if transpose else weight
    constant = network.add_constant(kept.shape, trt.Weights(trt.bfloat16, kept.ctypes.data, kept.size))
    operation = trt.MatrixOperation.TRANSPOSE if transpose else trt.MatrixOperation.NONE
    layer = network.add_matrix_multiply(add_input("x", x), trt.MatrixOperation.NONE, constant.get_output(0), operation)
    got = run(layer.get_output(0), precision, x=x)
    want = x.astype(np.float64) @ weight.astype(np.float64)
    assert got.dtype == (BF16 if precision == "network" else np.float64)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=2.0**-7 if got.dtype == BF16 else 1e-13, atol=1e-2)


def test_float64_gives_constants_back_in_float64(trt, network, evaluate):
    values = random(2, 3, dtype=BF16)
    tensor = network.add_constant((2, 3), trt.Weights(trt.bfloat16, values.ctypes.data, 6)).get_output(0)
    turned = network.add_shuffle(tensor)
    turned.first_transpose = (1, 0)
    names = [tensor.name, turned.get_output(0).name]
    (outputs,) = evaluate([network], [{}], precision="float64", extra_outputs=names)
    assert_bits(outputs[names[0]], values.astype(np.float64))
    assert_bits(outputs[names[1]], np.ascontiguousarray(values.astype(np.float64).T))


def test_einsum(trt, network, add_input, run):
    comb, streams = random(2, 4, 4), random(2, 4, 8, seed=1)
    layer = network.add_einsum([add_input("comb", comb), add_input("streams", streams)], "mji,mjh->mih")
    want = sum(comb[:, j, :, None].astype(np.float64) * streams[:, j, None, :] for j in range(4))
    np.testing.assert_allclose(run(layer.get_output(0), comb=comb, streams=streams), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axes", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("name", ["SUM", "PROD", "MAX", "MIN", "AVG"])
def test_reduce(trt, network, add_input, run, name, axes, keep):
    x = random(2, 3, 4)
    mask = sum(1 << axis for axis in axes)
    layer = network.add_reduce(add_input("x", x), getattr(trt.ReduceOperation, name), mask, keep)
    function = {"SUM": sum, "PROD": math.prod, "MAX": max, "MIN": min, "AVG": lambda v: sum(v) / len(v)}[name]
    kept = [axis for axis in range(3) if axis not in axes]
    moved = x.transpose(*kept, *axes).reshape(*(x.shape[axis] for axis in kept), -1)
    want = np.apply_along_axis(lambda v: function(v.astype(np.float64).tolist()), -1, moved)
    if keep:
        want = want.reshape([1 if axis in axes else x.shape[axis] for axis in range(3)])
    got = run(layer.get_output(0), x=x)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_bf16_sum_accumulates_in_fp32(trt, network, add_input, run):
    x = np.full((1, 65), 2.0**-9, BF16)
    x[0, 0] = 1
    layer = network.add_reduce(add_input("x", x), trt.ReduceOperation.SUM, 2, False)
    got = run(layer.get_output(0), x=x)
    assert got.dtype == BF16
    assert got.astype(np.float64).tolist() == [1.125]


def test_sum_of_integers(trt, network, add_input, run):
    x = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    got = run(network.add_reduce(add_input("x", x), trt.ReduceOperation.SUM, 1, False).get_output(0), x=x)
    assert got.dtype == np.int32
    assert got.tolist() == [5, 7, 9]


def test_average_of_integers_is_refused(trt, network, add_input, run):
    x = np.array([[1, 2], [4, 5]], np.int32)
    layer = network.add_reduce(add_input("x", x), trt.ReduceOperation.AVG, 1, False)
    with pytest.raises(NotImplementedError, match=r"REDUCE.*average of integers"):
        run(layer.get_output(0), x=x)


def test_softmax(trt, network, add_input, run):
    x = random(2, 4, 4) + np.float32(200)
    layer = network.add_softmax(add_input("x", x))
    layer.axes = 1 << 1
    exponentials = np.exp(x.astype(np.float64))
    want = exponentials / exponentials.sum(1, keepdims=True)
    np.testing.assert_allclose(run(layer.get_output(0), x=x), want, rtol=1e-6)


@pytest.mark.parametrize("version", [1, 2])
def test_normalization_subtracts_the_mean(trt, network, add_input, run, version):
    method = "add_normalization" if version == 1 else "add_normalization_v2"
    if not hasattr(network, method):
        pytest.skip(f"TensorRT {trt.__version__} has no {method}")
    x, scale, bias = random(3, 16) + np.float32(2), random(1, 16, seed=1), random(1, 16, seed=2)
    tensors = [add_input(n, v) for n, v in (("x", x), ("scale", scale), ("bias", bias))]
    layer = getattr(network, method)(*tensors, 1 << 1)
    layer.epsilon = 0.25
    wide = x.astype(np.float64)
    mean = wide.mean(1, keepdims=True)
    variance = (wide * wide).mean(1, keepdims=True) - mean * mean
    want = (wide - mean) / np.sqrt(variance + 0.25) * scale + bias
    np.testing.assert_allclose(run(layer.get_output(0), x=x, scale=scale, bias=bias), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "values", "indices"), [("MAX", [5, 5, 3], [1, 3, 0]), ("MIN", [-1, 3, 3], [2, 0, 4])])
def test_top_k(trt, network, add_input, evaluate, name, values, indices):
    x = np.array([[3, 5, -1, 5, 3]], np.float32)
    layer = network.add_topk(add_input("x", x), getattr(trt.TopKOperation, name), 3, 2)
    layer.get_output(0).name, layer.get_output(1).name = "values", "indices"
    (outputs,) = evaluate([network], [{"x": x}], extra_outputs=["values", "indices"])
    assert outputs["values"].tolist() == [values]
    assert outputs["indices"].dtype == np.int32
    assert outputs["indices"].tolist() == [indices]


# Moving data


def test_shuffle_transposes_reshapes_and_transposes(trt, network, add_input, run):
    x = random(2, 3, 4, dtype=BF16)
    layer = network.add_shuffle(add_input("x", x, dynamic=True))
    layer.first_transpose = (1, 0, 2)
    layer.reshape_dims = (0, -1, 2)
    layer.second_transpose = (2, 0, 1)
    want = np.zeros((2, 3, 4), BF16)
    for stream, row, column in np.ndindex(3, 2, 4):
        flat = row * 4 + column
        want[flat % 2, stream, flat // 2] = x[row, stream, column]
    assert_bits(run(layer.get_output(0), x=x), want)


def test_shuffle_without_a_reshape(trt, network, add_input, run):
    x = random(2, 3)
    layer = network.add_shuffle(add_input("x", x))
    layer.first_transpose = (1, 0)
    got = run(layer.get_output(0), x=x)
    assert got.tolist() == [[x[0, i], x[1, i]] for i in range(3)]


def test_shuffle_to_and_from_a_scalar(trt, network, add_input, run):
    x = random(1)
    scalar = network.add_shuffle(add_input("x", x))
    scalar.reshape_dims = ()
    matrix = network.add_shuffle(scalar.get_output(0))
    matrix.reshape_dims = (1, 1)
    assert run(matrix.get_output(0), x=x).tolist() == [x.tolist()]


def test_shuffle_to_a_computed_shape(trt, network, add_input, run):
    x, like = random(6, 4), random(3, 8)
    layer = network.add_shuffle(add_input("x", x, dynamic=True))
    layer.set_input(1, network.add_shape(add_input("like", like, dynamic=True)).get_output(0))
    assert_bits(run(layer.get_output(0), x=x, like=like), x.reshape(3, 8))


def test_shape(trt, network, add_input, run):
    x = random(3, 8)
    got = run(network.add_shape(add_input("x", x, dynamic=True)).get_output(0), x=x)
    assert got.dtype == np.int64
    assert got.tolist() == [3, 8]


def test_squeeze_and_unsqueeze(trt, network, add_input, run):
    if not hasattr(network, "add_squeeze"):
        pytest.skip(f"TensorRT {trt.__version__} has no such layers")
    x = random(2, 1, 3)
    axes = network.add_constant((1,), np.array([1], np.int64)).get_output(0)
    squeezed = network.add_squeeze(add_input("x", x), axes).get_output(0)
    last = network.add_constant((1,), np.array([2], np.int64)).get_output(0)
    expanded = network.add_unsqueeze(squeezed, last).get_output(0)
    assert_bits(run(expanded, x=x), x.reshape(2, 3, 1))


def test_concatenation(trt, network, add_input, run):
    a, b = random(2, 1, 3, dtype=BF16), random(2, 2, 3, seed=1, dtype=BF16)
    layer = network.add_concatenation([add_input("a", a), add_input("b", b)])
    layer.axis = 1
    got = run(layer.get_output(0), a=a, b=b)
    assert got.shape == (2, 3, 3)
    assert_bits(got[:, :1], a)
    assert_bits(got[:, 1:], b)


@pytest.mark.parametrize(
    ("mode", "want"),
    [
        ("STRICT_BOUNDS", None),
        ("WRAP", [2, 3, 4, 0, 1, 2, 3, 4, 0]),
        ("CLAMP", [0, 0, 0, 0, 1, 2, 3, 4, 4]),
        ("FILL", [0, 0, 0, 0, 1, 2, 3, 4, 0]),
        ("REFLECT", [3, 2, 1, 0, 1, 2, 3, 4, 3]),
    ],
)
def test_slice_modes(trt, network, add_input, run, mode, want):
    x = np.arange(5, dtype=np.float32)
    layer = network.add_slice(add_input("x", x), (-3,), (9,), (1,))
    layer.mode = getattr(trt.SampleMode, mode)
    if want is None:
        with pytest.raises(ValueError, match=r"expected indices in \[0, 5\)"):
            run(layer.get_output(0), x=x)
    else:
        assert run(layer.get_output(0), x=x).tolist() == want


def test_slice_with_strides(trt, network, add_input, run):
    x = random(4, 6, dtype=BF16)
    layer = network.add_slice(add_input("x", x), (3, 1), (2, 3), (-2, 2))
    assert_bits(run(layer.get_output(0), x=x), x[3::-2, 1::2])


def test_slice_with_stride_zero_broadcasts(trt, network, add_input, run):
    x = random(2, 1, 3, dtype=BF16)
    layer = network.add_slice(add_input("x", x), (0, 0, 0), (2, 4, 3), (1, 0, 1))
    assert_bits(run(layer.get_output(0), x=x), np.stack([x[:, 0]] * 4, axis=1))


def test_slice_of_a_computed_size(trt, network, add_input, run):
    x, like = random(6, 4), random(2, 3)
    layer = network.add_slice(add_input("x", x, dynamic=True), (1, 1), (0, 0), (1, 1))
    layer.set_input(2, network.add_shape(add_input("like", like, dynamic=True)).get_output(0))
    assert_bits(run(layer.get_output(0), x=x, like=like), x[1:3, 1:4])


def test_slice_fills_with_a_value(trt, network, add_input, run):
    x = np.ones((2, 2), np.float32)
    layer = network.add_slice(add_input("x", x), (-1, 0), (3, 3), (1, 1))
    layer.mode = trt.SampleMode.FILL
    layer.set_input(4, network.add_constant((), np.array([7], np.float32)).get_output(0))
    assert run(layer.get_output(0), x=x).tolist() == [[7, 7, 7], [1, 1, 7], [1, 1, 7]]


def test_slice_of_some_axes(trt, network, add_input, run):
    if not hasattr(trt.ISliceLayer, "axes"):
        pytest.skip(f"TensorRT {trt.__version__} slices all axes")
    x = random(2, 5)
    layer = network.add_slice(add_input("x", x), (1,), (3,), (1,))
    layer.axes = (1,)
    assert_bits(run(layer.get_output(0), x=x), x[:, 1:4])


@pytest.mark.parametrize("indices", [np.array(2, np.int32), np.array([[2, 0], [1, 1]], np.int32)], ids=["0d", "2d"])
def test_gather(trt, network, add_input, run, indices):
    x = random(3, 4, 5, dtype=BF16)
    layer = network.add_gather(add_input("x", x), add_input("i", indices), 1)
    got = run(layer.get_output(0), x=x, i=indices)
    want = np.stack([x[:, i] for i in indices.ravel()], axis=1).reshape(3, *indices.shape, 5)
    assert_bits(got, want)


def test_gather_with_batch_axes(trt, network, add_input, run):
    x, indices = random(2, 4, 3), np.array([[3, 0], [1, 1]], np.int32)
    layer = network.add_gather(add_input("x", x), add_input("i", indices), 1)
    layer.num_elementwise_dims = 1
    want = np.stack([x[b][indices[b]] for b in range(2)])
    assert_bits(run(layer.get_output(0), x=x, i=indices), want)


def test_gather_elements(trt, network, add_input, run):
    x, indices = random(2, 3), np.array([[2, 0], [1, 1]], np.int32)
    layer = network.add_gather_v2(add_input("x", x), add_input("i", indices), trt.GatherMode.ELEMENT)
    layer.axis = 1
    want = [[x[row, column] for column in indices[row]] for row in range(2)]
    assert run(layer.get_output(0), x=x, i=indices).tolist() == want


@pytest.mark.parametrize("batch", [0, 1])
def test_gather_nd(trt, network, add_input, run, batch):
    x = random(2, 3, 4)
    indices = np.array([[[1, 2], [0, 0]], [[1, 1], [0, 2]]], np.int32)
    layer = network.add_gather_v2(add_input("x", x), add_input("i", indices), trt.GatherMode.ND)
    layer.num_elementwise_dims = batch
    if batch:
        want = [[x[b, i, j] for i, j in indices[b]] for b in range(2)]
    else:
        want = [[x[i, j] for i, j in rows] for rows in indices]
    np.testing.assert_array_equal(run(layer.get_output(0), x=x, i=indices), np.array(want))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "fp8", "int8", "int32", "int64", "bool"])
def test_constants(trt, network, evaluate, name):
    from trtllm_mhc.network.layers import numpy_dtype

    values = np.array([[0, 1, 2], [3, 0, 5]]).astype(numpy_dtype(getattr(trt, name)))
    weights = trt.Weights(getattr(trt, name), values.ctypes.data, values.size)
    tensor = network.add_constant((2, 3), weights).get_output(0)
    (outputs,) = evaluate([network], [{}], extra_outputs=[tensor.name])
    assert_bits(outputs[tensor.name], values)
    outputs[tensor.name][0, 0] = 1
    assert not values[0, 0]


# The whole of `evaluate`


def test_order_is_by_data_not_by_insertion(trt, network, add_input, run):
    x = random(2, 3)
    tensor = add_input("x", x)
    late = network.add_unary(tensor, trt.UnaryOperation.ABS)
    early = network.add_elementwise(tensor, tensor, trt.ElementWiseOperation.PROD)
    late.set_input(0, early.get_output(0))
    early.set_input(1, network.add_unary(tensor, trt.UnaryOperation.NEG).get_output(0))
    assert_bits(run(late.get_output(0), x=x), np.abs(x * -x))


def test_cycle_is_an_error(trt, network, add_input, run):
    x = random(2, 3)
    first = network.add_unary(add_input("x", x), trt.UnaryOperation.ABS)
    second = network.add_unary(first.get_output(0), trt.UnaryOperation.ABS)
    out = second.get_output(0)
    network.mark_output(out)
    first.set_input(0, out)
    from trtllm_mhc.reference.interpreter.schedule import make_schedule

    with pytest.raises(ValueError, match="depends on its own output"):
        make_schedule(network, [out.name])


def test_dead_layers_are_not_evaluated(trt, network, add_input, run):
    x = random(1, 1, 8, 8)
    network.add_lrn(add_input("x", x), 3, 1.0, 0.5, 1.0)
    out = network.add_unary(network.get_input(0), trt.UnaryOperation.NEG).get_output(0)
    assert_bits(run(out, x=x), -x)


def test_unknown_layer_is_named(trt, network, add_input, run):
    x = random(1, 1, 8, 8)
    layer = network.add_lrn(add_input("x", x), 3, 1.0, 0.5, 1.0)
    layer.name = "the odd one"
    with pytest.raises(NotImplementedError, match=r"'the odd one'.*LRN"):
        run(layer.get_output(0), x=x)


def test_dynamic_rows_come_from_the_feed(trt, network, add_input, evaluate):
    x = add_input("x", random(1, 4), dynamic=True)
    network.mark_output(network.add_unary(x, trt.UnaryOperation.NEG).get_output(0))
    for rows in (1, 5, 64):
        feed = random(rows, 4, seed=rows)
        (outputs,) = evaluate([network], [{"x": feed}])
        assert_bits(next(iter(outputs.values())), -feed)


def test_extra_outputs(trt, network, add_input, evaluate):
    x = random(2, 3)
    middle = network.add_unary(add_input("x", x), trt.UnaryOperation.NEG).get_output(0)
    middle.name = "middle"
    last = network.add_unary(middle, trt.UnaryOperation.ABS).get_output(0)
    last.name = "last"
    network.mark_output(last)
    (outputs,) = evaluate([network], [{"x": x}], extra_outputs=["middle", "x"])
    assert set(outputs) == {"last", "middle", "x"}
    assert_bits(outputs["middle"], -x)
    with pytest.raises(ValueError, match="no tensor named 'nothing'"):
        evaluate([network], [{"x": x}], extra_outputs=["nothing"])


def test_outputs_are_copies(trt, network, add_input, evaluate):
    x = random(2, 3)
    layer = network.add_shuffle(add_input("x", x))
    layer.reshape_dims = (3, 2)
    network.mark_output(layer.get_output(0))
    (outputs,) = evaluate([network], [{"x": x}])
    before = x.copy()
    next(iter(outputs.values()))[:] = 0
    assert_bits(x, before)


@pytest.mark.parametrize(
    ("feed", "error", "message"),
    [
        ({}, ValueError, r"rank 0, input 'x': expected an array, got none"),
        ({"x": np.zeros((2, 3), np.float32)}, TypeError, r"expected dtype bfloat16, got float32"),
        ({"x": np.zeros((2, 4), BF16)}, ValueError, r"expected shape \[-1, 3\], got \[2, 4\]"),
        ({"x": np.zeros((2, 3), BF16), "y": np.zeros(1)}, ValueError, r"inputs of the network, \['x'\], got \['y'\]"),
        ({"x": [[1, 2, 3]]}, TypeError, r"expected a numpy array, got list"),
    ],
)
def test_bad_feeds(trt, network, evaluate, feed, error, message):
    x = network.add_input("x", trt.bfloat16, (-1, 3))
    network.mark_output(network.add_unary(x, trt.UnaryOperation.NEG).get_output(0))
    with pytest.raises(error, match=message):
        evaluate([network], [feed])


def test_float64_takes_feeds_of_any_float(trt, network, evaluate):
    x = network.add_input("x", trt.bfloat16, (-1, 3))
    network.mark_output(network.add_unary(x, trt.UnaryOperation.NEG).get_output(0))
    feed = np.random.default_rng(0).standard_normal((2, 3))
    (outputs,) = evaluate([network], [{"x": feed}], precision="float64")
    np.testing.assert_array_equal(next(iter(outputs.values())), -feed)
    with pytest.raises(TypeError, match="expected dtype bfloat16, got int64"):
        evaluate([network], [{"x": np.zeros((2, 3), np.int64)}], precision="float64")


def test_arguments(trt, network, evaluate):
    with pytest.raises(ValueError, match="as many feeds as networks"):
        evaluate([network], [])
    with pytest.raises(ValueError, match="as many feeds as networks"):
        evaluate([], [])
    with pytest.raises(ValueError, match="precision: expected one of"):
        evaluate([network], [{}], precision="float128")


def test_float64_rounds_nothing_along_a_chain(trt, network, add_input, evaluate):
    """A chain of bf16 layers: float64 gives the exact polynomial, the network's precision does not."""
    x = random(16, 32, dtype=BF16)
    tensor = add_input("x", x)
    square = network.add_elementwise(tensor, tensor, trt.ElementWiseOperation.PROD).get_output(0)
    total = network.add_elementwise(square, tensor, trt.ElementWiseOperation.SUM).get_output(0)
    network.mark_output(total)
    exact, rounded = (
        next(iter(evaluate([network], [{"x": x}], precision=precision)[0].values())).astype(np.float64)
        for precision in ("float64", "network")
    )
    wide = x.astype(np.float64)
    np.testing.assert_array_equal(exact, wide * wide + wide)
    twice = to_bf16(to_bf16(x.astype(np.float32) ** 2).astype(np.float32) + x.astype(np.float32))
    np.testing.assert_array_equal(rounded, twice.astype(np.float64))
    assert np.mean(exact != rounded) > 0.5


def test_infinities_and_nan_pass_silently(trt, network, add_input, run):
    x = np.array([np.inf, -np.inf, np.nan, 0], np.float32)
    layer = network.add_elementwise(add_input("x", x), network.get_input(0), trt.ElementWiseOperation.SUB)
    got = run(layer.get_output(0), x=x)
    assert np.isnan(got[:3]).all()
    assert got[3] == 0
