# SPDX-License-Identifier: Apache-2.0
"""Exact rational arithmetic: an oracle for the oracle. Slow, scalar, finite numbers only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np


def round_exactly(value: Fraction, precision: int = 24, least_exponent: int = -149, sign_of_zero: float = 1.0) -> float:
    """Round to nearest even at `precision` bits, ulp at least 2^least_exponent, overflow beyond 2^128."""
    if value == 0:
        return math.copysign(0.0, sign_of_zero)
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - precision + 1, least_exponent)
    rounded = round(magnitude / unit) * unit  # Fraction rounds half to even
    result = math.inf if rounded >= 2**128 else float(rounded)
    return math.copysign(result, value)


def fp32(value: Fraction) -> Fraction:
    return Fraction(round_exactly(value))


def bf16(value: Fraction) -> Fraction:
    return Fraction(round_exactly(value, precision=8, least_exponent=-133))


def keep(value: Fraction) -> Fraction:
    return value


def exact_rsqrt(x: np.float32) -> np.float32:
    """1/sqrt(x) rounded to fp32, for positive finite x."""
    value = Fraction(float(x))
    guess = np.float32(1 / math.sqrt(float(x)))
    for r in (np.nextafter(guess, np.float32(0)), guess, np.nextafter(guess, np.float32(np.inf))):
        # r is nearest if 1/sqrt(x) lies between the midpoints m to r's neighbours, and m < 1/sqrt(x) means m*m*x < 1.
        lower = (Fraction(float(np.nextafter(r, np.float32(0)))) + Fraction(float(r))) / 2
        upper = (Fraction(float(np.nextafter(r, np.float32(np.inf)))) + Fraction(float(r))) / 2
        if lower * lower * value < 1 < upper * upper * value:
            return r
    raise AssertionError(f"no candidate for {x!r}")


def tree_sum_of_squares(p: Sequence[Fraction]) -> Fraction:
    """The sum of squares as a thread block would do it: per-lane registers, shuffles by xor, groups one by one."""
    fragments = []
    for start in range(0, len(p), 8):
        acc = Fraction(0)
        for element in p[start : start + 8]:
            acc = fp32(element * element + acc)
        fragments.append(acc)
    total = None
    for start in range(0, len(fragments), 32):
        lanes = fragments[start : start + 32]
        lanes = lanes + [Fraction(0)] * (32 - len(lanes))
        for distance in (16, 8, 4, 2, 1):
            lanes = [fp32(lanes[lane] + lanes[lane ^ distance]) for lane in range(32)]
        assert len(set(lanes)) == 1
        total = lanes[0] if total is None else fp32(total + lanes[0])
    assert total is not None
    return total


Row = Sequence[Fraction]


def boundary_row(
    xs: Sequence[Row],
    residual: Sequence[Row],
    post: Row,
    comb: Sequence[Row],
    pre: Row,
    gamma: Row,
    eps: Fraction,
    round_reduced: Callable[[Fraction], Fraction] = bf16,
    round_collapsed: Callable[[Fraction], Fraction] = bf16,
) -> tuple[list[list[Fraction]], list[Fraction]]:
    """One token of the boundary, written as the contract says it, element by element."""
    hidden, hc = len(gamma), len(post)
    streams: list[list[Fraction]] = [[] for _ in range(hc)]
    collapsed = []
    for h in range(hidden):
        s = Fraction(0)
        for x in xs:
            s = fp32(s + x[h])
        reduced = round_reduced(s)
        c = Fraction(0)
        for i in range(hc):
            m = fp32(reduced * post[i])
            for j in range(hc):
                m = fp32(residual[j][h] * comb[j][i] + m)
            y = bf16(m)
            streams[i].append(y)
            c = fp32(y * pre[i] + c)
        collapsed.append(round_collapsed(c))
    mean = fp32(tree_sum_of_squares(collapsed) / hidden)
    inverse = Fraction(float(exact_rsqrt(np.float32(float(fp32(mean + eps))))))
    return streams, [bf16(fp32(fp32(p * inverse) * g)) for p, g in zip(collapsed, gamma, strict=True)]
