// SPDX-License-Identifier: Apache-2.0
//
// What callers hand over, checked, and as kernels take it.
#pragma once

#include "kernels.h"
#include "mhc/mhc.h"

namespace mhc {

// Throws unless `pointer` is not NULL and 16-byte aligned.
void requireAligned(void const* pointer, char const* name);

void checkBoundaryArgs(mhcBoundaryArgs const& args);
Consumer consumerOf(mhcBoundaryArgs const& args);
BoundaryArgs kernelArgs(mhcBoundaryArgs const& args);

// These check too.
LinearInput linearInput(mhcPublishLinearArgs const& args, int hidden);
BoundaryArgs allReduceArgs(void const* x, void* sum, int rows);

}  // namespace mhc
