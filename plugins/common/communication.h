// SPDX-License-Identifier: Apache-2.0
//
// With whom a plugin communicates, and whether it may: the attributes that name the group, the communicator bound to an
// execution context, and the phase gate.
#ifndef TRTLLM_MHC_PLUGINS_COMMON_COMMUNICATION_H
#define TRTLLM_MHC_PLUGINS_COMMON_COMMUNICATION_H

#include <cstdint>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "common/fields.h"
#include "mhc/mhc.h"

namespace trtllm_mhc {

// Attributes that every communicating plugin has.
struct GroupAttributes {
    int32_t tpSize = 1;
    int32_t rank = -1;           // index in the group; -1: the communicator's
    std::vector<int32_t> group;  // world ranks; empty: 0 .. tpSize-1

    GroupAttributes() = default;
    explicit GroupAttributes(FieldValues const& values);  // throws PluginError

    static std::vector<FieldSpec> fieldSpecs();
    // A rank enters only when it was given, so that engines of different ranks differ in nothing but weights.
    void serialize(FieldList& fields) const;
    std::string groupText() const;
};

// What tells the execution contexts of a process apart, where nobody says which lane each of them uses.
struct ContextIdentity {
    uint64_t origin = 0;             // the deserialised plugin object that the context's descends from; 0: none
    void const* resource = nullptr;  // TensorRT's IPluginResourceContext

    // Whether, of two plugin objects, each must belong to a context of its own.
    static bool apart(ContextIdentity const& a, ContextIdentity const& b);
    // Notes what TensorRT hands to an object that is being attached.
    static void learn(ContextIdentity const& attached);
};

// The communicator that one execution context uses, kept alive as long as the context's plugin object lives. A copy
// starts unbound: a clone belongs to another context, which may run on another rank.
class CommunicatorBinding {
public:
    CommunicatorBinding() = default;
    CommunicatorBinding(CommunicatorBinding const&) : CommunicatorBinding() {}
    CommunicatorBinding& operator=(CommunicatorBinding const&) = delete;
    ~CommunicatorBinding();

    // Binds when a communicator is there. Neither waits nor fails when there is none: the context may be made first.
    void tryBind(GroupAttributes const& attributes);
    // Binds to the communicator of the process's environment, which meets its group now if it has not yet: waits for
    // the peers. It has one lane, for one execution context. Does nothing where the environment names no group. Throws
    // PluginError.
    void bindFromEnvironment(
        GroupAttributes const& attributes, int64_t hidden, ContextIdentity context, cudaStream_t stream);
    // Throws PluginError unless bound to a communicator that fits.
    void require(GroupAttributes const& attributes, int64_t hidden) const;

    bool bound() const { return comm_ != nullptr; }
    mhcComm_t comm() const { return comm_; }
    int32_t lane() const { return lane_; }
    int32_t capacity() const { return info_.capacity; }

private:
    mhcComm_t comm_ = nullptr;
    ContextIdentity context_;  // by which this binding uses the lane of an environment's communicator
    int32_t lane_ = 0;
    mhcCommInfo info_{};
};

// Whether the calling thread has closed the gate on purpose (mhcPluginSetWarmup).
bool warmupMode() noexcept;

// Throws PluginError with mhc's sentence unless status is MHC_SUCCESS.
void checkStatus(char const* function, mhcStatus status);

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_COMMON_COMMUNICATION_H
