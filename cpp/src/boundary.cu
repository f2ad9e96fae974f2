// SPDX-License-Identifier: Apache-2.0
//
// Choosing and launching the instance of the boundary kernel.
#include <algorithm>

#include "boundary_table.h"
#include "kernels.h"
#include "launch.h"

namespace mhc {
namespace {

KernelTable const& allKernels() {
    static KernelTable const table = [] {
        KernelTable all;
        for (KernelTable const& part :
             {localBoundaryKernels(), boundaryKernelsTp2(), boundaryKernelsTp4(), boundaryKernelsTp8()})
            all.insert(all.end(), part.begin(), part.end());
        return all;
    }();
    return table;
}

KernelEntry const* find(BoundaryShape const& shape) {
    int const clusterSize = shape.consumer == Consumer::kBoundary ? shape.hidden / kElementsPerCta : 1;
    for (KernelEntry const& entry : allKernels()) {
        if (entry.source == shape.source && entry.tp == shape.tp && entry.consumer == shape.consumer &&
            entry.clusterSize == clusterSize)
            return &entry;
    }
    return nullptr;
}

}  // namespace

bool hiddenSizeSupported(int hidden) {
    return hidden > 0 && hidden % kElementsPerCta == 0 &&
           find({Source::kLocal, Consumer::kBoundary, hidden, 1}) != nullptr;
}

cudaError_t launchBoundary(
    BoundaryShape const& shape, Mailbox const& box, BoundaryArgs const& args, Launch how, cudaStream_t stream) {
    KernelEntry const* entry = find(shape);
    if (entry == nullptr)
        return cudaErrorInvalidDeviceFunction;
    int const ctasPerRow = shape.hidden / kElementsPerCta;
    dim3 const grid(static_cast<unsigned>(ctasPerRow), static_cast<unsigned>(args.chunk.rows), 1);
    return launchKernel(entry->kernel, grid, kThreads, entry->clusterSize, how, stream, box, args);
}

cudaError_t residentExchangeRows(int hidden, int tp, int& rows) {
    int const ctasPerRow = hidden / kElementsPerCta;
    int device = 0;
    int multiprocessors = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    rows = 1 << 30;
    for (Consumer const consumer : {Consumer::kAllReduce, Consumer::kResidualOnly, Consumer::kBoundary}) {
        KernelEntry const* entry = find({Source::kExchange, consumer, hidden, tp});
        if (status != cudaSuccess || entry == nullptr)
            return status != cudaSuccess ? status : cudaErrorInvalidDeviceFunction;
        int resident = 0;
        if (entry->clusterSize == 1) {
            status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, entry->kernel, kThreads, 0);
            resident = resident * multiprocessors / ctasPerRow;
        } else {
            cudaLaunchAttribute attribute;
            attribute.id = cudaLaunchAttributeClusterDimension;
            attribute.val.clusterDim = {static_cast<unsigned>(entry->clusterSize), 1, 1};
            cudaLaunchConfig_t config{};
            config.gridDim = dim3(static_cast<unsigned>(ctasPerRow), 1, 1);
            config.blockDim = dim3(kThreads);
            config.attrs = &attribute;
            config.numAttrs = 1;
            status = cudaOccupancyMaxActiveClusters(&resident, entry->kernel, &config);
        }
        rows = std::min(rows, resident);
    }
    return status;
}

cudaError_t loadBoundaryKernels() {
    for (KernelEntry const& entry : allKernels()) {
        cudaError_t const status = loadKernels({kernelAddress(entry.kernel)});
        if (status != cudaSuccess)
            return status;
    }
    return cudaSuccess;
}

cudaError_t loadAllKernels() {
    for (auto const load : {loadPublishKernels, loadBoundaryKernels, loadCoefficientsKernels}) {
        cudaError_t const status = load();
        if (status != cudaSuccess)
            return status;
    }
    return cudaSuccess;
}

}  // namespace mhc
