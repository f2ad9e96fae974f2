// SPDX-License-Identifier: Apache-2.0
//
// What a hostile or broken peer answers when a communicator is made: the input is the peers' bytes, round after round.
// Answers begin as this rank's own, so that they get past the first comparison; the input says what is changed.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "mhc/mhc.h"

namespace {

struct Peers {
    uint8_t const* data;
    size_t size;
    int round = 0;

    bool take(void* to, size_t bytes) {
        if (size < bytes)
            return false;
        std::memcpy(to, data, bytes);
        data += bytes;
        size -= bytes;
        return true;
    }
};

// From `at` on: all bytes `value`, one byte `value`, or bytes that follow in the input, as `form` says.
struct Change {
    uint16_t at;
    uint8_t value;
    uint8_t form;
};

// Every peer repeats this rank's message with its own rank in it, then with the input's changes.
int allGather(void* context, void const* send, void* receive, size_t bytes) {
    auto& peers = *static_cast<Peers*>(context);
    auto* const all = static_cast<uint8_t*>(receive);
    constexpr size_t kRankAt = 8;     // in the first message: magic, tp_size, rank
    constexpr size_t kReachAt = 256;  // in the second, after a verdict: how the rank reaches each
    constexpr int32_t reach[] = {MHC_REACH_PEER_ACCESS, MHC_REACH_SELF};
    for (int32_t rank = 0; rank < 2; ++rank) {
        uint8_t* const mine = all + bytes * static_cast<size_t>(rank);
        std::memcpy(mine, send, bytes);
        if (rank == 0)
            continue;
        if (peers.round == 0)
            std::memcpy(mine + kRankAt, &rank, sizeof(rank));
        if (peers.round == 1)
            std::memcpy(mine + kReachAt, reach, sizeof(reach));
        uint8_t changes = 0;
        peers.take(&changes, 1);
        for (int i = 0; i < changes % 4; ++i) {
            Change change{};
            if (!peers.take(&change, sizeof(change)))
                break;
            size_t const at = change.at % bytes;
            size_t const rest = bytes - at;
            if (change.form < 64)
                std::memset(mine + at, change.value, rest);
            else if (change.form < 128)
                mine[at] = change.value;
            else
                peers.take(mine + at, std::min<size_t>(change.form - 127u, rest));
        }
    }
    ++peers.round;
    return 0;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(uint8_t const* data, size_t size) {
    Peers peers{data, size, 0};
    mhcCommConfig config{};
    config.struct_size = sizeof(config);
    config.tp_size = 2;
    config.hidden_size = 4096;
    config.capacity = 1;
    config.lanes = 1;
    mhcComm_t comm = nullptr;
    if (mhcCommCreateAllGather(&comm, &config, allGather, &peers) == MHC_SUCCESS) {
        mhcCommInfo info{};
        info.struct_size = sizeof(info);
        mhcCommGetInfo(comm, &info);
        if (info.exchange_rows < 0)
            __builtin_trap();
        mhcCommReset(comm);
        mhcCommDestroy(comm);
    } else if (comm != nullptr || std::strlen(mhcLastError()) == 0 || std::strlen(mhcLastError()) > 1000) {
        __builtin_trap();
    }
    return 0;
}
