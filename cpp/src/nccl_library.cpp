// SPDX-License-Identifier: Apache-2.0
#include "nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>

namespace mhc {
namespace {

constexpr char kSoname[] = "libnccl.so.2";
// Communicators that do not block are older, but were not usable with everything that is done here.
constexpr int kOldest = 21800;

std::mutex openMutex;

std::string& furtherPath() {
    static std::string* const path = new std::string;
    return *path;
}

template <typename Function>
void find(void* handle, char const* name, std::string const& file, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (function == nullptr)
        fail(MHC_UNSUPPORTED, file, " has no function ", name);
}

struct Closing {
    void operator()(void* handle) const { dlclose(handle); }
};

}  // namespace

NcclLibrary::NcclLibrary(void* handle, std::string file) : file_(std::move(file)) {
    find(handle, "ncclGetVersion", file_, getVersion);
    int const result = getVersion(&version_);
    if (result != kNcclSuccess)
        fail(MHC_UNSUPPORTED, file_, ": ncclGetVersion failed with ", result);
    if (version_ < kOldest || version_ >= 30000) {
        fail(
            MHC_UNSUPPORTED, file_, " is NCCL ", versionText(version_), ", expected ", versionText(kOldest),
            " or newer of NCCL 2");
    }
    find(handle, "ncclGetUniqueId", file_, getUniqueId);
    find(handle, "ncclCommInitRankConfig", file_, commInitRankConfig);
    find(handle, "ncclCommAbort", file_, commAbort);
    find(handle, "ncclCommGetAsyncError", file_, commGetAsyncError);
    find(handle, "ncclCommCount", file_, commCount);
    find(handle, "ncclCommCuDevice", file_, commCuDevice);
    find(handle, "ncclCommUserRank", file_, commUserRank);
    find(handle, "ncclAllReduce", file_, allReduce);
    find(handle, "ncclAllGather", file_, allGather);
    find(handle, "ncclGetErrorString", file_, getErrorString);
    find(handle, "ncclGetLastError", file_, getLastError);
}

NcclLibrary NcclLibrary::open(std::vector<std::string> const& files) {
    std::string refused;
    for (std::string const& file : files) {
        std::unique_ptr<void, Closing> handle(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL));
        if (handle == nullptr) {
            refused += join(refused.empty() ? "" : "; ", dlerror());
            continue;
        }
        try {
            NcclLibrary const library(handle.get(), file);
            handle.release();  // stays open: NCCL has threads of its own
            return library;
        } catch (Failure const& failure) {
            refused += join(refused.empty() ? "" : "; ", failure.what());
        }
    }
    fail(
        MHC_UNSUPPORTED, "NCCL cannot be used (", refused,
        "): install the package nvidia-nccl, or name libnccl.so.2 in TRTLLM_MHC_NCCL");
}

NcclLibrary const& NcclLibrary::instance() {
    static NcclLibrary const* library = nullptr;
    std::lock_guard<std::mutex> const lock(openMutex);
    if (library != nullptr)
        return *library;
    std::vector<std::string> files;
    // Two NCCLs in one process do not share communicators: whoever else uses it has it already.
    if (void* const loaded = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) {
        dlclose(loaded);
        files.emplace_back(kSoname);
    } else {
        char const* const named = std::getenv("TRTLLM_MHC_NCCL");
        if (named != nullptr && *named != '\0') {
            files.emplace_back(named);
        } else {
            files.emplace_back(kSoname);
            if (!furtherPath().empty())
                files.push_back(furtherPath());
        }
    }
    library = new NcclLibrary(open(files));
    return *library;
}

void NcclLibrary::setPath(std::string const& path) {
    std::lock_guard<std::mutex> const lock(openMutex);
    furtherPath() = path;
}

std::string NcclLibrary::versionText(int version) {
    return join(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::string NcclLibrary::words(int result, ncclComm* comm) const {
    std::string text = join(getErrorString(result), " (", result, ")");
    char const* const last = getLastError(comm);
    if (last != nullptr && *last != '\0')
        text += join(": ", last);
    return text;
}

void NcclLibrary::failWith(int result, ncclComm* comm, std::string const& doing) const {
    fail(MHC_NCCL_ERROR, doing, ": ", words(result, comm));
}

void NcclLibrary::await(int result, ncclComm* comm, NcclDeadline deadline, char const* doing) const {
    auto pause = std::chrono::microseconds(1);
    while (result == kNcclInProgress) {
        check(commGetAsyncError(comm, &result), comm, doing);
        if (result != kNcclInProgress)
            break;
        if (std::chrono::steady_clock::now() > deadline)
            fail(MHC_TIMEOUT, doing, ": NCCL had not finished in time; a rank did not come, or cannot be reached");
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, std::chrono::microseconds(1000));
    }
    check(result, comm, doing);
}

}  // namespace mhc
