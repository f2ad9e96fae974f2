# SPDX-License-Identifier: Apache-2.0
"""Correctly rounded fp32 arithmetic on numpy arrays.

numpy's own fp32 add, multiply and divide are correctly rounded and keep denormals. It has no fused multiply-add and no
reciprocal square root. Computing those in float64 and rounding the result to fp32 rounds twice, which is wrong where
the float64 result falls on the midpoint of two fp32 numbers but the exact result does not. Here the exact error of the
float64 step is recovered and decides such cases.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._arrays import BFLOAT16, AnyArray, BFloat16Array, Float32Array, Float64Array


def two_sum(a: Float64Array, b: Float64Array) -> tuple[Float64Array, Float64Array]:
    """The float64 sum of a and b, and its exact rounding error (Knuth).

    Where the sum is not finite the error is NaN.
    """
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    return total, error


def round_to_odd(value: Float64Array, error: Float64Array) -> Float64Array:
    """The exact number `value + error` in float64, rounded to odd; |error| is at most half an ulp of `value`.

    A number that is not representable becomes its odd-mantissa neighbour. Rounding that to any format of at most 51
    bits of precision, denormals included, gives the correctly rounded exact number. NaN errors change nothing.
    """
    bits = value.view(np.int64)
    inexact = (error > 0) | (error < 0)
    # An even neighbour moves one step towards the exact number: away from zero when the error has the value's sign.
    step = np.where(np.signbit(error) == np.signbit(value), np.int64(1), np.int64(-1))
    moved = bits + np.where(inexact & ((bits & 1) == 0), step, np.int64(0))
    return moved.view(np.float64)


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Float32Array:
    """a * b + c with one rounding to fp32, as CUDA's __fmaf_rn. Arguments are fp32 (or narrower) and broadcast."""
    with np.errstate(all="ignore"):
        # 24 + 24 bits of significand: the float64 product is exact, and far from float64's overflow and underflow.
        product = np.asarray(_wide(a) * _wide(b))
        total, error = two_sum(product, _wide(c))
        return round_to_odd(np.asarray(total), np.asarray(error)).astype(np.float32)


def rsqrt(x: npt.ArrayLike) -> Float32Array:
    """1 / sqrt(x) with one rounding to fp32, as CUDA's __frsqrt_rn.

    rsqrt(+-0) is +-inf, rsqrt(inf) is 0, and of a negative number NaN.
    """
    with np.errstate(all="ignore"):
        wide = np.atleast_1d(_wide(x))
        guess = (1.0 / np.sqrt(wide)).astype(np.float32)
        guess = np.where(wide == 0, np.copysign(np.float32(np.inf), wide).astype(np.float32), guess)
        ordinary = np.isfinite(guess) & (guess > 0)
        safe_x = np.where(ordinary, wide, 1.0)
        safe_guess = np.where(ordinary, guess, np.float32(1))
        # The float64 guess is off by about one float64 ulp, so the answer is `guess` or one of its two neighbours.
        # 1/sqrt(x) is never a midpoint of fp32 numbers, so comparing it with both midpoints decides.
        above = np.nextafter(safe_guess, np.float32(np.inf))
        below = np.nextafter(safe_guess, np.float32(0))
        exceeds_upper = _square_times_x_below_one(_midpoint(safe_guess, above), safe_x)
        exceeds_lower = _square_times_x_below_one(_midpoint(safe_guess, below), safe_x)
        rounded = np.where(exceeds_upper, above, np.where(exceeds_lower, safe_guess, below))
        return np.where(ordinary, rounded, guess).astype(np.float32).reshape(np.shape(x))


def round_bf16(x: AnyArray) -> BFloat16Array:
    """fp32 to bf16, round to nearest even, overflow to infinity, denormals kept. Shape unchanged.

    Raises TypeError for anything but fp32: float64 would be rounded twice on its way.
    """
    array = np.asarray(x)
    if array.dtype != np.float32:
        raise TypeError(f"round_bf16: expected dtype float32, got {array.dtype}")
    with np.errstate(all="ignore"):
        return array.astype(BFLOAT16)


def widen(x: AnyArray) -> Float32Array:
    """bf16 (or fp32) to fp32, exactly."""
    return np.asarray(x).astype(np.float32)


def _wide(x: npt.ArrayLike) -> Float64Array:
    array = np.asarray(x)
    if array.dtype == np.float64 or array.dtype.kind in "iu":
        raise TypeError(f"expected fp32 or narrower floating point, got {array.dtype}")
    return array.astype(np.float64)


def _midpoint(a: Float32Array, b: Float32Array) -> Float64Array:
    middle: Float64Array = (a.astype(np.float64) + b.astype(np.float64)) * 0.5
    return middle


def _square_times_x_below_one(m: Float64Array, x: Float64Array) -> npt.NDArray[np.bool_]:
    """Whether m * m * x < 1, exactly, for a midpoint m of two fp32 numbers near 1/sqrt(x)."""
    square = m * m  # 25 + 25 bits: exact
    high, low = _two_product(square, x)
    # high is close to 1, so high - 1 is exact, and adding low rounds without changing the sign.
    result: npt.NDArray[np.bool_] = (high - 1.0) + low < 0
    return result


def _two_product(a: Float64Array, b: Float64Array) -> tuple[Float64Array, Float64Array]:
    """The float64 product of a and b, and its exact rounding error (Dekker, with Veltkamp's splitting)."""
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return product, error


def _split(a: Float64Array) -> tuple[Float64Array, Float64Array]:
    scaled = a * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - a)
    return high, a - high
