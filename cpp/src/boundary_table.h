// SPDX-License-Identifier: Apache-2.0
//
// The instances of the boundary kernel. Each file boundary_*.cu compiles those of one number of ranks, so that they
// compile side by side.
#pragma once

#include <vector>

#include "kernels.h"

namespace mhc {

using BoundaryKernel = void (*)(Mailbox const, BoundaryArgs const);

struct KernelEntry {
    Source source;
    int tp;
    Consumer consumer;
    int ctas;  // of a row, 0 = any
    int ctaThreads;
    BoundaryKernel kernel;
};

using KernelTable = std::vector<KernelEntry>;

KernelTable localBoundaryKernels();
KernelTable boundaryKernelsTp2();
KernelTable boundaryKernelsTp4();
KernelTable boundaryKernelsTp8();

}  // namespace mhc
