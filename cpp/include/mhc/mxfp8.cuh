// SPDX-License-Identifier: Apache-2.0
//
// MXFP8: E4M3 elements with one E8M0 scale per 32 of them.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "mhc/mix.cuh"
#include "mhc/mxfp8_layout.h"

namespace mhc {

// 1/448 rounded up to a power of two: the biased exponent, 0 for a block of zeros.
__device__ __forceinline__ uint32_t scaleExponent(float largest) {
    float const n = __fmul_rn(largest, 1.0F / 448.0F);
    if (!(n > 0.0F))
        return 0;
    uint32_t const bits = __float_as_uint(n);
    uint32_t exponent = bits >> 23;
    uint32_t const fraction = bits & 0x7FFFFFu;
    bool const subnormalAtMostHalf = exponent == 0 && fraction <= 0x400000u;
    if (fraction != 0 && !subnormalAtMostHalf)
        ++exponent;
    return exponent < 254u ? exponent : 254u;
}

// Quantises one fragment; the four threads of a block call it together. Returns 8 E4M3 bytes, sets the block's scale.
__device__ __forceinline__ uint2 quantiseFragment(uint4 const& fragment, uint32_t& exponent) {
    float largest = 0.0F;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        largest = fmaxf(largest, fmaxf(fabsf(lowHalf(wordOf(fragment, w))), fabsf(highHalf(wordOf(fragment, w)))));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
    exponent = scaleExponent(largest);
    float const inverse = exponent == 0 ? 0.0F : __uint_as_float((254u - exponent) << 23);
    uint32_t pairs[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        float2 const scaled{
            __fmul_rn(lowHalf(wordOf(fragment, w)), inverse), __fmul_rn(highHalf(wordOf(fragment, w)), inverse)};
        pairs[w] = __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
    }
    return {pairs[0] | (pairs[1] << 16), pairs[2] | (pairs[3] << 16)};
}

}  // namespace mhc
