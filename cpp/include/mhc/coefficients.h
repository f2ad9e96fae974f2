// SPDX-License-Identifier: Apache-2.0
//
// The coefficients' kernels, as the host launches them.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "mhc/mhc.h"

namespace mhc {

constexpr int kCoefficients = MHC_STREAMS * (MHC_STREAMS + 2);  // pre, post, comb
constexpr int kSums = kCoefficients + 1;                        // and the sum of squares
constexpr int kGroupElements = 256;                             // features that one warp sums: 32 fragments of 8

struct CoefficientsInput {
    uint4 const* x;   // [rows, features] bf16
    float const* fn;  // [24, features]
    float const* scale;
    float const* base;
    float* partial;  // [rows, kSums, groups]
    int32_t rows;
    int32_t features;  // hc * H, or H for the first layer
    int32_t sinkhornIterations;
    float rmsNormEps;
    float hcEps;
    float postAlpha;
    float* post;
    float* comb;
    float* pre;
};

inline size_t coefficientsPartialBytes(int rows, int features) {
    return static_cast<size_t>(rows) * kSums * (features / kGroupElements) * sizeof(float);
}

}  // namespace mhc
