# SPDX-License-Identifier: Apache-2.0
"""The linear layer that publishes its output: out[m, n] = sum over k of activation[m, k] * weight[n, k].

E4M3 weights have one UE8M0 scale for each block of 32 rows and 32 columns. Weight times scale is rounded to bf16, which
changes nothing unless it leaves bf16's range. All sums are fp32, the result is rounded once to bf16, and -0 becomes +0.

What tensor cores do within one instruction is not specified, so the reference is no bit-exact model of the sums but a
float64 evaluation and a bound. Where all partial sums are integers below 2^24 every order of additions is exact, and
the bits are defined.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ._arrays import (
    BFLOAT16,
    FLOAT8,
    AnyArray,
    BFloat16Array,
    BoolArray,
    Float8Array,
    Float32Array,
    Float64Array,
    UInt8Array,
    require,
)
from .floats import round_bf16
from .operations import clear_negative_zero

WEIGHT_BLOCK = 32  # rows and columns of weights that share a scale
FEATURE_STEP = 128  # K is a multiple of it
_TERMS_PER_INSTRUCTION = 16
_SCALES_PER_WORD = 4


def pack_weight_scales(scales: UInt8Array) -> AnyArray:
    """UE8M0 bytes [H/32, K/32] as the plugin takes them: int32 [H/32, K/128], the first byte the lowest."""
    require("scales", scales, (None, None), np.uint8)
    if scales.shape[1] % _SCALES_PER_WORD:
        raise ValueError(f"scales: expected a multiple of {_SCALES_PER_WORD} columns, got {scales.shape[1]}")
    return np.ascontiguousarray(scales).view("<i4")


def unpack_weight_scales(words: AnyArray) -> UInt8Array:
    """The inverse of `pack_weight_scales`."""
    require("words", words, (None, None), np.int32)
    return np.ascontiguousarray(words).view(np.uint8)


def dequantize_weight(weight: Float8Array, scales: UInt8Array) -> BFloat16Array:
    """E4M3 [H, K] times 2^(byte - 127) of its block, rounded to bf16; byte 255 is NaN. scales: uint8 [H/32, K/32]."""
    require("weight", weight, (None, None), FLOAT8)
    rows, features = weight.shape
    if rows % WEIGHT_BLOCK or features % WEIGHT_BLOCK:
        raise ValueError(f"weight: expected multiples of {WEIGHT_BLOCK} in [H, K], got {list(weight.shape)}")
    require("scales", scales, (rows // WEIGHT_BLOCK, features // WEIGHT_BLOCK), np.uint8)
    with np.errstate(all="ignore"):
        # At most 4 significant bits times a power of two, down to 2^-136: exact in fp32.
        return round_bf16(weight.astype(np.float32) * _spread(scales))


def publish_linear_float64(activation: AnyArray, weight: AnyArray, scales: UInt8Array | None = None) -> Float64Array:
    """The sums without any rounding but float64's; no dtypes are asked for.

    Args:
        activation: [M, K].
        weight: [H, K].
        scales: uint8 [H/32, K/32], UE8M0; None: 1.
    """
    require("activation", activation, (None, None))
    return np.asarray(activation.astype(np.float64) @ _wide_weight(weight, scales, activation.shape[1]).T)


def publish_linear(activation: BFloat16Array, weight: AnyArray, scales: UInt8Array | None = None) -> BFloat16Array:
    """The float64 sums as the layer's output, [M, H] bf16. The layer's bits where its sums are exact in fp32.

    Args:
        activation: [M, K] bf16.
        weight: [H, K] bf16, or float8_e4m3fn with `scales`.
        scales: uint8 [H/32, K/32], UE8M0.
    """
    require("activation", activation, (None, None), BFLOAT16)
    if scales is not None:
        weight = dequantize_weight(weight, scales)
    require("weight", weight, (None, activation.shape[1]), BFLOAT16)
    with np.errstate(all="ignore"):
        total = publish_linear_float64(activation, weight).astype(np.float32)
    return clear_negative_zero(round_bf16(total))


def publish_linear_agrees(
    out: BFloat16Array, activation: BFloat16Array, weight: AnyArray, scales: UInt8Array | None = None
) -> BoolArray:
    """Which elements of an output [M, H] bf16 lie within the bound of what fp32 sums may give.

    The bound is k * 2^-24 * (sum of the terms' magnitudes) plus half a unit in the last place of bf16, with
    k = 17/16 * 2 * K + 8. Products of bf16 are exact in fp32. One instruction adds 16 of them to a running sum; each of
    these 17 addends may lose less than one unit in the 24th bit of the largest, 2^-23 of the magnitudes' sum, to
    truncation. There are K/16 instructions; then 8 partial sums are added with 2^-24 each.
    """
    require("out", out, (activation.shape[0], weight.shape[0]), BFLOAT16)
    features = activation.shape[1]
    exact = publish_linear_float64(activation, weight, scales)
    magnitudes = np.abs(activation.astype(np.float64)) @ np.abs(_wide_weight(weight, scales, features)).T
    factor = 2 * features * (_TERMS_PER_INSTRUCTION + 1) / _TERMS_PER_INSTRUCTION + 8
    sums = factor * 2.0**-24 * magnitudes
    rounding = 2.0**-8 * (np.abs(exact) + sums)
    return np.asarray(np.abs(out.astype(np.float64) - exact) <= sums + rounding)


def _spread(scales: UInt8Array) -> Float32Array:
    """The factor of every weight, fp32 [H, K]."""
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return np.asarray(powers.repeat(WEIGHT_BLOCK, axis=0).repeat(WEIGHT_BLOCK, axis=1))


def _wide_weight(weight: AnyArray, scales: UInt8Array | None, features: int) -> Float64Array:
    require("weight", weight, (None, features))
    wide = weight.astype(np.float64)
    if scales is None:
        return wide
    require("scales", scales, (weight.shape[0] // WEIGHT_BLOCK, features // WEIGHT_BLOCK), np.uint8)
    return np.asarray(wide * _spread(scales))
