# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc.reference import (
    agreement_factor,
    assert_bits_equal,
    bits_equal,
    collapse,
    collapse_magnitude,
    error_ratio,
    mean_square_error,
    mhc_post,
    norm_interval,
    norms_agree,
    rms_norm,
    round_bf16,
    stream_magnitude,
    sums_agree,
    ulp_distance,
)
from trtllm_mhc.reference.compare import NAN_DISTANCE, ordered_bf16

BF16 = ml_dtypes.bfloat16
HC = 4


def bf(values: Any) -> np.ndarray:
    return np.array(values, np.float32).astype(BF16)


def from_bits(*patterns: int) -> np.ndarray:
    return np.array(patterns, np.uint16).view(BF16)


# ---- equal bits -----------------------------------------------------------------------------------------------------


def test_any_nan_equals_any_nan_and_zeros_differ() -> None:
    actual = from_bits(0x7FC0, 0x7F81, 0xFFC0, 0x0000, 0x3F80, 0x7F80, 0x7FC0)
    expected = from_bits(0xFFC0, 0x7FFF, 0x7F81, 0x8000, 0x3F80, 0xFF80, 0x7F80)
    assert bits_equal(actual, expected).tolist() == [True, True, True, False, True, False, False]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.float8_e4m3fn, np.uint8, np.int32, np.bool_])
def test_equal_bits_of_every_dtype(dtype: Any) -> None:
    a = np.array([0, 1, 1], np.float32).astype(dtype)
    b = np.array([0, 1, 0], np.float32).astype(dtype)
    assert bits_equal(a, b).tolist() == [True, True, False]


def test_equal_bits_of_views_that_are_not_contiguous() -> None:
    a = bf(np.arange(12).reshape(3, 4))
    assert bits_equal(a.T, np.ascontiguousarray(a.T)).all()


@pytest.mark.parametrize(
    ("other", "error"), [(np.zeros((2, 2), np.float32), TypeError), (np.zeros((2, 3), BF16), ValueError)]
)
def test_equal_bits_needs_one_dtype_and_shape(other: np.ndarray, error: type[Exception]) -> None:
    with pytest.raises(error, match="actual: expected"):
        bits_equal(other, np.zeros((2, 2), BF16))


def test_the_assertion_counts_and_shows_the_first_difference() -> None:
    actual, expected = from_bits(0x3F80, 0x3F81, 0x0000).reshape(1, 3), from_bits(0x3F80, 0x3F80, 0x8000).reshape(1, 3)
    assert_bits_equal(actual, actual)
    with pytest.raises(AssertionError) as caught:
        assert_bits_equal(actual, expected, "streams")
    assert str(caught.value) == (
        "streams: 2 of 3 elements differ; first at [0, 1]: expected 1 (0x3f80), got 1.00781 (0x3f81)"
    )


# ---- ulps -----------------------------------------------------------------------------------------------------------


def test_neighbours_are_one_ulp_apart_over_all_of_bf16() -> None:
    everything = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(BF16)
    numbers = everything[~np.isnan(everything)]
    values = np.unique(numbers.astype(np.float64))  # sorted; both zeros are one value
    assert np.unique(np.diff(ordered_bf16(values.astype(np.float32).astype(BF16)))).tolist() == [1]


def test_ulp_distance_by_hand() -> None:
    actual = from_bits(0x3F80, 0x3F80, 0x0001, 0x8000, 0x7F7F, 0x7FC0, 0x7FC0, 0x3F80)
    expected = from_bits(0x3F80, 0x3F82, 0x8001, 0x0000, 0x7F80, 0x7F81, 0x3F80, 0xFFC0)
    assert ulp_distance(actual, expected).tolist() == [0, 2, 2, 0, 1, 0, NAN_DISTANCE, NAN_DISTANCE]


# ---- sums in another order ------------------------------------------------------------------------------------------


def cancelling(rows: int, hidden: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arguments of the post-mix whose terms nearly cancel, so that the order of the sum shows."""
    rng = np.random.default_rng(seed)
    reduced = rng.standard_normal((rows, hidden), np.float32).astype(BF16)
    residual = rng.standard_normal((rows, HC, hidden), np.float32).astype(BF16)
    post = rng.uniform(0.5, 1.5, (rows, HC)).astype(np.float32)
    comb = rng.uniform(0.5, 1.5, (rows, HC, HC)).astype(np.float32)
    last = (
        -(reduced.astype(np.float64) * post[:, :1] + (residual[:, :3] * comb[:, :3, :1]).sum(axis=1)) / comb[:, 3, :1]
    )
    residual[:, 3] = last.astype(np.float32).astype(BF16)
    return reduced, residual, post, comb


def post_in_another_order(
    reduced: np.ndarray, residual: np.ndarray, post: np.ndarray, comb: np.ndarray, order: tuple[int, ...]
) -> np.ndarray:
    terms = [reduced.astype(np.float32)[:, None] * post[:, :, None]]
    terms += [residual[:, j, None].astype(np.float32) * comb[:, j, :, None] for j in range(HC)]
    total = terms[order[0]]
    for index in order[1:]:
        total = total + terms[index]
    return round_bf16(total)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_another_order_of_the_sum_agrees_but_not_within_an_ulp(order: tuple[int, ...]) -> None:
    arguments = cancelling(8, 4096, seed=1)
    expected = mhc_post(*arguments)
    actual = post_in_another_order(*arguments, order)
    assert ulp_distance(actual, expected).max() > 1
    assert sums_agree(actual, expected, stream_magnitude(*arguments), HC + 1).all()


def test_a_wrong_term_does_not_agree() -> None:
    reduced, residual, post, comb = cancelling(8, 4096, seed=2)
    expected = mhc_post(reduced, residual, post, comb)
    magnitude = stream_magnitude(reduced, residual, post, comb)
    transposed = mhc_post(reduced, residual, post, np.ascontiguousarray(comb.transpose(0, 2, 1)))
    assert not sums_agree(transposed, expected, magnitude, HC + 1).all()
    # TF32 keeps 10 bits of a factor: that must be seen, too.
    tf32 = (((comb.view(np.uint32) + 0x1000) >> 13) << 13).view(np.float32)
    assert not sums_agree(mhc_post(reduced, residual, post, tf32), expected, magnitude, HC + 1).all()


def test_the_rule_at_its_edge() -> None:
    assert agreement_factor(5) == pytest.approx(20, rel=1e-6)
    assert agreement_factor(4) == pytest.approx(16, rel=1e-6)
    expected = bf([1.0])
    two_ulps = bf([1 + 2.0**-6])
    magnitude = 2.0**-6 / (20 * 2.0**-24)
    assert sums_agree(two_ulps, expected, np.array([magnitude]), 5).all()
    assert not sums_agree(two_ulps, expected, np.array([magnitude * 0.999]), 5).any()
    assert sums_agree(bf([1 + 2.0**-7]), expected, np.array([0.0]), 5).all()
    with pytest.raises(ValueError, match="at least 1, got 0"):
        agreement_factor(0)


def test_nan_and_infinity_agree_only_with_themselves() -> None:
    expected = bf([np.nan, np.inf, np.inf, np.nan, 1.0])
    actual = bf([np.nan, np.inf, -np.inf, 1.0, np.nan])
    assert sums_agree(actual, expected, np.full(5, np.inf), 5).tolist() == [True, True, False, False, False]


def test_magnitudes_by_hand() -> None:
    streams = bf([1.0, -2.0, 4.0, -8.0]).reshape(1, HC, 1)
    pre = np.float32([[1, 2, -3, 0.5]])
    assert collapse_magnitude(streams, pre).tolist() == [[1 + 4 + 12 + 4]]
    comb = np.zeros((1, HC, HC), np.float32)
    comb[0, 1] = [1, -1, 0.5, 0]
    post = np.float32([[-1, 0, 2, 3]])
    got = stream_magnitude(bf([[-3.0]]), streams, post, comb)
    assert got.ravel().tolist() == [3 + 2, 0 + 2, 6 + 1, 9]


# ---- norm in another order ------------------------------------------------------------------------------------------


def norm_arguments(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    rng = np.random.default_rng(seed)
    streams = rng.standard_normal((16, HC, 5120), np.float32).astype(BF16)
    streams[:, 3] = -streams[:, 0]  # some cancellation
    return streams, rng.uniform(0.5, 1, (16, HC)).astype(np.float32), bf(rng.standard_normal(5120)), 1e-20


def norm_in_another_order(streams: np.ndarray, pre: np.ndarray, gamma: np.ndarray, eps: float) -> np.ndarray:
    terms = streams.astype(np.float32) * pre[:, :, None]
    p = round_bf16((terms[:, 3] + terms[:, 2]) + (terms[:, 1] + terms[:, 0])).astype(np.float32)
    mean = np.square(p).sum(axis=1, keepdims=True) * np.float32(1 / 5120)
    return round_bf16(gamma.astype(np.float32) * (p / np.sqrt(mean + np.float32(eps))))


def test_another_order_of_the_norm_agrees() -> None:
    streams, pre, gamma, eps = norm_arguments(3)
    expected = rms_norm(collapse(streams, pre), gamma, eps)
    actual = norm_in_another_order(streams, pre, gamma, eps)
    assert (ulp_distance(actual, expected) > 0).any()
    assert norms_agree(actual, expected, streams, pre, gamma, eps).all()
    low, high = norm_interval(streams, pre, gamma, eps)
    for values in (actual, expected):
        assert ((low <= values) & (values <= high)).all()
    # The interval is narrow: a value for most elements, and rarely more than two.
    width = ulp_distance(low, high)
    assert (width == 0).mean() > 0.7
    assert (width > 1).mean() < 1e-3


def test_a_wrong_norm_does_not_agree() -> None:
    streams, pre, gamma, eps = norm_arguments(4)
    p = collapse(streams, pre)
    expected = rms_norm(p, gamma, eps)
    assert not norms_agree(rms_norm(p, gamma, 0.02), expected, streams, pre, gamma, eps).all()
    assert not norms_agree(rms_norm(p[::-1].copy(), gamma, eps), expected, streams, pre, gamma, eps).all()
    nan = expected.copy()
    nan[0, 0] = np.nan
    assert np.argwhere(~norms_agree(nan, expected, streams, pre, gamma, eps)).tolist() == [[0, 0]]


def test_norms_of_zero_rows_agree() -> None:
    streams, pre = bf(np.zeros((1, HC, 8))), np.ones((1, HC), np.float32)
    zero = bf(np.zeros((1, 8)))
    assert norms_agree(zero, zero, streams, pre, bf(np.ones(8)), 1e-20).all()


# ---- ratio of errors ------------------------------------------------------------------------------------------------


def test_mean_square_error_by_hand() -> None:
    assert mean_square_error(bf([1.0, 2.0]), np.array([1.0, 4.0])) == 2.0
    with pytest.raises(ValueError, match="actual: expected shape"):
        mean_square_error(bf([1.0]), np.array([1.0, 4.0]))


def test_error_ratio_by_hand() -> None:
    # Pairs with one common ratio: every resample has it, so the interval is a point.
    got = error_ratio([4.0, 36.0], [1.0, 9.0])
    assert (got.ratio, got.low, got.high) == (2.0, 2.0, 2.0)
    assert got.rms_error == pytest.approx(20**0.5)
    assert got.rms_error_baseline == pytest.approx(5**0.5)
    assert got.inputs == 2
    assert got.not_above(2.0)
    assert not got.not_above(1.99)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(200):
        hard = rng.lognormal(0, 0.5, 24)  # an input's difficulty, common to both
        ours = hard * rng.lognormal(0, 0.1, 24) * 1.1**2
        baseline = hard * rng.lognormal(0, 0.1, 24)
        got = error_ratio(ours, baseline, resamples=1000, seed=trial)
        assert got.low <= got.ratio <= got.high
        covered += got.low <= 1.1 <= got.high
    assert 176 <= covered <= 198  # 95 % of 200 is 190; the bootstrap of 24 inputs is a little narrow


def test_error_ratio_is_reproducible_and_narrows_with_more_inputs() -> None:
    rng = np.random.default_rng(6)
    ours, baseline = rng.lognormal(0, 0.3, (2, 256))
    assert error_ratio(ours, baseline) == error_ratio(ours, baseline)
    few, many = error_ratio(ours[:16], baseline[:16]), error_ratio(ours, baseline)
    assert many.high - many.low < few.high - few.low


def test_error_ratio_of_no_error() -> None:
    assert error_ratio([0.0, 0.0], [0.0, 0.0]).ratio == 1.0
    assert error_ratio([1.0, 1.0], [0.0, 0.0]).high == np.inf
    assert error_ratio([0.0, 0.0], [1.0, 1.0]).ratio == 0.0


@pytest.mark.parametrize(
    ("ours", "baseline", "message"),
    [
        ([1.0], [1.0], "at least 2 inputs"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], "equally long"),
        ([1.0, np.nan], [1.0, 2.0], "mean_squares: expected finite"),
        ([1.0, 1.0], [1.0, -2.0], "baseline_mean_squares: expected finite"),
    ],
)
def test_error_ratio_says_what_it_expected(ours: list[float], baseline: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        error_ratio(ours, baseline)
