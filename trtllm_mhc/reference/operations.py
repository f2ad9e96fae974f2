# SPDX-License-Identifier: Apache-2.0
"""The boundary's operations, bit for bit: what every kernel and engine of this project is tested against.

Shapes: M rows (tokens), H hidden size, hc residual streams, K experts per token, P permuted rows. "bf16" is
ml_dtypes.bfloat16. All arithmetic is fp32 with each step rounded to nearest even and denormals kept; where the text
says fma, product and sum are rounded once. The order of the operations is part of the definition.

There are four bf16 roundings: after the all-reduce, the post-mix, the collapse and the norm.
Every function raises TypeError for a wrong dtype and ValueError for a wrong shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._arrays import BFLOAT16, AnyArray, BFloat16Array, BoolArray, Float32Array, require
from .floats import fma, round_bf16, rsqrt, widen

FRAGMENT = 8  # elements that one thread adds in index order
FRAGMENTS_PER_GROUP = 32  # fragments that one butterfly adds


def clear_negative_zero(x: BFloat16Array) -> BFloat16Array:
    """A contribution as it is published: bf16 -0 becomes +0, everything else keeps its bits. Any shape."""
    if not isinstance(x, np.ndarray) or x.dtype != BFLOAT16:
        raise TypeError(f"x: expected dtype bfloat16, got {getattr(x, 'dtype', type(x).__name__)}")
    bits = np.ascontiguousarray(x).view(np.uint16)
    return np.where(bits == 0x8000, np.uint16(0), bits).view(BFLOAT16)


def all_reduce(xs: Sequence[BFloat16Array]) -> BFloat16Array:
    """The sum of the ranks' contributions: fp32 adds in rank order starting from +0, rounded once to bf16.

    xs: one [M, H] bf16 array for each rank. Returns [M, H] bf16, never -0.
    """
    if len(xs) == 0:
        raise ValueError("xs: expected the contribution of at least one rank, got none")
    require("xs[0]", xs[0], (None, None), BFLOAT16)
    total = np.zeros(xs[0].shape, np.float32)
    with np.errstate(all="ignore"):
        for rank, x in enumerate(xs):
            require(f"xs[{rank}]", x, xs[0].shape, BFLOAT16)
            total = total + widen(clear_negative_zero(x))
    return round_bf16(total)


def mhc_post(reduced: BFloat16Array, residual: BFloat16Array, post: Float32Array, comb: Float32Array) -> BFloat16Array:
    """Mixes a sublayer's output into the residual streams.

    For each target stream i: m = reduced * post[i], then m = fma(residual[j], comb[j, i], m) for sources j in order,
    rounded to bf16.

    reduced [M, H] bf16; residual [M, hc, H] bf16; post [M, hc] fp32; comb [M, hc, hc] fp32, [source, target].
    Returns the new streams [M, hc, H] bf16.
    """
    require("reduced", reduced, (None, None), BFLOAT16)
    rows, hidden = reduced.shape
    require("residual", residual, (rows, None, hidden), BFLOAT16)
    streams = residual.shape[1]
    require("post", post, (rows, streams), np.float32)
    require("comb", comb, (rows, streams, streams), np.float32)
    sources = widen(residual)
    with np.errstate(all="ignore"):
        mixed: Float32Array = widen(reduced)[:, None, :] * post[:, :, None]
        for j in range(streams):
            mixed = fma(sources[:, j, None, :], comb[:, j, :, None], mixed)
    return round_bf16(mixed)


def collapse(streams: BFloat16Array, pre: Float32Array) -> BFloat16Array:
    """The weighted sum of the streams: c = fma(streams[i], pre[i], c) from 0 in stream order, rounded to bf16.

    streams [M, hc, H] bf16; pre [M, hc] fp32. Returns [M, H] bf16.
    """
    require("streams", streams, (None, None, None), BFLOAT16)
    require("pre", pre, streams.shape[:2], np.float32)
    total = np.zeros((streams.shape[0], streams.shape[2]), np.float32)
    for i in range(streams.shape[1]):
        total = fma(streams[:, i, :], pre[:, i, None], total)
    return round_bf16(total)


def tree_dot(a: AnyArray, b: AnyArray) -> Float32Array:
    """The sum over the last axis of a * b in the order that no launch geometry changes.

    Each fragment of 8 elements: acc = fma(a, b, acc) in index order from 0. 32 fragments (256 elements) form a group
    and are added by the butterfly over lane distances 16, 8, 4, 2, 1; a short last group is filled with zeros. The
    groups are added in index order.

    a, b: fp32 or bf16, broadcastable, last extent a multiple of 8. Returns fp32 without the last axis.
    """
    extent = a.shape[-1]
    if b.shape[-1] != extent or extent == 0 or extent % FRAGMENT:
        raise ValueError(
            f"tree_dot: expected equal last extents, a positive multiple of {FRAGMENT}; got {extent} and {b.shape[-1]}"
        )
    left = a.reshape(*a.shape[:-1], extent // FRAGMENT, FRAGMENT)
    right = b.reshape(*b.shape[:-1], extent // FRAGMENT, FRAGMENT)
    shape: tuple[int, ...] = np.broadcast_shapes(left.shape, right.shape)
    partial: Float32Array = np.zeros(shape[:-1], np.float32)
    for i in range(FRAGMENT):
        partial = fma(left[..., i], right[..., i], partial)
    groups = -(-partial.shape[-1] // FRAGMENTS_PER_GROUP)
    lanes = np.zeros((*partial.shape[:-1], groups * FRAGMENTS_PER_GROUP), np.float32)
    lanes[..., : partial.shape[-1]] = partial
    lanes = lanes.reshape(*partial.shape[:-1], groups, FRAGMENTS_PER_GROUP)
    with np.errstate(all="ignore"):
        # Every lane of an xor butterfly ends with the same bits, since addition commutes: follow the lower half only.
        distance = FRAGMENTS_PER_GROUP // 2
        while distance:
            lanes = lanes[..., :distance] + lanes[..., distance:]
            distance //= 2
        total: Float32Array = lanes[..., 0, 0]
        for group in range(1, groups):
            total = total + lanes[..., group, 0]
    return total


def inverse_rms(p: BFloat16Array, eps: float) -> Float32Array:
    """1 / sqrt(mean of squares + eps): tree sum, division by H, addition and rsqrt, each rounded once.

    p [M, H] bf16 with H a multiple of 8; eps is taken as fp32. Returns [M] fp32.
    """
    require("p", p, (None, None), BFLOAT16)
    with np.errstate(all="ignore"):
        mean = tree_dot(p, p) / np.float32(p.shape[1])
        return rsqrt(mean + np.float32(eps))


def rms_norm(p: BFloat16Array, gamma: BFloat16Array, eps: float) -> BFloat16Array:
    """(p * inverse_rms(p)) * gamma, each product rounded to fp32, then rounded to bf16.

    p [M, H] bf16 with H a multiple of 8; gamma [H] bf16; eps is taken as fp32. Returns [M, H] bf16.
    """
    require("p", p, (None, None), BFLOAT16)
    require("gamma", gamma, (p.shape[1],), BFLOAT16)
    inverse = inverse_rms(p, eps)
    with np.errstate(all="ignore"):
        return round_bf16((widen(p) * inverse[:, None]) * widen(gamma))


def boundary(
    xs: Sequence[BFloat16Array],
    residual: BFloat16Array,
    post: Float32Array,
    comb: Float32Array,
    pre: Float32Array | None = None,
    gamma: BFloat16Array | None = None,
    eps: float | None = None,
) -> tuple[BFloat16Array, BFloat16Array | None]:
    """The whole boundary: all_reduce, mhc_post and, unless it is residual-only, collapse and rms_norm.

    xs: one [M, H] bf16 contribution for each rank (of a MoE: what `finalize` returns); residual [M, hc, H] bf16;
    post [M, hc] fp32; comb [M, hc, hc] fp32, [source, target]; pre [M, hc] fp32, gamma [H] bf16 and eps, or none of the
    three for the residual-only boundary.

    Returns residual_out [M, hc, H] bf16, and layer_input [M, H] bf16 or None.
    """
    streams = mhc_post(all_reduce(xs), residual, post, comb)
    if pre is None and gamma is None and eps is None:
        return streams, None
    if pre is None or gamma is None or eps is None:
        raise ValueError("boundary: expected pre, gamma and eps together, or none of them for residual-only")
    return streams, rms_norm(collapse(streams, pre), gamma, eps)


def rows_with_bad_index(expanded_idx_to_permuted_idx: AnyArray, permuted_rows: int) -> BoolArray:
    """Which rows have an index that is neither -1 nor a row of gemm2_permuted. [M, K] int32 to [M] bool."""
    idx = expanded_idx_to_permuted_idx
    bad: BoolArray = np.any((idx < -1) | (idx >= permuted_rows), axis=1)
    return bad


def finalize(
    gemm2_permuted: BFloat16Array,
    expert_weights: Float32Array,
    expanded_idx_to_permuted_idx: AnyArray,
    shared_output: BFloat16Array,
) -> BFloat16Array:
    """A rank's MoE contribution: the weighted sum of its experts' rows plus the shared expert.

    acc = fma(gemm2_permuted[idx[t, k]], weight[t, k], acc) from 0 in route order k, then acc + shared_output[t],
    rounded once to bf16, -0 cleared. Index -1 means that the expert is not on this rank: neither row nor weight is
    looked at. A row with any other index outside gemm2_permuted is NaN as a whole.

    gemm2_permuted [P, H] bf16; expert_weights [M, K] fp32; expanded_idx_to_permuted_idx [M, K] int32;
    shared_output [M, H] bf16. Returns [M, H] bf16.
    """
    require("gemm2_permuted", gemm2_permuted, (None, None), BFLOAT16)
    permuted_rows, hidden = gemm2_permuted.shape
    require("expert_weights", expert_weights, (None, None), np.float32)
    rows, top_k = expert_weights.shape
    idx = expanded_idx_to_permuted_idx
    require("expanded_idx_to_permuted_idx", idx, (rows, top_k), np.int32)
    require("shared_output", shared_output, (rows, hidden), BFLOAT16)
    bad = rows_with_bad_index(idx, permuted_rows)
    total = np.zeros((rows, hidden), np.float32)
    for k in range(top_k):
        held = np.flatnonzero((idx[:, k] != -1) & ~bad)
        total[held] = fma(gemm2_permuted[idx[held, k]], expert_weights[held, k, None], total[held])
    with np.errstate(all="ignore"):
        total = total + widen(shared_output)
    total[bad] = np.nan
    return clear_negative_zero(round_bf16(total))


def aux_mean(streams: BFloat16Array) -> BFloat16Array:
    """The mean of the streams: fp32 adds in stream order, division by hc, rounded once to bf16.

    streams [M, hc, H] bf16. Returns [M, H] bf16.
    """
    require("streams", streams, (None, None, None), BFLOAT16)
    total = widen(streams[:, 0])
    with np.errstate(all="ignore"):
        for i in range(1, streams.shape[1]):
            total = total + widen(streams[:, i])
        return round_bf16(total / np.float32(streams.shape[1]))
