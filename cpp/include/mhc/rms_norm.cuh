// SPDX-License-Identifier: Apache-2.0
//
// RMSNorm with one order of additions, whatever the launch: 8-element fragments by fma in index order, 32 fragments
// (256 elements, one warp) by the butterfly 16, 8, 4, 2, 1, then these groups in index order.
#pragma once

#include <cstdint>

#include "mhc/mix.cuh"
#include "mhc/ptx.cuh"

namespace mhc {

// The sum of squares of the warp's 256 elements; every lane gets it.
__device__ __forceinline__ float sumOfSquares(uint4 const& fragment) {
    float sum = 0.0F;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        float const low = lowHalf(wordOf(fragment, w));
        float const high = highHalf(wordOf(fragment, w));
        sum = __fmaf_rn(low, low, sum);
        sum = __fmaf_rn(high, high, sum);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1) {
        sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, distance));
    }
    return sum;
}

// eps stays fp32 to the end: V4.1's 1e-20 vanishes beside any real mean square and keeps an all-zero row at 0.
__device__ __forceinline__ float inverseRms(float sum, int elements, float eps) {
    return __frsqrt_rn(__fadd_rn(__fdiv_rn(sum, static_cast<float>(elements)), eps));
}

__device__ __forceinline__ uint4 normalise(uint4 const& fragment, uint4 const& gamma, float inverse) {
    uint4 out;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        uint32_t const p = wordOf(fragment, w);
        uint32_t const g = wordOf(gamma, w);
        setWord(
            out, w,
            packRounded(
                __fmul_rn(__fmul_rn(lowHalf(p), inverse), lowHalf(g)),
                __fmul_rn(__fmul_rn(highHalf(p), inverse), highHalf(g))));
    }
    return out;
}

}  // namespace mhc
