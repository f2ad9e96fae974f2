// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include "status.h"

namespace mhc {

// Restores the calling thread's device.
class DeviceGuard {
public:
    explicit DeviceGuard(int device) {
        checkCuda(cudaGetDevice(&before_), "cudaGetDevice");
        if (before_ != device)
            checkCuda(cudaSetDevice(device), "cudaSetDevice(", device, ")");
    }
    ~DeviceGuard() { cudaSetDevice(before_); }
    DeviceGuard(DeviceGuard const&) = delete;
    DeviceGuard& operator=(DeviceGuard const&) = delete;

private:
    int before_ = 0;
};

}  // namespace mhc
