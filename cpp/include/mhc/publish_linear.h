// SPDX-License-Identifier: Apache-2.0
//
// The linear layer whose output goes straight into the mailbox: sizes, and what its kernel takes.
#pragma once

#include <vector_types.h>

#include <cstdint>

namespace mhc {

constexpr int kLinearTileRows = 64;        // tokens that one pass over the weights serves
constexpr int kLinearFeatureStep = 128;    // in_features is a multiple of it
constexpr int kLinearMaxFeatures = 16384;  // of one rank
constexpr int kWeightBlock = 32;           // rows and columns of weights that one UE8M0 scale belongs to

struct LinearInput {
    int32_t rows;             // M
    int32_t features;         // K
    uint4 const* activation;  // [M,K] bf16
    uint4 const* weight;      // [H,K] bf16, or E4M3 with scales
    uint32_t const* scales;   // [H/32,K/128], four UE8M0 bytes a word; nullptr for bf16
    uint4* out;               // [M,H] bf16
};

}  // namespace mhc
