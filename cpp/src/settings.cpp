// SPDX-License-Identifier: Apache-2.0
//
// Reading a communicator's configuration, which comes from outside.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "communicator.h"
#include "status.h"

namespace mhc {
namespace {

constexpr int kMaxLanes = 64;
constexpr int kNcclWorkspaceRows = 2048;
// Of the first mhcCommConfig: what came after is optional.
constexpr size_t kFirstConfigBytes = offsetof(mhcCommConfig, nccl_rows);

}  // namespace

std::string listOf(std::vector<int32_t> const& ranks) {
    std::string text;
    for (int32_t const rank : ranks)
        text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return "[" + text + "]";
}

std::vector<int32_t> groupRanks(int tpSize, int32_t const* group, int groupSize) {
    std::vector<int32_t> ranks;
    if (groupSize == 0) {
        require(tpSize >= 1 && tpSize <= MHC_MAX_RANKS, "tp_size must be 1, 2, 4 or 8, got ", tpSize);
        for (int r = 0; r < tpSize; ++r)
            ranks.push_back(r);
        return ranks;
    }
    require(group != nullptr, "group is NULL but has ", groupSize, " entries");
    require(groupSize == tpSize, "group has ", groupSize, " ranks, expected tp_size = ", tpSize);
    ranks.assign(group, group + groupSize);
    for (size_t i = 0; i < ranks.size(); ++i) {
        require(ranks[i] >= 0, "group holds the rank ", ranks[i], ", expected ranks >= 0");
        require(
            std::find(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(i), ranks[i]) ==
                ranks.begin() + static_cast<std::ptrdiff_t>(i),
            "group holds the rank ", ranks[i], " twice");
    }
    return ranks;
}

mhcCommConfig copyConfig(mhcCommConfig const* given) {
    require(given != nullptr, "config is NULL");
    require(
        given->struct_size >= kFirstConfigBytes && given->struct_size <= sizeof(mhcCommConfig),
        "mhcCommConfig.struct_size is ", given->struct_size, ", expected ", sizeof(mhcCommConfig),
        ": header and library differ");
    mhcCommConfig complete{};
    std::memcpy(&complete, given, given->struct_size);
    complete.struct_size = sizeof(complete);
    return complete;
}

CommSettings readConfig(mhcCommConfig const* given) {
    mhcCommConfig const complete = copyConfig(given);
    mhcCommConfig const* const config = &complete;
    int const tp = config->tp_size;
    require(tp == 1 || tp == 2 || tp == 4 || tp == 8, "tp_size must be 1, 2, 4 or 8, got ", tp);
    require(config->rank >= 0 && config->rank < tp, "rank must be in 0 .. ", tp - 1, ", got ", config->rank);
    require(
        hiddenSizeSupported(config->hidden_size), "hidden_size must be 4096, 5120 or 7168, got ", config->hidden_size);
    require(
        config->capacity >= 1 && config->capacity <= kMaxLaunchRows, "capacity must be in 1 .. ", kMaxLaunchRows,
        " rows, got ", config->capacity);
    require(
        config->lanes >= 1 && config->lanes <= kMaxLanes, "lanes must be in 1 .. ", kMaxLanes, ", got ", config->lanes);
    require(
        config->on_error == MHC_ON_ERROR_RAISE || config->on_error == MHC_ON_ERROR_TRAP,
        "on_error must be 0 (raise) or 1 (trap), got ", config->on_error);
    require(
        config->wait_mode >= MHC_WAIT_AUTO && config->wait_mode <= MHC_WAIT_SPLIT,
        "wait_mode must be 0 (auto), 1 (spin), 2 (gate) or 3 (split), got ", config->wait_mode);
    require(
        config->nccl_rows >= -1,
        "nccl_rows must be -1 (never), 0 (where there is no peer access) or a number of rows, got ", config->nccl_rows);
    require(
        config->nccl_workspace_rows >= 0 && config->nccl_workspace_rows <= kMaxLaunchRows,
        "nccl_workspace_rows must be in 0 .. ", kMaxLaunchRows, ", got ", config->nccl_workspace_rows);
    int devices = 0;
    cudaError_t const counted = cudaGetDeviceCount(&devices);
    checkCuda(counted, "a communicator needs a CUDA device: cudaGetDeviceCount");
    require(
        config->device >= 0 && config->device < devices, "device must be in 0 .. ", devices - 1, ", got ",
        config->device);
    uint32_t const timeout = config->timeout_ms == 0 ? 60000u : config->timeout_ms;
    require(timeout <= 86400000u, "timeout_ms must be at most a day, got ", timeout);
    return {
        tp,
        config->rank,
        config->device,
        config->hidden_size,
        config->capacity,
        config->lanes,
        static_cast<mhcOnError>(config->on_error),
        static_cast<mhcWaitMode>(config->wait_mode),
        std::chrono::milliseconds(timeout),
        groupRanks(tp, config->group, config->group_size),
        config->nccl_rows,
        config->nccl_workspace_rows == 0 ? kNcclWorkspaceRows : config->nccl_workspace_rows};
}

}  // namespace mhc
