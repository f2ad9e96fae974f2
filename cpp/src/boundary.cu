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
    for (KernelEntry const& entry : allKernels()) {
        if (entry.source == shape.source && entry.tp == shape.tp && entry.consumer == shape.consumer &&
            (entry.clusterSize == 0 || entry.clusterSize == ctasPerRow(shape.hidden)))
            return &entry;
    }
    return nullptr;
}

// Without a norm and without a mailbox the CTAs of a row have nothing to tell each other.
int clusterSize(BoundaryShape const& shape) {
    bool const alone = shape.source == Source::kLocal && shape.consumer != Consumer::kBoundary;
    return alone ? 1 : ctasPerRow(shape.hidden);
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
    dim3 const grid(static_cast<unsigned>(ctasPerRow(shape.hidden)), static_cast<unsigned>(args.chunk.rows), 1);
    return launchKernel(entry->kernel, grid, kThreads, clusterSize(shape), how, stream, box, args);
}

cudaError_t residentExchangeRows(int hidden, int tp, int& rows) {
    rows = 1 << 30;
    for (Consumer const consumer : {Consumer::kAllReduce, Consumer::kResidualOnly, Consumer::kBoundary}) {
        KernelEntry const* entry = find({Source::kExchange, consumer, hidden, tp});
        if (entry == nullptr)
            return cudaErrorInvalidDeviceFunction;
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {static_cast<unsigned>(ctasPerRow(hidden)), 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(ctasPerRow(hidden)), 1, 1);
        config.blockDim = dim3(kThreads);
        config.attrs = &attribute;
        config.numAttrs = 1;
        int clusters = 0;
        cudaError_t const status = cudaOccupancyMaxActiveClusters(&clusters, entry->kernel, &config);
        if (status != cudaSuccess)
            return status;
        rows = std::min(rows, clusters);
    }
    return cudaSuccess;
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
    for (auto const load :
         {loadPublishKernels, loadBoundaryKernels, loadCoefficientsKernels, loadPublishLinearKernels,
          loadNcclKernels}) {
        cudaError_t const status = load();
        if (status != cudaSuccess)
            return status;
    }
    return cudaSuccess;
}

}  // namespace mhc
