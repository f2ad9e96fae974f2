// SPDX-License-Identifier: Apache-2.0
//
// NCCL, looked for when somebody asks for it: nothing is linked against it. The few declarations of its interface that
// are used here have not changed since 2.14.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "status.h"

struct ncclComm;

namespace mhc {

struct NcclUniqueId {
    char bytes[128];
};

// NCCL's results; the others are failures.
constexpr int kNcclSuccess = 0;
constexpr int kNcclInProgress = 7;

constexpr int kNcclUint8 = 1;
constexpr int kNcclBfloat16 = 9;
constexpr int kNcclSum = 0;

// The start of ncclConfig_t as of 2.14, the version that it names: NCCL fills in the rest.
struct NcclConfig {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
};

using NcclDeadline = std::chrono::steady_clock::time_point;

class NcclLibrary {
public:
    // The process's, opened by the first call that finds it: libnccl.so.2 if somebody has loaded it, else the file that
    // TRTLLM_MHC_NCCL names, else libnccl.so.2 on the loader's path, else the file of setPath. Throws
    // Failure(MHC_UNSUPPORTED) that says where it was looked for.
    static NcclLibrary const& instance();
    static void setPath(std::string const& path);

    // The first of the files that can be opened and used.
    static NcclLibrary open(std::vector<std::string> const& files);

    // As NCCL counts: 22809 is 2.28.9.
    int version() const { return version_; }
    std::string const& file() const { return file_; }
    static std::string versionText(int version);

    // Throws Failure(MHC_NCCL_ERROR) with NCCL's words unless `result` is a success.
    template <typename... Parts>
    void check(int result, ncclComm* comm, Parts const&... doing) const {
        if (result != kNcclSuccess)
            failWith(result, comm, join(doing...));
    }
    // The same, after waiting for an operation that is still in progress.
    void await(int result, ncclComm* comm, NcclDeadline deadline, char const* doing) const;
    std::string words(int result, ncclComm* comm) const;

    int (*getVersion)(int*) = nullptr;
    int (*getUniqueId)(NcclUniqueId*) = nullptr;
    int (*commInitRankConfig)(ncclComm**, int ranks, NcclUniqueId, int rank, NcclConfig*) = nullptr;
    int (*commAbort)(ncclComm*) = nullptr;
    int (*commGetAsyncError)(ncclComm*, int*) = nullptr;
    int (*commCount)(ncclComm*, int*) = nullptr;
    int (*commCuDevice)(ncclComm*, int*) = nullptr;
    int (*commUserRank)(ncclComm*, int*) = nullptr;
    int (*allReduce)(void const*, void*, size_t, int type, int operation, ncclComm*, cudaStream_t) = nullptr;
    int (*allGather)(void const*, void*, size_t, int type, ncclComm*, cudaStream_t) = nullptr;
    char const* (*getErrorString)(int) = nullptr;
    char const* (*getLastError)(ncclComm*) = nullptr;

private:
    NcclLibrary(void* handle, std::string file);
    [[noreturn]] void failWith(int result, ncclComm* comm, std::string const& doing) const;

    std::string file_;
    int version_ = 0;
};

}  // namespace mhc
