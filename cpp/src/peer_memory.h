// SPDX-License-Identifier: Apache-2.0
//
// How the ranks of a group reach each other's memory, found out before any is allocated, and decided by all of them
// from the same answers.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "mhc/mhc.h"

namespace mhc {

// Where a rank is. Trivially copyable, without padding.
struct RankLocation {
    uint64_t process[2];  // random, one for each process
    char host[40];        // the running kernel's
    char deviceUuid[16];
    int32_t device;         // ordinal in its process
    int32_t multicastable;  // the device can take part in NVLink multicast
    int32_t ncclWindows;    // an NCCL is loaded that has symmetric windows and may use NVLink multicast
    int32_t reserved;
};

// This rank's, on `device`. Throws Failure(MHC_CUDA_ERROR).
RankLocation locate(int device);

bool sameProcess(RankLocation const& a, RankLocation const& b);
bool sameDevice(RankLocation const& a, RankLocation const& b);

// mhcReach from one rank to each.
struct ReachRow {
    int32_t to[MHC_MAX_RANKS];
};

// Asks CUDA for this rank's row.
ReachRow lookAround(std::vector<RankLocation> const& ranks, int rank);

// The first pair of ranks without a way to each other, as a sentence with what would help; empty: there is none.
std::string firstObstacle(std::vector<RankLocation> const& ranks, std::vector<ReachRow> const& rows);

int mostRanksOnADevice(std::vector<RankLocation> const& ranks);

// Why the group does not store through NVLink multicast; empty: it may. Only all ranks together can: any that cannot is
// named, and what it lacks.
std::string multicastObstacle(std::vector<RankLocation> const& ranks, std::vector<ReachRow> const& rows);

}  // namespace mhc
