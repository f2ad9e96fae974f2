# SPDX-License-Identifier: Apache-2.0
"""Layers that compute each element of the output from one element of each input.

Broadcasting is TensorRT's: equal ranks, extents of 1 repeat. Results are given in the type computed in; the caller
rounds them, once, to the dtype of the output. That is one rounding for sums, products, quotients and square roots; the
transcendental functions are numpy's in the type computed in, so fp32 outputs carry those functions' own error of an
ulp or so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from trtllm_mhc.reference._arrays import AnyArray

from .rules import Operation, rule, truncated


@rule("CAST")
@rule("IDENTITY")
def _keep(op: Operation) -> AnyArray:
    # One rounding when the caller stores it. Widening first would hide nothing: it is exact.
    return op.value(0)


@rule("SELECT")
def _select(op: Operation) -> AnyArray:
    return np.where(op.value(0), op.value(1), op.value(2))


def _divide(a: AnyArray, b: AnyArray) -> AnyArray:
    return truncated(a, b) if a.dtype.kind in "iu" else a / b


def _floor_divide(a: AnyArray, b: AnyArray) -> AnyArray:
    return a // b if a.dtype.kind in "iu" else np.floor(a / b)


_ELEMENTWISE: dict[str, Callable[[AnyArray, AnyArray], AnyArray]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "SUB": np.subtract,
    "DIV": _divide,
    "POW": np.power,
    "FLOOR_DIV": _floor_divide,
    "AND": np.logical_and,
    "OR": np.logical_or,
    "XOR": np.logical_xor,
    "EQUAL": np.equal,
    "GREATER": np.greater,
    "LESS": np.less,
}


@rule("ELEMENTWISE")
def _elementwise(op: Operation) -> AnyArray:
    return _ELEMENTWISE[op.layer.op.name](op.operand(0), op.operand(1))


def _erf(x: AnyArray) -> AnyArray:
    # numpy has none. The C library's, in float64, is rounded to the type computed in.
    exact = np.fromiter(map(math.erf, x.reshape(-1).tolist()), np.float64, x.size)
    return exact.reshape(x.shape).astype(x.dtype)


_UNARY: dict[str, Callable[[AnyArray], AnyArray]] = {
    "EXP": np.exp,
    "LOG": np.log,
    "SQRT": np.sqrt,
    "RECIP": lambda x: 1 / x,
    "ABS": np.abs,
    "NEG": np.negative,
    "SIN": np.sin,
    "COS": np.cos,
    "TAN": np.tan,
    "SINH": np.sinh,
    "COSH": np.cosh,
    "ASIN": np.arcsin,
    "ACOS": np.arccos,
    "ATAN": np.arctan,
    "ASINH": np.arcsinh,
    "ACOSH": np.arccosh,
    "ATANH": np.arctanh,
    "CEIL": np.ceil,
    "FLOOR": np.floor,
    "ERF": _erf,
    "NOT": np.logical_not,
    "SIGN": np.sign,
    "ROUND": np.rint,
    "ISINF": np.isinf,
    "ISNAN": np.isnan,
}


@rule("UNARY")
def _unary(op: Operation) -> AnyArray:
    return _UNARY[op.layer.op.name](op.operand(0))


def _softplus(x: AnyArray, alpha: float, beta: float) -> AnyArray:
    return alpha * np.logaddexp(beta * x, np.zeros((), x.dtype))


def _gelu_tanh(x: AnyArray) -> AnyArray:
    inner: AnyArray = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    result: AnyArray = 0.5 * x * (1 + np.tanh(inner))
    return result


# Functions of x, alpha and beta.
_ACTIVATIONS: dict[str, Callable[[AnyArray, float, float], AnyArray]] = {
    "RELU": lambda x, a, b: np.maximum(x, 0),
    "SIGMOID": lambda x, a, b: 1 / (1 + np.exp(-x)),
    "TANH": lambda x, a, b: np.tanh(x),
    "LEAKY_RELU": lambda x, a, b: np.where(x >= 0, x, a * x),
    "ELU": lambda x, a, b: np.where(x >= 0, x, a * np.expm1(x)),
    "SELU": lambda x, a, b: np.where(x > 0, b * x, b * (a * np.expm1(x))),
    "SOFTSIGN": lambda x, a, b: x / (1 + np.abs(x)),
    "SOFTPLUS": _softplus,
    "CLIP": lambda x, a, b: np.maximum(a, np.minimum(b, x)),
    "HARD_SIGMOID": lambda x, a, b: np.maximum(0, np.minimum(1, a * x + b)),
    "SCALED_TANH": lambda x, a, b: a * np.tanh(b * x),
    "THRESHOLDED_RELU": lambda x, a, b: np.where(x > a, x, 0),
    "GELU_ERF": lambda x, a, b: 0.5 * x * (1 + _erf(math.sqrt(0.5) * x)),
    "GELU_TANH": lambda x, a, b: _gelu_tanh(x),
}


@rule("ACTIVATION")
def _activation(op: Operation) -> AnyArray:
    layer = op.layer
    return _ACTIVATIONS[layer.type.name](op.operand(0), layer.alpha, layer.beta)
