// SPDX-License-Identifier: Apache-2.0
//
// Where the E8M0 scales of an MXFP8 tensor lie: the 128x4 layout that block-scaled GEMMs read.
#pragma once

#include <cstddef>

#include "mhc/mailbox.h"

namespace mhc {

constexpr int kScaleBlock = 32;       // elements that share a scale
constexpr int kScaleTileRows = 128;   // rows of a scale tile
constexpr int kScaleTileColumns = 4;  // scales of a row in a tile

// Scales of a row, padded to whole tiles.
MHC_HOST_DEVICE constexpr int scaleColumns(int hidden) {
    int const blocks = (hidden + kScaleBlock - 1) / kScaleBlock;
    return (blocks + kScaleTileColumns - 1) / kScaleTileColumns * kScaleTileColumns;
}

MHC_HOST_DEVICE constexpr int paddedScaleRows(int rows) {
    return (rows + kScaleTileRows - 1) / kScaleTileRows * kScaleTileRows;
}

// Byte offset of the scale of block `block` in row `row`. Four blocks of a row are one aligned 32-bit word.
MHC_HOST_DEVICE constexpr size_t scaleOffset(int row, int block, int columns) {
    return static_cast<size_t>(row / kScaleTileRows) * kScaleTileRows * columns +
           static_cast<size_t>(block / kScaleTileColumns) * kScaleTileRows * kScaleTileColumns + (row % 32) * 16 +
           (row % kScaleTileRows) / 32 * 4 + block % kScaleTileColumns;
}

}  // namespace mhc
