# SPDX-License-Identifier: Apache-2.0
"""The reference against an independent implementation: DeepSeek V4.1's layers in NVIDIA's nemo-automodel, on torch.

Runs where both are installed: `scripts/nemo_test.sh` makes such an environment. Their package is installed without its
dependencies, so its __init__ files and its configuration class are not run; the layers and the Sinkhorn iteration are.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc.reference import (
    coefficients_float32,
    coefficients_float64,
    collapse,
    collapse_magnitude,
    float64,
    mhc_post,
    norms_agree,
    rms_norm,
    stream_magnitude,
    sums_agree,
    ulp_distance,
)

torch = pytest.importorskip("torch", reason="torch is not installed (scripts/nemo_test.sh)")
if importlib.util.find_spec("nemo_automodel") is None:
    pytest.skip("nemo-automodel is not installed (scripts/nemo_test.sh)", allow_module_level=True)

pytestmark = pytest.mark.nemo

BF16 = ml_dtypes.bfloat16
HC, HIDDEN, ROWS = 4, 5120, 6
EPS = float(np.float32(1e-20))
HC_EPS = float(np.float32(1e-6))


@pytest.fixture(scope="module")
def layers() -> Iterator[ModuleType]:
    spec = importlib.util.find_spec("nemo_automodel")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    before = set(sys.modules)
    for path in (
        "",
        "shared",
        "components",
        "components/models",
        "components/models/deepseek_v4",
        "components/models/deepseek_v4/kernels",
        "components/models/deepseek_v41",
    ):
        package = ModuleType(".".join(["nemo_automodel", *Path(path).parts]))
        package.__path__ = [str(root / path)]
        sys.modules[package.__name__] = package
    config = ModuleType("nemo_automodel.components.models.deepseek_v41.config")
    config.DeepseekV41TextConfig = object  # type: ignore[attr-defined]  # they need it for an annotation only
    sys.modules[config.__name__] = config
    yield importlib.import_module("nemo_automodel.components.models.deepseek_v41.layers")
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "nemo_automodel":
            del sys.modules[name]


@contextlib.contextmanager
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their code asks for fp32 by Tensor.float(); here that gives float64, so that only the formulae are compared."""
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def to_torch(x: np.ndarray, dtype: Any = None) -> Any:
    """One row of a batch of tokens as [1, M, ...]; bf16 keeps its bits."""
    tensor = torch.from_numpy(x.astype(np.float32))
    if dtype is None:
        dtype = torch.bfloat16 if x.dtype == BF16 else torch.float32
    return tensor.to(dtype)[None]


def to_numpy(x: Any) -> np.ndarray:
    array: np.ndarray = x[0].detach().to(torch.float32 if x.dtype == torch.bfloat16 else x.dtype).numpy()
    return array.astype(BF16) if x.dtype == torch.bfloat16 else array


def arguments(seed: int) -> SimpleNamespace:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(BF16)

    return SimpleNamespace(
        reduced=normal(ROWS, HIDDEN),
        residual=normal(ROWS, HC, HIDDEN),
        post=rng.uniform(0, 2, (ROWS, HC)).astype(np.float32),
        comb=rng.uniform(0, 0.5, (ROWS, HC, HC)).astype(np.float32),
        pre=rng.uniform(0, 1, (ROWS, HC)).astype(np.float32),
        gamma=normal(HIDDEN),
        fn=rng.standard_normal((24, HC * HIDDEN), np.float32) * np.float32(0.01),
        scale=np.float32([1.0, 0.7, 1.3]),
        base=rng.standard_normal(24, np.float32),
    )


def expand(layers: ModuleType, a: SimpleNamespace, dtype: Any = None) -> np.ndarray:
    mix = layers.DeepseekV41Mix(to_torch(a.pre, dtype), to_torch(a.post, dtype), to_torch(a.comb, dtype))
    connection = layers.DeepseekV41HyperConnection
    return to_numpy(connection.expand(to_torch(a.reduced, dtype), to_torch(a.residual, dtype), mix))


def collapse_theirs(layers: ModuleType, a: SimpleNamespace, dtype: Any = None) -> np.ndarray:
    connection = layers.DeepseekV41HyperConnection
    return to_numpy(connection.collapse(to_torch(a.residual, dtype), to_torch(a.pre, dtype)))


def norm_theirs(layers: ModuleType, a: SimpleNamespace, dtype: Any = None) -> np.ndarray:
    norm = layers.DeepseekV41RMSNorm(HIDDEN, EPS, dtype or torch.bfloat16)
    norm.weight.data = to_torch(a.gamma, dtype)[0]
    return to_numpy(norm(to_torch(a.reduced, dtype)))


def coefficients_theirs(layers: ModuleType, a: SimpleNamespace, dtype: Any) -> tuple[np.ndarray, ...]:
    config = SimpleNamespace(
        hc_mult=HC, hc_sinkhorn_iters=20, hc_eps=HC_EPS, rms_norm_eps=EPS, hidden_size=HIDDEN, initializer_range=0.02
    )
    connection = layers.DeepseekV41HyperConnection(config)
    for name in ("fn", "base", "scale"):
        getattr(connection, name).data = to_torch(getattr(a, name), dtype)[0]
    mix = connection(to_torch(a.residual))
    return to_numpy(mix.post), to_numpy(mix.comb), to_numpy(mix.pre)


SETTINGS = {"rms_norm_eps": EPS, "hc_eps": HC_EPS, "post_alpha": 2.0, "sinkhorn_iters": 20}


def test_formulae_in_float64(layers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    a = arguments(1)
    with in_float64(monkeypatch):
        theirs = (
            expand(layers, a, torch.float64),
            collapse_theirs(layers, a, torch.float64),
            norm_theirs(layers, a, torch.float64),
            *coefficients_theirs(layers, a, torch.float64),
        )
    ours = (
        float64.mhc_post(a.reduced, a.residual, a.post, a.comb),
        float64.collapse(a.residual, a.pre),
        float64.rms_norm(a.reduced, a.gamma, EPS),
        *coefficients_float64(a.residual, a.fn, a.scale, a.base, **SETTINGS),
    )
    for name, got, want in zip(("expand", "collapse", "norm", "post", "comb", "pre"), theirs, ours, strict=True):
        assert got.dtype == np.float64, name
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13, err_msg=name)


def test_streams_and_collapse_in_bf16(layers: ModuleType) -> None:
    a = arguments(2)
    theirs, ours = expand(layers, a), mhc_post(a.reduced, a.residual, a.post, a.comb)
    assert sums_agree(theirs, ours, stream_magnitude(a.reduced, a.residual, a.post, a.comb), HC + 1).all()
    assert (ulp_distance(theirs, ours) > 0).mean() < 1e-3
    theirs, ours = collapse_theirs(layers, a), collapse(a.residual, a.pre)
    assert sums_agree(theirs, ours, collapse_magnitude(a.residual, a.pre), HC).all()
    assert (ulp_distance(theirs, ours) > 0).mean() < 1e-3


def test_norm_in_bf16(layers: ModuleType) -> None:
    a = arguments(3)
    theirs, ours = norm_theirs(layers, a), rms_norm(a.reduced, a.gamma, EPS)
    # The norm of one stream with weight 1 is the norm of that stream.
    assert norms_agree(theirs, ours, a.reduced[:, None], np.ones((ROWS, 1), np.float32), a.gamma, EPS).all()
    assert (ulp_distance(theirs, ours) > 0).mean() < 1e-3


def test_coefficients_in_fp32(layers: ModuleType) -> None:
    a = arguments(4)
    with torch.no_grad():
        theirs = coefficients_theirs(layers, a, torch.float32)
    ours = coefficients_float32(a.residual, a.fn, a.scale, a.base, **SETTINGS)
    exact = coefficients_float64(a.residual, a.fn, a.scale, a.base, **SETTINGS)
    for name, got, mine, truth in zip(("post", "comb", "pre"), theirs, ours, exact, strict=True):
        assert got.dtype == mine.dtype == np.float32, name
        # The formulae are compared in float64 above. In fp32 the two orders differ; ours may not cost accuracy.
        error_theirs = np.sqrt(np.mean(np.square(got - truth)))
        error_ours = np.sqrt(np.mean(np.square(mine - truth)))
        assert error_ours <= 1.1 * error_theirs, name
        assert error_theirs < 1e-6, name
