// SPDX-License-Identifier: Apache-2.0
//
// The host side of NCCL: finding it, making communicators, deciding when to use it, and what becomes of its failures.
// NCCL is fake_nccl.cpp, which scripts/check_host.sh compiles and names in TRTLLM_MHC_NCCL.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"
#include "fake_nccl.h"
#include "mhc/mhc.h"
#include "nccl_library.h"
#include "status.h"

namespace {

using Clock = std::chrono::steady_clock;
using mhc::NcclLibrary;

std::string fakeFile() {
    char const* const file = std::getenv("TRTLLM_MHC_NCCL");
    return file == nullptr ? "" : file;
}

FakeNccl& fake() {
    static auto* const state = static_cast<FakeNccl*>(dlsym(dlopen(fakeFile().c_str(), RTLD_NOW), "fakeNccl"));
    return *state;
}

mhcCommConfig configOf(int rank, int ncclRows, uint32_t timeoutMs = 20000, int ranks = 2) {
    mhcCommConfig config{};
    config.struct_size = sizeof(config);
    config.tp_size = ranks;
    config.rank = rank;
    config.device = rank % 2;
    config.hidden_size = 4096;
    config.capacity = 64;
    config.lanes = 1;
    config.timeout_ms = timeoutMs;
    config.nccl_rows = ncclRows;
    config.nccl_workspace_rows = 256;
    return config;
}

template <typename Work>
void onRanks(Work work, int ranks = 2) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back(work, rank);
    for (std::thread& thread : threads)
        thread.join();
}

mhcCommInfo infoOf(mhcComm_t comm) {
    mhcCommInfo info{};
    info.struct_size = sizeof(info);
    EXPECT_EQ(mhcCommGetInfo(comm, &info), MHC_SUCCESS) << mhcLastError();
    return info;
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

// Device memory that nobody looks into.
struct Tensors {
    std::vector<uint64_t> x = std::vector<uint64_t>(4096 * 600 / 4 + 2);
    std::vector<uint64_t> out = x;
    std::vector<uint64_t> mixes = x;
    static void* aligned(std::vector<uint64_t>& data) {
        return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(data.data()) + 15) / 16 * 16);
    }
    mhcBoundaryArgs boundary(int rows) {
        mhcBoundaryArgs args{};
        args.struct_size = sizeof(args);
        args.rows = rows;
        args.x = aligned(x);
        args.residual = aligned(x);
        args.post = static_cast<float*>(aligned(mixes));
        args.comb = static_cast<float*>(aligned(mixes));
        args.residual_out = aligned(out);
        return args;
    }
};

class Nccl : public ::testing::Test {
protected:
    void SetUp() override {
        if (fakeFile().empty())
            GTEST_SKIP() << "needs the fake NCCL: scripts/check_host.sh threads";
        alive_ = fake().communicators;
    }
    void TearDown() override {
        if (fakeFile().empty())
            return;
        fake().initFailsOnRank = -1;
        fake().initHangsOnRank = -1;
        fake().asyncErrorOnRank = -1;
        fake().allReduceHangs = false;
        fake().abortHangs = false;
        fakeNcclWaits = false;
        fakePeerAccess = true;
        auto const end = Clock::now() + std::chrono::seconds(10);
        while (fake().communicators != alive_ && Clock::now() < end)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(fake().communicators, alive_) << "communicators were left";
    }

private:
    int alive_ = 0;
};

TEST_F(Nccl, IsLookedForAndTheErrorNamesWhere) {
    std::string const old = fakeFile().substr(0, fakeFile().size() - 3) + "_old.so";
    try {
        NcclLibrary::open({"/nowhere/libnccl.so.2", old});
        FAIL() << "expected a failure";
    } catch (mhc::Failure const& failure) {
        EXPECT_EQ(failure.status(), MHC_UNSUPPORTED);
        std::string const text = failure.what();
        EXPECT_TRUE(contains(text, "/nowhere/libnccl.so.2")) << text;
        EXPECT_TRUE(contains(text, old + " is NCCL 2.10.3, expected 2.18.0 or newer")) << text;
        EXPECT_TRUE(contains(text, "TRTLLM_MHC_NCCL")) << text;
    }
    EXPECT_EQ(NcclLibrary::open({"/nowhere/libnccl.so.2", fakeFile()}).version(), 22809);
    int32_t version = 0;
    EXPECT_EQ(mhcNcclVersion(&version), MHC_SUCCESS) << mhcLastError();
    EXPECT_EQ(version, 22809);
}

TEST_F(Nccl, IsUsedFromTheThresholdOnWhateverTheOperation) {
    onRanks([](int rank) {
        mhcCommConfig const config = configOf(rank, 128);
        mhcComm_t comm = nullptr;
        ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "threshold"), MHC_SUCCESS) << mhcLastError();
        mhcCommInfo const info = infoOf(comm);
        EXPECT_EQ(info.transport, MHC_TRANSPORT_MAILBOX_NCCL);
        EXPECT_EQ(info.nccl_rows, 128);
        EXPECT_EQ(info.nccl_workspace_rows, 256);
        EXPECT_EQ(info.nccl_version, 22809);
        EXPECT_STREQ(info.transport_reason, "nccl_rows is 128");
        EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
    });
    // One rank at a time from here, so that counts are known: the group's other rank enqueues nothing.
    std::array<mhcComm_t, 2> comms{};
    onRanks([&](int rank) {
        mhcCommConfig const config = configOf(rank, 128);
        ASSERT_EQ(mhcCommCreateThreads(&comms[static_cast<size_t>(rank)], &config, "counts"), MHC_SUCCESS);
    });
    Tensors tensors;
    struct {
        int rows, reduces, last;
    } const cases[] = {{1, 0, 0}, {127, 0, 0}, {128, 1, 128}, {256, 1, 256}, {257, 2, 1}, {600, 3, 88}};
    for (auto const& expected : cases) {
        int const before = fake().allReduces;
        int const boundaries = fakeLocalBoundaries;
        mhcBoundaryArgs const args = tensors.boundary(expected.rows);
        ASSERT_EQ(mhcBoundary(comms[0], 0, &args, nullptr), MHC_SUCCESS) << mhcLastError();
        EXPECT_EQ(fake().allReduces - before, expected.reduces) << expected.rows;
        EXPECT_EQ(fakeLocalBoundaries - boundaries, expected.reduces) << expected.rows;
        if (expected.reduces > 0) {
            EXPECT_EQ(fake().lastCount, 4096L * expected.last);
            EXPECT_EQ(fakeLastRows, expected.last);
        }
        int const reduced = fake().allReduces;
        void* const x = Tensors::aligned(tensors.x);
        void* const sum = Tensors::aligned(tensors.out);
        ASSERT_EQ(mhcAllReduce(comms[0], 0, x, sum, expected.rows, nullptr), MHC_SUCCESS) << mhcLastError();
        EXPECT_EQ(fake().allReduces - reduced, expected.reduces > 0 ? 1 : 0) << expected.rows;
        ASSERT_EQ(mhcAllReduceNccl(comms[0], 0, x, sum, expected.rows, nullptr), MHC_SUCCESS) << mhcLastError();
        EXPECT_EQ(fake().lastCount, 4096L * expected.rows);
    }
    // A published contribution of so many rows is not in the mailbox.
    mhcBoundaryArgs published = tensors.boundary(128);
    published.published = 1;
    EXPECT_EQ(mhcPublish(comms[0], 0, published.x, 128, nullptr), MHC_SUCCESS) << mhcLastError();
    EXPECT_EQ(mhcBoundary(comms[0], 0, &published, nullptr), MHC_SUCCESS) << mhcLastError();
    published.x = nullptr;
    EXPECT_EQ(mhcBoundary(comms[0], 0, &published, nullptr), MHC_INVALID_ARGUMENT);
    EXPECT_TRUE(contains(mhcLastError(), "needs x: nccl_rows is 128")) << mhcLastError();
    onRanks(
        [&](int rank) { EXPECT_EQ(mhcCommDestroy(comms[static_cast<size_t>(rank)]), MHC_SUCCESS) << mhcLastError(); });
}

TEST_F(Nccl, ThresholdsThatDifferAreAnErrorOnAllRanks) {
    for (bool const workspace : {false, true}) {
        onRanks([&](int rank) {
            mhcCommConfig config = configOf(rank, 128);
            (workspace ? config.nccl_workspace_rows : config.nccl_rows) += rank;
            mhcComm_t comm = nullptr;
            EXPECT_EQ(mhcCommCreateThreads(&comm, &config, "thresholds"), MHC_INVALID_ARGUMENT);
            char const* const field = workspace ? "has nccl_workspace_rows = 25" : "has nccl_rows = 12";
            EXPECT_TRUE(contains(mhcLastError(), field)) << mhcLastError();
        });
    }
}

TEST_F(Nccl, AFailureToInitialiseIsAnErrorOnAllRanks) {
    fake().initFailsOnRank = 1;
    auto const start = Clock::now();
    onRanks([](int rank) {
        mhcCommConfig const config = configOf(rank, 128, 1000);
        mhcComm_t comm = nullptr;
        EXPECT_EQ(mhcCommCreateThreads(&comm, &config, "failing"), MHC_PEER_FAILED) << mhcLastError();
        EXPECT_TRUE(contains(mhcLastError(), "making an NCCL communicator failed on rank ")) << mhcLastError();
        EXPECT_EQ(comm, nullptr);
    });
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(2));
}

TEST_F(Nccl, InitialisingEndsWithTheTimeOut) {
    fake().initHangsOnRank = 0;
    auto const start = Clock::now();
    onRanks([](int rank) {
        mhcCommConfig const config = configOf(rank, 128, 400);
        mhcComm_t comm = nullptr;
        EXPECT_EQ(mhcCommCreateThreads(&comm, &config, "hanging"), MHC_PEER_FAILED);
        EXPECT_TRUE(contains(mhcLastError(), "NCCL had not finished in time")) << mhcLastError();
    });
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(2));
}

TEST_F(Nccl, AnAsynchronousErrorStopsTheLaneUntilTheReset) {
    onRanks([](int rank) {
        mhcCommConfig const config = configOf(rank, 128);
        mhcComm_t comm = nullptr;
        ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "asynchronous"), MHC_SUCCESS) << mhcLastError();
        if (rank == 1) {
            fake().asyncErrorOnRank = 1;
            Tensors tensors;
            mhcBoundaryArgs const args = tensors.boundary(3);
            EXPECT_EQ(mhcBoundary(comm, 0, &args, nullptr), MHC_MAILBOX_ERROR);
            EXPECT_TRUE(contains(mhcLastError(), "NCCL reported an error, 6")) << mhcLastError();
            mhcErrorRecord record{};
            EXPECT_EQ(mhcCommStatus(comm, -1, &record), MHC_MAILBOX_ERROR);
            EXPECT_EQ(record.kind, MHC_ERROR_NCCL);
            EXPECT_EQ(record.field, 1u);
            EXPECT_EQ(record.got, 6u);
            fake().asyncErrorOnRank = -1;
        }
        ASSERT_EQ(mhcCommReset(comm), MHC_SUCCESS) << mhcLastError();
        Tensors tensors;
        mhcBoundaryArgs const args = tensors.boundary(300);
        EXPECT_EQ(mhcBoundary(comm, 0, &args, nullptr), MHC_SUCCESS) << mhcLastError();
        EXPECT_EQ(mhcCommStatus(comm, -1, nullptr), MHC_SUCCESS) << mhcLastError();
        EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
    });
}

TEST_F(Nccl, AnAllReduceThatNeverEndsIsAbortedAfterTheTimeOut) {
    onRanks([](int rank) {
        mhcCommConfig const config = configOf(rank, 128, 500);
        mhcComm_t comm = nullptr;
        ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "never ends"), MHC_SUCCESS) << mhcLastError();
        fakeNcclWaits = true;
        Tensors tensors;
        mhcBoundaryArgs const args = tensors.boundary(128);
        auto const start = Clock::now();
        ASSERT_EQ(mhcBoundary(comm, 0, &args, nullptr), MHC_SUCCESS) << mhcLastError();
        while (mhcCommStatus(comm, 0, nullptr) == MHC_SUCCESS && Clock::now() - start < std::chrono::seconds(5))
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        auto const elapsed = Clock::now() - start;
        EXPECT_GE(elapsed, std::chrono::milliseconds(500));
        EXPECT_LT(elapsed, std::chrono::milliseconds(1500));
        EXPECT_EQ(mhcBoundary(comm, 0, &args, nullptr), MHC_MAILBOX_ERROR);
        EXPECT_TRUE(contains(mhcLastError(), "a rank did not take part in it in time")) << mhcLastError();
        EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
    });
}

TEST_F(Nccl, AnEnqueueWaitsForNcclNoLongerThanTheTimeOut) {
    onRanks([](int rank) {
        mhcCommConfig const config = configOf(rank, 128, 400);
        mhcComm_t comm = nullptr;
        ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "enqueue"), MHC_SUCCESS) << mhcLastError();
        ASSERT_EQ(mhcCommReset(comm), MHC_SUCCESS) << mhcLastError();  // both are there before NCCL fails
        fake().allReduceHangs = true;
        Tensors tensors;
        mhcBoundaryArgs const args = tensors.boundary(128);
        auto const start = Clock::now();
        EXPECT_EQ(mhcBoundary(comm, 0, &args, nullptr), MHC_TIMEOUT);
        EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(1400));
        EXPECT_EQ(mhcBoundary(comm, 0, &args, nullptr), MHC_MAILBOX_ERROR) << mhcLastError();
        EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
    });
}

TEST_F(Nccl, ClosingDoesNotWaitForAnAbortWithoutEnd) {
    onRanks([](int rank) {
        mhcCommConfig const config = configOf(rank, 128);
        mhcComm_t comm = nullptr;
        ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "abort"), MHC_SUCCESS) << mhcLastError();
        fake().abortHangs = true;
        auto const start = Clock::now();
        EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
        EXPECT_LT(Clock::now() - start, std::chrono::seconds(4));
    });
}

TEST_F(Nccl, RanksThatShareADeviceDoWithoutAndSayWhy) {
    onRanks(
        [](int rank) {
            mhcCommConfig const config = configOf(rank, 1, 20000, 4);
            mhcComm_t comm = nullptr;
            ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "shared device"), MHC_SUCCESS) << mhcLastError();
            mhcCommInfo const info = infoOf(comm);
            EXPECT_EQ(info.transport, MHC_TRANSPORT_MAILBOX);
            EXPECT_EQ(info.nccl_rows, 0);
            EXPECT_EQ(info.nccl_version, 0);
            EXPECT_TRUE(contains(info.transport_reason, "2 ranks share a device, which NCCL does not allow"));
            Tensors tensors;
            void* const sum = Tensors::aligned(tensors.out);
            EXPECT_EQ(mhcAllReduceNccl(comm, 0, Tensors::aligned(tensors.x), sum, 4, nullptr), MHC_UNSUPPORTED);
            EXPECT_TRUE(contains(mhcLastError(), "share a device")) << mhcLastError();
            EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
        },
        4);
}

TEST_F(Nccl, CarriesEverythingWhereThereIsNoPeerAccess) {
    fakePeerAccess = false;
    onRanks([](int rank) {
        mhcCommConfig const config = configOf(rank, 0);
        mhcComm_t comm = nullptr;
        ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "apart"), MHC_SUCCESS) << mhcLastError();
        mhcCommInfo const info = infoOf(comm);
        EXPECT_EQ(info.transport, MHC_TRANSPORT_NCCL);
        EXPECT_EQ(info.nccl_rows, 1);
        EXPECT_TRUE(contains(info.transport_reason, "device 0 cannot access the memory of device 1"));
        Tensors tensors;
        mhcBoundaryArgs args = tensors.boundary(1);
        args.published = 1;
        EXPECT_EQ(mhcPublish(comm, 0, args.x, 1, nullptr), MHC_SUCCESS) << mhcLastError();
        EXPECT_EQ(mhcBoundary(comm, 0, &args, nullptr), MHC_SUCCESS) << mhcLastError();
        EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
    });
    onRanks([](int rank) {
        mhcCommConfig const config = configOf(rank, -1);
        mhcComm_t comm = nullptr;
        EXPECT_EQ(mhcCommCreateThreads(&comm, &config, "apart for ever"), MHC_PEER_FAILED);
        EXPECT_TRUE(contains(mhcLastError(), "NCCL would do without, but nccl_rows is -1")) << mhcLastError();
    });
}

TEST_F(Nccl, OneRankMayUseItToo) {
    mhcCommConfig const config = configOf(0, 4, 20000, 1);
    mhcComm_t comm = nullptr;
    ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "alone"), MHC_SUCCESS) << mhcLastError();
    int const before = fake().allReduces;
    Tensors tensors;
    for (int const rows : {3, 4}) {
        mhcBoundaryArgs const args = tensors.boundary(rows);
        EXPECT_EQ(mhcBoundary(comm, 0, &args, nullptr), MHC_SUCCESS) << mhcLastError();
        EXPECT_EQ(fake().allReduces - before, rows - 3);
    }
    EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
}

// ncclComm_t as somebody else would have made it.
ncclComm* handedIn(int rank, mhc::NcclUniqueId const& id) {
    NcclLibrary const& nccl = NcclLibrary::instance();
    ncclComm* comm = nullptr;
    mhc::NcclConfig config{sizeof(mhc::NcclConfig), 0xcafebeef, 21400, 0};
    int const result = nccl.commInitRankConfig(&comm, 2, id, rank, &config);
    nccl.await(result, comm, Clock::now() + std::chrono::seconds(10), "handed in");
    return comm;
}

TEST_F(Nccl, RanksMeetThroughACommunicatorThatIsHandedIn) {
    mhc::NcclUniqueId id;
    NcclLibrary::instance().getUniqueId(&id);
    onRanks([&](int rank) {
        ncclComm* const theirs = handedIn(rank, id);
        for (int const ncclRows : {0, 128}) {
            mhcCommConfig const config = configOf(rank, ncclRows);
            mhcComm_t comm = nullptr;
            ASSERT_EQ(mhcCommCreateNccl(&comm, &config, theirs), MHC_SUCCESS) << mhcLastError();
            EXPECT_EQ(infoOf(comm).nccl_rows, ncclRows);
            ASSERT_EQ(mhcCommReset(comm), MHC_SUCCESS) << mhcLastError();
            EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
        }
        mhcCommConfig config = configOf(1 - rank, 0);
        mhcComm_t comm = nullptr;
        EXPECT_EQ(mhcCommCreateNccl(&comm, &config, theirs), MHC_INVALID_ARGUMENT);
        EXPECT_TRUE(contains(mhcLastError(), "the NCCL communicator has the rank")) << mhcLastError();
        EXPECT_EQ(mhcCommCreateNccl(&comm, &config, nullptr), MHC_INVALID_ARGUMENT);
        // A rank that does not come: an error within the time-out, and the communicator is left alone.
        if (rank == 0) {
            config = configOf(rank, 0, 300);
            auto const start = Clock::now();
            EXPECT_EQ(mhcCommCreateNccl(&comm, &config, theirs), MHC_TIMEOUT) << mhcLastError();
            EXPECT_LT(Clock::now() - start, std::chrono::milliseconds(1300));
        }
        EXPECT_GE(fake().communicators, 1);
        NcclLibrary::instance().commAbort(theirs);
    });
}

TEST_F(Nccl, StructuresFromBeforeItAreAccepted) {
    onRanks([](int rank) {
        mhcCommConfig config = configOf(rank, 12345);
        config.struct_size = offsetof(mhcCommConfig, nccl_rows);
        mhcComm_t comm = nullptr;
        ASSERT_EQ(mhcCommCreateThreads(&comm, &config, "older"), MHC_SUCCESS) << mhcLastError();
        mhcCommInfo info;
        std::memset(&info, 0x77, sizeof(info));
        info.struct_size = offsetof(mhcCommInfo, transport);
        EXPECT_EQ(mhcCommGetInfo(comm, &info), MHC_SUCCESS) << mhcLastError();
        EXPECT_EQ(info.struct_size, offsetof(mhcCommInfo, transport));
        EXPECT_EQ(info.capacity, 64);
        EXPECT_EQ(info.nccl_rows, 0x77777777);
        EXPECT_EQ(infoOf(comm).nccl_rows, 0);
        EXPECT_EQ(mhcCommDestroy(comm), MHC_SUCCESS) << mhcLastError();
    });
}

}  // namespace
