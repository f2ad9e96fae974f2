# SPDX-License-Identifier: Apache-2.0
"""The same operations in float64 without any intermediate rounding: the truth that engines are measured against.

Shapes are those of `operations`; every array may have any floating-point dtype and every result is float64. eps is
first rounded to fp32, since that rounded number is what every implementation is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._arrays import AnyArray, Float64Array, require
from .operations import rows_with_bad_index


def all_reduce(xs: Sequence[AnyArray]) -> Float64Array:
    """The sum of the ranks' [M, H] contributions."""
    if len(xs) == 0:
        raise ValueError("xs: expected the contribution of at least one rank, got none")
    require("xs[0]", xs[0], (None, None))
    total = np.zeros(xs[0].shape, np.float64)
    for rank, x in enumerate(xs):
        require(f"xs[{rank}]", x, xs[0].shape)
        total = total + x.astype(np.float64)
    return total


def mhc_post(reduced: AnyArray, residual: AnyArray, post: AnyArray, comb: AnyArray) -> Float64Array:
    """New streams [M, hc, H]: reduced * post[i] + sum over j of residual[j] * comb[j, i]."""
    require("reduced", reduced, (None, None))
    rows, hidden = reduced.shape
    require("residual", residual, (rows, None, hidden))
    streams = residual.shape[1]
    require("post", post, (rows, streams))
    require("comb", comb, (rows, streams, streams))
    mixed: Float64Array = reduced.astype(np.float64)[:, None, :] * post.astype(np.float64)[:, :, None]
    for j in range(streams):
        mixed = mixed + residual[:, j, None, :].astype(np.float64) * comb[:, j, :, None].astype(np.float64)
    return mixed


def collapse(streams: AnyArray, pre: AnyArray) -> Float64Array:
    """The weighted sum of the streams [M, hc, H] with pre [M, hc]: [M, H]."""
    require("streams", streams, (None, None, None))
    require("pre", pre, streams.shape[:2])
    total: Float64Array = (streams.astype(np.float64) * pre.astype(np.float64)[:, :, None]).sum(axis=1)
    return total


def rms_norm(p: AnyArray, gamma: AnyArray, eps: float) -> Float64Array:
    """p / sqrt(mean of squares + eps) * gamma; p [M, H], gamma [H]."""
    require("p", p, (None, None))
    require("gamma", gamma, (p.shape[1],))
    wide = p.astype(np.float64)
    mean = np.square(wide).mean(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        result: Float64Array = wide / np.sqrt(mean + np.float64(np.float32(eps))) * gamma.astype(np.float64)
    return result


def boundary(
    xs: Sequence[AnyArray],
    residual: AnyArray,
    post: AnyArray,
    comb: AnyArray,
    pre: AnyArray | None = None,
    gamma: AnyArray | None = None,
    eps: float | None = None,
) -> tuple[Float64Array, Float64Array | None]:
    """The whole boundary, as `operations.boundary`."""
    streams = mhc_post(all_reduce(xs), residual, post, comb)
    if pre is None and gamma is None and eps is None:
        return streams, None
    if pre is None or gamma is None or eps is None:
        raise ValueError("boundary: expected pre, gamma and eps together, or none of them for residual-only")
    return streams, rms_norm(collapse(streams, pre), gamma, eps)


def finalize(
    gemm2_permuted: AnyArray, expert_weights: AnyArray, expanded_idx_to_permuted_idx: AnyArray, shared_output: AnyArray
) -> Float64Array:
    """A rank's MoE contribution [M, H], as `operations.finalize`."""
    require("gemm2_permuted", gemm2_permuted, (None, None))
    permuted_rows, hidden = gemm2_permuted.shape
    require("expert_weights", expert_weights, (None, None))
    rows, top_k = expert_weights.shape
    idx = expanded_idx_to_permuted_idx
    require("expanded_idx_to_permuted_idx", idx, (rows, top_k))
    require("shared_output", shared_output, (rows, hidden))
    bad = rows_with_bad_index(idx, permuted_rows)
    total = shared_output.astype(np.float64)
    for k in range(top_k):
        held = np.flatnonzero((idx[:, k] != -1) & ~bad)
        row = gemm2_permuted[idx[held, k]].astype(np.float64)
        total[held] += row * expert_weights[held, k, None].astype(np.float64)
    total[bad] = np.nan
    return total


def aux_mean(streams: AnyArray) -> Float64Array:
    """The mean of the streams [M, hc, H]: [M, H]."""
    require("streams", streams, (None, None, None))
    mean: Float64Array = streams.astype(np.float64).mean(axis=1)
    return mean
