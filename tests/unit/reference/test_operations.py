# SPDX-License-Identifier: Apache-2.0
"""The reference against cases computed by hand, exact rational arithmetic, and itself with one step changed."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exact import bf16, boundary_row, fp32, keep

from trtllm_mhc import reference
from trtllm_mhc.reference import (
    all_reduce,
    assert_bits_equal,
    aux_mean,
    boundary,
    clear_negative_zero,
    collapse,
    finalize,
    fma,
    mhc_post,
    rms_norm,
    round_bf16,
    rsqrt,
    widen,
)
from trtllm_mhc.reference.operations import tree_dot

BF16 = ml_dtypes.bfloat16
HC = 4


def bf(values: Any) -> np.ndarray:
    return np.array(values, np.float32).astype(BF16)


def bits(x: np.ndarray) -> list[int]:
    return np.ascontiguousarray(x).view(np.uint16).ravel().tolist()


def every_bf16() -> np.ndarray:
    return np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(BF16)


def random_arguments(rows: int, hidden: int, tp: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(BF16)

    return {
        "xs": [normal(rows, hidden) for _ in range(tp)],
        "residual": normal(rows, HC, hidden),
        "post": rng.uniform(0, 2, (rows, HC)).astype(np.float32),
        "comb": rng.uniform(0, 0.5, (rows, HC, HC)).astype(np.float32),
        "pre": rng.uniform(0, 1, (rows, HC)).astype(np.float32),
        "gamma": normal(hidden),
        "eps": 1e-20,
    }


# ---- all-reduce -----------------------------------------------------------------------------------------------------


def test_all_reduce_adds_in_rank_order() -> None:
    # 2^24 + 1 is a tie in fp32 and goes back to 2^24.
    big, one, minus = bf([[2.0**24]]), bf([[1.0]]), bf([[-(2.0**24)]])
    assert bits(all_reduce([big, one, minus])) == [0x0000]
    assert bits(all_reduce([big, minus, one])) == [0x3F80]


def test_all_reduce_rounds_the_sum_once_to_nearest_even() -> None:
    # bf16 has an ulp of 2^-7 at 1, so 2^-8 is half of it.
    assert bits(all_reduce([bf([[1.0]]), bf([[2.0**-8]])])) == [0x3F80]
    assert bits(all_reduce([bf([[1 + 2.0**-7]]), bf([[2.0**-8]])])) == [0x3F82]
    # Rounded after every add, 1 would stay 1; the fp32 sum is 1 + 2^-7.
    assert bits(all_reduce([bf([[1.0]]), bf([[2.0**-8]]), bf([[2.0**-8]])])) == [0x3F81]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_all_reduce_never_gives_negative_zero(tp: int) -> None:
    assert bits(all_reduce([bf([[-0.0]])] * tp)) == [0x0000]


def test_all_reduce_carries_every_bf16_pattern() -> None:
    payload = every_bf16().reshape(16, 4096)
    expected = clear_negative_zero(payload)
    for tp in (1, 2, 8):
        for rank in range(tp):
            xs = [bf(np.full((16, 4096), -0.0)) for _ in range(tp)]
            xs[rank] = payload
            assert_bits_equal(all_reduce(xs), expected)


def test_all_reduce_overflows_to_infinity_and_cancels_it_to_nan() -> None:
    largest = np.array([[0x7F7F]], np.uint16).view(BF16)
    assert bits(all_reduce([largest, largest])) == [0x7F80]
    inf = bf([[np.inf]])
    assert np.isnan(all_reduce([inf, -inf])).all()


def test_clear_negative_zero_changes_one_pattern() -> None:
    before, after = every_bf16(), clear_negative_zero(every_bf16())
    changed = np.flatnonzero(before.view(np.uint16) != after.view(np.uint16))
    assert changed.tolist() == [0x8000]
    assert bits(after[changed]) == [0x0000]


# ---- post-mix -------------------------------------------------------------------------------------------------------


def one_element_post(reduced: float, residual: list[float], post: list[float], comb: Any) -> list[int]:
    return bits(
        mhc_post(bf([[reduced]]), bf(residual).reshape(1, HC, 1), np.float32([post]), np.array([comb], np.float32))
    )


def test_comb_is_indexed_by_source_then_target() -> None:
    comb = np.zeros((HC, HC))
    comb[0, 1] = 1
    assert one_element_post(0.0, [5.0, 0, 0, 0], [1.0] * HC, comb) == [0, 0x40A0, 0, 0]


def test_post_by_hand() -> None:
    # Stream 0: 2*0.5 + 1*1 + 3*2 = 8; stream 1: 2*-1 + 1*0 + 3*0.25 = -1.25; stream 2: 2*1.5 = 3; stream 3: 2*0 + 1*-7.
    comb = [[1, 0, 0, -7], [2, 0.25, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    got = one_element_post(2.0, [1.0, 3.0, 9.0, 9.0], [0.5, -1.0, 1.5, 0.0], comb)
    assert got == [0x4100, 0xBFA0, 0x4040, 0xC0E0]


def test_post_fuses_product_and_sum() -> None:
    # -(1 + 2^-7) + (1 + 2^-7)(1 + 2^-23) = 2^-23 + 2^-30 exactly; a rounded product loses the 2^-30.
    x = 1 + 2.0**-7
    comb = np.zeros((HC, HC))
    comb[0] = 1 + 2.0**-23
    assert one_element_post(-x, [x, 0, 0, 0], [1.0] * HC, comb) == [0x3401] * HC


def test_post_rounds_its_first_product() -> None:
    # (1 + 2^-7)(1 + 2^-23) - (1 + 2^-7): here the product comes first and is rounded, so the 2^-30 is lost.
    x = 1 + 2.0**-7
    comb = np.zeros((HC, HC))
    comb[0] = 1
    assert one_element_post(x, [-x, 0, 0, 0], [1 + 2.0**-23] * HC, comb) == [0x3400] * HC


def test_post_adds_sources_in_order() -> None:
    comb = np.ones((HC, HC))
    assert one_element_post(0.0, [2.0**24, 1.0, -(2.0**24), 0.0], [1.0] * HC, comb) == [0x0000] * HC
    assert one_element_post(0.0, [2.0**24, -(2.0**24), 1.0, 0.0], [1.0] * HC, comb) == [0x3F80] * HC
    # The reduced term comes before all sources.
    assert one_element_post(1.0, [2.0**24, -(2.0**24), 0.0, 0.0], [1.0] * HC, comb) == [0x0000] * HC


def test_post_carries_every_bf16_pattern_of_every_source() -> None:
    payload = every_bf16().reshape(16, 4096)
    post = np.ones((16, HC), np.float32)
    for source in range(HC):
        residual = bf(np.zeros((16, HC, 4096)))
        residual[:, source] = payload
        comb = np.zeros((16, HC, HC), np.float32)
        comb[:, source] = 1
        got = mhc_post(bf(np.zeros((16, 4096))), residual, post, comb)
        for target in range(HC):
            assert_bits_equal(got[:, target], clear_negative_zero(payload))


def test_post_can_underflow_to_negative_zero() -> None:
    got = one_element_post(-(2.0**-100), [0] * HC, [2.0**-100] * HC, np.zeros((HC, HC)))
    assert got == [0x0000] * HC  # -0 + 0*0 = +0
    got = one_element_post(-(2.0**-100), [-0.0] * HC, [2.0**-100] * HC, np.ones((HC, HC)))
    assert got == [0x8000] * HC


# ---- collapse -------------------------------------------------------------------------------------------------------


def one_element_collapse(streams: list[float], pre: list[float]) -> list[int]:
    return bits(collapse(bf(streams).reshape(1, HC, 1), np.float32([pre])))


def test_collapse_by_hand() -> None:
    # 1*0.5 - 2*1 + 4*0.25 + 8*-1 = -8.5
    assert one_element_collapse([1.0, -2.0, 4.0, 8.0], [0.5, 1.0, 0.25, -1.0]) == [0xC108]


def test_collapse_adds_in_stream_order_and_fuses() -> None:
    assert one_element_collapse([2.0**24, 1.0, -(2.0**24), 0.0], [1.0] * HC) == [0x0000]
    assert one_element_collapse([2.0**24, -(2.0**24), 1.0, 0.0], [1.0] * HC) == [0x3F80]
    x = 1 + 2.0**-7
    assert one_element_collapse([-x, x, 0.0, 0.0], [1.0, 1 + 2.0**-23, 0.0, 0.0]) == [0x3401]
    assert one_element_collapse([x, -x, 0.0, 0.0], [1 + 2.0**-23, 1.0, 0.0, 0.0]) == [0x3400]


def test_collapse_starts_from_positive_zero() -> None:
    assert one_element_collapse([-0.0] * HC, [1.0] * HC) == [0x0000]


# ---- norm -----------------------------------------------------------------------------------------------------------


def squares(hidden: int, at: dict[int, float]) -> float:
    p = np.zeros((1, hidden), np.float32)
    for index, value in at.items():
        p[0, index] = value
    return float(tree_dot(bf(p), bf(p))[0])


def test_sum_of_squares_inside_a_fragment_goes_by_index() -> None:
    assert squares(8, {0: 4096, 1: 1, 2: 1}) == 2**24
    assert squares(8, {0: 1, 1: 1, 2: 4096}) == 2**24 + 2


def test_sum_of_squares_adds_fragments_by_the_butterfly() -> None:
    # Lanes 1 and 17 meet at distance 16, before lane 0 joins; lanes 1 and 2 meet lane 0 one after the other.
    assert squares(256, {0: 4096, 8 * 1: 1, 8 * 17: 1}) == 2**24 + 2
    assert squares(256, {0: 4096, 8 * 1: 1, 8 * 2: 1}) == 2**24
    # Lane 16 meets lane 0 first of all, lane 8 next.
    assert squares(256, {0: 4096, 8 * 16: 1, 8 * 8: 1}) == 2**24
    assert squares(256, {0: 4096, 8 * 9: 1, 8 * 1: 1}) == 2**24 + 2


def test_sum_of_squares_adds_groups_by_index() -> None:
    assert squares(768, {0: 4096, 256: 1, 512: 1}) == 2**24
    assert squares(768, {0: 1, 256: 1, 512: 4096}) == 2**24 + 2
    # A short last group counts like any other.
    assert squares(520, {0: 1, 256: 1, 512: 4096}) == 2**24 + 2


def test_norm_by_hand() -> None:
    # q = 25, mean 3.125, inverse 0.56568542: 3 -> 1.6970563, nearest 217/128; 4 -> 2.2627417, nearest 145/64.
    got = rms_norm(bf([[3, 4, 0, 0, 0, 0, 0, -0.0]]), bf([1] * 8), 0.0)
    assert bits(got) == [0x3FD9, 0x4011, 0, 0, 0, 0, 0, 0x8000]
    # Twice gamma is twice the result.
    got = rms_norm(bf([[3, 4, 0, 0, 0, 0, 0, -0.0]]), bf([2, -2, 1, 1, 1, 1, 1, 1]), 0.0)
    assert bits(got) == [0x4059, 0xC091, 0, 0, 0, 0, 0, 0x8000]


@pytest.mark.parametrize("hidden", [8, 264, 4096, 5120, 7168])
def test_norm_of_a_constant_row_is_gamma(hidden: int) -> None:
    gamma = random_arguments(1, hidden, 1, 0)["gamma"]
    assert_bits_equal(rms_norm(bf(np.full((1, hidden), 2.0)), gamma, 0.0)[0], gamma)


def test_norm_adds_eps_to_the_mean() -> None:
    # mean 4 + eps 12 = 16: inverse 1/4.
    assert bits(rms_norm(bf([[2.0] * 8]), bf([1.0] * 8), 12.0)) == [0x3F00] * 8


def test_norm_of_a_zero_row_needs_the_small_eps() -> None:
    zero, one = bf([[0.0] * 8]), bf([1.0] * 8)
    assert bits(rms_norm(zero, one, 1e-20)) == [0x0000] * 8
    assert np.isnan(rms_norm(zero, one, 0.0)).all()


def test_norm_of_nan_and_infinity() -> None:
    one = bf([1.0] * 8)
    assert np.isnan(rms_norm(bf([[np.nan] + [1.0] * 7]), one, 1e-20)).all()
    got = rms_norm(bf([[np.inf] + [1.0] * 7]), one, 1e-20)
    assert np.isnan(got[0, 0])
    assert bits(got[0, 1:]) == [0x0000] * 7


def test_norm_refuses_a_hidden_size_without_whole_fragments() -> None:
    with pytest.raises(ValueError, match="multiple of 8; got 12"):
        rms_norm(bf(np.ones((1, 12))), bf(np.ones(12)), 1e-6)


# ---- the whole boundary ---------------------------------------------------------------------------------------------


def fractions(x: np.ndarray) -> Any:
    return [fractions(row) for row in x] if x.ndim > 1 else [Fraction(float(v)) for v in x]


def as_bf16(rows: list[Any]) -> np.ndarray:
    return np.array([[float(v) for v in row] for row in rows], np.float32).astype(BF16)


@pytest.mark.parametrize(("tp", "hidden"), [(1, 8), (2, 264), (4, 520), (8, 256)])
@pytest.mark.parametrize("scale", [1.0, 2.0**-62, 2.0**55])
def test_boundary_equals_exact_arithmetic_rounded_step_by_step(tp: int, hidden: int, scale: float) -> None:
    a = random_arguments(2, hidden, tp, seed=hidden + tp)
    # Small scales make the squares denormal, large ones come near overflow.
    a["xs"] = [(x.astype(np.float32) * np.float32(scale)).astype(BF16) for x in a["xs"]]
    a["residual"] = (a["residual"].astype(np.float32) * np.float32(scale)).astype(BF16)
    a["eps"] = 1e-20 * scale * scale
    streams, layer_input = boundary(**a)
    for row in range(2):
        want_streams, want_input = boundary_row(
            [fractions(x[row]) for x in a["xs"]],
            fractions(a["residual"][row]),
            fractions(a["post"][row]),
            fractions(a["comb"][row]),
            fractions(a["pre"][row]),
            fractions(a["gamma"]),
            fp32(Fraction(a["eps"])),
        )
        assert (streams[row].astype(np.float32) == as_bf16(want_streams).astype(np.float32)).all()
        assert layer_input is not None
        assert (layer_input[row].astype(np.float32) == as_bf16([want_input])[0].astype(np.float32)).all()


def unrounded_variants(a: dict[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The boundary with one step done differently: (streams, layer input) by the name of the step."""
    reduced_fp32 = sum((widen(x) for x in a["xs"]), np.zeros(a["xs"][0].shape, np.float32))

    def post(reduced: np.ndarray) -> np.ndarray:
        m = reduced[:, None, :] * a["post"][:, :, None]
        for j in range(HC):
            m = fma(a["residual"][:, j, None, :], a["comb"][:, j, :, None], m)
        return m

    def collapsed(streams: np.ndarray) -> np.ndarray:
        c = np.zeros(reduced_fp32.shape, np.float32)
        for i in range(HC):
            c = fma(streams[:, i], a["pre"][:, i, None], c)
        return c

    def inverse(p: np.ndarray) -> np.ndarray:
        return rsqrt(tree_dot(p, p) / np.float32(p.shape[1]) + np.float32(a["eps"]))[:, None]

    def norm(p: np.ndarray, inv: np.ndarray) -> np.ndarray:
        return round_bf16((widen(p) * inv) * widen(a["gamma"]))

    m = post(widen(round_bf16(reduced_fp32)))
    y = round_bf16(m)
    c = collapsed(y)
    p = round_bf16(c)
    wide_reduced = round_bf16(post(reduced_fp32))
    wide_collapsed = round_bf16(collapsed(m))
    p_from_reduced = round_bf16(collapsed(wide_reduced))
    exact_product = p.astype(np.float64) * inverse(p) * a["gamma"].astype(np.float64)
    return {
        "nothing": (y, norm(p, inverse(p))),
        "no rounding after the all-reduce": (wide_reduced, norm(p_from_reduced, inverse(p_from_reduced))),
        "collapse of unrounded streams": (y, norm(wide_collapsed, inverse(wide_collapsed))),
        "norm of the unrounded collapse": (y, norm(c, inverse(c))),
        "mean square of the unrounded collapse": (y, norm(p, inverse(c))),
        "one rounding for both products": (y, round_bf16(exact_product.astype(np.float32))),
        "gamma before the inverse": (y, round_bf16(widen(p) * (inverse(p) * widen(a["gamma"])))),
    }


def test_every_rounding_point_matters() -> None:
    a = random_arguments(64, 5120, 4, seed=7)
    streams, layer_input = boundary(**a)
    variants = unrounded_variants(a)
    same_streams, same_input = variants.pop("nothing")
    assert_bits_equal(streams, same_streams)
    assert layer_input is not None
    assert_bits_equal(layer_input, same_input)
    for name, (other_streams, other_input) in variants.items():
        assert (other_input != layer_input).any(), name
        assert (other_streams != streams).any() == (name == "no rounding after the all-reduce"), name


def test_the_exact_oracle_sees_a_missing_rounding() -> None:
    # So that the comparison with exact arithmetic is known to be able to fail.
    a = random_arguments(1, 264, 4, seed=11)
    arguments = (
        [fractions(x[0]) for x in a["xs"]],
        *(fractions(a[name][0]) for name in ("residual", "post", "comb", "pre")),
        fractions(a["gamma"]),
        fp32(Fraction(a["eps"])),
    )
    reference_row = boundary_row(*arguments)
    assert boundary_row(*arguments, round_reduced=keep) != reference_row
    assert boundary_row(*arguments, round_collapsed=keep) != reference_row
    assert boundary_row(*arguments, round_reduced=bf16, round_collapsed=bf16) == reference_row


def test_residual_only_boundary_is_the_same_streams() -> None:
    a = random_arguments(3, 64, 2, seed=3)
    streams, _ = boundary(**a)
    for name in ("pre", "gamma", "eps"):
        del a[name]
    only, layer_input = boundary(**a)
    assert layer_input is None
    assert_bits_equal(only, streams)


@pytest.mark.parametrize("missing", ["pre", "gamma", "eps"])
def test_boundary_takes_all_of_the_collapse_or_nothing(missing: str) -> None:
    a = random_arguments(1, 8, 1, seed=0)
    a[missing] = None
    with pytest.raises(ValueError, match="pre, gamma and eps together"):
        boundary(**a)
    with pytest.raises(ValueError, match="pre, gamma and eps together"):
        reference.float64.boundary(**a)


def test_rows_do_not_depend_on_each_other() -> None:
    a = random_arguments(5, 520, 2, seed=5)
    streams, layer_input = boundary(**a)
    assert layer_input is not None
    for row in range(5):
        one = dict(a, xs=[x[row : row + 1] for x in a["xs"]])
        one |= {name: a[name][row : row + 1] for name in ("residual", "post", "comb", "pre")}
        one_streams, one_input = boundary(**one)
        assert_bits_equal(one_streams[0], streams[row])
        assert one_input is not None
        assert_bits_equal(one_input[0], layer_input[row])


def test_a_nan_or_infinity_stays_in_its_row() -> None:
    a = random_arguments(3, 64, 2, seed=6)
    clean_streams, clean_input = boundary(**a)
    assert clean_input is not None
    a["xs"][1][1, 5] = np.nan
    streams, layer_input = boundary(**a)
    assert layer_input is not None
    assert np.isnan(streams[1, :, 5]).all()
    assert np.isnan(layer_input[1]).all()
    for row in (0, 2):
        assert_bits_equal(streams[row], clean_streams[row])
        assert_bits_equal(layer_input[row], clean_input[row])


def test_no_rows_at_all() -> None:
    a = random_arguments(0, 64, 2, seed=6)
    streams, layer_input = boundary(**a)
    assert streams.shape == (0, HC, 64)
    assert layer_input is not None
    assert layer_input.shape == (0, 64)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("xs", [], ValueError, "at least one rank"),
        ("xs", [np.zeros((2, 16), np.float32)], TypeError, r"xs\[0\]: expected dtype bfloat16, got float32"),
        ("xs", [bf(np.ones((2, 16))), bf(np.ones((3, 16)))], ValueError, r"xs\[1\]: expected shape \[2, 16\], got"),
        ("residual", bf(np.ones((2, 16))), ValueError, r"residual: expected shape \[2, any, 16\], got \[2, 16\]"),
        ("post", np.ones((2, HC)), TypeError, "post: expected dtype float32, got float64"),
        ("post", np.ones((2, HC, 1), np.float32), ValueError, r"post: expected shape \[2, 4\], got \[2, 4, 1\]"),
        ("comb", np.ones((2, 16), np.float32), ValueError, r"comb: expected shape \[2, 4, 4\], got \[2, 16\]"),
        ("pre", np.ones((2, 3), np.float32), ValueError, r"pre: expected shape \[2, 4\], got \[2, 3\]"),
        ("gamma", bf(np.ones(8)), ValueError, r"gamma: expected shape \[16\], got \[8\]"),
        ("gamma", [1.0] * 16, TypeError, "gamma: expected a numpy array, got list"),
    ],
)
def test_boundary_says_what_it_expected(name: str, value: Any, error: type[Exception], message: str) -> None:
    a = random_arguments(2, 16, 1, seed=0)
    a[name] = value
    with pytest.raises(error, match=message):
        boundary(**a)


# ---- finalize -------------------------------------------------------------------------------------------------------


def test_finalize_by_hand() -> None:
    rows = bf([[1.0, 10.0], [2.0, 20.0], [4.0, -40.0]])
    weights = np.float32([[0.5, 0.25], [2.0, 1.0]])
    idx = np.int32([[2, 0], [1, 1]])
    shared = bf([[1.0, 0.5], [-6.0, 0.0]])
    # Row 0: 4*0.5 + 1*0.25 + 1 = 3.25 and -40*0.5 + 10*0.25 + 0.5 = -17; row 1: 2*2 + 2*1 - 6 = 0 and 20*2 + 20*1 = 60.
    assert bits(finalize(rows, weights, idx, shared)) == [0x4050, 0xC188, 0x0000, 0x4270]


def one_element_finalize(rows: list[float], weights: list[float], shared: float) -> list[int]:
    idx = np.arange(len(rows), dtype=np.int32)[None]
    return bits(finalize(bf(rows)[:, None], np.float32([weights]), idx, bf([[shared]])))


def test_finalize_adds_in_route_order_then_shared() -> None:
    big = 2.0**24
    assert one_element_finalize([big, 1.0, -big], [1.0] * 3, 0.0) == [0x0000]
    assert one_element_finalize([big, -big, 1.0], [1.0] * 3, 0.0) == [0x3F80]
    assert one_element_finalize([big, -big], [1.0] * 2, 1.0) == [0x3F80]
    assert one_element_finalize([big, 1.0], [1.0] * 2, -big) == [0x0000]


def test_finalize_fuses_and_rounds_once() -> None:
    x = 1 + 2.0**-7
    assert one_element_finalize([-x, x], [1.0, 1 + 2.0**-23], 0.0) == [0x3401]
    # 1 + 2^-8 would round to 1 before the shared 2^-8 is added; rounded once, the sum is 1 + 2^-7.
    assert one_element_finalize([1.0, 2.0**-8], [1.0, 1.0], 2.0**-8) == [0x3F81]


def test_finalize_clears_negative_zero() -> None:
    none = np.int32([[-1]])
    assert bits(finalize(bf([[1.0]]), np.float32([[1.0]]), none, bf([[-0.0]]))) == [0x0000]
    assert one_element_finalize([-(2.0**-130)], [2.0**-100], -0.0) == [0x0000]


def test_finalize_carries_every_bf16_pattern() -> None:
    payload = every_bf16().reshape(16, 4096)
    weights, idx = np.ones((16, 1), np.float32), np.arange(16, dtype=np.int32)[:, None]
    zero = bf(np.zeros((16, 4096)))
    assert_bits_equal(finalize(payload, weights, idx, zero), clear_negative_zero(payload))
    assert_bits_equal(finalize(zero, weights, idx, payload), clear_negative_zero(payload))


def test_finalize_does_not_look_at_experts_of_other_ranks() -> None:
    rows = bf(np.full((3, 8), np.nan))
    rows[1] = 2.0
    weights = np.float32([[np.nan, 3.0, np.inf]])
    got = finalize(rows, weights, np.int32([[-1, 1, -1]]), bf(np.ones((1, 8))))
    assert bits(got) == [0x40E0] * 8  # 2*3 + 1


@pytest.mark.parametrize("bad", [3, -2, 2**31 - 1, -(2**31)])
def test_finalize_makes_a_row_with_a_bad_index_nan(bad: int) -> None:
    rows = bf(np.ones((3, 8)))
    idx = np.int32([[0, 1], [2, bad], [-1, -1]])
    got = finalize(rows, np.ones((3, 2), np.float32), idx, bf(np.zeros((3, 8))))
    assert np.isnan(got[1]).all()
    assert bits(got[[0, 2]]) == [0x4000] * 8 + [0x0000] * 8
    assert reference.rows_with_bad_index(idx, 3).tolist() == [False, True, False]
    wide = reference.float64.finalize(rows, np.ones((3, 2), np.float32), idx, bf(np.zeros((3, 8))))
    assert np.isnan(wide[1]).all()
    assert wide[[0, 2]].tolist() == [[2.0] * 8, [0.0] * 8]


def test_finalize_of_an_empty_permuted_tensor() -> None:
    got = finalize(bf(np.zeros((0, 8))), np.ones((1, 2), np.float32), np.int32([[-1, -1]]), bf(np.ones((1, 8))))
    assert bits(got) == [0x3F80] * 8


def test_finalize_says_what_it_expected() -> None:
    rows, weights, shared = bf(np.ones((3, 8))), np.ones((2, 2), np.float32), bf(np.ones((2, 8)))
    with pytest.raises(TypeError, match="expected dtype int32, got int64"):
        finalize(rows, weights, np.zeros((2, 2), np.int64), shared)
    with pytest.raises(ValueError, match=r"shared_output: expected shape \[2, 8\], got \[3, 8\]"):
        finalize(rows, weights, np.zeros((2, 2), np.int32), rows)


# ---- aux mean -------------------------------------------------------------------------------------------------------


def test_aux_mean_by_hand() -> None:
    assert bits(aux_mean(bf([1.0, 2.0, 4.0, 8.0]).reshape(1, HC, 1))) == [0x4070]  # 15/4 = 3.75
    # The mean 1 + 3 * 2^-8 is a tie and goes to the even 1 + 2^-6.
    assert bits(aux_mean(bf([4.0, 2.0**-5, 2.0**-6, 0.0]).reshape(1, HC, 1))) == [0x3F82]
    big = 2.0**24
    assert bits(aux_mean(bf([big, 1.0, -big, 0.0]).reshape(1, HC, 1))) == [0x0000]


# ---- float64 --------------------------------------------------------------------------------------------------------


def test_float64_equals_exact_arithmetic() -> None:
    a = random_arguments(2, 64, 4, seed=9)
    streams, layer_input = reference.float64.boundary(**a)
    assert layer_input is not None
    assert streams.dtype == layer_input.dtype == np.float64
    eps = fp32(Fraction(a["eps"]))
    for row in range(2):
        xs = [fractions(x[row]) for x in a["xs"]]
        residual, post, comb, pre = (fractions(a[name][row]) for name in ("residual", "post", "comb", "pre"))
        collapsed = []
        for h in range(64):
            reduced = sum(x[h] for x in xs)
            exact = [reduced * post[i] + sum(residual[j][h] * comb[j][i] for j in range(HC)) for i in range(HC)]
            np.testing.assert_allclose(streams[row, :, h], [float(v) for v in exact], rtol=1e-14, atol=1e-15)
            collapsed.append(sum(y * w for y, w in zip(exact, pre, strict=True)))
        inverse = 1 / np.sqrt(float(sum(c * c for c in collapsed) / 64 + eps))
        expected = [float(c) * inverse * float(g) for c, g in zip(collapsed, a["gamma"], strict=True)]
        np.testing.assert_allclose(layer_input[row], expected, rtol=1e-13, atol=1e-15)


def test_float64_finalize_and_mean_by_hand() -> None:
    rows = bf([[1.0], [2.0], [4.0]])
    got = reference.float64.finalize(rows, np.float32([[0.5, 0.25, 9.0]]), np.int32([[2, 0, -1]]), bf([[2.0**-30]]))
    assert got.tolist() == [[2.25 + 2.0**-30]]
    assert reference.float64.aux_mean(bf([[[4.0], [2.0**-30], [0.0], [0.0]]])).tolist() == [[1 + 2.0**-32]]


def test_float64_takes_float64_streams() -> None:
    a = random_arguments(1, 8, 1, seed=0)
    a["residual"] = a["residual"].astype(np.float64) + 2.0**-40
    streams, _ = reference.float64.boundary(**a)
    rounded, _ = reference.float64.boundary(**dict(a, residual=a["residual"].astype(np.float32)))
    assert (streams != rounded).any()
