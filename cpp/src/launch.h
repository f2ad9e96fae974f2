// SPDX-License-Identifier: Apache-2.0
//
// Launching with cluster and overlap attributes, and loading kernels ahead of time.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

#include "kernels.h"

namespace mhc {

// sharedBytes: dynamic shared memory; beyond 48 KB the kernel must have been told to allow it.
template <typename... Parameters, typename... Arguments>
cudaError_t launchKernelShared(
    void (*kernel)(Parameters...), dim3 grid, int threads, int clusterSize, size_t sharedBytes, Launch how,
    cudaStream_t stream, Arguments const&... arguments) {
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (clusterSize > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = static_cast<unsigned>(clusterSize);
        attributes[count].val.clusterDim.y = 1;
        attributes[count].val.clusterDim.z = 1;
        ++count;
    }
    if (how == Launch::kOverlapped) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count].val.programmaticStreamSerializationAllowed = 1;
        ++count;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = sharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launchKernel(
    void (*kernel)(Parameters...), dim3 grid, int threads, int clusterSize, Launch how, cudaStream_t stream,
    Arguments const&... arguments) {
    return launchKernelShared(kernel, grid, threads, clusterSize, 0, how, stream, arguments...);
}

template <typename... Parameters>
void const* kernelAddress(void (*kernel)(Parameters...)) {
    return reinterpret_cast<void const*>(kernel);
}

inline cudaError_t loadKernels(std::initializer_list<void const*> kernels) {
    for (void const* kernel : kernels) {
        cudaFuncAttributes attributes;
        cudaError_t const status = cudaFuncGetAttributes(&attributes, kernel);
        if (status != cudaSuccess)
            return status;
    }
    return cudaSuccess;
}

cudaError_t loadPublishKernels();
cudaError_t loadBoundaryKernels();
cudaError_t loadCoefficientsKernels();
cudaError_t loadNcclKernels();
cudaError_t loadPublishLinearKernels();

}  // namespace mhc
