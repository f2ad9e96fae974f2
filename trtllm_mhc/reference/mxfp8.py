# SPDX-License-Identifier: Apache-2.0
"""MXFP8 quantisation of the layer input: E4M3 data, one E8M0 scale for each 32 elements, scales swizzled 128x4.

The swizzled layout is that of the block-scaled GEMMs of cuBLAS and FlashInfer: tiles of 128 rows by 4 scales, 512
bytes each. Inside a tile, the 4 scales of a row are adjacent, and rows that are 32 apart follow each other.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ._arrays import BFLOAT16, FLOAT8, BFloat16Array, Float8Array, Float32Array, UInt8Array, require
from .floats import widen

BLOCK = 32  # elements that share a scale
TILE_ROWS = 128
TILE_SCALES = 4
E4M3_MAX = np.float32(448)
_ONE_OVER_E4M3_MAX = np.float32(1 / 448)


def scale_bytes(rows: int, hidden: int) -> int:
    """Bytes of the swizzled scales of a [rows, hidden] tensor. hidden must be a multiple of 32."""
    row_tiles, scale_tiles = _tiles(rows, hidden)
    return row_tiles * scale_tiles * TILE_ROWS * TILE_SCALES


def quantize(layer_input: BFloat16Array) -> tuple[Float8Array, UInt8Array]:
    """Quantises a layer input to what the boundary writes.

    layer_input [M, H] bf16, H a multiple of 32. Returns data [M, H] float8_e4m3fn and the swizzled scales, uint8
    [scale_bytes(M, H)], where padding is 0.

    A block's scale comes from its largest magnitude; NaN elements are passed over for that. An infinity makes the scale
    254 and its inverse 0: the infinity itself becomes NaN and the other elements of the block 0.
    """
    require("layer_input", layer_input, (None, None), BFLOAT16)
    rows, hidden = layer_input.shape
    _tiles(rows, hidden)
    values = widen(layer_input).reshape(rows, hidden // BLOCK, BLOCK)
    with np.errstate(all="ignore"):
        largest = np.where(np.isnan(values), np.float32(0), np.abs(values)).max(axis=2)
        scales = e8m0_round_up(largest * _ONE_OVER_E4M3_MAX)
        data = to_e4m3(values * inverse_scale(scales)[:, :, None])
    return data.reshape(rows, hidden), swizzle_scales(scales)


def e8m0_round_up(x: Float32Array) -> UInt8Array:
    """The exponent byte of the smallest power of two that is not below x, for fp32 of any shape.

    Byte e stands for 2^(e-127). 0 where x <= 2^-127 or is not positive; at most 254. NaN gives 254.
    """
    require("x", x, (None,) * x.ndim, np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    exponent = (bits >> 23) & 255
    fraction = bits & 0x7FFFFF
    # Denormals up to 2^-127 are exact or rounded up to byte 0 itself.
    above_power = (fraction != 0) & ~((exponent == 0) & (fraction <= 0x400000))
    rounded = np.minimum(exponent + above_power, 254)
    with np.errstate(all="ignore"):
        return np.where(x <= 0, 0, rounded).astype(np.uint8)


def inverse_scale(scales: UInt8Array) -> Float32Array:
    """What elements are multiplied by: 2^(127-e) as fp32, and 0 for the bytes 0 and 254."""
    exponent = np.where(scales == 0, 0, 254 - scales.astype(np.int64)).astype(np.uint32)
    return (exponent << 23).view(np.float32)


def to_e4m3(x: Float32Array) -> Float8Array:
    """fp32 to E4M3, round to nearest even, saturating at +-448 (infinities too); NaN stays NaN. Any shape."""
    require("x", x, (None,) * x.ndim, np.float32)
    with np.errstate(all="ignore"):
        return np.clip(x, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)


def swizzle_scales(scales: UInt8Array) -> UInt8Array:
    """Scales [M, H/32] uint8 into the 128x4 layout, uint8 [scale_bytes(M, H)]; padding rows and columns are 0."""
    require("scales", scales, (None, None), np.uint8)
    rows, groups = scales.shape
    out = np.zeros(scale_bytes(rows, groups * BLOCK), np.uint8)
    padded_groups = -(-groups // TILE_SCALES) * TILE_SCALES
    row = np.arange(rows)[:, None]
    group = np.arange(groups)[None, :]
    offset = (row // TILE_ROWS) * (TILE_ROWS * padded_groups)
    offset = offset + (group // TILE_SCALES) * (TILE_ROWS * TILE_SCALES)
    offset = offset + (row % 32) * 16 + ((row % TILE_ROWS) // 32) * 4 + group % TILE_SCALES
    out[offset] = scales
    return out


def unswizzle_scales(swizzled: UInt8Array, rows: int, hidden: int) -> tuple[UInt8Array, UInt8Array]:
    """Reads the 128x4 layout by its tiles, independently of `swizzle_scales`.

    swizzled: uint8 [scale_bytes(rows, hidden)]. Returns the scales [rows, hidden/32] and all padding bytes, flat.
    """
    require("swizzled", swizzled, (scale_bytes(rows, hidden),), np.uint8)
    row_tiles, scale_tiles = _tiles(rows, hidden)
    tiles = swizzled.reshape(row_tiles, scale_tiles, 32, TILE_ROWS // 32, TILE_SCALES)
    table = tiles.transpose(0, 3, 2, 1, 4).reshape(row_tiles * TILE_ROWS, scale_tiles * TILE_SCALES)
    groups = hidden // BLOCK
    padding = np.concatenate([table[rows:].ravel(), table[:rows, groups:].ravel()])
    return table[:rows, :groups].copy(), padding


def dequantize(data: Float8Array, swizzled: UInt8Array) -> Float32Array:
    """The numbers that quantised data stands for: data [M, H] float8_e4m3fn times 2^(scale - 127), fp32 [M, H]."""
    require("data", data, (None, None), FLOAT8)
    rows, hidden = data.shape
    scales, _ = unswizzle_scales(swizzled, rows, hidden)
    factors = np.ldexp(1.0, scales.astype(np.int32) - 127)
    values = data.astype(np.float64).reshape(rows, hidden // BLOCK, BLOCK) * factors[:, :, None]
    return values.astype(np.float32).reshape(rows, hidden)


def _tiles(rows: int, hidden: int) -> tuple[int, int]:
    if rows < 0 or hidden <= 0 or hidden % BLOCK:
        raise ValueError(
            f"expected rows >= 0 and a hidden size that is a positive multiple of {BLOCK}; got [{rows}, {hidden}]"
        )
    return -(-rows // TILE_ROWS), -(-(hidden // BLOCK) // TILE_SCALES)
