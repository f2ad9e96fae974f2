// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic between the mailbox and the norm, on one fragment of 8 elements: all-reduce, mHC post, collapse.
//
// R() is round-to-nearest-even to bf16; everything else is fp32 with explicit instructions, so that the compiler can
// neither contract nor reorder it:
//   s = 0, s += x_r for r = 0 .. tp-1;                                reduced = R(s)
//   m = reduced * post[i], m = fma(residual[j], comb[j][i], m);       y_i = R(m)
//   c = 0, c = fma(y_i, pre[i], c) for i = 0 .. 3;                    p = R(c)
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "mhc/mhc.h"

namespace mhc {

constexpr int kWords = 4;  // 32-bit words, of two bf16 each, in a fragment

__device__ __forceinline__ float lowHalf(uint32_t word) {
    return __uint_as_float(word << 16);
}
__device__ __forceinline__ float highHalf(uint32_t word) {
    return __uint_as_float(word & 0xFFFF0000u);
}

__device__ __forceinline__ uint32_t packRounded(float low, float high) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t const*>(&pair);
}

__device__ __forceinline__ uint32_t wordOf(uint4 const& v, int index) {
    return index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w;
}

__device__ __forceinline__ void setWord(uint4& v, int index, uint32_t word) {
    (index == 0 ? v.x : index == 1 ? v.y : index == 2 ? v.z : v.w) = word;
}

// The mixing weights of one token.
struct Mixes {
    float post[MHC_STREAMS];
    float comb[MHC_STREAMS][MHC_STREAMS];  // [source][target]
    float pre[MHC_STREAMS];
};

__device__ __forceinline__ void loadFour(float (&out)[MHC_STREAMS], float const* from) {
    float4 const v = *reinterpret_cast<float4 const*>(from);
    out[0] = v.x;
    out[1] = v.y;
    out[2] = v.z;
    out[3] = v.w;
}

// The ranks' sum, rounded: what an unfused all-reduce would have returned. kNoNegativeZero: none of the numbers is -0,
// so that adding the first one to 0 changes nothing.
template <int kTp, bool kNoNegativeZero>
__device__ __forceinline__ uint4 reduceRanks(uint4 const (&contributions)[kTp]) {
    uint4 reduced;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        float low = kNoNegativeZero ? lowHalf(wordOf(contributions[0], w)) : 0.0F;
        float high = kNoNegativeZero ? highHalf(wordOf(contributions[0], w)) : 0.0F;
#pragma unroll
        for (int r = kNoNegativeZero ? 1 : 0; r < kTp; ++r) {
            low = __fadd_rn(low, lowHalf(wordOf(contributions[r], w)));
            high = __fadd_rn(high, highHalf(wordOf(contributions[r], w)));
        }
        setWord(reduced, w, packRounded(low, high));
    }
    return reduced;
}

// One mixed stream: target `i` of the post mix.
__device__ __forceinline__ uint4
mixStream(uint4 reduced, uint4 const (&residual)[MHC_STREAMS], Mixes const& mixes, int i) {
    uint4 stream;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        float low = __fmul_rn(lowHalf(wordOf(reduced, w)), mixes.post[i]);
        float high = __fmul_rn(highHalf(wordOf(reduced, w)), mixes.post[i]);
#pragma unroll
        for (int j = 0; j < MHC_STREAMS; ++j) {
            low = __fmaf_rn(lowHalf(wordOf(residual[j], w)), mixes.comb[j][i], low);
            high = __fmaf_rn(highHalf(wordOf(residual[j], w)), mixes.comb[j][i], high);
        }
        setWord(stream, w, packRounded(low, high));
    }
    return stream;
}

__device__ __forceinline__ uint4 collapse(uint4 const (&streams)[MHC_STREAMS], Mixes const& mixes) {
    uint4 collapsed;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        float low = 0.0F;
        float high = 0.0F;
#pragma unroll
        for (int i = 0; i < MHC_STREAMS; ++i) {
            low = __fmaf_rn(lowHalf(wordOf(streams[i], w)), mixes.pre[i], low);
            high = __fmaf_rn(highHalf(wordOf(streams[i], w)), mixes.pre[i], high);
        }
        setWord(collapsed, w, packRounded(low, high));
    }
    return collapsed;
}

}  // namespace mhc
