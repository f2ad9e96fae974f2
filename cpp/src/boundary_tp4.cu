// SPDX-License-Identifier: Apache-2.0
#include "boundary_kernel.cuh"

namespace mhc {

KernelTable boundaryKernelsTp4() {
    KernelTable table = makeTable<4, Source::kMailbox>();
    KernelTable const exchange = makeTable<4, Source::kExchange>();
    table.insert(table.end(), exchange.begin(), exchange.end());
    return table;
}

}  // namespace mhc
