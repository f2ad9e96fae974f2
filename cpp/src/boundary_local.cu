// SPDX-License-Identifier: Apache-2.0
#include "boundary_kernel.cuh"

namespace mhc {

KernelTable localBoundaryKernels() {
    return makeTable<1, Source::kLocal>();
}

}  // namespace mhc
