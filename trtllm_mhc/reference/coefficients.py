# SPDX-License-Identifier: Apache-2.0
"""The mHC coefficients of one sublayer: post-mix, residual mix and the next pre-mix.

    mixes = (x @ fn^T) * rsqrt(mean(x^2) + rms_norm_eps)
    pre   = sigmoid(mixes[:hc] * scale[0] + base[:hc]) + hc_eps
    post  = sigmoid(mixes[hc:2*hc] * scale[1] + base[hc:2*hc]) * post_alpha
    comb  = Sinkhorn(softmax over targets(mixes[2*hc:] * scale[2] + base[2*hc:]) + hc_eps), as [source, target]

The first Sinkhorn round divides by the column sums only, every further one by row sums and then column sums, each sum
plus hc_eps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ._arrays import AnyArray, BFloat16Array, Float32Array, require
from .floats import fma, rsqrt
from .operations import tree_dot


class Coefficients(NamedTuple):
    """post [M, hc], comb [M, hc, hc] ([source, target]) and pre [M, hc], all fp32 (or all float64)."""

    post: AnyArray
    comb: AnyArray
    pre: AnyArray


def coefficients_float32(
    x: BFloat16Array,
    fn: Float32Array,
    scale: Float32Array,
    base: Float32Array,
    *,
    rms_norm_eps: float,
    hc_eps: float,
    post_alpha: float,
    sinkhorn_iters: int,
) -> Coefficients:
    """The coefficients in fp32, in a fixed order.

    Both sums over D are `tree_dot`s; the mean is the sum divided by D; 1/sqrt is rounded once; mixes * scale + base is
    one fma; exp is taken in float64 and rounded; sigmoid(v) = 1 / (1 + exp(-v)); softmax subtracts the row's maximum;
    sums of hc numbers are added in index order. Everything else is one fp32 operation after the other.

    x: the sublayer's entry streams, [M, hc, H] bf16, or [M, D] bf16 (the first layer's embedding, with the fn of
    `broadcast_projection`); fn [(2+hc)*hc, D] fp32 with D = hc*H; scale [3] fp32; base [(2+hc)*hc] fp32.
    D must be a multiple of 8. sinkhorn_iters: at least 1, the first round included.
    """
    flat, hc = _check(x, fn, scale, base, sinkhorn_iters)
    with np.errstate(all="ignore"):
        mean = tree_dot(flat, flat) / np.float32(flat.shape[1])
        inverse = rsqrt(mean + np.float32(rms_norm_eps))
        projection = np.stack([tree_dot(flat, row) for row in fn], axis=1)
        mixes = projection * inverse[:, None]
        logits = fma(mixes, _repeat_scale(scale, hc), base)
        return _from_logits(logits, hc, np.float32(hc_eps), np.float32(post_alpha), sinkhorn_iters)


def coefficients_float64(
    x: AnyArray,
    fn: AnyArray,
    scale: AnyArray,
    base: AnyArray,
    *,
    rms_norm_eps: float,
    hc_eps: float,
    post_alpha: float,
    sinkhorn_iters: int,
) -> Coefficients:
    """The same coefficients in float64, for judging fp32 ones.

    Arguments as `coefficients_float32`, of any floating dtype. The eps, and post_alpha, are first rounded to fp32,
    since those are the numbers that every implementation is given.
    """
    flat, hc = _check(x, fn, scale, base, sinkhorn_iters)
    wide = flat.astype(np.float64)
    with np.errstate(all="ignore"):
        inverse = 1 / np.sqrt(np.square(wide).mean(axis=1) + np.float64(np.float32(rms_norm_eps)))
        mixes = (wide @ fn.astype(np.float64).T) * inverse[:, None]
        logits = mixes * _repeat_scale(scale, hc).astype(np.float64) + base.astype(np.float64)
        eps, alpha = np.float64(np.float32(hc_eps)), np.float64(np.float32(post_alpha))
        return _from_logits(logits, hc, eps, alpha, sinkhorn_iters)


def broadcast_projection(fn: Float32Array, hc: int) -> Float32Array:
    """The projection for streams that are all equal, as the first layer's: fn summed over the streams in order.

    fn [(2+hc)*hc, hc*H] fp32. Returns [(2+hc)*hc, H] fp32.
    """
    require("fn", fn, (None, None), np.float32)
    outputs, width = fn.shape
    if hc < 1 or width % hc:
        raise ValueError(f"fn: expected a multiple of hc = {hc} columns, got {width}")
    streams = fn.reshape(outputs, hc, width // hc)
    total: Float32Array = streams[:, 0].copy()
    for i in range(1, hc):
        total = total + streams[:, i]
    return total


def _check(x: AnyArray, fn: AnyArray, scale: AnyArray, base: AnyArray, sinkhorn_iters: int) -> tuple[AnyArray, int]:
    require("base", base, (None,))
    hc = math.isqrt(base.shape[0] + 1) - 1
    if hc < 1 or (2 + hc) * hc != base.shape[0]:
        raise ValueError(f"base: expected (2 + hc) * hc elements for some hc >= 1, got {base.shape[0]}")
    if x.ndim == 3 and x.shape[1] != hc:
        raise ValueError(f"x: expected hc = {hc} streams (from base), got shape {list(x.shape)}")
    flat = x.reshape(x.shape[0], -1) if x.ndim == 3 else x
    require("x", flat, (None, None))
    require("fn", fn, (base.shape[0], flat.shape[1]))
    require("scale", scale, (3,))
    if sinkhorn_iters < 1:
        raise ValueError(f"sinkhorn_iters: expected at least 1, got {sinkhorn_iters}")
    return flat, hc


def _repeat_scale(scale: AnyArray, hc: int) -> AnyArray:
    return np.repeat(scale, [hc, hc, hc * hc])


def _from_logits(logits: AnyArray, hc: int, eps: Any, post_alpha: Any, sinkhorn_iters: int) -> Coefficients:
    """The elementwise part, in the dtype of `logits`."""
    pre = _sigmoid(logits[:, :hc]) + eps
    post = _sigmoid(logits[:, hc : 2 * hc]) * post_alpha
    square = logits[:, 2 * hc :].reshape(-1, hc, hc)
    comb = _exp(square - square.max(axis=2, keepdims=True))
    comb = comb / _sum(comb, axis=2) + eps
    comb = comb / (_sum(comb, axis=1) + eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (_sum(comb, axis=2) + eps)
        comb = comb / (_sum(comb, axis=1) + eps)
    return Coefficients(post, comb, pre)


def _exp(x: AnyArray) -> AnyArray:
    result: AnyArray = np.exp(x.astype(np.float64)).astype(x.dtype)
    return result


def _sigmoid(x: AnyArray) -> AnyArray:
    one = x.dtype.type(1)
    result: AnyArray = one / (one + _exp(-x))
    return result


def _sum(x: AnyArray, axis: int) -> AnyArray:
    """The sum over an axis in index order; the axis stays, with extent 1."""
    total = np.take(x, [0], axis)
    for i in range(1, x.shape[axis]):
        total = total + np.take(x, [i], axis)
    return total
