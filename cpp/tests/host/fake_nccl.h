// SPDX-License-Identifier: Apache-2.0
//
// What tests set in the NCCL of fake_nccl.cpp, and what they see of it. The library exports it as `fakeNccl`.
#pragma once

#include <atomic>

struct FakeNccl {
    std::atomic<int> initFailsOnRank{-1};
    std::atomic<int> initHangsOnRank{-1};     // the rank never joins, and its call fails with the time-out
    std::atomic<int> asyncErrorOnRank{-1};    // of communicators that are ready
    std::atomic<bool> allReduceHangs{false};  // stays in progress
    std::atomic<bool> abortHangs{false};
    std::atomic<int> allReduces{0};
    std::atomic<long> lastCount{0};
    std::atomic<int> communicators{0};  // alive
};
