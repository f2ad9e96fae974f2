// SPDX-License-Identifier: Apache-2.0
//
// How an error leaves a plugin. TensorRT's interfaces carry only "failed", and ILogger changed its layout between
// TensorRT 10 and 11, so the sentence goes to stderr and is kept for mhcPluginTakeError().
#ifndef TRTLLM_MHC_PLUGINS_COMMON_ERRORS_H
#define TRTLLM_MHC_PLUGINS_COMMON_ERRORS_H

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace trtllm_mhc {

class PluginError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// Prints "[trtllm_mhc] ERROR: <plugin>: <message>" and keeps the sentence.
void reportError(char const* plugin, char const* message) noexcept;

// Runs body and reports what it throws: the frame of every override, since none of them may let an exception through.
template <typename Body>
bool guarded(char const* plugin, Body&& body) noexcept {
    try {
        std::forward<Body>(body)();
        return true;
    } catch (std::exception const& error) {
        reportError(plugin, error.what());
    } catch (...) {
        reportError(plugin, "unknown exception");
    }
    return false;
}

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_COMMON_ERRORS_H
