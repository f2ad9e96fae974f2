// SPDX-License-Identifier: Apache-2.0
#include "peer_memory.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "status.h"

namespace mhc {
namespace {

// Tells processes apart, where process ids cannot (containers).
std::array<uint64_t, 2> processIdentity() {
    static std::array<uint64_t, 2> const identity = [] {
        std::random_device random;
        auto const word = [&] { return (uint64_t{random()} << 32) | random(); };
        return std::array<uint64_t, 2>{word(), word() ^ static_cast<uint64_t>(getpid())};
    }();
    return identity;
}

// CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, which the runtime does not have.
bool supportsMulticast(int device) {
    constexpr int kMulticastSupported = 132;
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (driver == nullptr)
        return false;
    auto* const ask = reinterpret_cast<int (*)(int*, int, int)>(dlsym(driver, "cuDeviceGetAttribute"));
    int value = 0;
    bool const supported = ask != nullptr && ask(&value, kMulticastSupported, device) == 0 && value != 0;
    dlclose(driver);
    return supported;
}

bool hasNcclWindows() {
    char const* const allowed = std::getenv("NCCL_NVLS_ENABLE");
    if (allowed != nullptr && std::strcmp(allowed, "0") == 0)
        return false;
    void* const nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (nccl == nullptr)
        return false;
    bool const has = dlsym(nccl, "ncclCommWindowRegister") != nullptr;
    dlclose(nccl);
    return has;
}

// The ordinal that another process's device has here, or -1 where it is hidden from this process.
int ordinalOf(RankLocation const& peer) {
    int devices = 0;
    checkCuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    for (int device = 0; device < devices; ++device) {
        cudaDeviceProp properties;
        checkCuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties(", device, ")");
        if (std::memcmp(&properties.uuid, peer.deviceUuid, sizeof(peer.deviceUuid)) == 0)
            return device;
    }
    return -1;
}

bool canAccess(int from, int to) {
    int can = 0;
    checkCuda(cudaDeviceCanAccessPeer(&can, from, to), "cudaDeviceCanAccessPeer(", from, ", ", to, ")");
    return can != 0;
}

mhcReach reach(RankLocation const& me, RankLocation const& peer) {
    if (sameProcess(me, peer))
        return me.device == peer.device || canAccess(me.device, peer.device) ? MHC_REACH_PEER_ACCESS : MHC_REACH_NONE;
    if (std::memcmp(me.host, peer.host, sizeof(me.host)) != 0)
        return MHC_REACH_NONE;
    if (sameDevice(me, peer))
        return MHC_REACH_IPC;
    int const ordinal = ordinalOf(peer);
    // What is hidden cannot be asked for: opening the handle tells.
    return ordinal < 0 || canAccess(me.device, ordinal) ? MHC_REACH_IPC : MHC_REACH_NONE;
}

}  // namespace

RankLocation locate(int device) {
    RankLocation here{};
    auto const process = processIdentity();
    std::copy(process.begin(), process.end(), here.process);
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    std::memcpy(here.host, boot.data(), std::min(boot.size(), sizeof(here.host)));
    cudaDeviceProp properties;
    checkCuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties(", device, ")");
    std::memcpy(here.deviceUuid, &properties.uuid, sizeof(here.deviceUuid));
    here.device = device;
    here.multicastable = supportsMulticast(device) ? 1 : 0;
    here.ncclWindows = hasNcclWindows() ? 1 : 0;
    return here;
}

bool sameProcess(RankLocation const& a, RankLocation const& b) {
    return std::memcmp(a.process, b.process, sizeof(a.process)) == 0;
}

bool sameDevice(RankLocation const& a, RankLocation const& b) {
    return std::memcmp(a.deviceUuid, b.deviceUuid, sizeof(a.deviceUuid)) == 0;
}

ReachRow lookAround(std::vector<RankLocation> const& ranks, int rank) {
    ReachRow row{};
    for (size_t r = 0; r < ranks.size(); ++r) {
        row.to[r] = static_cast<int>(r) == rank ? static_cast<int32_t>(MHC_REACH_SELF)
                                                : reach(ranks[static_cast<size_t>(rank)], ranks[r]);
    }
    return row;
}

std::string firstObstacle(std::vector<RankLocation> const& ranks, std::vector<ReachRow> const& rows) {
    for (size_t from = 0; from < ranks.size(); ++from) {
        for (size_t to = 0; to < ranks.size(); ++to) {
            int32_t const reached = rows[from].to[to];
            if (reached == MHC_REACH_PEER_ACCESS || reached == MHC_REACH_IPC || from == to)
                continue;
            if (std::memcmp(ranks[from].host, ranks[to].host, sizeof(ranks[to].host)) != 0) {
                return join(
                    "ranks ", from, " and ", to,
                    " run on different hosts (or virtual machines): a mailbox does not go beyond one");
            }
            return join(
                "rank ", from, " on device ", ranks[from].device, " cannot access the memory of device ",
                ranks[to].device, " of rank ", to,
                " (cudaDeviceCanAccessPeer): the mailbox needs peer access, by NVLink or by PCIe with peer-to-peer "
                "enabled (nvidia-smi topo -p2p rw)");
        }
    }
    return "";
}

int mostRanksOnADevice(std::vector<RankLocation> const& ranks) {
    std::ptrdiff_t most = 1;
    for (RankLocation const& rank : ranks) {
        most = std::max(most, std::count_if(ranks.begin(), ranks.end(), [&](RankLocation const& other) {
                            return sameDevice(rank, other);
                        }));
    }
    return static_cast<int>(most);
}

std::string multicastObstacle(std::vector<RankLocation> const& ranks, std::vector<ReachRow> const& rows) {
    if (ranks.size() < 2)
        return "there is one rank";
    if (mostRanksOnADevice(ranks) > 1)
        return "ranks share a device";
    if (!firstObstacle(ranks, rows).empty())
        return "not all ranks have peer access to each other";
    for (size_t r = 0; r < ranks.size(); ++r) {
        if (ranks[r].multicastable != 1)
            return join("device ", ranks[r].device, " of rank ", r, " does not support it");
    }
    for (size_t r = 0; r < ranks.size(); ++r) {
        if (ranks[r].ncclWindows != 1) {
            return join("rank ", r, " has no NCCL with symmetric windows (2.27 or newer), or NCCL_NVLS_ENABLE is 0");
        }
    }
    return "";
}

}  // namespace mhc
