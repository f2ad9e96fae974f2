# SPDX-License-Identifier: Apache-2.0
"""The reference of the publishing linear layer against hand-computed cases."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc import reference

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn


def test_each_block_of_32_by_32_has_its_scale() -> None:
    weight = np.full((64, 128), 1.5, E4M3)
    scales = np.array([[127, 128, 126, 130], [120, 127, 127, 137]], np.uint8)
    dequantised = reference.dequantize_weight(weight, scales)
    assert dequantised.dtype == BF16
    wide = dequantised.astype(np.float32)
    assert wide[0, 0] == wide[31, 31] == 1.5
    assert wide[0, 32] == 3.0
    assert wide[31, 64] == 0.75
    assert wide[5, 127] == 12.0
    assert wide[32, 0] == wide[63, 31] == 1.5 / 128
    assert wide[32, 127] == 1536.0


@pytest.mark.parametrize(
    ("value", "byte", "expected"),
    [
        (448.0, 127, 448.0),
        (-(2.0**-9), 127, -(2.0**-9)),  # the smallest subnormal
        (448.0, 246, 448.0 * 2.0**119),
        (448.0, 247, float("inf")),  # 448 * 2^120 is more than bf16 holds
        (1.0, 0, 2.0**-127),  # subnormal in bf16, and exact
        (1.875 * 2.0**-6, 0, 2.0**-132),  # 1.875 * 2^-133: bf16's last bit is 2^-133
        (2.0**-9, 9, 2.0**-127),
        (2.0**-9, 1, 0.0),  # 2^-135 is below half of the smallest bf16 number, 2^-133
        (2.0**-7, 1, 2.0**-133),
        (1.0, 255, float("nan")),
        (float("nan"), 127, float("nan")),
        (0.0, 254, 0.0),
    ],
)
def test_range_of_the_scales(value: float, byte: int, expected: float) -> None:
    weight = np.zeros((32, 32), E4M3)
    weight[3, 7] = value
    got = reference.dequantize_weight(weight, np.array([[byte]], np.uint8)).astype(np.float64)
    np.testing.assert_equal(got[3, 7], expected)
    if byte != 255:
        assert np.count_nonzero(np.delete(got, 3 * 32 + 7)) == 0


def test_words_hold_four_scales_lowest_first() -> None:
    scales = np.array([[1, 2, 3, 4, 5, 6, 7, 200]], np.uint8)
    words = reference.pack_weight_scales(scales)
    assert words.dtype == np.int32
    assert words.shape == (1, 2)
    assert words[0, 0] == 0x04030201
    np.testing.assert_array_equal(words.view(np.uint32)[0, 1], 0xC8070605)
    np.testing.assert_array_equal(reference.unpack_weight_scales(words), scales)
    with pytest.raises(ValueError, match="multiple of 4 columns, got 3"):
        reference.pack_weight_scales(scales[:, :3])


def test_sums_are_rounded_once_and_zero_is_positive() -> None:
    activation = np.array([[1, 1, 1, 0], [-1, 1, 0, 0], [0, 0, -1, 0]], np.float32).astype(BF16)
    # 256 + 1 + 1 = 258 is a bf16 number, 256 + 1 is not
    weight = np.array([[256, 1, 1, 5], [1, 1, 0, 7]], np.float32).astype(BF16)
    out = reference.publish_linear(activation, weight)
    np.testing.assert_array_equal(out.astype(np.float32), [[258, 2], [-255, 0], [-1, 0]])
    assert not np.signbit(out.astype(np.float32)[1:, 1]).any()
    zero = reference.publish_linear(-activation[2:], np.zeros((2, 4), BF16) * BF16(-1))
    assert not np.signbit(zero.astype(np.float32)).any()


def test_scaled_weights_give_what_their_bf16_form_gives() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 256), np.float32).astype(E4M3)
    scales = rng.integers(100, 140, (2, 8), np.uint8)
    activation = rng.standard_normal((5, 256), np.float32).astype(BF16)
    plain = reference.publish_linear(activation, reference.dequantize_weight(weight, scales))
    reference.assert_bits_equal(reference.publish_linear(activation, weight, scales), plain, "out")


def test_the_bound_holds_for_fp32_sums_and_not_for_a_missing_instruction() -> None:
    rng = np.random.default_rng(1)
    features = 512
    activation = rng.standard_normal((8, features), np.float32).astype(BF16)
    weight = rng.standard_normal((64, features), np.float32).astype(BF16)
    total = np.zeros((8, 64), np.float32)
    for k in range(features):
        total += activation[:, k : k + 1].astype(np.float32) * weight[:, k].astype(np.float32)
    assert reference.publish_linear_agrees(total.astype(BF16), activation, weight).all()
    without = publish_without(activation, weight, slice(64, 80))
    assert not reference.publish_linear_agrees(without, activation, weight).all()
    assert not reference.publish_linear_agrees(np.full((8, 64), np.nan, BF16), activation, weight).any()


def publish_without(activation: np.ndarray, weight: np.ndarray, left_out: slice) -> np.ndarray:
    shortened = activation.copy()
    shortened[:, left_out] = 0
    return reference.publish_linear(shortened, weight)


@pytest.mark.parametrize(
    ("weight", "scales", "error", "message"),
    [
        (np.zeros((32, 100), E4M3), np.zeros((1, 3), np.uint8), ValueError, r"multiples of 32 .*, got \[32, 100\]"),
        (np.zeros((32, 128), E4M3), np.zeros((1, 3), np.uint8), ValueError, r"scales: expected shape \[1, 4\]"),
        (np.zeros((32, 128), E4M3), np.zeros((1, 4), np.int32), TypeError, "scales: expected dtype uint8, got int32"),
        (np.zeros((32, 128), BF16), np.zeros((1, 4), np.uint8), TypeError, "weight: expected dtype float8_e4m3fn"),
    ],
)
def test_wrong_weights(weight: np.ndarray, scales: np.ndarray, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        reference.dequantize_weight(weight, scales)


def test_wrong_operands() -> None:
    with pytest.raises(TypeError, match="weight: expected dtype bfloat16, got float8_e4m3fn"):
        reference.publish_linear(np.zeros((1, 128), BF16), np.zeros((32, 128), E4M3))
    with pytest.raises(ValueError, match=r"weight: expected shape \[any, 128\], got \[32, 64\]"):
        reference.publish_linear(np.zeros((1, 128), BF16), np.zeros((32, 64), BF16))
