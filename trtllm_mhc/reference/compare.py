# SPDX-License-Identifier: Apache-2.0
"""What "equal" means for the results of kernels and engines.

* Our kernels against the reference: equal bits, where any NaN equals any NaN (`bits_equal`).
* One boundary of an engine made of TensorRT's own layers against the reference, given the same inputs: `sums_agree` for
  the streams, `norms_agree` for the layer input. Such layers add in whatever order they like.
* Whole networks: `error_ratio`, the ratio of the distances to an evaluation without rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ._arrays import BFLOAT16, AnyArray, BFloat16Array, BoolArray, Float64Array, Int64Array, require
from .floats import round_bf16

FP32_UNIT_ROUNDOFF = 2.0**-24
NAN_DISTANCE = np.iinfo(np.int64).max


def bits_equal(actual: AnyArray, expected: AnyArray) -> BoolArray:
    """Which elements have equal bits, or are both NaN; arrays of one shape and one dtype. -0 differs from +0."""
    require("actual", actual, expected.shape, expected.dtype)
    same = _bits(actual) == _bits(expected)
    if expected.dtype.kind not in "iub":
        same = same | (np.isnan(actual) & np.isnan(expected))
    return np.asarray(same)


def assert_bits_equal(actual: AnyArray, expected: AnyArray, name: str = "result") -> None:
    """Raises AssertionError that counts the elements that differ and shows the first of them with its bits."""
    wrong = np.argwhere(~bits_equal(actual, expected))
    if len(wrong) == 0:
        return
    first = tuple(int(i) for i in wrong[0])
    digits = 2 * expected.dtype.itemsize
    raise AssertionError(
        f"{name}: {len(wrong)} of {expected.size} elements differ; first at {list(first)}: "
        f"expected {expected[first]!s} (0x{int(_bits(expected)[first]):0{digits}x}), "
        f"got {actual[first]!s} (0x{int(_bits(actual)[first]):0{digits}x})"
    )


def ordered_bf16(x: BFloat16Array) -> Int64Array:
    """bf16 numbers as integers in their order: neighbours differ by 1, and both zeros are 0. Not for NaN."""
    require("x", x, (None,) * x.ndim, BFLOAT16)
    bits = _bits(x).astype(np.int64)
    magnitude = bits & 0x7FFF
    return np.where(bits >= 0x8000, -magnitude, magnitude)


def ulp_distance(actual: BFloat16Array, expected: BFloat16Array) -> Int64Array:
    """How many bf16 numbers apart the elements are: 0 for two NaNs, NAN_DISTANCE for one."""
    require("actual", actual, expected.shape, BFLOAT16)
    distance = np.abs(ordered_bf16(actual) - ordered_bf16(expected))
    nan_actual, nan_expected = np.isnan(actual), np.isnan(expected)
    distance = np.where(nan_actual ^ nan_expected, NAN_DISTANCE, distance)
    return np.where(nan_actual & nan_expected, 0, distance)


def agreement_factor(terms: int) -> float:
    """The k of `sums_agree` for a sum of n = `terms` products: 4 * n / (1 - n * 2^-24), that is 4 * n.

    Let S be the sum of the products' magnitudes and u = 2^-24. In a sum of n products, added in any order with or
    without fma, each product passes through at most n roundings: its own and n - 1 additions. So an fp32 result is
    within g * S of the exact one, g = n*u / (1 - n*u), and two results a and b are within 2*g*S of each other. After
    rounding to bf16, either R(a) and R(b) are equal or neighbours, which is the rule's first half; or at least one bf16
    number lies between them. Then a and b enclose the midpoints next to R(a) and R(b), so |a - b| is at least half of
    the first and of the last gap plus all gaps between, hence |R(a) - R(b)| <= 2 * |a - b| <= 4*g*S. Products that
    underflow add at most n * 2^-150, far below the smallest distance of two bf16 numbers, 2^-133.

    The post-mix is a sum of hc + 1 = 5 products, so k = 20; the collapse has hc = 4, so k = 16. A sum of n numbers that
    are no products has one rounding less for each, so this k is on the safe side for an all-reduce over n ranks.
    """
    if terms < 1:
        raise ValueError(f"terms: expected at least 1, got {terms}")
    return 4 * _sum_error(terms) / FP32_UNIT_ROUNDOFF


def sums_agree(actual: BFloat16Array, expected: BFloat16Array, magnitude: Float64Array, terms: int) -> BoolArray:
    """Which elements of two bf16-rounded fp32 sums may differ only by the order of their additions.

    True within 1 bf16 ulp, or within agreement_factor(terms) * 2^-24 * magnitude, or where both are NaN.

    actual, expected: bf16; magnitude: float64 of the same shape, the sum of the terms' magnitudes before rounding
    (`stream_magnitude`, `collapse_magnitude`).
    """
    distance = ulp_distance(actual, expected)
    require("magnitude", magnitude, expected.shape, np.float64)
    with np.errstate(all="ignore"):
        difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
        near = difference <= agreement_factor(terms) * FP32_UNIT_ROUNDOFF * magnitude
    return np.asarray((distance <= 1) | (near & np.isfinite(difference)))


def stream_magnitude(reduced: BFloat16Array, residual: BFloat16Array, post: AnyArray, comb: AnyArray) -> Float64Array:
    """Sum of |terms| of every stream element [M, hc, H], in float64. Arguments as `operations.mhc_post`."""
    terms = np.abs(reduced.astype(np.float64))[:, None, :] * np.abs(post.astype(np.float64))[:, :, None]
    sources = np.abs(residual.astype(np.float64))
    weights = np.abs(comb.astype(np.float64))
    for j in range(residual.shape[1]):
        terms = terms + sources[:, j, None, :] * weights[:, j, :, None]
    result: Float64Array = terms
    return result


def collapse_magnitude(streams: BFloat16Array, pre: AnyArray) -> Float64Array:
    """Sum of |terms| of every collapsed element [M, H], in float64. Arguments as `operations.collapse`."""
    terms = np.abs(streams.astype(np.float64)) * np.abs(pre.astype(np.float64))[:, :, None]
    total: Float64Array = terms.sum(axis=1)
    return total


def norm_interval(
    streams: BFloat16Array, pre: AnyArray, gamma: BFloat16Array, eps: float
) -> tuple[BFloat16Array, BFloat16Array]:
    """The lowest and the highest layer input that some order of the sums can give from these very streams.

    A collapsed element lies between the bf16 roundings of its exact value -+ the error of a 4-term sum; that is one
    value for nearly every element. The mean square lies between those of the smallest and largest such elements, with
    the relative error of H + 1 roundings. Eight roundings more cover the addition of eps, a reciprocal square root good
    to 2 ulps or a division by a square root, and the two products; then the result is rounded to bf16.

    streams [M, hc, H] bf16, the bits that this implementation itself produced; pre [M, hc] fp32; gamma [H] bf16.
    Returns two [M, H] bf16 arrays.
    """
    require("streams", streams, (None, None, None), BFLOAT16)
    hidden = streams.shape[2]
    require("gamma", gamma, (hidden,), BFLOAT16)
    with np.errstate(all="ignore"):
        exact = (streams.astype(np.float64) * pre.astype(np.float64)[:, :, None]).sum(axis=1)
        radius = _sum_error(streams.shape[1] + 1) * collapse_magnitude(streams, pre)
        bounds = np.stack([_monotone_bf16(exact - radius), _monotone_bf16(exact + radius)]).astype(np.float64)
        largest = np.abs(bounds).max(axis=0)
        smallest = np.where(bounds[0] * bounds[1] <= 0, 0.0, np.abs(bounds).min(axis=0))
        mean_error = _sum_error(hidden + 1)
        low_mean = np.square(smallest).mean(axis=1) * (1 - mean_error)
        high_mean = np.square(largest).mean(axis=1) * (1 + mean_error)
        wide_eps = np.float64(np.float32(eps))
        inverses = np.stack([1 / np.sqrt(high_mean + wide_eps), 1 / np.sqrt(low_mean + wide_eps)])
        slack = 8 * FP32_UNIT_ROUNDOFF
        inverses *= np.array([[1 - slack], [1 + slack]])
        corners = bounds[:, None] * inverses[None, :, :, None] * gamma.astype(np.float64)
        return _monotone_bf16(corners.min(axis=(0, 1))), _monotone_bf16(corners.max(axis=(0, 1)))


def norms_agree(
    actual: BFloat16Array,
    expected: BFloat16Array,
    streams: BFloat16Array,
    pre: AnyArray,
    gamma: BFloat16Array,
    eps: float,
) -> BoolArray:
    """Which elements of two layer inputs may differ only by the order of their sums.

    True within 1 bf16 ulp, inside `norm_interval`, or where both are NaN. `streams` are those that `actual` was
    computed from, and `expected` is the reference's `rms_norm(collapse(streams, pre), gamma, eps)` of the same streams:
    a stream that differs is for `sums_agree` to judge.
    """
    low, high = norm_interval(streams, pre, gamma, eps)
    place = ordered_bf16(actual)
    inside = (ordered_bf16(low) <= place) & (place <= ordered_bf16(high)) & ~np.isnan(actual)
    return np.asarray((ulp_distance(actual, expected) <= 1) | (inside & ~np.isnan(low) & ~np.isnan(high)))


@dataclass(frozen=True)
class ErrorRatio:
    """The ratio of two rms errors over the same inputs, with a bootstrap confidence interval."""

    ratio: float
    low: float
    high: float
    rms_error: float
    rms_error_baseline: float
    inputs: int
    confidence: float

    def not_above(self, limit: float) -> bool:
        """Whether the whole confidence interval is at most `limit`."""
        return self.high <= limit


def mean_square_error(actual: AnyArray, exact: AnyArray) -> float:
    """The mean of the squared differences, in float64. Any floating-point dtypes, one shape."""
    require("actual", actual, exact.shape)
    return float(np.mean(np.square(actual.astype(np.float64) - exact.astype(np.float64))))


def error_ratio(
    mean_squares: Sequence[float],
    baseline_mean_squares: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> ErrorRatio:
    """Compares the rms errors of two evaluations, for instance of a fused engine and of the unfused one.

    mean_squares, baseline_mean_squares: `mean_square_error` of each input, the same inputs in both. The rms error is
    the root of the mean over the inputs. Inputs are resampled in pairs (percentile bootstrap), since an input that is
    hard for one evaluation is hard for the other. A ratio of zero to zero is 1.

    Raises ValueError for fewer than 2 inputs, unequal numbers of them, or values that are negative or not finite.
    """
    ours = np.asarray(mean_squares, np.float64)
    baseline = np.asarray(baseline_mean_squares, np.float64)
    if ours.ndim != 1 or ours.shape != baseline.shape or len(ours) < 2:
        raise ValueError(
            f"expected two equally long sequences of at least 2 inputs, got shapes {ours.shape} and {baseline.shape}"
        )
    for name, values in (("mean_squares", ours), ("baseline_mean_squares", baseline)):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"{name}: expected finite values that are not negative, got {values.tolist()}")
    inputs = len(ours)
    picks = np.random.default_rng(seed).integers(0, inputs, (resamples, inputs))
    ratios = _rms_ratio(ours[picks].mean(axis=1), baseline[picks].mean(axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail], method="nearest")
    return ErrorRatio(
        ratio=float(_rms_ratio(ours.mean(), baseline.mean())),
        low=float(low),
        high=float(high),
        rms_error=float(np.sqrt(ours.mean())),
        rms_error_baseline=float(np.sqrt(baseline.mean())),
        inputs=inputs,
        confidence=confidence,
    )


def _sum_error(roundings: int) -> float:
    """The relative error of a number that passed through that many fp32 roundings."""
    return roundings * FP32_UNIT_ROUNDOFF / (1 - roundings * FP32_UNIT_ROUNDOFF)


def _monotone_bf16(x: Float64Array) -> BFloat16Array:
    """float64 to bf16 by way of fp32. Bounds stay bounds of fp32 numbers, since both roundings are monotone."""
    return round_bf16(x.astype(np.float32))


def _rms_ratio(ours: npt.ArrayLike, baseline: npt.ArrayLike) -> Float64Array:
    a, b = np.asarray(ours, np.float64), np.asarray(baseline, np.float64)
    with np.errstate(all="ignore"):
        ratio: Float64Array = np.where((a == 0) & (b == 0), 1.0, np.sqrt(a / b))
    return ratio


def _bits(x: AnyArray) -> AnyArray:
    contiguous = np.ascontiguousarray(x).reshape(x.shape)
    view: AnyArray = contiguous.view(f"u{x.dtype.itemsize}")
    return view
