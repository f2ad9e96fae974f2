// SPDX-License-Identifier: Apache-2.0
//
// Errors inside the library are exceptions; the C functions turn them into a status and a sentence.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>

#include "mhc/mhc.h"

namespace mhc {

class Failure : public std::runtime_error {
public:
    Failure(mhcStatus status, std::string const& sentence) : std::runtime_error(sentence), status_(status) {}
    mhcStatus status() const noexcept { return status_; }

private:
    mhcStatus status_;
};

// join("expected ", 4, ", got ", 5)
template <typename... Parts>
std::string join(Parts const&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

template <typename... Parts>
[[noreturn]] void fail(mhcStatus status, Parts const&... parts) {
    throw Failure(status, join(parts...));
}

template <typename... Parts>
void require(bool condition, Parts const&... parts) {
    if (!condition)
        fail(MHC_INVALID_ARGUMENT, parts...);
}

// Throws with the call, CUDA's name for the error and what was being done.
template <typename... Parts>
void checkCuda(cudaError_t error, Parts const&... doing) {
    if (error == cudaSuccess)
        return;
    cudaGetLastError();  // not sticky errors must not surface in somebody else's call
    fail(MHC_CUDA_ERROR, join(doing...), ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")");
}

// Sentence for mhcLastError() of this thread.
void setLastError(std::string const& sentence) noexcept;

// Runs `body` and maps what it throws.
template <typename Body>
mhcStatus guarded(Body&& body) noexcept {
    try {
        body();
        return MHC_SUCCESS;
    } catch (Failure const& failure) {
        setLastError(failure.what());
        return failure.status();
    } catch (std::exception const& error) {
        setLastError(error.what());
        return MHC_INVALID_ARGUMENT;
    }
}

}  // namespace mhc
