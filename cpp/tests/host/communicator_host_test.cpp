// SPDX-License-Identifier: Apache-2.0
//
// Communicators and handles on many threads, on a CUDA that is not there (fake_cuda.cpp). Built with ThreadSanitizer by
// scripts/check_host.sh, which finds what these tests only stir.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"
#include "mhc/mhc.h"

namespace {

constexpr int kRanks = 4;

mhcCommConfig configOf(int rank, int ranks, uint32_t timeoutMs = 20000) {
    mhcCommConfig config{};
    config.struct_size = sizeof(config);
    config.tp_size = ranks;
    config.rank = rank;
    config.device = rank % 2;
    config.hidden_size = 4096;
    config.capacity = 2;
    config.lanes = 2;
    config.timeout_ms = timeoutMs;
    return config;
}

template <typename Work>
void onThreads(int count, Work work) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i)
        threads.emplace_back(work, i);
    for (std::thread& thread : threads)
        thread.join();
}

TEST(Communicator, GroupsAreMadeResetAndDestroyed) {
    for (int round = 0; round < 20; ++round) {
        onThreads(kRanks, [](int rank) {
            mhcCommConfig const config = configOf(rank, kRanks);
            mhcComm_t comm = nullptr;
            ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "group"), MHC_SUCCESS) << mhcLastError();
            ASSERT_EQ(mhcCommReset(comm), MHC_SUCCESS) << mhcLastError();
            EXPECT_EQ(mhcCommStatus(comm, -1, nullptr), MHC_SUCCESS) << mhcLastError();
            EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
        });
    }
}

// Whoever looks at the error records while they are cleared: for ThreadSanitizer.
TEST(Communicator, IsAskedForItsStatusWhileItIsReset) {
    std::atomic<bool> done{false};
    onThreads(2, [&](int rank) {
        mhcCommConfig const config = configOf(rank, 2);
        mhcComm_t comm = nullptr;
        ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "status"), MHC_SUCCESS) << mhcLastError();
        std::thread asking([&] {
            mhcErrorRecord record{};
            while (!done)
                EXPECT_EQ(mhcCommStatus(comm, -1, &record), MHC_SUCCESS) << mhcLastError();
        });
        for (int i = 0; i < 200; ++i)
            EXPECT_EQ(mhcCommReset(comm), MHC_SUCCESS) << mhcLastError();
        done = true;
        asking.join();
        EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS);
    });
}

TEST(Communicator, GroupsOfTheSameProcessDoNotMeet) {
    onThreads(2 * kRanks, [](int thread) {
        int const rank = thread / 2;
        mhcCommConfig const config = configOf(rank, kRanks);
        mhcComm_t comm = nullptr;
        ASSERT_EQ(mhcCommCreateThreads(&comm, &config, thread % 2 == 0 ? "even" : "odd"), MHC_SUCCESS);
        EXPECT_EQ(mhcCommReset(comm), MHC_SUCCESS) << mhcLastError();
        EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS);
    });
}

TEST(Communicator, ARankThatDoesNotComeIsAnErrorOnAllOthers) {
    onThreads(kRanks, [](int rank) {
        if (rank == 1)
            return;
        mhcCommConfig const config = configOf(rank, kRanks, 200);
        mhcComm_t comm = nullptr;
        mhcStatus const status = mhcCommCreateThreads(&comm, &config, "incomplete");
        EXPECT_TRUE(status == MHC_TIMEOUT || status == MHC_PEER_FAILED) << mhcStatusName(status);
        EXPECT_EQ(comm, nullptr);
    });
}

TEST(Communicator, RanksThatDisagreeAllFindOut) {
    onThreads(2, [](int rank) {
        mhcCommConfig config = configOf(rank, 2);
        config.capacity = 2 + rank;
        mhcComm_t comm = nullptr;
        EXPECT_EQ(mhcCommCreateThreads(&comm, &config, "disagree"), MHC_INVALID_ARGUMENT);
        EXPECT_NE(std::string(mhcLastError()).find("has capacity = "), std::string::npos) << mhcLastError();
    });
}

TEST(Communicator, DevicesThatDoNotReachEachOtherAreAnErrorOnAllRanks) {
    fakePeerAccess = false;
    onThreads(kRanks, [](int rank) {
        mhcCommConfig const config = configOf(rank, kRanks);
        mhcComm_t comm = nullptr;
        EXPECT_EQ(mhcCommCreateThreads(&comm, &config, "apart"), MHC_PEER_FAILED);
        std::string const message = mhcLastError();
        EXPECT_NE(message.find("device 0 cannot access the memory of device 1"), std::string::npos) << message;
        EXPECT_NE(message.find("needs peer access"), std::string::npos) << message;
        EXPECT_NE(message.find("(cudaDeviceCanAccessPeer)"), std::string::npos) << message;
    });
    fakePeerAccess = true;
}

TEST(Communicator, EveryRankKnowsWhatTheGroupDecided) {
    std::vector<mhcGroupInfo> infos(kRanks);
    onThreads(kRanks, [&](int rank) {
        mhcCommConfig const config = configOf(rank, kRanks);
        mhcComm_t comm = nullptr;
        ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "decided"), MHC_SUCCESS) << mhcLastError();
        mhcGroupInfo& info = infos[static_cast<size_t>(rank)];
        info.struct_size = sizeof(info);
        EXPECT_EQ(mhcCommGetGroupInfo(comm, &info), MHC_SUCCESS) << mhcLastError();
        mhcCommInfo own{};
        own.struct_size = sizeof(own);
        EXPECT_EQ(mhcCommGetInfo(comm, &own), MHC_SUCCESS);
        EXPECT_EQ(own.multicast, 0);
        EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS);
    });
    for (mhcGroupInfo const& info : infos) {
        EXPECT_EQ(std::memcmp(&info, infos.data(), sizeof(info)), 0);
        for (int from = 0; from < kRanks; ++from) {
            EXPECT_EQ(info.device[from], from % 2);
            EXPECT_EQ(info.first_in_process[from], 0);
            EXPECT_EQ(info.first_on_device[from], from % 2);
            for (int to = 0; to < kRanks; ++to)
                EXPECT_EQ(info.reach[from][to], from == to ? MHC_REACH_SELF : MHC_REACH_PEER_ACCESS);
        }
        EXPECT_STREQ(info.multicast_reason, "ranks share a device");
        std::string const sentence = info.sentence;
        EXPECT_NE(sentence.find("group [0, 1, 2, 3], hidden size 4096: mailbox by peer access"), std::string::npos)
            << sentence;
        EXPECT_NE(sentence.find("no NVLink multicast: ranks share a device"), std::string::npos) << sentence;
    }
}

TEST(Communicator, OtherHiddenSizesAreRefusedBeforeAnybodyWaits) {
    for (int const hidden : {0, -4096, 4100, 5128, 8192}) {
        mhcCommConfig config = configOf(0, 2);
        config.hidden_size = hidden;
        mhcComm_t comm = nullptr;
        EXPECT_EQ(mhcCommCreateThreads(&comm, &config, "hidden"), MHC_INVALID_ARGUMENT);
        EXPECT_NE(std::string(mhcLastError()).find("4096, 5120 or 7168"), std::string::npos) << mhcLastError();
    }
}

TEST(Communicator, PublishTargetsOfAllRanksNameTheSameMemory) {
    std::array<std::array<mhcPublishTarget, 2>, kRanks> targets{};  // of each rank, for each lane
    std::array<mhcComm_t, kRanks> comms{};
    onThreads(kRanks, [&](int rank) {
        mhcCommConfig const config = configOf(rank, kRanks);
        auto const at = static_cast<size_t>(rank);
        ASSERT_EQ(mhcCommCreateThreads(&comms[at], &config, "targets"), MHC_SUCCESS) << mhcLastError();
        for (int lane = 0; lane < 2; ++lane) {
            mhcPublishTarget& target = targets[at][static_cast<size_t>(lane)];
            target.struct_size = sizeof(target);
            ASSERT_EQ(mhcCommPublishTarget(comms[at], lane, &target), MHC_SUCCESS) << mhcLastError();
        }
    });
    std::set<uint32_t> owners;
    std::set<void*> states;
    for (auto const& lanes : targets) {
        for (size_t lane = 0; lane < 2; ++lane) {
            mhcPublishTarget const& target = lanes[lane];
            owners.insert(target.owner);
            states.insert(target.state);
            EXPECT_EQ(target.row_stride, size_t{2} * 4096);
            EXPECT_EQ(target.rank_stride, 2 * target.row_stride);
            EXPECT_EQ(target.generation_stride, kRanks * target.rank_stride);
            for (size_t r = 0; r < MHC_MAX_RANKS; ++r)
                EXPECT_EQ(target.slots[r], r < kRanks ? targets[r][lane].slots[r] : nullptr);
        }
        // Three generations of one lane end where the next lane's may begin.
        auto const first = reinterpret_cast<uintptr_t>(lanes[0].slots[0]);
        EXPECT_GE(reinterpret_cast<uintptr_t>(lanes[1].slots[0]), first + 3 * lanes[0].generation_stride);
    }
    EXPECT_EQ(owners.size(), size_t{2} * kRanks);
    EXPECT_EQ(owners.count(0), 0U);
    EXPECT_EQ(states.size(), size_t{2} * kRanks);

    mhcPublishTarget target{};
    EXPECT_EQ(mhcCommPublishTarget(comms[0], 0, &target), MHC_INVALID_ARGUMENT);
    EXPECT_NE(std::string(mhcLastError()).find("mhcPublishTarget.struct_size is 0"), std::string::npos);
    target.struct_size = sizeof(target);
    EXPECT_EQ(mhcCommPublishTarget(comms[0], 2, &target), MHC_INVALID_ARGUMENT);
    EXPECT_EQ(mhcMarkPublished(comms[0], 0, 0, 1, nullptr), MHC_INVALID_ARGUMENT);
    EXPECT_EQ(mhcMarkPublished(comms[0], 0, 1, 3, nullptr), MHC_INVALID_ARGUMENT);
    EXPECT_NE(std::string(mhcLastError()).find("0 .. 2, got 3"), std::string::npos) << mhcLastError();
    EXPECT_EQ(mhcMarkPublished(comms[0], 0, 1, 2, nullptr), MHC_SUCCESS) << mhcLastError();
    onThreads(kRanks, [&](int rank) { mhcCommDestroy(comms[static_cast<size_t>(rank)]); });
}

// Plugins hold, look for and let go of handles on their threads while others use and destroy them.
TEST(Registry, HandlesAreUsedWhileTheyAreDestroyed) {
    for (int round = 0; round < 50; ++round) {
        std::array<mhcComm_t, 2> comms{};
        onThreads(2, [&](int rank) {
            mhcCommConfig const config = configOf(rank, 2);
            ASSERT_EQ(mhcCommCreateThreads(&comms[static_cast<size_t>(rank)], &config, "registry"), MHC_SUCCESS);
        });
        std::atomic<int> started{0};
        onThreads(6, [&](int thread) {
            ++started;
            while (started < 6)
                std::this_thread::yield();
            auto const rank = static_cast<size_t>(thread % 2);
            if (thread < 2) {
                EXPECT_EQ(mhcCommDestroy(comms[rank]), MHC_SUCCESS) << mhcLastError();
                return;
            }
            if (mhcCommSetCurrent(comms[rank], 1) != MHC_SUCCESS)
                return;
            for (int i = 0; i < 50; ++i) {
                mhcComm_t found = nullptr;
                int32_t lane = 0;
                if (mhcCommFind(2, nullptr, 0, &found, &lane) != MHC_SUCCESS)
                    continue;
                mhcCommInfo info{};
                info.struct_size = sizeof(info);
                mhcCommStatus(found, -1, nullptr);
                if (mhcCommRetain(found) != MHC_SUCCESS)
                    continue;
                EXPECT_EQ(mhcCommGetInfo(found, &info), MHC_SUCCESS);
                EXPECT_EQ(mhcCommRelease(found), MHC_SUCCESS);
            }
            mhcCommSetCurrent(nullptr, 0);
        });
    }
}

}  // namespace
