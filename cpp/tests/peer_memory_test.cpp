// SPDX-License-Identifier: Apache-2.0
//
// The group's decisions on peer memory and multicast, over ranks and answers that are made up.
#include "../src/peer_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace mhc {
namespace {

// `devices` has each rank's device; every rank is a process of its own on one host, and can do multicast.
std::vector<RankLocation> ranksOn(std::vector<int> const& devices) {
    std::vector<RankLocation> ranks;
    for (size_t r = 0; r < devices.size(); ++r) {
        RankLocation rank{};
        rank.process[0] = 100 + r;
        std::strcpy(rank.host, "host");
        rank.deviceUuid[0] = static_cast<char>(1 + devices[r]);
        rank.device = devices[r];
        rank.multicastable = 1;
        rank.ncclWindows = 1;
        ranks.push_back(rank);
    }
    return ranks;
}

std::vector<ReachRow> reachEverywhere(size_t ranks) {
    std::vector<ReachRow> rows(ranks);
    for (size_t from = 0; from < ranks; ++from) {
        for (size_t to = 0; to < ranks; ++to)
            rows[from].to[to] = from == to ? MHC_REACH_SELF : MHC_REACH_IPC;
    }
    return rows;
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

TEST(PeerMemory, OneDirectionThatIsMissingIsAnObstacleWithThePairAndTheRemedy) {
    auto const ranks = ranksOn({0, 1, 2, 5});
    auto rows = reachEverywhere(4);
    EXPECT_EQ(firstObstacle(ranks, rows), "");
    rows[1].to[3] = MHC_REACH_NONE;
    std::string const text = firstObstacle(ranks, rows);
    EXPECT_TRUE(contains(text, "rank 1 on device 1 cannot access the memory of device 5 of rank 3")) << text;
    EXPECT_TRUE(contains(text, "cudaDeviceCanAccessPeer")) << text;
    EXPECT_TRUE(contains(text, "nvidia-smi topo -p2p")) << text;
}

TEST(PeerMemory, WhatAPeerMakesUpIsNoWay) {
    auto const ranks = ranksOn({0, 1});
    for (int32_t const value : {-1, 4, 1 << 30, static_cast<int32_t>(MHC_REACH_SELF)}) {
        auto rows = reachEverywhere(2);
        rows[1].to[0] = value;
        EXPECT_NE(firstObstacle(ranks, rows), "") << value;
    }
}

TEST(PeerMemory, OtherHostsAreNamed) {
    auto ranks = ranksOn({0, 0});
    std::strcpy(ranks[1].host, "other");
    auto rows = reachEverywhere(2);
    rows[0].to[1] = MHC_REACH_NONE;
    EXPECT_TRUE(contains(firstObstacle(ranks, rows), "ranks 0 and 1 run on different hosts"));
}

TEST(PeerMemory, RanksOnADeviceAreCountedByItsIdentity) {
    EXPECT_EQ(mostRanksOnADevice(ranksOn({0, 1, 2, 3})), 1);
    EXPECT_EQ(mostRanksOnADevice(ranksOn({0, 1, 1, 0, 1})), 3);
    // Ordinals are each process's own.
    auto hidden = ranksOn({0, 1});
    hidden[1].device = 0;
    EXPECT_EQ(mostRanksOnADevice(hidden), 1);
}

TEST(Multicast, IsPossibleOnlyWhereEveryRankCan) {
    EXPECT_EQ(multicastObstacle(ranksOn({0, 1, 2, 3}), reachEverywhere(4)), "");
}

// Each fault on each rank alone is enough, whoever evaluates it.
TEST(Multicast, EveryFaultOfEveryRankIsFoundAndNamed) {
    struct Fault {
        std::function<void(RankLocation&)> inject;
        std::string text;
    };
    std::vector<Fault> const faults{
        {[](RankLocation& rank) { rank.multicastable = 0; }, " does not support it"},
        {[](RankLocation& rank) { rank.multicastable = 7; }, " does not support it"},
        {[](RankLocation& rank) { rank.ncclWindows = 0; }, "NCCL_NVLS_ENABLE is 0"},
        {[](RankLocation& rank) { rank.ncclWindows = -1; }, "NCCL_NVLS_ENABLE is 0"},
    };
    for (Fault const& fault : faults) {
        for (size_t rank = 0; rank < 4; ++rank) {
            auto ranks = ranksOn({0, 1, 2, 3});
            fault.inject(ranks[rank]);
            std::string const text = multicastObstacle(ranks, reachEverywhere(4));
            EXPECT_TRUE(contains(text, fault.text)) << text;
            EXPECT_TRUE(contains(text, "rank " + std::to_string(rank))) << text;
        }
    }
}

TEST(Multicast, IsOffForOneRankForSharedDevicesAndWithoutPeerAccess) {
    EXPECT_EQ(multicastObstacle(ranksOn({0}), reachEverywhere(1)), "there is one rank");
    EXPECT_EQ(multicastObstacle(ranksOn({0, 1, 1, 2}), reachEverywhere(4)), "ranks share a device");
    auto rows = reachEverywhere(2);
    rows[0].to[1] = MHC_REACH_NONE;
    EXPECT_EQ(multicastObstacle(ranksOn({0, 1}), rows), "not all ranks have peer access to each other");
}

}  // namespace
}  // namespace mhc
