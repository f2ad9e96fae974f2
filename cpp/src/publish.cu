// SPDX-License-Identifier: Apache-2.0
//
// Publishing: this rank's contribution goes into every rank's mailbox.
#include "kernels.h"
#include "launch.h"
#include "mhc/finalize.cuh"
#include "mhc/mailbox.cuh"
#include "mhc/mix.cuh"

namespace mhc {
namespace {

// The frame of a publishing kernel: ticket, rows, headers. The CTAs of a row are a cluster. `value` computes this
// thread's fragment.
template <typename Value>
__device__ __forceinline__ void publishRows(Mailbox const& box, Chunk const& chunk, Value value) {
    __shared__ uint32_t sequenceShared;
    __shared__ bool granted;
    __shared__ bool entered;
    // The consumer may start now: it waits for this grid, and what came before this grid is complete.
    ptx::gridDependencyWait();
    ptx::launchDependents();

    int const token = static_cast<int>(blockIdx.y);
    int const fragment = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
    if (threadIdx.x == 0)
        granted = takeTicket(box, token, chunk.owner, sequenceShared);
    if (threadIdx.x == 32)
        entered = blockIdx.x != 0 || enterLane(box, token, chunk.owner, chunk.rows);
    uint4 const v = clearNegativeZero(value(token, fragment));
    __syncthreads();
    bool const mine = granted && entered;
    if (mine)
        storeFragment(box, sequenceShared, token, fragment, v);
    if (box.headerLast) {
        __threadfence_system();
        ptx::clusterArrive();
        ptx::clusterWait();
    }
    if (!mine || blockIdx.x != 0)
        return;
    announceRow(box, token, sequenceShared, chunk.totalRows, chunk.operation);
}

__global__ void __launch_bounds__(kThreads)
    publishKernel(__grid_constant__ Mailbox const box, uint4 const* x, __grid_constant__ Chunk const chunk) {
    int const rowFragments = box.hiddenSize / kFragment;
    publishRows(box, chunk, [&](int token, int fragment) {
        return x[static_cast<size_t>(chunk.rowBegin + token) * rowFragments + fragment];
    });
}

__global__ void __launch_bounds__(kThreads) finalizePublishKernel(
    __grid_constant__ Mailbox const box, __grid_constant__ FinalizeInput const input,
    __grid_constant__ Chunk const chunk) {
    publishRows(box, chunk, [&](int token, int fragment) {
        return finalizeForMailbox(box, input, chunk.owner, chunk.rowBegin + token, token, fragment);
    });
}

// The rest of a publish whose producer stored the rows: one CTA a row.
__global__ void __launch_bounds__(32)
    markPublishedKernel(__grid_constant__ Mailbox const box, __grid_constant__ Chunk const chunk) {
    ptx::gridDependencyWait();
    ptx::launchDependents();
    int const token = static_cast<int>(blockIdx.x);
    bool granted = false;
    uint32_t sequence = 0;
    if (threadIdx.x == 0) {
        granted = takeTicket(box, token, chunk.owner, sequence);
        granted = enterLane(box, token, chunk.owner, chunk.rows) && granted;
    }
    granted = __shfl_sync(0xFFFFFFFFu, static_cast<int>(granted), 0) != 0;
    sequence = __shfl_sync(0xFFFFFFFFu, sequence, 0);
    if (!granted)
        return;
    __threadfence_system();  // the producer's rows before their header
    announceRow(box, token, sequence, chunk.totalRows, chunk.operation);
}

// Waits for all headers so that the consumer, launched after it, finds everything in place. Where ranks share a device
// this one CTA is all that ever waits there: consumers that spun would keep the peers' kernels off the device.
__global__ void __launch_bounds__(kThreads)
    gateKernel(__grid_constant__ Mailbox const box, __grid_constant__ Chunk const chunk) {
    ptx::gridDependencyWait();
    Deadline deadline(box);
    for (int i = static_cast<int>(threadIdx.x); i < chunk.rows * box.tpSize; i += kThreads) {
        int const token = i / box.tpSize;
        int const source = i % box.tpSize;
        uint4 const row = ptx::loadRelaxedDevice(reinterpret_cast<uint4 const*>(box.rows + token));
        // Nothing to wait for when the lane is stopped or nothing was published: the consumer says so.
        if (ptx::loadRelaxedDevice(&box.state->error) != MHC_ERROR_NONE || row.z != chunk.operation)
            return;
        uint4 const* headerAt = box.headers[box.rank] + headerOffset(box, generationOf(row.x), source, token);
        uint4 const expected = headerOf(box, row.x, chunk.totalRows, chunk.operation);
        uint4 header = ptx::loadRelaxedSystem(headerAt);
        bool late = false;
        while (headerMissing(header)) {
            if (!deadline.keepWaiting(late)) {
                if (late)
                    recordError(box, chunk.owner, {MHC_ERROR_TIMEOUT, source, chunk.rowBegin + token, row.x, 0, 0, 0});
                return;
            }
            header = ptx::loadRelaxedSystem(headerAt);
        }
        // A rank that is in another call may never send the rows that other threads here wait for.
        if (!sameHeader(header, expected)) {
            recordOtherHeader(box, chunk.owner, source, chunk.rowBegin + token, expected, header);
            return;
        }
    }
}

__global__ void fillKernel(uint4* words, size_t count) {
    size_t const step = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        words[i] = filled(kFillWord);
    }
}

dim3 rowGrid(int hidden, int rows) {
    return {static_cast<unsigned>(ctasPerRow(hidden)), static_cast<unsigned>(rows), 1};
}

}  // namespace

cudaError_t launchPublish(Mailbox const& box, uint4 const* x, Chunk const& chunk, Launch how, cudaStream_t stream) {
    return launchKernel(
        publishKernel, rowGrid(box.hiddenSize, chunk.rows), kThreads, ctasPerRow(box.hiddenSize), how, stream, box, x,
        chunk);
}

cudaError_t launchFinalizePublish(
    Mailbox const& box, FinalizeInput const& input, Chunk const& chunk, Launch how, cudaStream_t stream) {
    return launchKernel(
        finalizePublishKernel, rowGrid(box.hiddenSize, chunk.rows), kThreads, ctasPerRow(box.hiddenSize), how, stream,
        box, input, chunk);
}

cudaError_t launchMarkPublished(Mailbox const& box, Chunk const& chunk, cudaStream_t stream) {
    return launchKernel(
        markPublishedKernel, dim3(static_cast<unsigned>(chunk.rows)), 32, 1, Launch::kOverlapped, stream, box, chunk);
}

cudaError_t launchGate(Mailbox const& box, Chunk const& chunk, cudaStream_t stream) {
    return launchKernel(gateKernel, dim3(1), kThreads, 1, Launch::kPlain, stream, box, chunk);
}

cudaError_t launchFill(void* memory, size_t bytes, cudaStream_t stream) {
    constexpr unsigned kBlocks = 512;
    return launchKernel(
        fillKernel, dim3(kBlocks), kThreads, 1, Launch::kPlain, stream, static_cast<uint4*>(memory),
        bytes / sizeof(uint4));
}

cudaError_t loadPublishKernels() {
    return loadKernels(
        {kernelAddress(publishKernel), kernelAddress(finalizePublishKernel), kernelAddress(markPublishedKernel),
         kernelAddress(gateKernel), kernelAddress(fillKernel)});
}

}  // namespace mhc
