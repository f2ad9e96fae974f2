// SPDX-License-Identifier: Apache-2.0
//
// A group made from environment variables, for processes in which nobody calls this library: who this process is, and
// where its group meets. docs/ranks.md lists the variables.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bootstrap.h"
#include "communicator.h"
#include "mhc/mhc.h"

namespace mhc {

// The value of a variable, or NULL.
using Variables = std::function<char const*(char const*)>;

// What a launcher says about this process.
struct LaunchedProcess {
    std::string launcher;
    int32_t rank = 0;
    int32_t size = 0;
    int32_t localRank = -1;  // among the processes of this host; -1: not said
    std::string job;         // tells this launch from others of the user; empty: not said
};

// Nothing where no launcher's variables are set. Throws where they are incomplete or no numbers.
std::optional<LaunchedProcess> readLaunchedProcess(Variables const& variables);

// A group's settings and how it meets.
struct EnvironmentGroup {
    CommSettings settings;
    std::function<std::unique_ptr<Bootstrap>()> meet;
};

// Completes `config` from the variables: rank and device where they are -1; capacity, timeout_ms and nccl_rows where
// they are 0; on_error where it is -1. Throws Failure(MHC_NOT_BOUND) where the variables name no group.
EnvironmentGroup readEnvironmentGroup(mhcCommConfig const* config, Variables const& variables);

// Throws Failure(MHC_NOT_BOUND) where the variables name no group.
void requireEnvironmentGroup(Variables const& variables);

// The process's own.
char const* environmentVariable(char const* name);

}  // namespace mhc
