// SPDX-License-Identifier: Apache-2.0
//
// Choosing and launching the instance of the publishing linear layer.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "launch.h"
#include "publish_linear_kernel.cuh"

namespace mhc {
namespace {

using LinearKernel = void (*)(Mailbox, LinearInput, Chunk);

struct LinearEntry {
    int hidden;
    bool e4m3;
    int maxRows;
    int clusterSize;
    size_t sharedBytes;
    LinearKernel kernel;
};

template <bool kE4m3, int kRowTiles, int kCluster, int kColumns, int kStages>
constexpr LinearEntry entry(int maxRows) {
    return {
        kColumns * kLinearCtas,
        kE4m3,
        maxRows,
        kCluster,
        static_cast<size_t>(LinearShape<kE4m3, kColumns>::sharedBytes(kStages)),
        publishLinearKernel<kE4m3, kRowTiles, kCluster, kColumns, kStages>};
}

template <bool kE4m3, int kColumns>
void addEntries(std::vector<LinearEntry>& all) {
    // In the order of their rows: the first that is large enough is taken. What was fastest of those measured
    // (docs/performance.md).
    all.push_back(entry<kE4m3, 1, 1, kColumns, kE4m3 ? 4 : 2>(8));
    all.push_back(entry<kE4m3, 1, 1, kColumns, 4>(16));
    all.push_back(entry<kE4m3, 2, 2, kColumns, 4>(32));
    all.push_back(entry<kE4m3, 4, 2, kColumns, 4>(kLinearTileRows));
}

std::vector<LinearEntry> const& allKernels() {
    static std::vector<LinearEntry> const table = [] {
        std::vector<LinearEntry> all;
        addEntries<false, 4096 / kLinearCtas>(all);
        addEntries<true, 4096 / kLinearCtas>(all);
        addEntries<false, 5120 / kLinearCtas>(all);
        addEntries<true, 5120 / kLinearCtas>(all);
        addEntries<false, 7168 / kLinearCtas>(all);
        addEntries<true, 7168 / kLinearCtas>(all);
        return all;
    }();
    return table;
}

// GPUs for desktops have less shared memory than these kernels take: cudaErrorNotSupported.
cudaError_t allowShared(LinearEntry const& entry) {
    int device = 0;
    int most = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status != cudaSuccess)
        return status;
    if (static_cast<size_t>(most) < entry.sharedBytes)
        return cudaErrorNotSupported;
    return cudaFuncSetAttribute(
        kernelAddress(entry.kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(entry.sharedBytes));
}

cudaError_t launch(Mailbox const& box, LinearInput const& input, Chunk const& chunk, int hidden, cudaStream_t stream) {
    bool const e4m3 = input.scales != nullptr;
    int const rows = input.rows < kLinearTileRows ? input.rows : kLinearTileRows;
    auto const found = std::find_if(allKernels().begin(), allKernels().end(), [&](LinearEntry const& each) {
        return each.hidden == hidden && each.e4m3 == e4m3 && rows <= each.maxRows;
    });
    if (found == allKernels().end())
        return cudaErrorInvalidDeviceFunction;
    cudaError_t const status = allowShared(*found);
    if (status != cudaSuccess)
        return status;
    // Passes over the same weights run side by side, so that the L2 serves all but the first.
    int const passes = (input.rows + kLinearTileRows - 1) / kLinearTileRows;
    return launchKernelShared(
        found->kernel, dim3(static_cast<unsigned>(kLinearCtas * passes)), kLinearThreads, found->clusterSize,
        found->sharedBytes, Launch::kOverlapped, stream, box, input, chunk);
}

}  // namespace

cudaError_t launchLinear(LinearInput const& input, int hidden, cudaStream_t stream) {
    return launch(Mailbox{}, input, Chunk{}, hidden, stream);
}

cudaError_t launchPublishLinear(Mailbox const& box, LinearInput const& input, Chunk const& chunk, cudaStream_t stream) {
    cudaError_t const status = launch(box, input, chunk, box.hiddenSize, stream);
    // Where headers come last they follow in a kernel of their own: no CTA knows when a row is complete.
    return status == cudaSuccess && box.headerLast ? launchMarkPublished(box, chunk, stream) : status;
}

cudaError_t loadPublishLinearKernels() {
    for (LinearEntry const& each : allKernels()) {
        cudaError_t const status = allowShared(each);
        if (status != cudaSuccess && status != cudaErrorNotSupported)
            return status;
    }
    return cudaSuccess;
}

}  // namespace mhc
