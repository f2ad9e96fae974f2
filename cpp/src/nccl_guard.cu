// SPDX-License-Identifier: Apache-2.0
//
// The kernels before and after NCCL's all-reduce; nccl_path.h says what they are for.
#include "kernels.h"
#include "launch.h"
#include "mhc/mailbox.cuh"

namespace mhc {
namespace {

constexpr unsigned kMostBlocks = 128;
constexpr int kEndThreads = 1024;

__global__ void __launch_bounds__(kThreads) beginKernel(
    __grid_constant__ Mailbox const box, NcclProgress* progress, NcclBeat* beat,
    __grid_constant__ FinalizeInput const finalize, __grid_constant__ Chunk const chunk) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        uint32_t const started = progress->started + 1;
        progress->started = started;
        *const_cast<uint32_t volatile*>(&beat->started) = started;
    }
    // Finalized without a mailbox, a bad index only makes its row NaN; the record is made here.
    int const routes = chunk.rows * finalize.topK;
    int const step = static_cast<int>(gridDim.x) * kThreads;
    for (int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x); i < routes; i += step) {
        int const row = chunk.rowBegin + i / finalize.topK;
        int const at = finalize.index[static_cast<size_t>(chunk.rowBegin) * finalize.topK + i];
        if (at < -1 || at >= finalize.permutedRows) {
            recordError(
                box, chunk.owner,
                {MHC_ERROR_INDEX, box.rank, row, 0, static_cast<uint32_t>(finalize.permutedRows),
                 static_cast<uint32_t>(at), 0});
        }
    }
}

// One CTA: a read of the host's memory takes a microsecond, and those of several CTAs come one after another. Making
// the sum NaN may take its time.
__global__ void __launch_bounds__(kEndThreads) endKernel(
    __grid_constant__ Mailbox const box, NcclProgress* progress, NcclBeat* beat, uint32_t epoch, uint4* sum,
    size_t fragments, uint32_t owner) {
    __shared__ bool failed;
    if (threadIdx.x == 0) {
        uint32_t const told = *const_cast<uint32_t const volatile*>(&box.record->kind);
        uint32_t const error = ptx::loadRelaxedDevice(&box.state->error);
        uint32_t const now = progress->epoch;
        failed = error != MHC_ERROR_NONE || told != MHC_ERROR_NONE || now != epoch;
        if (told != MHC_ERROR_NONE && error == MHC_ERROR_NONE) {
            // The host has stopped the lane; other kernels look at the device's word.
            atomicCAS(&box.state->error, 0u, told);
            if (box.trapOnError)
                __trap();
        } else if (now != epoch && error == MHC_ERROR_NONE) {
            recordError(box, owner, {MHC_ERROR_NCCL, -1, -1, 0, now, epoch, 2});
        }
        uint32_t const finished = progress->finished + 1;
        progress->finished = finished;
        *const_cast<uint32_t volatile*>(&beat->finished) = finished;
    }
    __syncthreads();
    if (!failed)
        return;
    for (size_t i = threadIdx.x; i < fragments; i += kEndThreads)
        sum[i] = filled(kNaNWord);
}

}  // namespace

cudaError_t launchNcclBegin(
    Mailbox const& box, NcclProgress* progress, NcclBeat* beat, FinalizeInput const& finalize, Chunk const& chunk,
    cudaStream_t stream) {
    unsigned const routes = static_cast<unsigned>(chunk.rows) * static_cast<unsigned>(finalize.topK);
    unsigned const blocks = 1 + (routes == 0 ? 0 : (routes - 1) / kThreads);
    return launchKernel(
        beginKernel, dim3(blocks < kMostBlocks ? blocks : kMostBlocks), kThreads, 1, Launch::kPlain, stream, box,
        progress, beat, finalize, chunk);
}

cudaError_t launchNcclEnd(
    Mailbox const& box, NcclProgress* progress, NcclBeat* beat, uint32_t epoch, uint4* sum, size_t fragments,
    uint32_t owner, cudaStream_t stream) {
    return launchKernel(
        endKernel, dim3(1), kEndThreads, 1, Launch::kPlain, stream, box, progress, beat, epoch, sum, fragments, owner);
}

cudaError_t loadNcclKernels() {
    return loadKernels({kernelAddress(beginKernel), kernelAddress(endKernel)});
}

}  // namespace mhc
