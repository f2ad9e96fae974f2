# SPDX-License-Identifier: Apache-2.0
"""What the functional layers compute, evaluated by the interpreter and compared with the reference."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc import reference
from trtllm_mhc.reference.coefficients import coefficients_float64

ROWS, HC, HIDDEN = 5, 4, 256
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
COEFFICIENTS = {"rms_norm_eps": 1e-20, "hc_eps": 1e-6, "post_alpha": 2.0, "sinkhorn_iters": 20}


@pytest.fixture
def values():
    rng = np.random.default_rng(3)
    return {
        "x": rng.standard_normal((ROWS, HIDDEN)).astype(BFLOAT16),
        "residual": rng.standard_normal((ROWS, HC, HIDDEN)).astype(BFLOAT16),
        "post": rng.uniform(0, 2, (ROWS, HC)).astype(np.float32),
        "comb": rng.dirichlet(np.ones(HC), (ROWS, HC)).astype(np.float32),
        "pre": rng.uniform(0, 1, (ROWS, HC)).astype(np.float32),
        "gamma": rng.normal(1, 0.1, HIDDEN).astype(BFLOAT16),
    }


@pytest.fixture
def exact_values(values):
    """Small integers times small dyadic fractions: every order of the sums gives the same float32."""
    rng = np.random.default_rng(4)

    def integers(like, bound, unit):
        return (rng.integers(-bound, bound + 1, like.shape) * unit).astype(like.dtype)

    units = {"x": 1, "residual": 1, "post": 1 / 64, "comb": 1 / 64, "pre": 1 / 64}
    return values | {name: integers(values[name], 100, unit) for name, unit in units.items()}


@pytest.fixture
def run(trt, network):
    """Builds layers on inputs named like the arrays, evaluates them, and returns the outputs in order."""
    from trtllm_mhc.network import functional
    from trtllm_mhc.reference.interpreter import evaluate

    def run(build, arrays, precision="network"):
        dtypes = {BFLOAT16: trt.bfloat16, np.dtype(np.float32): trt.float32, np.dtype(np.int32): trt.int32}
        inputs = {
            name: network.add_input(name, dtypes[a.dtype], (-1, *a.shape[1:]) if a.ndim > 1 else a.shape)
            for name, a in arrays.items()
        }
        outputs = build(functional, SimpleNamespace(**inputs))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for index, tensor in enumerate(outputs):
            tensor.name = f"out{index}"
            network.mark_output(tensor)
        used = {network.get_input(i).name for i in range(network.num_inputs)}
        result = evaluate([network], [{k: v for k, v in arrays.items() if k in used}], precision=precision)[0]
        results = tuple(result[f"out{index}"] for index in range(len(outputs)))
        return results if len(results) > 1 else results[0]

    return run


def only(values, *names):
    return {name: values[name] for name in names}


@pytest.mark.parametrize("exact", [True, False])
def test_finalize(run, network, exact):
    """Exactly the reference where no sum rounds, else as near as products that are rounded by themselves come."""
    top_k, permuted = 6, 11
    rng = np.random.default_rng(6)

    def numbers(*shape, dtype=BFLOAT16):
        if exact:
            return (rng.integers(-100, 101, shape) / 16).astype(dtype)
        return rng.standard_normal(shape).astype(dtype)

    rows, weights = numbers(permuted, HIDDEN), numbers(ROWS, top_k, dtype=np.float32)
    index = rng.integers(-1, permuted, (ROWS, top_k)).astype(np.int32)
    index[1] = -1
    index[2, 3] = index[0, 0] = -1
    # What stands where an expert is elsewhere does not matter.
    weights[2, 3] = np.inf
    weights[0, 0] = np.nan
    shared = numbers(ROWS, HIDDEN)
    arrays = {"rows": rows, "weights": weights, "index": index, "shared": shared}
    actual = run(lambda f, t: f.moe_finalize(network, t.rows, t.weights, t.index, t.shared), arrays)
    expected = reference.finalize(*arrays.values())
    actual = reference.clear_negative_zero(actual)
    if exact:
        reference.assert_bits_equal(actual, expected)
    else:
        held = np.where(index >= 0, weights, 0).astype(np.float64)
        magnitude = np.abs(held[:, :, None] * rows[index].astype(np.float64)).sum(axis=1)
        magnitude += np.abs(shared.astype(np.float64))
        assert reference.sums_agree(actual, expected, magnitude, top_k + 1).all()


def test_post_of_exact_sums(run, network, exact_values):
    arrays = only(exact_values, "x", "residual", "post", "comb")
    actual = run(lambda f, t: f.mhc_post(network, t.x, t.residual, t.post, t.comb), arrays)
    reference.assert_bits_equal(actual, reference.mhc_post(*arrays.values()))


def test_post(run, network, values):
    arrays = only(values, "x", "residual", "post", "comb")
    actual = run(lambda f, t: f.mhc_post(network, t.x, t.residual, t.post, t.comb), arrays)
    expected = reference.mhc_post(*arrays.values())
    assert reference.sums_agree(actual, expected, reference.stream_magnitude(*arrays.values()), HC + 1).all()


def test_post_in_float64(run, network, values):
    arrays = only(values, "x", "residual", "post", "comb")
    actual = run(lambda f, t: f.mhc_post(network, t.x, t.residual, t.post, t.comb), arrays, "float64")
    np.testing.assert_allclose(actual, reference.float64.mhc_post(*arrays.values()), rtol=1e-13, atol=1e-13)


def test_collapse_of_exact_sums(run, network, exact_values):
    arrays = only(exact_values, "residual", "pre")
    actual = run(lambda f, t: f.mhc_collapse(network, t.residual, t.pre), arrays)
    reference.assert_bits_equal(actual, reference.collapse(*arrays.values()))


def test_collapse(run, network, values):
    arrays = only(values, "residual", "pre")
    actual = run(lambda f, t: f.mhc_collapse(network, t.residual, t.pre), arrays)
    expected = reference.collapse(*arrays.values())
    assert reference.sums_agree(actual, expected, reference.collapse_magnitude(*arrays.values()), HC).all()


def test_final_collapse_rounds_every_product_and_sum(run, network, values):
    arrays = only(values, "residual", "pre")
    actual = run(lambda f, t: f.mhc_final_collapse(network, t.residual, t.pre), arrays)
    total = values["residual"][:, 0].astype(np.float32) * values["pre"][:, :1]
    for i in range(1, HC):
        total = total + values["residual"][:, i].astype(np.float32) * values["pre"][:, i : i + 1]
    reference.assert_bits_equal(actual, total.astype(BFLOAT16))


def test_norm(run, network, values):
    arrays = only(values, "x", "gamma")
    actual = run(lambda f, t: f.rms_norm(network, t.x, t.gamma, 1e-20), arrays)
    expected = reference.rms_norm(values["x"], values["gamma"], 1e-20)
    # The sum of squares has another order: a handful of float32 ulps, which may cross a bf16 rounding boundary.
    assert reference.ulp_distance(actual, expected).max() <= 1


def test_norm_of_exact_sums(run, network, values):
    """Powers of four with an exact mean: the root and its reciprocal are exact, so every bit is settled."""
    signs = np.where(np.arange(HIDDEN) % 3 == 0, -1, 1)
    x = np.stack([signs * 4.0**k for k in range(-2, 3)]).astype(BFLOAT16)
    actual = run(lambda f, t: f.rms_norm(network, t.x, t.gamma, 1e-20), {"x": x, "gamma": values["gamma"]})
    reference.assert_bits_equal(actual, reference.rms_norm(x, values["gamma"], 1e-20))


def test_norm_of_a_zero_row_is_zero(run, network, values):
    x = values["x"].copy()
    x[2] = 0
    actual = run(lambda f, t: f.rms_norm(network, t.x, t.gamma, 1e-20), {"x": x, "gamma": values["gamma"]})
    assert (actual[2] == 0).all()
    assert np.isfinite(actual.astype(np.float32)).all()


def test_pre_delayed_without_pre(run, network, values):
    arrays = only(values, "residual", "gamma")
    actual = run(lambda f, t: f.mhc_pre_delayed(network, t.residual, None, t.gamma, 1e-20), arrays)
    expected = reference.rms_norm(values["residual"][:, 0], values["gamma"], 1e-20)
    assert reference.ulp_distance(actual, expected).max() <= 1


def test_pre_delayed_in_float64(run, network, values):
    arrays = only(values, "residual", "pre", "gamma")
    actual = run(lambda f, t: f.mhc_pre_delayed(network, t.residual, t.pre, t.gamma, 1e-20), arrays, "float64")
    collapsed = reference.float64.collapse(values["residual"], values["pre"])
    np.testing.assert_allclose(actual, reference.float64.rms_norm(collapsed, values["gamma"], 1e-20), rtol=1e-12)


def test_broadcast_and_mean(run, network, values):
    streams, mean = run(
        lambda f, t: (f.broadcast_streams(network, t.x, HC), f.mean_streams(network, t.residual)),
        only(values, "x", "residual"),
    )
    reference.assert_bits_equal(streams, np.repeat(values["x"][:, None], HC, axis=1))
    reference.assert_bits_equal(mean, reference.aux_mean(values["residual"]))


@pytest.fixture
def weights():
    rng = np.random.default_rng(5)
    fn = rng.normal(0, (HC * HIDDEN) ** -0.5, (24, HC * HIDDEN)).astype(np.float32)
    return fn, rng.uniform(0.5, 2, 3).astype(np.float32), rng.standard_normal(24).astype(np.float32)


@pytest.mark.parametrize("precision", ["network", "float64"])
def test_coefficients(run, network, values, weights, precision):
    actual = run(
        lambda f, t: f.mhc_coefficients(network, t.residual, *weights, **COEFFICIENTS),
        only(values, "residual"),
        precision,
    )
    expected = coefficients_float64(values["residual"], *weights, **COEFFICIENTS)
    tolerance = 1e-12 if precision == "float64" else 1e-5
    for got, want in zip(actual, (expected.post, expected.comb, expected.pre), strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=0)
    # Indexed [source, target]; the last normalisation was over the sources.
    np.testing.assert_allclose(actual[1].sum(axis=1), 1, atol=1e-5)


def test_coefficients_of_the_first_layer(run, network, values, weights):
    """A projection summed over the streams gives what the full one gives on equal streams."""
    fn, scale, base = weights
    summed = fn.reshape(24, HC, HIDDEN).sum(axis=1)

    def build(functional, t):
        streams = functional.broadcast_streams(network, t.x, HC)
        full = functional.mhc_coefficients(network, streams, fn, scale, base, **COEFFICIENTS)
        return (*full, *functional.mhc_coefficients(network, t.x, summed, scale, base, **COEFFICIENTS))

    results = run(build, only(values, "x"), "float64")
    for full, broadcast in zip(results[:3], results[3:], strict=True):
        np.testing.assert_allclose(broadcast, full, rtol=1e-6)


def test_linear(run, network, values):
    weight = np.random.default_rng(6).integers(-8, 9, (48, HIDDEN)).astype(BFLOAT16)
    x = np.random.default_rng(7).integers(-8, 9, (ROWS, HIDDEN)).astype(BFLOAT16)
    actual = run(lambda f, t: f.linear(network, t.x, weight), {"x": x})
    reference.assert_bits_equal(actual, (x.astype(np.float32) @ weight.astype(np.float32).T).astype(BFLOAT16))
