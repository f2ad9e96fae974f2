// SPDX-License-Identifier: Apache-2.0
//
// Groups made from environment variables, on a CUDA that is not there (fake_cuda.cpp).
#include "environment.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"
#include "status.h"

namespace mhc {
namespace {

using Table = std::map<std::string, std::string>;

Variables from(Table const& table) {
    return [table](char const* name) -> char const* {
        auto const found = table.find(name);
        return found == table.end() ? nullptr : found->second.c_str();
    };
}

mhcCommConfig configOf(int ranks, int32_t const* group = nullptr) {
    mhcCommConfig config{};
    config.struct_size = sizeof(config);
    config.tp_size = ranks;
    config.rank = -1;
    config.device = -1;
    config.hidden_size = 4096;
    config.lanes = 1;
    config.on_error = -1;
    config.group = group;
    config.group_size = group == nullptr ? 0 : ranks;
    return config;
}

std::string errorOf(mhcCommConfig const& config, Table const& table, mhcStatus status = MHC_INVALID_ARGUMENT) {
    try {
        readEnvironmentGroup(&config, from(table));
    } catch (Failure const& failure) {
        EXPECT_EQ(failure.status(), status) << failure.what();
        return failure.what();
    }
    return "no error";
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

Table const kTorchrun{
    {"RANK", "3"},
    {"WORLD_SIZE", "4"},
    {"LOCAL_RANK", "1"},
    {"MASTER_ADDR", "127.0.0.1"},
    {"MASTER_PORT", "29500"},
    {"TORCHELASTIC_RUN_ID", "none"}};
Table const kOpenMpi{
    {"OMPI_COMM_WORLD_RANK", "0"},
    {"OMPI_COMM_WORLD_SIZE", "2"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
    {"PMIX_NAMESPACE", "job.1"}};
Table const kSlurm{
    {"SLURM_PROCID", "5"},
    {"SLURM_NTASKS", "8"},
    {"SLURM_LOCALID", "1"},
    {"SLURM_JOB_ID", "77"},
    {"SLURM_STEP_ID", "0"}};
Table const kOwn{
    {"TRTLLM_MHC_RANK", "1"},
    {"TRTLLM_MHC_WORLD_SIZE", "2"},
    {"TRTLLM_MHC_DEVICE", "1"},
    {"TRTLLM_MHC_RENDEZVOUS", "/run/somewhere"}};

Table with(Table table, Table const& changes) {
    for (auto const& [name, value] : changes)
        table[name] = value;
    return table;
}

TEST(LaunchedProcess, IsReadFromEveryLauncher) {
    auto const torchrun = readLaunchedProcess(from(kTorchrun));
    ASSERT_TRUE(torchrun);
    EXPECT_EQ(torchrun->launcher, "torchrun");
    EXPECT_EQ(std::make_tuple(torchrun->rank, torchrun->size, torchrun->localRank), std::make_tuple(3, 4, 1));
    EXPECT_TRUE(contains(torchrun->job, "MASTER_PORT=29500"));
    auto const mpi = readLaunchedProcess(from(kOpenMpi));
    ASSERT_TRUE(mpi);
    EXPECT_EQ(std::make_tuple(mpi->rank, mpi->size, mpi->localRank), std::make_tuple(0, 2, 0));
    auto const slurm = readLaunchedProcess(from(kSlurm));
    ASSERT_TRUE(slurm);
    EXPECT_EQ(std::make_tuple(slurm->rank, slurm->size, slurm->localRank), std::make_tuple(5, 8, 1));
    auto const mpich =
        readLaunchedProcess(from({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"PMI_FD", "9"}}));
    ASSERT_TRUE(mpich);
    EXPECT_EQ(std::make_tuple(mpich->rank, mpich->size, mpich->localRank), std::make_tuple(1, 2, 1));
    EXPECT_EQ(mpich->job, "");
    EXPECT_FALSE(readLaunchedProcess(from({})));
}

TEST(LaunchedProcess, OurOwnVariablesWinThenTorchrun) {
    Table all = with(with(kTorchrun, kOpenMpi), kOwn);
    EXPECT_EQ(readLaunchedProcess(from(all))->launcher, "TRTLLM_MHC_*");
    EXPECT_EQ(readLaunchedProcess(from(with(kTorchrun, kOpenMpi)))->launcher, "torchrun");
}

TEST(LaunchedProcess, BadNumbersAreRefused) {
    for (char const* const bad : {"-1", "x", "1x", " 1", "99999999999999999999", "0x1", "1.5"}) {
        try {
            readLaunchedProcess(from(with(kTorchrun, {{"RANK", bad}})));
            ADD_FAILURE() << bad;
        } catch (Failure const& failure) {
            EXPECT_TRUE(contains(failure.what(), "the variable RANK must be a number in 0 .. ")) << failure.what();
        }
    }
    EXPECT_THROW(readLaunchedProcess(from(with(kTorchrun, {{"RANK", "4"}}))), Failure);
    EXPECT_THROW(readLaunchedProcess(from({{"RANK", "0"}})), Failure);
    EXPECT_THROW(readLaunchedProcess(from({{"WORLD_SIZE", "2"}})), Failure);
}

TEST(EnvironmentGroup, TheGroupsRankIsTheIndexOfTheWorldRank) {
    int32_t const group[] = {2, 3};
    mhcCommConfig const config = configOf(2, group);
    EnvironmentGroup const read = readEnvironmentGroup(&config, from(kTorchrun));
    EXPECT_EQ(read.settings.rank, 1);
    EXPECT_EQ(read.settings.device, 1);
    EXPECT_EQ(read.settings.capacity, 64);
    EXPECT_EQ(read.settings.timeout, std::chrono::minutes(1));
    EXPECT_EQ(read.settings.onError, MHC_ON_ERROR_TRAP);
    int32_t const reversed[] = {3, 0};
    mhcCommConfig const other = configOf(2, reversed);
    EXPECT_EQ(readEnvironmentGroup(&other, from(kTorchrun)).settings.rank, 0);
}

TEST(EnvironmentGroup, WhatIsGivenWinsOverTheVariables) {
    Table const table = with(
        kOwn, {{"TRTLLM_MHC_CAPACITY", "7"},
               {"TRTLLM_MHC_TIMEOUT_MS", "1500"},
               {"TRTLLM_MHC_ON_ERROR", "raise"},
               {"TRTLLM_MHC_NCCL_ROWS", "-1"}});
    mhcCommConfig config = configOf(2);
    CommSettings settings = readEnvironmentGroup(&config, from(table)).settings;
    EXPECT_EQ(settings.capacity, 7);
    EXPECT_EQ(settings.timeout, std::chrono::milliseconds(1500));
    EXPECT_EQ(settings.onError, MHC_ON_ERROR_RAISE);
    EXPECT_EQ(settings.device, 1);
    EXPECT_EQ(settings.ncclRows, -1);
    config.nccl_rows = 300;
    config.capacity = 9;
    config.timeout_ms = 20;
    config.on_error = MHC_ON_ERROR_TRAP;
    config.device = 0;
    settings = readEnvironmentGroup(&config, from(table)).settings;
    EXPECT_EQ(settings.capacity, 9);
    EXPECT_EQ(settings.ncclRows, 300);
    EXPECT_EQ(settings.timeout, std::chrono::milliseconds(20));
    EXPECT_EQ(settings.onError, MHC_ON_ERROR_TRAP);
    EXPECT_EQ(settings.device, 0);
}

TEST(EnvironmentGroup, LocalRanksBeyondTheVisibleDevicesShareThem) {
    mhcCommConfig const config = configOf(8);
    EXPECT_EQ(readEnvironmentGroup(&config, from(with(kSlurm, {{"SLURM_LOCALID", "5"}}))).settings.device, 1);
}

TEST(EnvironmentGroup, WhatIsMissingOrWrongIsNamed) {
    EXPECT_TRUE(contains(errorOf(configOf(2), {}, MHC_NOT_BOUND), "run it under torchrun or mpirun, or set"));
    EXPECT_TRUE(contains(
        errorOf(configOf(2), kTorchrun), "world rank 3 of 4 (torchrun), is not in the tensor-parallel group [0, 1]"));
    EXPECT_TRUE(contains(errorOf(configOf(4), kOpenMpi), "needs 4 processes, Open MPI started 2"));
    Table own = kOwn;
    own.erase("TRTLLM_MHC_RENDEZVOUS");
    EXPECT_TRUE(contains(errorOf(configOf(2), own), "set TRTLLM_MHC_RENDEZVOUS to a folder of your own"));
    own = kOwn;
    own.erase("TRTLLM_MHC_DEVICE");
    EXPECT_TRUE(contains(errorOf(configOf(2), own), "set TRTLLM_MHC_DEVICE"));
    EXPECT_TRUE(contains(
        errorOf(configOf(2), with(kOwn, {{"TRTLLM_MHC_DEVICE", "2"}})),
        "TRTLLM_MHC_DEVICE must be a number in 0 .. 1"));
    EXPECT_TRUE(contains(errorOf(configOf(2), with(kOwn, {{"TRTLLM_MHC_RENDEZVOUS", "here"}})), "got 'here'"));
    EXPECT_TRUE(contains(
        errorOf(configOf(2), with(kOwn, {{"TRTLLM_MHC_ON_ERROR", "ignore"}})), "must be trap or raise, got 'ignore'"));
    mhcCommConfig config = configOf(2);
    config.rank = 0;
    EXPECT_TRUE(contains(errorOf(config, kOwn), "rank 0 of the group is asked for, but this process, world rank 1"));
    EXPECT_TRUE(contains(errorOf(configOf(9), kOwn), "tp_size must be 1, 2, 4 or 8, got 9"));
    EXPECT_TRUE(contains(errorOf(configOf(-1), kOwn), "tp_size must be 1, 2, 4 or 8, got -1"));
}

TEST(EnvironmentGroup, ASecretThatCannotBeReadIsAnErrorWithoutIt) {
    EXPECT_TRUE(contains(
        errorOf(configOf(2), with(kOwn, {{"TRTLLM_MHC_SECRET_FILE", "/does/not/exist"}})),
        "opening the file of the group's secret, /does/not/exist"));
}

// Every rank with variables of its own; returns what each threw, or "".
std::vector<std::string> makeGroups(int ranks, std::function<Table(int)> const& tableOf) {
    std::vector<std::string> errors(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                mhcCommConfig config = configOf(ranks);
                config.device = rank % 2;
                EnvironmentGroup const group = readEnvironmentGroup(&config, from(tableOf(rank)));
                Communicator communicator(group.settings, group.meet());
                communicator.reset();
                EXPECT_EQ(communicator.info().rank, rank);
                communicator.close();
            } catch (std::exception const& error) {
                errors[static_cast<size_t>(rank)] = error.what();
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    return errors;
}

TEST(EnvironmentGroup, MeetsInAFolder) {
    char path[] = "/tmp/environment_test_XXXXXX";
    std::string const folder = mkdtemp(path);
    auto const errors = makeGroups(4, [&](int rank) {
        return Table{
            {"TRTLLM_MHC_RANK", std::to_string(rank)},
            {"TRTLLM_MHC_WORLD_SIZE", "4"},
            {"TRTLLM_MHC_TIMEOUT_MS", "20000"},
            {"TRTLLM_MHC_RENDEZVOUS", folder}};
    });
    EXPECT_EQ(errors, std::vector<std::string>(4));
    std::filesystem::remove_all(folder);
}

TEST(EnvironmentGroup, MeetsUnderALauncherWithoutAnythingElse) {
    auto const errors = makeGroups(2, [](int rank) {
        return Table{
            {"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
            {"OMPI_COMM_WORLD_SIZE", "2"},
            {"PMIX_NAMESPACE", "test " + std::to_string(getpid())},
            {"TRTLLM_MHC_TIMEOUT_MS", "20000"}};
    });
    EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(EnvironmentGroup, MeetsOverTcp) {
    auto const errors = makeGroups(2, [](int rank) {
        return Table{
            {"TRTLLM_MHC_RANK", std::to_string(rank)},
            {"TRTLLM_MHC_WORLD_SIZE", "2"},
            {"TRTLLM_MHC_TIMEOUT_MS", "20000"},
            {"TRTLLM_MHC_SECRET", "a secret of the test"},
            {"TRTLLM_MHC_RENDEZVOUS", "tcp://127.0.0.1:" + std::to_string(20000 + getpid() % 10000)}};
    });
    EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(EnvironmentGroup, RanksThatAreThreadsTakeTheirDevicesNumber) {
    auto const errors = makeGroups(
        2, [](int) { return Table{{"TRTLLM_MHC_RENDEZVOUS", "threads"}, {"TRTLLM_MHC_TIMEOUT_MS", "20000"}}; });
    EXPECT_EQ(errors, std::vector<std::string>(2));
}

// The process's own variables, and the function that plugins call.
TEST(FindEnvironment, MakesOneCommunicatorForAGroupAndKeepsIt) {
    setenv("TRTLLM_MHC_RENDEZVOUS", "threads", 1);
    std::vector<mhcComm_t> first(2), second(2);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
            mhcCommConfig config = configOf(2);
            config.device = rank;
            for (auto* const comms : {&first, &second}) {
                mhcComm_t& comm = (*comms)[static_cast<size_t>(rank)];
                ASSERT_EQ(mhcCommFindEnvironment(&comm, &config, nullptr), MHC_SUCCESS) << mhcLastError();
            }
        });
    }
    for (std::thread& thread : threads)
        thread.join();
    EXPECT_EQ(first, second);
    EXPECT_NE(first[0], first[1]);
    mhcComm_t found = nullptr;
    int32_t lane = 0;
    EXPECT_EQ(mhcCommFind(2, nullptr, 0, &found, &lane), MHC_NOT_BOUND);
    unsetenv("TRTLLM_MHC_RENDEZVOUS");
}

TEST(FindEnvironment, DoesNotMeetWhileAGraphIsCaptured) {
    setenv("TRTLLM_MHC_RENDEZVOUS", "threads", 1);
    fakeCapturing = true;
    mhcCommConfig config = configOf(4);
    config.device = 0;
    mhcComm_t comm = nullptr;
    EXPECT_EQ(mhcCommFindEnvironment(&comm, &config, nullptr), MHC_CAPTURE_NOT_READY);
    EXPECT_TRUE(contains(mhcLastError(), "run every rank's engine once before capturing")) << mhcLastError();
    fakeCapturing = false;
    unsetenv("TRTLLM_MHC_RENDEZVOUS");
    EXPECT_EQ(mhcCommFindEnvironment(&comm, &config, nullptr), MHC_NOT_BOUND);
}

TEST(FindEnvironment, LeavesGroupsToWhoeverHasMadeCommunicators) {
    setenv("TRTLLM_MHC_RENDEZVOUS", "threads", 1);
    mhcCommConfig config = configOf(1);
    config.rank = 0;
    config.device = 0;
    config.capacity = 2;
    config.on_error = MHC_ON_ERROR_RAISE;
    mhcComm_t made = nullptr;
    ASSERT_EQ(mhcCommCreateThreads(&made, &config, "made"), MHC_SUCCESS) << mhcLastError();
    mhcComm_t comm = nullptr;
    EXPECT_EQ(mhcCommFindEnvironment(&comm, &config, nullptr), MHC_NOT_BOUND);
    EXPECT_TRUE(contains(mhcLastError(), "this process has made communicators")) << mhcLastError();
    EXPECT_EQ(mhcCommDestroy(made), MHC_SUCCESS);
    unsetenv("TRTLLM_MHC_RENDEZVOUS");
}

}  // namespace
}  // namespace mhc
