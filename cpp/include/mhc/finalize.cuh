// SPDX-License-Identifier: Apache-2.0
//
// The MoE's weighted sum over a token's experts, left to whoever publishes it.
#pragma once

#include <cstdint>

#include "mhc/finalize.h"
#include "mhc/mailbox.cuh"
#include "mhc/mix.cuh"

namespace mhc {

struct BadIndex {
    bool found = false;
    int value = 0;
};

// acc = fma(row, weight, acc) in route order from 0, one rounding after the shared expert is added. Index -1 names an
// expert of another rank, whose row is not read. Any other index outside the tensor makes the fragment NaN.
__device__ __forceinline__ uint4
finalizeFragment(FinalizeInput const& input, int row, int fragment, int rowFragments, BadIndex& bad) {
    float low[kWords] = {};
    float high[kWords] = {};
    int32_t const* index = input.index + static_cast<size_t>(row) * input.topK;
    float const* weights = input.weights + static_cast<size_t>(row) * input.topK;
    for (int k = 0; k < input.topK; ++k) {
        int const at = index[k];
        if (at == -1)
            continue;
        if (at < 0 || at >= input.permutedRows) {
            bad = {true, at};
            return filled(kNaNWord);
        }
        uint4 const v = input.permuted[static_cast<size_t>(at) * rowFragments + fragment];
        float const weight = weights[k];
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            low[w] = __fmaf_rn(lowHalf(wordOf(v, w)), weight, low[w]);
            high[w] = __fmaf_rn(highHalf(wordOf(v, w)), weight, high[w]);
        }
    }
    uint4 const shared = input.shared[static_cast<size_t>(row) * rowFragments + fragment];
    uint4 out;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        setWord(
            out, w,
            packRounded(
                __fadd_rn(low[w], lowHalf(wordOf(shared, w))), __fadd_rn(high[w], highHalf(wordOf(shared, w)))));
    }
    return out;
}

// The same for the mailbox's row `token`: a bad index stops the lane, but the call's rows are still published, so that
// no peer waits.
__device__ __forceinline__ uint4
finalizeForMailbox(Mailbox const& box, FinalizeInput const& input, uint32_t owner, int row, int token, int fragment) {
    BadIndex bad;
    uint4 const v = finalizeFragment(input, row, fragment, box.hiddenSize / kFragment, bad);
    if (bad.found && fragment == 0) {
        uint32_t const sequence = ptx::loadRelaxedDevice(&box.rows[token].next);
        uint32_t const rows = static_cast<uint32_t>(input.permutedRows);
        recordError(box, owner, {MHC_ERROR_INDEX, box.rank, row, sequence, rows, static_cast<uint32_t>(bad.value), 0});
    }
    return v;
}

}  // namespace mhc
