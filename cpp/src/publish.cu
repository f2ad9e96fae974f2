// SPDX-License-Identifier: Apache-2.0
//
// Publishing: this rank's contribution goes into every rank's mailbox.
#include "kernels.h"
#include "launch.h"
#include "mhc/mailbox.cuh"
#include "mhc/mix.cuh"

namespace mhc {
namespace {

// Stores one fragment at every rank, the neighbours first, so that the ranks do not all write to rank 0 at once.
__device__ __forceinline__ void storeFragment(Mailbox const& box, uint32_t sequence, int token, int fragment, uint4 v) {
    size_t const offset = slotOffset(box, generationOf(sequence), box.rank, token, fragment);
    int peer = box.rank;
    for (int i = 0; i < box.tpSize; ++i) {
        peer = peer + 1 == box.tpSize ? 0 : peer + 1;
        ptx::storeRelaxedSystem(box.slots[peer] + offset, v);
    }
}

// The frame of a publishing kernel: ticket, rows, header. `value` computes this thread's fragment.
template <typename Value>
__device__ __forceinline__ void publishRows(Mailbox const& box, Chunk const& chunk, Value value) {
    __shared__ uint32_t sequenceShared;
    __shared__ bool granted;
    __shared__ bool last;
    // The consumer may start now: it waits for this grid, and what came before this grid is complete.
    ptx::gridDependencyWait();
    ptx::launchDependents();

    if (threadIdx.x == 0)
        granted = takeTicket(box, chunk.owner, sequenceShared);
    int const token = static_cast<int>(blockIdx.y);
    int const fragment = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    uint4 const v = clearNegativeZero(value(chunk.rowBegin + token, fragment));
    __syncthreads();
    if (!granted)
        return;
    uint32_t const sequence = sequenceShared;
    storeFragment(box, sequence, token, fragment, v);

    if (!box.headerLast) {
        if (blockIdx.x == 0 && blockIdx.y == 0)
            publishHeader(box, sequence, chunk.totalRows, chunk.operation);
        return;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        last = atomicAdd(&box.state->publishArrivals, 1u) + 1 == gridDim.x * gridDim.y;
    }
    __syncthreads();
    if (!last)
        return;
    publishHeader(box, sequence, chunk.totalRows, chunk.operation);
    if (threadIdx.x == 0)
        box.state->publishArrivals = 0;
}

__global__ void __launch_bounds__(kThreads)
    publishKernel(__grid_constant__ Mailbox const box, uint4 const* x, __grid_constant__ Chunk const chunk) {
    int const rowFragments = box.hiddenSize / kFragment;
    publishRows(
        box, chunk, [&](int row, int fragment) { return x[static_cast<size_t>(row) * rowFragments + fragment]; });
}

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

__global__ void __launch_bounds__(kThreads) finalizePublishKernel(
    __grid_constant__ Mailbox const box, __grid_constant__ FinalizeInput const input,
    __grid_constant__ Chunk const chunk) {
    publishRows(box, chunk, [&](int row, int fragment) {
        BadIndex bad;
        uint4 const v = finalizeFragment(input, row, fragment, box.hiddenSize / kFragment, bad);
        // Only noted here: the whole call is still published, so that no peer waits; the consumer reports it.
        if (bad.found && fragment == 0 && atomicCAS(&box.state->badIndexToken, 0u, row + 1u) == 0u) {
            box.state->badIndex = static_cast<uint32_t>(bad.value);
            box.state->badIndexRows = static_cast<uint32_t>(input.permutedRows);
        }
        return v;
    });
}

__global__ void __launch_bounds__(kThreads)
    finalizeLocalKernel(__grid_constant__ FinalizeInput const input, uint4* out, int rowStride, int rowFragments) {
    int const row = static_cast<int>(blockIdx.y);
    int const fragment = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    BadIndex bad;
    ptx::gridDependencyWait();
    out[static_cast<size_t>(row) * rowStride + fragment] =
        clearNegativeZero(finalizeFragment(input, row, fragment, rowFragments, bad));
}

// Waits for all headers so that the consumer, launched after it, finds everything in place. Where ranks share a device
// this one warp is all that ever waits there: consumers that spun would keep the peers' kernels off the device.
__global__ void __launch_bounds__(32)
    gateKernel(__grid_constant__ Mailbox const box, __grid_constant__ Chunk const chunk) {
    ptx::gridDependencyWait();
    int const source = static_cast<int>(threadIdx.x);
    // Nothing to wait for when the lane is stopped or nothing was published: the consumer says so.
    if (source >= box.tpSize || ptx::loadRelaxedDevice(&box.state->error) != MHC_ERROR_NONE ||
        box.state->pending != chunk.operation)
        return;
    uint32_t const sequence = box.state->active;
    uint4 const* header = box.headers[box.rank] + headerOffset(box, generationOf(sequence), source);
    Deadline deadline(box);
    bool late = false;
    while (headerMissing(ptx::loadRelaxedSystem(header))) {
        if (deadline.keepWaiting(late))
            continue;
        if (late)
            recordError(box, MHC_ERROR_TIMEOUT, source, chunk.rowBegin, sequence, 0, 0, 0);
        return;
    }
}

__global__ void fillKernel(uint4* words, size_t count) {
    size_t const step = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        words[i] = filled(kFillWord);
    }
}

dim3 rowGrid(int hidden, int rows) {
    return {static_cast<unsigned>(hidden / kElementsPerCta), static_cast<unsigned>(rows), 1};
}

}  // namespace

cudaError_t launchPublish(Mailbox const& box, uint4 const* x, Chunk const& chunk, Launch how, cudaStream_t stream) {
    return launchKernel(publishKernel, rowGrid(box.hiddenSize, chunk.rows), kThreads, 1, how, stream, box, x, chunk);
}

cudaError_t launchFinalizePublish(
    Mailbox const& box, FinalizeInput const& input, Chunk const& chunk, Launch how, cudaStream_t stream) {
    return launchKernel(
        finalizePublishKernel, rowGrid(box.hiddenSize, chunk.rows), kThreads, 1, how, stream, box, input, chunk);
}

cudaError_t launchFinalizeLocal(
    FinalizeInput const& input, uint4* out, int rowStride, int rows, int hidden, cudaStream_t stream) {
    return launchKernel(
        finalizeLocalKernel, rowGrid(hidden, rows), kThreads, 1, Launch::kPlain, stream, input, out, rowStride,
        hidden / kFragment);
}

cudaError_t launchGate(Mailbox const& box, Chunk const& chunk, cudaStream_t stream) {
    return launchKernel(gateKernel, dim3(1), 32, 1, Launch::kPlain, stream, box, chunk);
}

cudaError_t launchFill(void* memory, size_t bytes, cudaStream_t stream) {
    constexpr unsigned kBlocks = 512;
    return launchKernel(
        fillKernel, dim3(kBlocks), kThreads, 1, Launch::kPlain, stream, static_cast<uint4*>(memory),
        bytes / sizeof(uint4));
}

cudaError_t loadPublishKernels() {
    return loadKernels(
        {kernelAddress(publishKernel), kernelAddress(finalizePublishKernel), kernelAddress(finalizeLocalKernel),
         kernelAddress(gateKernel), kernelAddress(fillKernel)});
}

}  // namespace mhc
