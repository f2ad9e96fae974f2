// SPDX-License-Identifier: Apache-2.0
#include "boundary_kernel.cuh"

namespace mhc {

KernelTable boundaryKernelsTp8() {
    KernelTable table = makeTable<8, Source::kMailbox>();
    KernelTable const exchange = makeTable<8, Source::kExchange>();
    table.insert(table.end(), exchange.begin(), exchange.end());
    return table;
}

}  // namespace mhc
