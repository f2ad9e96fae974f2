# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc.reference import (
    assert_bits_equal,
    bits_equal,
    broadcast_projection,
    coefficients_float32,
    coefficients_float64,
)

BF16 = ml_dtypes.bfloat16
HC = 4
SETTINGS = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "post_alpha": 2.0, "sinkhorn_iters": 20}


def arguments(rows: int, hidden: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((rows, HC, hidden), np.float32).astype(BF16),
        "fn": (rng.standard_normal((24, HC * hidden), np.float32) / np.float32(math.sqrt(HC * hidden))),
        "scale": np.float32([1.0, 0.7, 1.3]),
        "base": rng.standard_normal(24, np.float32),
        **SETTINGS,
    }


def one_hot_projection() -> dict[str, Any]:
    """Streams of constant 2 (mean square 4), and mixes that are easy by hand: fn row r picks r/16 of element 0."""
    fn = np.zeros((24, HC * 8), np.float32)
    fn[:, 0] = np.arange(24) / 16
    return {"x": np.full((1, HC, 8), 2.0, np.float32).astype(BF16), "fn": fn}


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


@pytest.mark.parametrize("function", [coefficients_float32, coefficients_float64])
def test_pre_and_post_by_hand(function: Any) -> None:
    # mixes[r] = 2 * (r/16) / 2 = r/16.
    scale, base = np.float32([2.0, -3.0, 0.0]), np.zeros(24, np.float32)
    base[1], base[6] = 0.5, -0.25
    got = function(**one_hot_projection(), scale=scale, base=base, **SETTINGS)
    pre = [sigmoid(0) + 1e-6, sigmoid(2 / 16 + 0.5) + 1e-6, sigmoid(4 / 16) + 1e-6, sigmoid(6 / 16) + 1e-6]
    post = [2 * sigmoid(-12 / 16), 2 * sigmoid(-15 / 16), 2 * sigmoid(-18 / 16 - 0.25), 2 * sigmoid(-21 / 16)]
    np.testing.assert_allclose(got.pre[0], pre, rtol=2e-7)
    np.testing.assert_allclose(got.post[0], post, rtol=2e-7)
    # With scale 0 and base 0 every residual mix is the same: a quarter, but for the eps in the sums.
    np.testing.assert_allclose(got.comb[0], np.full((HC, HC), 0.25), rtol=5e-6)


@pytest.mark.parametrize("function", [coefficients_float32, coefficients_float64])
def test_comb_by_hand_shows_its_orientation(function: Any) -> None:
    # One round: softmax over targets, then division by the sums over sources.
    base = np.zeros(24, np.float32)
    base[8 + 0 * HC + 1] = math.log(5)  # source 0 prefers target 1: weights 1 5 1 1 of 8; other sources 1/4 each
    scale = np.float32([1, 1, 0])
    eps = 0.0625  # large, so that every place that it is added in shows
    settings = SETTINGS | {"sinkhorn_iters": 1, "hc_eps": eps}
    comb = function(**one_hot_projection(), scale=scale, base=base, **settings).comb[0]
    row = [1 / 8 + eps, 5 / 8 + eps, 1 / 8 + eps, 1 / 8 + eps]
    for target in range(HC):
        column = row[target] + 3 * (0.25 + eps) + eps
        assert comb[0, target] == pytest.approx(row[target] / column, rel=3e-7)
        for source in range(1, HC):
            assert comb[source, target] == pytest.approx((0.25 + eps) / column, rel=3e-7)
    # The second round: rows first, then columns.
    settings["sinkhorn_iters"] = 2
    twice = function(**one_hot_projection(), scale=scale, base=base, **settings).comb[0]
    expected = comb.astype(np.float64)
    expected = expected / (expected.sum(axis=1, keepdims=True) + eps)
    expected = expected / (expected.sum(axis=0, keepdims=True) + eps)
    np.testing.assert_allclose(twice, expected, rtol=5e-7)


def test_sinkhorn_converges_to_a_doubly_stochastic_matrix() -> None:
    got = coefficients_float32(**arguments(8, 512, seed=1))
    np.testing.assert_allclose(got.comb.sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(got.comb.sum(axis=2), 1, atol=1e-3)
    assert (got.comb > 0).all()


def test_shapes_and_dtypes() -> None:
    a = arguments(3, 64, seed=2)
    for function, dtype in ((coefficients_float32, np.float32), (coefficients_float64, np.float64)):
        post, comb, pre = function(**a)
        assert (post.shape, comb.shape, pre.shape) == ((3, HC), (3, HC, HC), (3, HC))
        assert {post.dtype, comb.dtype, pre.dtype} == {np.dtype(dtype)}


@pytest.mark.parametrize("hidden", [512, 5120])
def test_fp32_is_as_near_to_float64_as_its_roundings_allow(hidden: int) -> None:
    # Roundings behave like a random walk. With u = 2^-24, adding up to 80 groups whose partial sums grow to 1 leaves
    # about sqrt(80 / 2 / 3) = 3.7 u in a logit. sigmoid has a slope of at most 1/4 and rounds a few times itself: some
    # 1.5 u in pre and twice that in post. A mix changes relatively by up to twice its logits, and by the last rounds'
    # roundings (the effect of earlier ones shrinks): some 8 u. One TF32 factor would be hundreds of u.
    a = arguments(16, hidden, seed=3)
    got, exact = coefficients_float32(**a), coefficients_float64(**a)
    unit = 2.0**-24
    for name, bound in (("pre", 1.5 * unit), ("post", 3 * unit), ("comb", 8 * unit)):
        error = getattr(got, name) - getattr(exact, name)
        if name == "comb":
            error = error / exact.comb
        assert 0 < np.sqrt(np.mean(np.square(error))) < bound, name


def test_the_first_layer_takes_the_embedding_and_the_summed_projection() -> None:
    a = arguments(4, 512, seed=4)
    embedding = a["x"][:, 0].copy()
    a["x"] = np.repeat(embedding[:, None], HC, axis=1)
    full = coefficients_float64(**a)
    summed = dict(a, x=embedding, fn=a["fn"].astype(np.float64).reshape(24, HC, 512).sum(axis=1))
    for whole, short in zip(full, coefficients_float64(**summed), strict=True):
        np.testing.assert_allclose(short, whole, rtol=1e-11)
    short32 = coefficients_float32(**dict(a, x=embedding, fn=broadcast_projection(a["fn"], HC)))
    for whole, short in zip(full, short32, strict=True):
        np.testing.assert_allclose(short, whole, rtol=1e-5)


def test_broadcast_projection_adds_streams_in_order() -> None:
    fn = np.float32([[2.0**24, 7, 1, 8, -(2.0**24), 9, 0, 10]])
    assert broadcast_projection(fn, 4).tolist() == [[0.0, 34.0]]
    with pytest.raises(ValueError, match="multiple of hc = 3 columns, got 8"):
        broadcast_projection(fn, 3)


def test_rows_do_not_depend_on_each_other() -> None:
    a = arguments(5, 64, seed=5)
    together = coefficients_float32(**a)
    for row in range(5):
        alone = coefficients_float32(**dict(a, x=a["x"][row : row + 1]))
        for one, all_rows in zip(alone, together, strict=True):
            assert_bits_equal(one[0], all_rows[row])


def test_a_zero_row_has_coefficients() -> None:
    a = arguments(1, 64, seed=6)
    a["x"] = np.zeros((1, HC, 64), BF16)
    got = coefficients_float32(**a)
    assert all(np.isfinite(part).all() for part in got)
    exact = coefficients_float64(**a)
    np.testing.assert_allclose(got.pre, exact.pre, rtol=2e-7)
    # With the eps rounded to zero it would have none.
    assert np.isnan(coefficients_float32(**dict(a, rms_norm_eps=0.0)).pre).all()


def test_every_setting_matters() -> None:
    a = arguments(2, 64, seed=7)
    post, comb, pre = coefficients_float32(**a)
    changed = {
        "rms_norm_eps": (0.1, "post comb pre"),
        "hc_eps": (1e-3, "comb pre"),
        "post_alpha": (1.0, "post"),
        "sinkhorn_iters": (19, "comb"),
    }
    for name, (value, affected) in changed.items():
        other = coefficients_float32(**(a | {name: value}))
        for part, before in (("post", post), ("comb", comb), ("pre", pre)):
            same = bits_equal(getattr(other, part), before).all()
            assert same == (part not in affected.split()), (name, part)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("base", np.zeros(23, np.float32), r"base: expected \(2 \+ hc\) \* hc elements for some hc >= 1, got 23"),
        ("x", np.zeros((2, 3, 64), BF16), r"x: expected hc = 4 streams \(from base\), got shape \[2, 3, 64\]"),
        ("fn", np.zeros((24, 8), np.float32), r"fn: expected shape \[24, 256\], got \[24, 8\]"),
        ("scale", np.zeros(4, np.float32), r"scale: expected shape \[3\], got \[4\]"),
        ("sinkhorn_iters", 0, "sinkhorn_iters: expected at least 1, got 0"),
    ],
)
def test_coefficients_say_what_they_expected(name: str, value: Any, message: str) -> None:
    a = arguments(2, 64, seed=0) | {name: value}
    for function in (coefficients_float32, coefficients_float64):
        with pytest.raises(ValueError, match=message):
            function(**a)
