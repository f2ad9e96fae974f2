// SPDX-License-Identifier: Apache-2.0
//
// How ranks tell each other whether a step of a collective call went well.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "status.h"

namespace mhc {

// How a step went on one rank.
struct Verdict {
    int32_t failed;
    char reason[252];
};

inline void setReason(char (&reason)[252], std::string const& text) {
    std::snprintf(reason, sizeof(reason), "%s", text.c_str());
}

// A peer's words, which need not end and may hold anything.
inline std::string readReason(char const (&reason)[252]) {
    std::string text(reason, strnlen(reason, sizeof(reason)));
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
    return text;
}

// Throws when the step failed on any rank. `Answer` has Verdict's fields.
template <typename Answer>
void requireAll(std::vector<Answer> const& answers, char const* step) {
    for (size_t r = 0; r < answers.size(); ++r) {
        if (answers[r].failed)
            fail(MHC_PEER_FAILED, step, " failed on rank ", r, ": ", readReason(answers[r].reason));
    }
}

}  // namespace mhc
