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

// Where this thread's fragment of every rank arrives.
template <int kTp>
class Arrivals {
public:
    __device__ __forceinline__
    Arrivals(Mailbox const& box, uint32_t generation, int token, int fragment, int rowFragments)
        : rankStride_(static_cast<uint32_t>(box.capacity) * static_cast<uint32_t>(rowFragments)),
          slot_(
              box.slots[box.rank] + (generation * kTp * rankStride_ + static_cast<uint32_t>(token * rowFragments) +
                                     static_cast<uint32_t>(fragment))) {}
    __device__ __forceinline__ uint4* of(int rank) const { return slot_ + static_cast<uint32_t>(rank) * rankStride_; }

private:
    uint32_t rankStride_;  // in 16-byte units
    uint4* slot_;
};

// Waits for this thread's fragment of every rank; the row's first warp also for all headers, and compares them.
// kOwnKept: `own` is this rank's own fragment, which is not looked for. False: the lane has an error.
template <int kTp, bool kOwnKept>
__device__ __forceinline__ bool collect(
    Mailbox const& box, Chunk const& chunk, uint32_t sequence, int token, Arrivals<kTp> const& arrivals, uint4 own,
    uint4 (&contributions)[kTp]) {
    bool const headerWarp = blockIdx.x == 0 && threadIdx.x < 32u;
    int const lane = static_cast<int>(threadIdx.x & 31u);
    Deadline deadline(box);
    while (true) {
        // The sum of two does not depend on their order.
        if constexpr (kTp == 2 && kOwnKept) {
            contributions[0] = own;
            contributions[1] = ptx::loadRelaxedSystem(arrivals.of(box.rank ^ 1));
        } else {
#pragma unroll
            for (int r = 0; r < kTp; ++r) {
                contributions[r] = own;
                if (!kOwnKept || r != box.rank)
                    contributions[r] = ptx::loadRelaxedSystem(arrivals.of(r));
            }
        }
        bool headerMissed = false;
        bool otherCall = false;
        uint4 header{};
        if (headerWarp && lane < kTp && !(kOwnKept && lane == box.rank)) {
            header =
                ptx::loadRelaxedSystem(box.headers[box.rank] + headerOffset(box, generationOf(sequence), lane, token));
            headerMissed = headerMissing(header);
            otherCall = !headerMissed && !sameHeader(header, headerOf(box, sequence, chunk.totalRows, chunk.operation));
        }
        uint32_t sentinels = 0;
#pragma unroll
        for (int r = kTp == 2 && kOwnKept ? 1 : 0; r < kTp; ++r)
            sentinels |= sentinelBits(contributions[r]);
        bool const here = sentinels == 0 && !headerMissed && !otherCall;
        // The whole warp leaves together: a lane that went ahead would wait for the others in the norm's shuffles.
        if (__all_sync(0xFFFFFFFFu, here))
            return true;
        if (__any_sync(0xFFFFFFFFu, otherCall)) {
            if (otherCall) {
                recordOtherHeader(
                    box, chunk.owner, lane, chunk.rowBegin + token,
                    headerOf(box, sequence, chunk.totalRows, chunk.operation), header);
            }
            return false;
        }
        bool late = false;
        bool const waiting = deadline.keepWaiting(late);
        if (__all_sync(0xFFFFFFFFu, waiting))
            continue;
        if (__any_sync(0xFFFFFFFFu, late) && !here) {
            int missing = lane;
#pragma unroll
            for (int r = kTp - 1; r >= 0; --r) {
                if (sentinelBits(contributions[r]) != 0)
                    missing = kTp == 2 && kOwnKept ? box.rank ^ 1 : r;
            }
            recordError(box, chunk.owner, {MHC_ERROR_TIMEOUT, missing, chunk.rowBegin + token, sequence, 0, 0, 0});
        }
        return false;
    }
}

template <int kTp, bool kOwnKept>
__device__ __forceinline__ void rearm(Mailbox const& box, Arrivals<kTp> const& arrivals) {
    if constexpr (kTp == 2 && kOwnKept) {
        *arrivals.of(box.rank ^ 1) = filled(kFillWord);
    } else {
#pragma unroll
        for (int r = 0; r < kTp; ++r) {
            if (!kOwnKept || r != box.rank)
                *arrivals.of(r) = filled(kFillWord);
        }
    }
}

// This rank's own fragment, as it is published.
__device__ __forceinline__ uint4
ownFragment(Mailbox const& box, BoundaryArgs const& args, int row, int token, int fragment, uint4 const* x) {
    return clearNegativeZero(
        args.finalize.topK > 0 ? finalizeForMailbox(box, args.finalize, args.chunk.owner, row, token, fragment) : *x);
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

// Where this thread's operands and results are; worked out before the wait for the kernel before.
struct Places {
    uint4 const* x;
    uint4 const* residual;
    float const* post;
    float const* comb;
    float const* pre;
    uint4* residualOut;
    uint4* layerInput;

    __device__ __forceinline__ Places(BoundaryArgs const& args, int row, int fragment, int rowFragments) {
        size_t const at = static_cast<size_t>(row) * rowFragments + fragment;
        size_t const streamsAt = static_cast<size_t>(row) * MHC_STREAMS * rowFragments + fragment;
        x = ptx::pinned(args.x + at);
        residual = ptx::pinned(args.residual + streamsAt);
        post = ptx::pinned(args.post + static_cast<size_t>(row) * MHC_STREAMS);
        comb = ptx::pinned(args.comb + static_cast<size_t>(row) * MHC_STREAMS * MHC_STREAMS);
        pre = ptx::pinned(args.pre + static_cast<size_t>(row) * MHC_STREAMS);
        residualOut = ptx::pinned(args.residualOut + streamsAt);
        layerInput = ptx::pinned(args.layerInput + at);
    }
};

template <Consumer kConsumer>
__device__ __forceinline__ void loadOperands(Places const& places, int rowFragments, Operands& o) {
    if constexpr (kConsumer != Consumer::kAllReduce) {
#pragma unroll
        for (int j = 0; j < MHC_STREAMS; ++j)
            o.residual[j] = places.residual[j * rowFragments];
        loadFour(o.mixes.post, places.post);
#pragma unroll
        for (int j = 0; j < MHC_STREAMS; ++j)
            loadFour(o.mixes.comb[j], places.comb + j * MHC_STREAMS);
        if constexpr (kConsumer == Consumer::kBoundary)
            loadFour(o.mixes.pre, places.pre);
    }
}

// Zero scales for the rows that pad the last tile: a GEMM may load them, and a random E8M0 byte can be NaN. The tile's
// 16 consecutive bytes hold four scales of each of four rows, 32 rows apart.
__device__ __forceinline__ void zeroPaddedScales(BoundaryArgs const& args, int token, int fragment, int rowFragments) {
    int const columns = scaleColumns(rowFragments * kFragment);
    int const total = args.chunk.totalRows;
    int const lastTile = (total - 1) / kScaleTileRows * kScaleTileRows;
    int const live = total - lastTile;
    int const units = columns / kScaleTileColumns * 32;
    int const step = args.chunk.rows * rowFragments;
#pragma unroll 1
    for (int i = token * rowFragments + fragment; i < units; i += step) {
        size_t const at = scaleOffset(lastTile + i % 32, i / 32 * kScaleTileColumns, columns);
        int const liveRows = (live - i % 32 + 31) / 32;  // of the unit's four
        if (liveRows <= 0) {
            *reinterpret_cast<uint4*>(args.scales + at) = {0, 0, 0, 0};
            continue;
        }
#pragma unroll 1
        for (int k = liveRows; k < 4; ++k)
            reinterpret_cast<uint32_t*>(args.scales + at)[k] = 0;
    }
}

// Stores the four scales of 16 neighbouring threads as one word.
__device__ __forceinline__ void storeScales(
    BoundaryArgs const& args, uint32_t exponent, int row, int fragment, int rowFragments) {
    constexpr int kThreadsPerBlock = kScaleBlock / kFragment;
    constexpr int kThreadsPerWord = kThreadsPerBlock * kScaleTileColumns;
    uint32_t word = exponent << (8 * (fragment / kThreadsPerBlock % kScaleTileColumns));
    word |= __shfl_xor_sync(0xFFFFFFFFu, word, kThreadsPerBlock);
    word |= __shfl_xor_sync(0xFFFFFFFFu, word, 2 * kThreadsPerBlock);
    if (fragment % kThreadsPerWord == 0) {
        size_t const at = scaleOffset(row, fragment / kThreadsPerBlock, scaleColumns(rowFragments * kFragment));
        *reinterpret_cast<uint32_t*>(args.scales + at) = word;
    }
}

// The same without a mailbox to note a bad index in: the row is NaN.
__device__ __forceinline__ uint4
ownFragmentLocal(BoundaryArgs const& args, int row, int fragment, int rowFragments, uint4 const* x) {
    if (args.finalize.topK == 0)
        return *x;
    BadIndex bad;
    return finalizeFragment(args.finalize, row, fragment, rowFragments, bad);
}

// kTp is 1 for Source::kLocal. A row is kCtas CTAs (0: any number, without a norm) of kCtaThreads threads.
template <int kTp, Source kSource, Consumer kConsumer, int kCtas, int kCtaThreads>
__global__ void __launch_bounds__(kCtaThreads)
    boundaryKernel(__grid_constant__ Mailbox const box, __grid_constant__ BoundaryArgs const args) {
    constexpr bool kNorm = kConsumer == Consumer::kBoundary;
    constexpr bool kMailbox = kSource != Source::kLocal;
    constexpr bool kOwnKept = kSource == Source::kExchange;
    constexpr bool kTogether = kNorm || kMailbox;  // the threads of a row tell each other something
    constexpr int kWarps = kCtaThreads / 32;
    static_assert(kCtas != 0 || !kNorm);
    int const token = static_cast<int>(blockIdx.y);
    int const row = args.chunk.rowBegin + token;
    int const fragment = static_cast<int>(blockIdx.x * kCtaThreads + threadIdx.x);
    int const rowFragments = (kCtas > 0 ? kCtas : static_cast<int>(gridDim.x)) * kCtaThreads;
    int const lane = static_cast<int>(threadIdx.x & 31u);

    // What the row's warps tell each other: a sum of squares, and whether they have found everything.
    constexpr int kGroups = kWarps * (kCtas > 0 ? kCtas : kMaxCtas);
    __shared__ __align__(16) uint2 reports[kGroups];
    __shared__ __align__(8) uint64_t reported;
    if constexpr (kTogether) {
        if (threadIdx.x == 0)
            ptx::expectBytes(&reported, static_cast<uint32_t>(rowFragments / 32 * sizeof(uint2)));
        ptx::clusterArriveRelaxed();
    }
    Places const places(args, row, fragment, rowFragments);
    uint4 gamma;
    if constexpr (kNorm)
        gamma = args.gamma[fragment];  // a weight: no kernel writes it
    Operands operands;
    if (args.preload)
        loadOperands<kConsumer>(places, rowFragments, operands);
    ptx::gridDependencyWait();

    uint4 contributions[kTp];
    uint4 own{};
    uint32_t sequence = 0;
    bool arrived = true;
    if constexpr (kSource == Source::kExchange) {
        __shared__ uint32_t sequenceShared;
        __shared__ bool granted;
        __shared__ bool entered;
        if (threadIdx.x == 0)
            granted = takeTicket(box, token, args.chunk.owner, sequenceShared);
        if (threadIdx.x == 32)
            entered = blockIdx.x != 0 || enterLane(box, token, args.chunk.owner, args.chunk.rows);
        own = ownFragment(box, args, row, token, fragment, places.x);
        loadOperands<kConsumer>(places, rowFragments, operands);
        __syncthreads();
        sequence = sequenceShared;
        arrived = granted && entered;
        if (arrived) {
            if (blockIdx.x == 0)
                publishHeader<false>(box, token, headerOf(box, sequence, args.chunk.totalRows, args.chunk.operation));
            size_t const at = slotOffset<kTp>(box, generationOf(sequence), token, fragment, rowFragments);
#pragma unroll
            for (int i = 1; i < kTp; ++i)
                ptx::storeRelaxedSystem(box.slots[(box.rank + i) & (kTp - 1)] + at, own);
        }
    } else {
        if (!args.preload)
            loadOperands<kConsumer>(places, rowFragments, operands);
        if constexpr (kSource == Source::kLocal) {
            contributions[0] = ownFragmentLocal(args, row, fragment, rowFragments, places.x);
        } else {
            Call const call = currentCall(box, args, token);
            sequence = call.sequence;
            arrived = __all_sync(0xFFFFFFFFu, call.usable);
        }
    }
    // What comes next may start: it waits for this grid before it reads or takes anything. Earlier its CTAs would be in
    // the way of this one's loads (docs/performance.md).
    ptx::launchDependents();
    Arrivals<kTp> const arrivals(box, generationOf(sequence), token, fragment, rowFragments);
    if constexpr (kMailbox) {
        arrived = arrived && collect<kTp, kOwnKept>(box, args.chunk, sequence, token, arrivals, own, contributions);
        // NaN in the sum makes everything NaN that is computed from it.
        if (!arrived) {
#pragma unroll
            for (int r = 0; r < kTp; ++r)
                contributions[r] = filled(kNaNWord);
        }
    }

    uint4 const reduced = reduceRanks<kTp, kMailbox>(contributions);
    uint4 collapsed;
    if constexpr (kConsumer == Consumer::kAllReduce) {
        args.residualOut[static_cast<size_t>(row) * rowFragments + fragment] = reduced;
    } else {
        uint4 streams[MHC_STREAMS];
#pragma unroll
        for (int i = 0; i < MHC_STREAMS; ++i) {
            streams[i] = mixStream(reduced, operands.residual, operands.mixes, i);
            places.residualOut[i * rowFragments] = streams[i];
        }
        if constexpr (kNorm)
            collapsed = collapse(streams, operands.mixes);
    }
    if constexpr (kMailbox) {
        if (arrived)
            rearm<kTp, kOwnKept>(box, arrivals);
    }
    if constexpr (!kTogether)
        return;

    float sum = 0.0F;
    if constexpr (kNorm)
        sum = sumOfSquares(collapsed);
    uint2 const report{__float_as_uint(sum), arrived ? 0u : 1u};
    int const group = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x >> 5u);
    if constexpr (kTogether) {
        ptx::clusterWait();
        if (lane < rowFragments / kCtaThreads)
            ptx::storeAsync(&reports[group], static_cast<uint32_t>(lane), report, &reported);
        if constexpr (kNorm) {
            if (args.quantised != nullptr)
                zeroPaddedScales(args, token, fragment, rowFragments);
        }
        ptx::waitForBytes(&reported);
    }
    float total = 0.0F;
    uint32_t failed = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        if (kCtas > 0 || g < rowFragments / 32) {
            uint2 const found = reports[g];
            total = g == 0 ? __uint_as_float(found.x) : __fadd_rn(total, __uint_as_float(found.x));
            failed |= found.y;
        }
    }
    if constexpr (kMailbox) {
        if (failed != 0) {
            // Some of the row's threads found all they looked for, and the row is not to be used all the same.
            if constexpr (kConsumer == Consumer::kAllReduce) {
                args.residualOut[static_cast<size_t>(row) * rowFragments + fragment] = filled(kNaNWord);
            } else {
#pragma unroll
                for (int i = 0; i < MHC_STREAMS; ++i)
                    places.residualOut[i * rowFragments] = filled(kNaNWord);
            }
            collapsed = filled(kNaNWord);
        } else if (blockIdx.x == 0 && threadIdx.x < 32u) {
            finishRow<kTp>(box, sequence, token);
        }
    }
    if constexpr (kNorm) {
        uint4 const normalised = normalise(collapsed, gamma, inverseRms(total, rowFragments * kFragment, args.eps));
        *places.layerInput = normalised;
        if (args.quantised != nullptr) {
            uint32_t exponent;
            args.quantised[static_cast<size_t>(row) * rowFragments + fragment] = quantiseFragment(normalised, exponent);
            storeScales(args, exponent, row, fragment, rowFragments);
        }
    }
}

template <int kTp, Source kSource, int kHidden>
void addBoundaries(KernelTable& table) {
    constexpr int kFragments = kHidden / kFragment;
    constexpr auto kFull = Consumer::kBoundary;
    table.push_back(
        {kSource, kTp, kFull, kFragments / kThreads, kThreads,
         boundaryKernel<kTp, kSource, kFull, kFragments / kThreads, kThreads>});
    table.push_back(
        {kSource, kTp, kFull, kManyRowsCtas, kFragments / kManyRowsCtas,
         boundaryKernel<kTp, kSource, kFull, kManyRowsCtas, kFragments / kManyRowsCtas>});
}

template <int kTp, Source kSource>
KernelTable makeTable() {
    KernelTable table{
        {kSource, kTp, Consumer::kAllReduce, 0, kThreads,
         boundaryKernel<kTp, kSource, Consumer::kAllReduce, 0, kThreads>},
        {kSource, kTp, Consumer::kResidualOnly, 0, kThreads,
         boundaryKernel<kTp, kSource, Consumer::kResidualOnly, 0, kThreads>},
    };
    addBoundaries<kTp, kSource, 4096>(table);
    addBoundaries<kTp, kSource, 5120>(table);
    addBoundaries<kTp, kSource, 7168>(table);
    return table;
}

}  // namespace
}  // namespace mhc
