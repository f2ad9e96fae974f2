// SPDX-License-Identifier: Apache-2.0
//
// How the ranks of a group meet on the host. Everything a communicator agrees on goes through one all-gather.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "mhc/mhc.h"

namespace mhc {

class Bootstrap {
public:
    virtual ~Bootstrap() = default;
    // Throws Failure(MHC_TIMEOUT) naming who did not come, where that is known.
    virtual void allGather(void const* send, void* receive, size_t bytes) = 0;

    template <typename T>
    std::vector<T> gather(T const& mine, int ranks) {
        static_assert(std::is_trivially_copyable_v<T>);
        std::vector<T> all(static_cast<size_t>(ranks));
        allGather(&mine, all.data(), sizeof(T));
        return all;
    }
};

// Ranks are threads of this process; those that give the same name meet.
std::unique_ptr<Bootstrap> makeThreadBootstrap(
    std::string const& name, int rank, int ranks, std::chrono::milliseconds timeout);
std::unique_ptr<Bootstrap> makeCallbackBootstrap(mhcAllGatherFn allGather, void* context);
// `comm` is an ncclComm_t of exactly these ranks; it stays the caller's and must outlive the bootstrap.
std::unique_ptr<Bootstrap> makeNcclBootstrap(
    void* comm, int rank, int ranks, int device, std::chrono::milliseconds timeout);

}  // namespace mhc
