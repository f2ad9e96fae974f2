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

// Up to this M a row is CTAs of kThreads threads, which share its loads between many multiprocessors; beyond, every
// multiprocessor has work anyhow, and fewer, larger CTAs spread more evenly (docs/performance.md).
constexpr int kFewRows = 32;

bool fits(KernelEntry const& entry, int hidden) {
    return entry.ctas == 0 || entry.ctas * entry.ctaThreads * kFragment == hidden;
}

KernelEntry const* find(BoundaryShape const& shape, int rows) {
    for (KernelEntry const& entry : allKernels()) {
        bool const wanted = entry.ctas == 0 || (entry.ctas == kManyRowsCtas) == (rows > kFewRows);
        if (entry.source == shape.source && entry.tp == shape.tp && entry.consumer == shape.consumer &&
            fits(entry, shape.hidden) && wanted)
            return &entry;
    }
    return nullptr;
}

int ctasOf(KernelEntry const& entry, int hidden) {
    return hidden / kFragment / entry.ctaThreads;
}

// Without a norm and without a mailbox the CTAs of a row have nothing to tell each other.
int clusterSize(KernelEntry const& entry, int hidden) {
    bool const alone = entry.source == Source::kLocal && entry.consumer != Consumer::kBoundary;
    return alone ? 1 : ctasOf(entry, hidden);
}

}  // namespace

bool hiddenSizeSupported(int hidden) {
    return hidden > 0 && hidden % kElementsPerCta == 0 &&
           find({Source::kLocal, Consumer::kBoundary, hidden, 1}, 1) != nullptr;
}

cudaError_t launchBoundary(
    BoundaryShape const& shape, Mailbox const& box, BoundaryArgs const& args, Launch how, cudaStream_t stream) {
    KernelEntry const* entry = find(shape, args.chunk.rows);
    if (entry == nullptr)
        return cudaErrorInvalidDeviceFunction;
    dim3 const grid(static_cast<unsigned>(ctasOf(*entry, shape.hidden)), static_cast<unsigned>(args.chunk.rows), 1);
    return launchKernel(
        entry->kernel, grid, entry->ctaThreads, clusterSize(*entry, shape.hidden), how, stream, box, args);
}

cudaError_t residentExchangeRows(int hidden, int tp, int& rows) {
    rows = 1 << 30;
    for (KernelEntry const& entry : allKernels()) {
        if (entry.source != Source::kExchange || entry.tp != tp || !fits(entry, hidden))
            continue;
        auto const size = static_cast<unsigned>(ctasOf(entry, hidden));
        cudaLaunchAttribute attribute;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {size, 1, 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(size, 1, 1);
        config.blockDim = dim3(static_cast<unsigned>(entry.ctaThreads));
        config.attrs = &attribute;
        config.numAttrs = 1;
        int clusters = 0;
        cudaError_t const status = cudaOccupancyMaxActiveClusters(&clusters, entry.kernel, &config);
        if (status != cudaSuccess)
            return status;
        rows = std::min(rows, clusters);
    }
    return rows == 1 << 30 ? cudaErrorInvalidDeviceFunction : cudaSuccess;
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
