# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc.reference import assert_bits_equal, dequantize, quantize, scale_bytes, swizzle_scales, unswizzle_scales
from trtllm_mhc.reference.mxfp8 import e8m0_round_up, inverse_scale, to_e4m3

BF16 = ml_dtypes.bfloat16


def bf(values: Any) -> np.ndarray:
    return np.array(values, np.float32).astype(BF16)


def block(*values: float) -> np.ndarray:
    """One row of one block: the values, then zeros."""
    row = np.zeros((1, 32), np.float32)
    row[0, : len(values)] = values
    return row.astype(BF16)


def e4m3_values() -> dict[int, Fraction]:
    """E4M3 by its definition: 4 exponent bits with bias 7, 3 fraction bits, 0x7f and 0xff NaN, no infinity."""
    values = {}
    for code in range(256):
        exponent, fraction = (code >> 3) & 15, code & 7
        if exponent == 15 and fraction == 7:
            continue
        magnitude = Fraction(8 + fraction, 8) * Fraction(2) ** (exponent - 7)
        if exponent == 0:
            magnitude = Fraction(fraction, 8) * Fraction(2) ** -6
        values[code] = -magnitude if code & 0x80 else magnitude
    return values


# ---- elements -------------------------------------------------------------------------------------------------------


def test_e4m3_rounds_to_nearest_even_and_saturates() -> None:
    rng = np.random.default_rng(0)
    positive = sorted(value for code, value in e4m3_values().items() if code < 0x80)
    midpoints = [float(a + b) / 2 for a, b in itertools.pairwise(positive)]
    x = np.concatenate(
        [
            np.array([float(value) for value in positive]),
            np.array(midpoints),
            np.nextafter(np.array(midpoints, np.float32), np.float32(0)).astype(np.float64),
            np.nextafter(np.array(midpoints, np.float32), np.float32(1e9)).astype(np.float64),
            rng.uniform(0, 500, 500),
            np.exp2(rng.uniform(-12, 9, 500)),
            np.array([448.0, 463.9, 464.0, 480.0, 1e30, np.inf]),
        ]
    ).astype(np.float32)
    x = np.concatenate([x, -x])
    codes = e4m3_values()
    got = to_e4m3(x).view(np.uint8)
    for value, code in zip(x.tolist(), got.tolist(), strict=True):
        clamped = Fraction(max(-448.0, min(448.0, value)))
        nearest = min(abs(clamped - other) for other in codes.values())
        assert abs(clamped - codes[code]) == nearest, value
        tied = {abs(other) for other in codes.values() if abs(clamped - other) == nearest}
        assert len(tied) == 1 or code % 2 == 0, value
        assert (code >= 0x80) == bool(np.signbit(np.float32(value))), value


def test_e4m3_of_nan_is_nan() -> None:
    assert to_e4m3(np.float32([np.nan])).view(np.uint8)[0] & 0x7F == 0x7F


# ---- scales ---------------------------------------------------------------------------------------------------------


def test_e8m0_is_the_next_power_of_two() -> None:
    rng = np.random.default_rng(1)
    powers = np.exp2(np.arange(-149.0, 128.0)).astype(np.float32)
    x = np.concatenate(
        [
            powers,
            np.nextafter(powers, np.float32(np.inf)),
            np.nextafter(powers[1:], np.float32(0)),
            rng.integers(1, 0x7F800000, 1000, dtype=np.uint32).view(np.float32),
        ]
    )
    got = e8m0_round_up(x)
    for value, code in zip(x.tolist(), got.tolist(), strict=True):
        if code < 254:
            assert Fraction(value) <= Fraction(2) ** (code - 127), value
        if code > 0:
            assert Fraction(value) > Fraction(2) ** (code - 128), value


def test_e8m0_by_hand() -> None:
    bits = np.array([0x00000000, 0x80000000, 0xBF800000, 0x00400000, 0x00400001, 0x00800000, 0x00800001], np.uint32)
    assert e8m0_round_up(bits.view(np.float32)).tolist() == [0, 0, 0, 0, 1, 1, 2]
    bits = np.array([0x3F800000, 0x3F800001, 0x7E800000, 0x7F000000, 0x7F000001, 0x7F800000, 0x7FC00000], np.uint32)
    assert e8m0_round_up(bits.view(np.float32)).tolist() == [127, 128, 253, 254, 254, 254, 254]


def test_inverse_scale_is_exact() -> None:
    got = inverse_scale(np.arange(255, dtype=np.uint8))
    assert got[0] == got[254] == 0
    assert (got[1:254].astype(np.float64) == np.exp2(127 - np.arange(1.0, 254.0))).all()


# ---- quantisation ---------------------------------------------------------------------------------------------------


def test_quantize_by_hand() -> None:
    # Largest 448: n = 448 * fl(1/448) rounds to 1, scale byte 127. 3 -> 0x44, -0.5 -> 0xb0, 17 is a tie of 16 and 18.
    data, scales = quantize(block(448, 3, -0.5, 17, 0.0, -0.0))
    assert data.view(np.uint8)[0, :7].tolist() == [0x7E, 0x44, 0xB0, 0x58, 0x00, 0x80, 0x00]
    assert scales[0] == 127
    # 450 / 448 is above 1: scale 2, elements halved.
    data, scales = quantize(block(450, 3))
    assert data.view(np.uint8)[0, :3].tolist() == [0x76, 0x3C, 0x00]
    assert scales[0] == 128


def test_quantize_of_a_zero_block() -> None:
    data, scales = quantize(block(0.0, -0.0))
    assert data.view(np.uint8)[0, :3].tolist() == [0x00, 0x80, 0x00]
    assert scales[0] == 0


def test_quantize_of_nan_and_infinity() -> None:
    data, scales = quantize(block(np.nan, 448, 1))
    assert data.view(np.uint8)[0, 0] & 0x7F == 0x7F
    assert data.view(np.uint8)[0, 1:3].tolist() == [0x7E, 0x38]
    assert scales[0] == 127
    data, scales = quantize(block(np.inf, 448, -1))
    assert data.view(np.uint8)[0, 0] & 0x7F == 0x7F
    assert data.view(np.uint8)[0, 1:3].tolist() == [0x00, 0x80]
    assert scales[0] == 254


def test_quantize_of_every_bf16_pattern() -> None:
    x = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(BF16).reshape(16, 4096)
    data, swizzled = quantize(x)
    scales, _ = unswizzle_scales(swizzled, 16, 4096)
    number = np.isfinite(x.astype(np.float32))
    assert (np.isnan(data.astype(np.float32)) == ~number).all()
    # A scale is the least one that holds the block's largest magnitude, within fp32's rounding of 1/448.
    largest = (
        np.where(number, np.abs(x.astype(np.float32)), np.float32(0))
        .astype(np.float64)
        .reshape(16, 128, 32)
        .max(axis=2)
    )
    finite = number.reshape(16, 128, 32).all(axis=2) & (scales > 0)
    factor = np.exp2(scales.astype(np.float64) - 127)
    assert (largest <= 448 * factor * (1 + 2.0**-23))[finite].all()
    assert (largest > 224 * factor * (1 - 2.0**-23))[finite & (scales > 1)].all()


@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
def test_round_trip_is_within_half_a_step(hidden: int) -> None:
    rng = np.random.default_rng(hidden)
    x = (rng.standard_normal((5, hidden)) * np.exp2(rng.uniform(-20, 20, (5, hidden)))).astype(np.float32).astype(BF16)
    data, swizzled = quantize(x)
    scales, padding = unswizzle_scales(swizzled, 5, hidden)
    assert not padding.any()
    wide = x.astype(np.float64)
    error = np.abs(dequantize(data, swizzled).astype(np.float64) - wide)
    factor = np.repeat(np.exp2(scales.astype(np.float64) - 127), 32, axis=1)
    # Half a step: 2^-4 of the magnitude, and 2^-10 of the scale among E4M3's denormals.
    assert (error <= np.maximum(np.abs(wide) * 2.0**-4, factor * 2.0**-10)).all()
    assert (error > 0).any()


def test_quantize_says_what_it_expected() -> None:
    with pytest.raises(ValueError, match=r"multiple of 32; got \[1, 48\]"):
        quantize(bf(np.ones((1, 48))))
    with pytest.raises(TypeError, match="expected dtype bfloat16, got float32"):
        quantize(np.ones((1, 32), np.float32))


# ---- layout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "hidden", "expected"),
    [
        (1, 5120, 20480),
        (128, 5120, 20480),
        (129, 5120, 40960),
        (1, 4096, 16384),
        (1, 7168, 28672),
        (3, 32, 512),
        (0, 32, 0),
    ],
)
def test_scale_bytes(rows: int, hidden: int, expected: int) -> None:
    assert scale_bytes(rows, hidden) == expected


@pytest.mark.parametrize(
    ("row", "group", "offset"),
    [
        (0, 0, 0),
        (0, 3, 3),
        (1, 0, 16),
        (32, 0, 4),
        (96, 2, 14),
        (31, 0, 496),
        (127, 3, 511),
        (0, 4, 512),
        (33, 5, 512 + 16 + 4 + 1),
        (128, 0, 128 * 8),
        (161, 6, 128 * 8 + 512 + 16 + 4 + 2),
    ],
)
def test_swizzled_offsets_by_hand(row: int, group: int, offset: int) -> None:
    # 7 groups are padded to 8: two tiles for each 128 rows.
    scales = np.zeros((200, 7), np.uint8)
    scales[row, group] = 1
    assert np.flatnonzero(swizzle_scales(scales)).tolist() == [offset]


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (6, 160), (64, 128), (128, 4), (130, 5), (257, 3)])
def test_the_tile_reader_reads_back_what_the_offset_writer_wrote(rows: int, groups: int) -> None:
    scales = np.random.default_rng(rows).integers(1, 255, (rows, groups)).astype(np.uint8)
    swizzled = swizzle_scales(scales)
    got, padding = unswizzle_scales(swizzled, rows, groups * 32)
    assert_bits_equal(got, scales)
    assert not padding.any()
    assert got.size + padding.size == swizzled.size
    # What lies in the padding is found, wherever it is.
    dirty = np.where(swizzled == 0, np.uint8(255), swizzled)
    assert (unswizzle_scales(dirty, rows, groups * 32)[1] == 255).all()


def test_the_reader_says_what_it_expected() -> None:
    with pytest.raises(ValueError, match=r"swizzled: expected shape \[512\], got \[511\]"):
        unswizzle_scales(np.zeros(511, np.uint8), 1, 32)
