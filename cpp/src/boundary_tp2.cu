// SPDX-License-Identifier: Apache-2.0
#include "boundary_kernel.cuh"

namespace mhc {

KernelTable boundaryKernelsTp2() {
    KernelTable table = makeTable<2, Source::kMailbox>();
    KernelTable const exchange = makeTable<2, Source::kExchange>();
    table.insert(table.end(), exchange.begin(), exchange.end());
    return table;
}

}  // namespace mhc
