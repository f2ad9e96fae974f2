// SPDX-License-Identifier: Apache-2.0
//
// A MoE output left unfinalized, as kernels take it.
#pragma once

#include <vector_types.h>

#include <cstdint>

namespace mhc {

struct FinalizeInput {
    uint4 const* permuted;  // [permutedRows, H]
    float const* weights;   // [M, topK]
    int32_t const* index;   // [M, topK]
    uint4 const* shared;    // [M, H]
    int32_t topK;           // 0: nothing to finalize
    int32_t permutedRows;
};

}  // namespace mhc
