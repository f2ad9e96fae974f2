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

// To the peers and to this rank's consumer. Called by one CTA.
__device__ __forceinline__ void announce(Mailbox const& box, uint32_t sequence, Chunk const& chunk) {
    publishHeader<true>(box, sequence, chunk.totalRows, chunk.operation);
    if (threadIdx.x == 0)
        markPending(box, sequence, chunk.totalRows, chunk.operation);
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
    storeFragment<true>(box, sequence, token, fragment, v);

    if (!box.headerLast) {
        if (blockIdx.x == 0 && blockIdx.y == 0)
            announce(box, sequence, chunk);
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
    announce(box, sequence, chunk);
    if (threadIdx.x == 0)
        box.state->publishArrivals = 0;
}

__global__ void __launch_bounds__(kThreads)
    publishKernel(__grid_constant__ Mailbox const box, uint4 const* x, __grid_constant__ Chunk const chunk) {
    int const rowFragments = box.hiddenSize / kFragment;
    publishRows(
        box, chunk, [&](int row, int fragment) { return x[static_cast<size_t>(row) * rowFragments + fragment]; });
}

__global__ void __launch_bounds__(kThreads) finalizePublishKernel(
    __grid_constant__ Mailbox const box, __grid_constant__ FinalizeInput const input,
    __grid_constant__ Chunk const chunk) {
    publishRows(box, chunk, [&](int row, int fragment) { return finalizeForMailbox(box, input, row, fragment); });
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
        {kernelAddress(publishKernel), kernelAddress(finalizePublishKernel), kernelAddress(gateKernel),
         kernelAddress(fillKernel)});
}

}  // namespace mhc
