// SPDX-License-Identifier: Apache-2.0
//
// What the host side knows of the kernels: their arguments and how to launch them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "mhc/coefficients.h"
#include "mhc/finalize.h"
#include "mhc/mailbox.h"
#include "mhc/mhc.h"
#include "mhc/publish_linear.h"

namespace mhc {

// Rows [rowBegin, rowBegin + rows) of a call of totalRows go through the mailbox at once.
struct Chunk {
    int32_t rowBegin;
    int32_t rows;
    int32_t totalRows;
    uint32_t owner;      // number of the enqueue, never 0
    uint32_t operation;  // operationWord of what is published
};

struct BoundaryArgs {
    Chunk chunk;
    uint4 const* x;          // with finalize.topK 0; not read where the contribution is in the mailbox already
    FinalizeInput finalize;  // likewise
    uint4 const* residual;
    float const* post;
    float const* comb;
    float const* pre;
    uint4 const* gamma;
    float eps;
    uint4* residualOut;  // or the sum of an all-reduce
    uint4* layerInput;
    uint2* quantised;  // nullptr: no MXFP8
    uint8_t* scales;
    int32_t publishedByProducer;
    int32_t preload;  // 1: the kernel before this one has waited for everything earlier, so inputs may be read at once
};

// Where a boundary kernel finds the contributions.
enum class Source {
    kLocal,     // there is only this rank's own
    kMailbox,   // in the mailbox, published by an earlier kernel
    kExchange,  // this kernel publishes this rank's and waits for the others': all its CTAs must be resident at once
};

struct BoundaryShape {
    Source source;
    Consumer consumer;
    int hidden;
    int tp;
};

constexpr int kMaxLaunchRows = 65535;  // rows are the grid's y dimension

constexpr int kManyRowsCtas = 2;  // of a row, where there are many rows

// The CTAs of a row, which are a cluster wherever they must know of each other.
constexpr int ctasPerRow(int hidden) {
    return hidden / kElementsPerCta;
}

enum class Launch { kPlain, kOverlapped };  // kOverlapped: programmatic dependent launch

// "Not arrived" everywhere; `bytes` is a multiple of 16.
cudaError_t launchFill(void* memory, size_t bytes, cudaStream_t stream);
cudaError_t launchPublish(Mailbox const& box, uint4 const* x, Chunk const& chunk, Launch how, cudaStream_t stream);
cudaError_t launchFinalizePublish(
    Mailbox const& box, FinalizeInput const& input, Chunk const& chunk, Launch how, cudaStream_t stream);
// The ticket, header and note of rows that a producer has stored.
cudaError_t launchMarkPublished(Mailbox const& box, Chunk const& chunk, cudaStream_t stream);
cudaError_t launchGate(Mailbox const& box, Chunk const& chunk, cudaStream_t stream);
cudaError_t launchBoundary(
    BoundaryShape const& shape, Mailbox const& box, BoundaryArgs const& args, Launch how, cudaStream_t stream);

// How far a lane's all-reduces through NCCL have come, in device memory.
struct NcclProgress {
    uint32_t started;
    uint32_t finished;
    uint32_t epoch;  // of the communicator that is in use
};

// The same for the host, in its memory.
struct NcclBeat {
    uint32_t started;
    uint32_t finished;
};

// Before NCCL's all-reduce: counts it, and records indices outside of what is finalized.
cudaError_t launchNcclBegin(
    Mailbox const& box, NcclProgress* progress, NcclBeat* beat, FinalizeInput const& finalize, Chunk const& chunk,
    cudaStream_t stream);
// After it: counts it, and where the lane has an error, or another epoch, makes `fragments` fragments of `sum` NaN.
cudaError_t launchNcclEnd(
    Mailbox const& box, NcclProgress* progress, NcclBeat* beat, uint32_t epoch, uint4* sum, size_t fragments,
    uint32_t owner, cudaStream_t stream);

// rows >= 1.
cudaError_t launchCoefficients(CoefficientsInput const& input, cudaStream_t stream);

// Writes input.out only, for any number of rows.
cudaError_t launchLinear(LinearInput const& input, int hidden, cudaStream_t stream);
// Publishes as well; chunk.rows <= kLinearTileRows.
cudaError_t launchPublishLinear(Mailbox const& box, LinearInput const& input, Chunk const& chunk, cudaStream_t stream);

bool hiddenSizeSupported(int hidden);

// Rows of which an exchanging kernel's CTAs are resident at once on the current device, whatever the consumer.
cudaError_t residentExchangeRows(int hidden, int tp, int& rows);

// Loads every kernel onto the current device. A kernel that is loaded on first use can stall behind one that spins.
cudaError_t loadAllKernels();

}  // namespace mhc
