# SPDX-License-Identifier: Apache-2.0
"""Correct rounding, judged by exact rational arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from exact import exact_rsqrt, round_exactly

from trtllm_mhc.reference import fma, round_bf16, rsqrt, widen

BF16 = ml_dtypes.bfloat16


def from_bits(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def to_bits(x: np.float32) -> int:
    return int(np.float32(x).view(np.uint32))


def exact_fma(a: np.float32, b: np.float32, c: np.float32) -> np.float32:
    x, y, z = float(a), float(b), float(c)
    if not all(map(math.isfinite, (x, y, z))):
        return np.float32(x * y + z)  # the value is settled by infinities and NaN alone
    product = Fraction(x) * Fraction(y)
    total = product + Fraction(z)
    # A sum that is exactly zero is -0 only if both addends are -0.
    product_sign = math.copysign(1, x) * math.copysign(1, y)
    negative = product == 0 and z == 0 and product_sign < 0 and math.copysign(1, z) < 0
    return np.float32(round_exactly(total, sign_of_zero=-1.0 if negative else 1.0))


def assert_fma(cases: Iterable[tuple[np.float32, np.float32, np.float32]]) -> None:
    a, b, c = (np.array(column, np.float32) for column in zip(*cases, strict=True))
    got = fma(a, b, c)
    assert got.dtype == np.float32
    for i in range(len(a)):
        want = exact_fma(a[i], b[i], c[i])
        same = to_bits(got[i]) == to_bits(want) or (np.isnan(got[i]) and np.isnan(want))
        assert same, f"fma({a[i]!r}, {b[i]!r}, {c[i]!r}) = {got[i]!r}, exactly {want!r}"


SPECIAL_MAGNITUDES = """
    00000000 00000001 00000003 007fffff 00800000 00800001 33800000 33800001
    3f7fffff 3f800000 3f800001 4b800001 7f000000 7f7fffff 7f800000 7fc00000
"""
SPECIAL = [from_bits(int(bits, 16) | sign) for bits in SPECIAL_MAGNITUDES.split() for sign in (0, 0x80000000)]


def test_fma_on_all_triples_of_special_numbers() -> None:
    assert_fma((a, b, c) for a in SPECIAL for b in SPECIAL for c in SPECIAL)


def test_fma_on_random_bit_patterns() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, (3, 4000), dtype=np.uint64).astype(np.uint32)
    assert_fma(zip(*bits.view(np.float32), strict=True))


def test_fma_on_close_exponents() -> None:
    rng = np.random.default_rng(2)
    significand = rng.integers(2**23, 2**24, (3, 6000)).astype(np.float32)
    scale = np.exp2(rng.integers(-26, 27, (3, 6000))).astype(np.float32)
    sign = rng.choice(np.array([-1, 1], np.float32), (3, 6000))
    assert_fma(zip(*(significand * scale * sign), strict=True))


def test_fma_on_denormal_results() -> None:
    rng = np.random.default_rng(3)
    a = np.exp2(rng.uniform(-80, -60, 4000)).astype(np.float32) * rng.choice(np.array([-1, 1], np.float32), 4000)
    b = np.exp2(rng.uniform(-80, -60, 4000)).astype(np.float32)
    c = rng.integers(0, 2**24, 4000, dtype=np.uint32).view(np.float32)
    assert_fma(zip(a, b, c, strict=True))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tail", [1, -1])
def test_fma_where_float64_rounds_twice(sign: int, tail: int) -> None:
    # The product is +-(1 + 2^-11 + 2^-24), a midpoint of two fp32 numbers; c is too small for float64 to hold the sum.
    x, y, c = np.float32(sign * (1 + 2.0**-12)), np.float32(1 + 2.0**-12), np.float32(tail * 2.0**-90)
    got = fma(x, y, c)[()]
    # The even neighbour is 1 + 2^-11, 0x3f801000; c alone says whether the exact sum lies above the midpoint.
    away_from_zero = sign == tail
    assert to_bits(got) & 0x7FFFFFFF == (0x3F801001 if away_from_zero else 0x3F801000)
    naive = np.float32(np.float64(x) * np.float64(y) + np.float64(c))
    assert (to_bits(naive) != to_bits(got)) == away_from_zero


@pytest.mark.parametrize(("last_bit", "expected"), [(0, 2), (-1, 1)])
def test_fma_rounds_once_to_a_denormal(last_bit: int, expected: int) -> None:
    # 1.5 times the smallest denormal is a midpoint and goes to the even 2; one bit less goes to 1.
    a = from_bits(to_bits(np.float32(1.5 * 2.0**-75)) + last_bit)
    assert to_bits(fma(a, np.float32(2.0**-74), np.float32(0))[()]) == expected


def test_fma_broadcasts_and_takes_bf16() -> None:
    a = np.array([[1.5], [2.0]], BF16)
    got = fma(a, np.array([2.0, 4.0], np.float32), np.float32(1))
    np.testing.assert_array_equal(got, np.array([[4, 7], [5, 9]], np.float32))


@pytest.mark.parametrize("bad", [np.float64(1), np.int32(1), 1.0, 1])
def test_fma_refuses_what_it_would_round(bad: object) -> None:
    with pytest.raises(TypeError, match="fp32 or narrower"):
        fma(np.float32(1), bad, np.float32(1))  # type: ignore[arg-type]


def assert_rsqrt(x: np.ndarray) -> None:
    got = rsqrt(x)
    assert (got.dtype, got.shape) == (np.float32, x.shape)
    for xi, gi in zip(x.tolist(), got.tolist(), strict=True):
        assert gi == exact_rsqrt(np.float32(xi)), f"rsqrt({xi!r}) = {gi!r}"


def test_rsqrt_on_random_positive_numbers() -> None:
    bits = np.random.default_rng(4).integers(1, 0x7F800000, 4000, dtype=np.uint32)
    assert_rsqrt(bits.view(np.float32))


def test_rsqrt_on_denormals_and_around_powers_of_two() -> None:
    powers = np.exp2(np.arange(-149, 128, dtype=np.float64)).astype(np.float32)
    assert_rsqrt(
        np.concatenate([powers, np.nextafter(powers[1:], np.float32(0)), np.nextafter(powers, np.float32(np.inf))])
    )


def test_rsqrt_next_to_midpoints() -> None:
    # The inputs whose exact result lies closest to a midpoint, among all of one exponent: the hardest to round.
    x = (np.arange(2**23, dtype=np.uint32) + np.uint32(0x3F800000)).view(np.float32)
    for scale in (1.0, 2.0):
        scaled = x * np.float32(scale)
        root = 1.0 / np.sqrt(scaled.astype(np.float64))
        ulp = np.spacing(root.astype(np.float32)).astype(np.float64)
        position = root / ulp
        to_midpoint = np.abs(position - np.floor(position) - 0.5)
        assert_rsqrt(scaled[np.argsort(to_midpoint)[:200]])


def test_rsqrt_of_special_numbers() -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, -1.0, np.nan, 1e-20, 4.0], np.float32)
    got = rsqrt(x)
    np.testing.assert_array_equal(got[:3], [np.inf, -np.inf, 0.0])
    assert not np.signbit(got[2])
    assert np.isnan(got[3:6]).all()
    assert got[7] == 0.5
    assert_rsqrt(x[6:])
    assert rsqrt(np.float32(0.25)).shape == ()


def test_round_bf16_against_exact_rounding() -> None:
    rng = np.random.default_rng(5)
    patterns = np.concatenate(
        [
            rng.integers(0, 2**32, 3000, dtype=np.uint64).astype(np.uint32),
            # midpoints between bf16 numbers and their fp32 neighbours, denormals and the largest numbers included
            *(
                ((rng.integers(0, 2**16, 700, dtype=np.uint32) << 16) | np.uint32(low))
                for low in (0x7FFF, 0x8000, 0x8001)
            ),
            np.array([0x7F7F8000, 0x7F7F7FFF, 0xFF7FFFFF, 0x00008000, 0x00018000, 0x80008000, 0x80008001], np.uint32),
        ]
    )
    x = patterns.view(np.float32)
    got = round_bf16(x)
    for xi, gi in zip(x.tolist(), got.tolist(), strict=True):
        if math.isfinite(xi):
            want = round_exactly(Fraction(xi), precision=8, least_exponent=-133, sign_of_zero=math.copysign(1, xi))
            assert (gi, math.copysign(1, gi)) == (want, math.copysign(1, xi)), xi
        else:
            assert gi == xi or (math.isnan(gi) and math.isnan(xi))


def test_round_bf16_of_literal_bits() -> None:
    x = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F8000, 0x00008000], np.uint32).view(np.float32)
    expected = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x0000]
    assert round_bf16(x).view(np.uint16).tolist() == expected


def test_round_bf16_refuses_float64() -> None:
    with pytest.raises(TypeError, match="expected dtype float32, got float64"):
        round_bf16(np.zeros(1, np.float64))


def test_every_bf16_pattern_survives_widening() -> None:
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    x = bits.view(BF16)
    wide = widen(x)
    not_nan = ~np.isnan(wide)
    np.testing.assert_array_equal(wide.view(np.uint32)[not_nan], bits.astype(np.uint32)[not_nan] << 16)
    np.testing.assert_array_equal(round_bf16(wide).view(np.uint16)[not_nan], bits[not_nan])
    assert np.count_nonzero(~not_nan) == 2 * 127
    assert np.isnan(round_bf16(wide)[~not_nan]).all()


def test_numpy_keeps_denormals_and_rounds_its_own_operations() -> None:
    # The reference relies on numpy for add, multiply and divide.
    rng = np.random.default_rng(6)
    bits = rng.integers(0, 2**32, (2, 4000), dtype=np.uint64).astype(np.uint32)
    tiny = rng.integers(0, 2**24, (2, 1000), dtype=np.uint32)
    a, b = np.concatenate([bits, tiny], axis=1).view(np.float32)
    with np.errstate(all="ignore"):
        results = {"add": a + b, "multiply": a * b, "divide": a / b}
    for i in range(len(a)):
        x, y = float(a[i]), float(b[i])
        if not (math.isfinite(x) and math.isfinite(y)) or y == 0:
            continue
        exact = {
            "add": Fraction(x) + Fraction(y),
            "multiply": Fraction(x) * Fraction(y),
            "divide": Fraction(x) / Fraction(y),
        }
        for name, value in exact.items():
            assert float(results[name][i]) == round_exactly(value), (name, x, y)
