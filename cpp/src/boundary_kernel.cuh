// SPDX-License-Identifier: Apache-2.0
//
// The boundary: all ranks' contributions, then all-reduce, mHC post, collapse, RMSNorm and, if asked, MXFP8.
//
// One thread handles 8 consecutive elements of one row and all its streams; a CTA of 128 threads 1024 of them. The CTAs
// of a row are a cluster: the norm needs the whole row, and the mailbox must know when all of it is consumed.
#pragma once

#include "boundary_table.h"
#include "kernels.h"
#include "mhc/finalize.cuh"
#include "mhc/mailbox.cuh"
#include "mhc/mix.cuh"
#include "mhc/mxfp8.cuh"
#include "mhc/rms_norm.cuh"

namespace mhc {
namespace {

constexpr int kWarps = kThreads / 32;
// Up to this M the next kernel is let in at once; beyond, its CTAs take room from this one's (docs/performance.md).
constexpr unsigned kEarlyRows = 16;

// Of the call this kernel consumes, or the reason why it must not.
struct Call {
    uint32_t sequence;
    bool usable;
};

__device__ __forceinline__ Call currentCall(Mailbox const& box, BoundaryArgs const& args, int token) {
    uint4 const row = ptx::loadRelaxedDevice(reinterpret_cast<uint4 const*>(box.rows + token));
    uint32_t const error = ptx::loadRelaxedDevice(&box.state->error);
    uint32_t const sequence = row.x;
    uint32_t const ticket = row.y;
    if (error != MHC_ERROR_NONE)
        return {sequence, false};
    // A consumer that was launched with its publish owns the ticket; one that follows a producer's publish cannot know
    // the producer's number.
    bool const ticketOk = args.publishedByProducer ? ticket != 0 : ticket == args.chunk.owner;
    bool const noteOk = row.z == args.chunk.operation && row.w == static_cast<uint32_t>(args.chunk.totalRows);
    if (ticketOk && noteOk)
        return {sequence, true};
    if (threadIdx.x == 0) {
        auto const kind = ticketOk || ticket == 0 ? MHC_ERROR_NOT_PUBLISHED : MHC_ERROR_TICKET;
        recordError(
            box, args.chunk.owner,
            {kind, box.rank, args.chunk.rowBegin + token, sequence, args.chunk.operation, row.z, 0});
    }
    return {sequence, false};
}

// Waits for this thread's fragment of every rank and, warp by warp, for all headers. kOwnKept: this rank's own fragment
// is in contributions[rank] already and is not looked for. False: the lane has an error.
template <int kTp, bool kOwnKept>
__device__ __forceinline__ bool collect(
    Mailbox const& box, Chunk const& chunk, uint32_t sequence, int token, int fragment, uint4 (&contributions)[kTp]) {
    uint32_t const generation = generationOf(sequence);
    int const lane = static_cast<int>(threadIdx.x & 31u);
    bool const readsHeader = lane < kTp && !(kOwnKept && lane == box.rank);
    uint4 const* slot = box.slots[box.rank] + slotOffset(box, generation, 0, token, fragment);
    size_t const rankStride = static_cast<size_t>(box.capacity) * (box.hiddenSize / kFragment);
    uint4 const* headerAt = box.headers[box.rank] + headerOffset(box, generation, readsHeader ? lane : 0, token);
    uint4 const expected = headerOf(box, sequence, chunk.totalRows, chunk.operation);
    Deadline deadline(box);
    while (true) {
        int missing = -1;
#pragma unroll
        for (int r = 0; r < kTp; ++r) {
            if (!kOwnKept || r != box.rank)
                contributions[r] = ptx::loadRelaxedSystem(slot + r * rankStride);
        }
        uint4 const header = ptx::loadRelaxedSystem(headerAt);
#pragma unroll
        for (int r = kTp - 1; r >= 0; --r) {
            if (hasSentinel(contributions[r]))
                missing = r;
        }
        bool other = false;
        if (readsHeader) {
            if (headerMissing(header)) {
                missing = lane;
            } else {
                other = !sameHeader(header, expected);
            }
        }
        // The whole warp leaves together: a lane that went ahead would wait for the others in the norm's shuffles.
        if (__any_sync(0xFFFFFFFFu, other)) {
            if (other)
                recordOtherHeader(box, chunk.owner, lane, chunk.rowBegin + token, expected, header);
            return false;
        }
        if (__all_sync(0xFFFFFFFFu, missing < 0))
            return true;
        bool late = false;
        bool const waiting = deadline.keepWaiting(late);
        if (__all_sync(0xFFFFFFFFu, waiting))
            continue;
        if (__any_sync(0xFFFFFFFFu, late) && missing >= 0)
            recordError(box, chunk.owner, {MHC_ERROR_TIMEOUT, missing, chunk.rowBegin + token, sequence, 0, 0, 0});
        return false;
    }
}

template <int kTp, bool kOwnKept>
__device__ __forceinline__ void rearm(Mailbox const& box, uint32_t sequence, int token, int fragment) {
    uint4* slot = box.slots[box.rank] + slotOffset(box, generationOf(sequence), 0, token, fragment);
    size_t const rankStride = static_cast<size_t>(box.capacity) * (box.hiddenSize / kFragment);
#pragma unroll
    for (int r = 0; r < kTp; ++r) {
        if (!kOwnKept || r != box.rank)
            slot[r * rankStride] = filled(kFillWord);
    }
}

// This rank's own fragment, as it is published.
__device__ __forceinline__ uint4
ownFragment(Mailbox const& box, BoundaryArgs const& args, int row, int token, int fragment, size_t at) {
    return clearNegativeZero(
        args.finalize.topK > 0 ? finalizeForMailbox(box, args.finalize, args.chunk.owner, row, token, fragment)
                               : args.x[at]);
}

// Ends the row's call once all its CTAs have consumed. Called by the first warp of its first CTA. Plain stores do:
// until this grid has completed, only an enqueue that must not be there could look.
template <int kTp>
__device__ __forceinline__ void finishRow(Mailbox const& box, uint32_t sequence, int token) {
    int const lane = static_cast<int>(threadIdx.x);
    if (lane < kTp)
        box.headers[box.rank][headerOffset(box, generationOf(sequence), lane, token)] = filled(kFillWord);
    if (lane == 0) {
        uint32_t const next = sequence + 1 == kSequenceLimit ? 0 : sequence + 1;
        *reinterpret_cast<uint4*>(box.rows + token) = {next, 0, 0, 0};
    }
}

struct Operands {
    uint4 residual[MHC_STREAMS];
    Mixes mixes;
};

template <Consumer kConsumer>
__device__ __forceinline__ void loadOperands(
    BoundaryArgs const& args, int row, int fragment, int rowFragments, Operands& o) {
    if constexpr (kConsumer != Consumer::kAllReduce) {
        size_t const first = static_cast<size_t>(row) * MHC_STREAMS;
#pragma unroll
        for (int j = 0; j < MHC_STREAMS; ++j)
            o.residual[j] = args.residual[(first + j) * rowFragments + fragment];
        loadFour(o.mixes.post, args.post + first);
#pragma unroll
        for (int j = 0; j < MHC_STREAMS; ++j) {
            loadFour(o.mixes.comb[j], args.comb + first * MHC_STREAMS + j * MHC_STREAMS);
        }
        if constexpr (kConsumer == Consumer::kBoundary)
            loadFour(o.mixes.pre, args.pre + first);
    }
}

// Zero scales for the rows that pad the last tile: a GEMM may load them, and a random E8M0 byte can be NaN.
__device__ __forceinline__ void zeroPaddedScales(BoundaryArgs const& args, int hidden, int token, int fragment) {
    int const columns = scaleColumns(hidden);
    int const wordsPerRow = columns / kScaleTileColumns;
    int const total = args.chunk.totalRows;
    int const words = (paddedScaleRows(total) - total) * wordsPerRow;
    int const step = args.chunk.rows * (hidden / kFragment);
    for (int i = token * (hidden / kFragment) + fragment; i < words; i += step) {
        size_t const at = scaleOffset(total + i / wordsPerRow, i % wordsPerRow * kScaleTileColumns, columns);
        *reinterpret_cast<uint32_t*>(args.scales + at) = 0;
    }
}

// The same without a mailbox to note a bad index in: the row is NaN.
__device__ __forceinline__ uint4
ownFragmentLocal(BoundaryArgs const& args, int row, int fragment, int rowFragments, size_t at) {
    if (args.finalize.topK == 0)
        return args.x[at];
    BadIndex bad;
    return finalizeFragment(args.finalize, row, fragment, rowFragments, bad);
}

// kTp is 1 for Source::kLocal. kClusterSize is H / 1024 for a boundary with a norm, else 0: any.
template <int kTp, Source kSource, Consumer kConsumer, int kClusterSize>
__global__ void __launch_bounds__(kThreads)
    boundaryKernel(__grid_constant__ Mailbox const box, __grid_constant__ BoundaryArgs const args) {
    constexpr bool kNorm = kConsumer == Consumer::kBoundary;
    constexpr bool kMailbox = kSource != Source::kLocal;
    constexpr bool kOwnKept = kSource == Source::kExchange;
    constexpr bool kClustered = kNorm || kMailbox;
    int const token = static_cast<int>(blockIdx.y);
    int const row = args.chunk.rowBegin + token;
    int const fragment = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    int const rowFragments = static_cast<int>(gridDim.x) * kThreads;
    size_t const at = static_cast<size_t>(row) * rowFragments + fragment;

    // What comes next may start: it waits for this grid before it reads or takes anything.
    bool const early = gridDim.y <= kEarlyRows;
    if (early)
        ptx::launchDependents();
    __shared__ float rowFailed;  // of the row's first CTA
    if constexpr (kClustered) {
        // The CTAs of a cluster store into each other's shared memory below; by then all of them must have started.
        if (threadIdx.x == 0)
            rowFailed = 0.0F;
        ptx::clusterArrive();
    }
    uint4 gamma;
    if constexpr (kNorm)
        gamma = args.gamma[fragment];  // a weight: no kernel writes it
    Operands operands;
    if (args.preload)
        loadOperands<kConsumer>(args, row, fragment, rowFragments, operands);
    ptx::gridDependencyWait();

    uint4 contributions[kTp];
    uint32_t sequence = 0;
    bool arrived = true;
    if constexpr (kSource == Source::kExchange) {
        __shared__ uint32_t sequenceShared;
        __shared__ bool granted;
        if (threadIdx.x == 0)
            granted = takeTicket(box, token, args.chunk.owner, sequenceShared);
        uint4 const own = ownFragment(box, args, row, token, fragment, at);
        loadOperands<kConsumer>(args, row, fragment, rowFragments, operands);
        __syncthreads();
        sequence = sequenceShared;
        arrived = granted;
        if (arrived) {
            storeFragment<false>(box, sequence, token, fragment, own);
            if (blockIdx.x == 0)
                publishHeader<false>(box, token, headerOf(box, sequence, args.chunk.totalRows, args.chunk.operation));
        }
#pragma unroll
        for (int r = 0; r < kTp; ++r) {
            if (r == box.rank)
                contributions[r] = own;
        }
    } else {
        if (!args.preload)
            loadOperands<kConsumer>(args, row, fragment, rowFragments, operands);
        if constexpr (kSource == Source::kLocal) {
            contributions[0] = ownFragmentLocal(args, row, fragment, rowFragments, at);
        } else {
            Call const call = currentCall(box, args, token);
            sequence = call.sequence;
            arrived = __all_sync(0xFFFFFFFFu, call.usable);
        }
    }
    if constexpr (kMailbox) {
        arrived = arrived && collect<kTp, kOwnKept>(box, args.chunk, sequence, token, fragment, contributions);
        // NaN in the sum makes everything NaN that is computed from it.
        if (!arrived)
            contributions[0] = filled(kNaNWord);
    }

    if (!early)
        ptx::launchDependents();

    uint4 const reduced = reduceRanks(contributions);
    uint4 collapsed;
    if constexpr (kConsumer == Consumer::kAllReduce) {
        args.residualOut[at] = reduced;
    } else {
        uint4 streams[MHC_STREAMS];
#pragma unroll
        for (int i = 0; i < MHC_STREAMS; ++i) {
            streams[i] = mixStream(reduced, operands.residual, operands.mixes, i);
            args.residualOut[(static_cast<size_t>(row) * MHC_STREAMS + i) * rowFragments + fragment] = streams[i];
        }
        if constexpr (kNorm)
            collapsed = collapse(streams, operands.mixes);
    }
    if constexpr (kMailbox) {
        if (arrived)
            rearm<kTp, kOwnKept>(box, sequence, token, fragment);
    }
    if constexpr (!kClustered)
        return;

    constexpr int kGroups = kNorm ? kWarps * kClusterSize : 1;
    __shared__ float groupSums[kGroups];
    [[maybe_unused]] float sum = 0.0F;
    if constexpr (kNorm)
        sum = sumOfSquares(collapsed);
    ptx::clusterWait();
    if constexpr (kNorm) {
        int const lane = static_cast<int>(threadIdx.x & 31u);
        int const group = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x >> 5u);
        if (lane < kClusterSize)
            ptx::storeCluster(&groupSums[group], static_cast<uint32_t>(lane), sum);
    }
    if constexpr (kMailbox) {
        if (!arrived)
            ptx::storeCluster(&rowFailed, 0, 1.0F);
    }
    ptx::clusterArrive();
    ptx::clusterWait();
    if constexpr (kMailbox) {
        if (blockIdx.x == 0 && threadIdx.x < 32u && rowFailed == 0.0F)
            finishRow<kTp>(box, sequence, token);
    }
    if constexpr (kNorm) {
        float total = groupSums[0];
#pragma unroll
        for (int g = 1; g < kGroups; ++g)
            total = __fadd_rn(total, groupSums[g]);
        uint4 const normalised = normalise(collapsed, gamma, inverseRms(total, rowFragments * kFragment, args.eps));
        args.layerInput[at] = normalised;
        if (args.quantised != nullptr) {
            uint32_t exponent;
            args.quantised[at] = quantiseFragment(normalised, exponent);
            int const hidden = rowFragments * kFragment;
            constexpr int kThreadsPerBlock = kScaleBlock / kFragment;
            if (fragment % kThreadsPerBlock == 0) {
                args.scales[scaleOffset(row, fragment / kThreadsPerBlock, scaleColumns(hidden))] =
                    static_cast<uint8_t>(exponent);
            }
            zeroPaddedScales(args, hidden, token, fragment);
        }
    }
}

template <int kTp, Source kSource>
KernelTable makeTable() {
    constexpr auto kFull = Consumer::kBoundary;
    return {
        {kSource, kTp, Consumer::kAllReduce, 0, boundaryKernel<kTp, kSource, Consumer::kAllReduce, 0>},
        {kSource, kTp, Consumer::kResidualOnly, 0, boundaryKernel<kTp, kSource, Consumer::kResidualOnly, 0>},
        {kSource, kTp, kFull, 4, boundaryKernel<kTp, kSource, kFull, 4>},
        {kSource, kTp, kFull, 5, boundaryKernel<kTp, kSource, kFull, 5>},
        {kSource, kTp, kFull, 7, boundaryKernel<kTp, kSource, kFull, 7>},
    };
}

}  // namespace
}  // namespace mhc
