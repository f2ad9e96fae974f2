// SPDX-License-Identifier: Apache-2.0
//
// How ranks meet: right bytes, and no wait without an end.
#include "../src/bootstrap.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../src/status.h"
#include "on_threads.h"

namespace mhc {
namespace {

using namespace std::chrono_literals;

TEST(ThreadBootstrap, ManyRoundsGiveEverybodysBytesInRankOrder) {
    constexpr int kRanks = 8;
    auto const errors = onThreads(kRanks, [](int rank) {
        auto const meeting = makeThreadBootstrap("many rounds", rank, kRanks, 10s);
        for (int round = 0; round < 2000; ++round) {
            std::vector<int> const all = meeting->gather(1000 * round + rank, kRanks);
            for (int r = 0; r < kRanks; ++r) {
                if (all[static_cast<size_t>(r)] != 1000 * round + r)
                    fail(MHC_INVALID_ARGUMENT, "round ", round, ": rank ", r, "'s bytes are wrong");
            }
        }
    });
    EXPECT_EQ(errors, std::vector<std::string>(kRanks));
}

TEST(ThreadBootstrap, AnAbsentRankIsNamed) {
    auto const errors = onThreads(3, [](int rank) {
        if (rank == 1)
            return;
        makeThreadBootstrap("absent", rank, 3, 200ms)->gather(rank, 3);
    });
    std::string const all = errors[0] + errors[2];
    EXPECT_NE(all.find("rank(s) 1 of 3 did not come within 200 ms"), std::string::npos) << all;
    EXPECT_FALSE(errors[0].empty());
    EXPECT_FALSE(errors[2].empty());
}

TEST(ThreadBootstrap, RanksInDifferentCallsFindOut) {
    auto const errors = onThreads(2, [](int rank) {
        auto const meeting = makeThreadBootstrap("different", rank, 2, 5s);
        if (rank == 0)
            meeting->gather(int32_t{1}, 2);
        else
            meeting->gather(int64_t{1}, 2);
    });
    std::string const all = errors[0] + errors[1];
    EXPECT_NE(all.find("the ranks are not in the same call"), std::string::npos) << all;
}

TEST(ThreadBootstrap, TheSameRankTwiceIsAnError) {
    auto const first = makeThreadBootstrap("twice", 0, 2, 1s);
    EXPECT_THROW(makeThreadBootstrap("twice", 0, 2, 1s), Failure);
}

TEST(ThreadBootstrap, AnotherSizeIsAnError) {
    auto const first = makeThreadBootstrap("sizes", 0, 2, 1s);
    EXPECT_THROW(makeThreadBootstrap("sizes", 1, 4, 1s), Failure);
}

TEST(ThreadBootstrap, ANameCanBeUsedAgainAfterwards) {
    for (int again = 0; again < 3; ++again) {
        auto const errors = onThreads(2, [](int rank) { makeThreadBootstrap("again", rank, 2, 5s)->gather(rank, 2); });
        EXPECT_EQ(errors, std::vector<std::string>(2));
    }
}

TEST(CallbackBootstrap, AFailureOfTheCallersFunctionIsAnError) {
    auto const bootstrap = makeCallbackBootstrap([](void*, void const*, void*, size_t) { return 7; }, nullptr);
    try {
        bootstrap->gather(1, 1);
        FAIL() << "no error";
    } catch (Failure const& failure) {
        EXPECT_EQ(failure.status(), MHC_PEER_FAILED);
        EXPECT_NE(std::string(failure.what()).find("failed with 7"), std::string::npos);
    }
}

}  // namespace
}  // namespace mhc
