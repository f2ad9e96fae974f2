// SPDX-License-Identifier: Apache-2.0
#include "common/errors.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "common/plugin_api.h"

namespace trtllm_mhc {
namespace {

// Fixed size, so that an error can be kept when memory is short and no destructor runs at thread or process exit.
struct Message {
    char text[1024];
    size_t length;

    size_t take(char* buffer, size_t size) noexcept {
        size_t const taken = length;
        if (buffer != nullptr && size > 0) {
            size_t const count = std::min(taken, size - 1);
            std::memcpy(buffer, text, count);
            buffer[count] = '\0';
        }
        length = 0;
        return taken;
    }
};

thread_local Message threadMessage{};
std::mutex processMutex;
Message processMessage{};

}  // namespace

void reportError(char const* plugin, char const* message) noexcept {
    Message& own = threadMessage;
    int const written = std::snprintf(own.text, sizeof(own.text), "%s: %s", plugin, message);
    own.length = written < 0 ? 0 : std::min(static_cast<size_t>(written), sizeof(own.text) - 1);
    std::fprintf(stderr, "[trtllm_mhc] ERROR: %s\n", own.text);
    std::lock_guard<std::mutex> const lock(processMutex);
    processMessage = own;
}

}  // namespace trtllm_mhc

size_t mhcPluginTakeError(char* buffer, size_t size, int32_t anyThread) {
    using namespace trtllm_mhc;
    if (threadMessage.length > 0) {
        std::lock_guard<std::mutex> const lock(processMutex);
        bool const same = processMessage.length == threadMessage.length &&
                          std::memcmp(processMessage.text, threadMessage.text, threadMessage.length) == 0;
        if (same) {
            processMessage.length = 0;
        }
        return threadMessage.take(buffer, size);
    }
    if (anyThread != 0) {
        std::lock_guard<std::mutex> const lock(processMutex);
        return processMessage.take(buffer, size);
    }
    if (buffer != nullptr && size > 0) {
        buffer[0] = '\0';
    }
    return 0;
}
