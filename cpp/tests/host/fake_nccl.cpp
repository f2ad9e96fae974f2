// SPDX-License-Identifier: Apache-2.0
//
// An NCCL without GPUs whose ranks are threads of one process: communicators that do not block, all-gathers of host
// memory, all-reduces that do nothing, and faults on demand. A shared library of its own, to be found by dlopen.
#include "fake_nccl.h"

#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#ifndef FAKE_NCCL_VERSION
#define FAKE_NCCL_VERSION 22809
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kSuccess = 0;
constexpr int kSystemError = 2;
constexpr int kRemoteError = 6;
constexpr int kInProgress = 7;

struct UniqueId {
    char bytes[128];
};

struct Config {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
};

struct Group {
    explicit Group(int ranks) : receive(static_cast<size_t>(ranks), nullptr), rounds(receive.size(), 0) {}
    int joined = 0;
    std::vector<char> data;
    std::vector<void*> receive;
    std::vector<int> rounds;  // all-gathers that each rank has begun
    int arrived = 0;
    int finished = 0;  // all-gathers
};

std::mutex mutex;

std::map<std::string, std::weak_ptr<Group>>& groups() {
    static auto* const all = new std::map<std::string, std::weak_ptr<Group>>;
    return *all;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) FakeNccl fakeNccl;
FakeNccl fakeNccl;

struct ncclComm {
    std::shared_ptr<Group> group;
    int rank;
    int ranks;
    int device;
};

EXPORT int ncclGetVersion(int* version) {
    *version = FAKE_NCCL_VERSION;
    return kSuccess;
}

EXPORT int ncclGetUniqueId(UniqueId* id) {
    static std::atomic<int> counter{0};
    std::memset(id, 0, sizeof(*id));
    int const number = ++counter;
    std::memcpy(id->bytes, &number, sizeof(number));
    return kSuccess;
}

EXPORT int ncclCommInitRankConfig(ncclComm** comm, int ranks, UniqueId id, int rank, Config* config) {
    if (config->magic != 0xcafebeef || config->size != sizeof(Config) || config->blocking != 0)
        return 4;
    *comm = nullptr;
    if (fakeNccl.initFailsOnRank == rank)
        return kSystemError;
    std::lock_guard<std::mutex> const lock(mutex);
    std::string const key(id.bytes, sizeof(id.bytes));
    std::shared_ptr<Group> group = groups()[key].lock();
    if (group == nullptr)
        groups()[key] = group = std::make_shared<Group>(ranks);
    if (fakeNccl.initHangsOnRank != rank)
        ++group->joined;
    *comm = new ncclComm{group, rank, ranks, rank};
    ++fakeNccl.communicators;
    return kInProgress;
}

EXPORT int ncclCommAbort(ncclComm* comm) {
    while (fakeNccl.abortHangs)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::lock_guard<std::mutex> const lock(mutex);
    delete comm;
    --fakeNccl.communicators;
    return kSuccess;
}

EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* error) {
    std::lock_guard<std::mutex> const lock(mutex);
    Group const& group = *comm->group;
    bool const ready = group.joined == comm->ranks;
    bool const gathering = group.rounds[static_cast<size_t>(comm->rank)] > group.finished;
    bool const reducing = fakeNccl.allReduceHangs;
    *error = !ready || gathering || reducing ? kInProgress : kSuccess;
    if (ready && fakeNccl.asyncErrorOnRank == comm->rank)
        *error = kRemoteError;
    return kSuccess;
}

EXPORT int ncclCommCount(ncclComm* comm, int* count) {
    *count = comm->ranks;
    return kSuccess;
}

EXPORT int ncclCommUserRank(ncclComm* comm, int* rank) {
    *rank = comm->rank;
    return kSuccess;
}

EXPORT int ncclCommCuDevice(ncclComm* comm, int* device) {
    *device = comm->device;
    return kSuccess;
}

EXPORT int ncclAllReduce(void const*, void*, size_t count, int type, int operation, ncclComm*, void*) {
    if (type != 9 || operation != 0)
        return 4;
    fakeNccl.lastCount = static_cast<long>(count);
    ++fakeNccl.allReduces;
    return fakeNccl.allReduceHangs ? kInProgress : kSuccess;
}

EXPORT int ncclAllGather(void const* send, void* receive, size_t bytes, int type, ncclComm* comm, void*) {
    if (type != 1)
        return 4;
    std::lock_guard<std::mutex> const lock(mutex);
    Group& group = *comm->group;
    auto const rank = static_cast<size_t>(comm->rank);
    if (group.arrived == 0)
        group.data.assign(bytes * static_cast<size_t>(comm->ranks), 0);
    std::memcpy(group.data.data() + bytes * rank, send, bytes);
    group.receive[rank] = receive;
    ++group.rounds[rank];
    if (++group.arrived < comm->ranks)
        return kInProgress;
    for (void* const to : group.receive)
        std::memcpy(to, group.data.data(), group.data.size());
    group.arrived = 0;
    ++group.finished;
    return kSuccess;
}

EXPORT char const* ncclGetErrorString(int result) {
    return result == kSystemError   ? "unhandled system error"
           : result == kRemoteError ? "remote process exited"
                                    : "error";
}

EXPORT char const* ncclGetLastError(ncclComm*) {
    return "";
}
