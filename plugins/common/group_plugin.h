// SPDX-License-Identifier: Apache-2.0
//
// A plugin that communicates: the phase gate, and the binding of a communicator to an execution context.
//
// The gate. An object communicates only if it descends from createPlugin(kRUNTIME), its group has more than one rank
// and a communicator is bound. Objects of the build phase, which TensorRT may time, compute this rank's contribution
// alone. A runtime object without a communicator is an error, never silently local; mhcPluginSetWarmup() closes the
// gate on purpose.
#ifndef TRTLLM_MHC_PLUGINS_COMMON_GROUP_PLUGIN_H
#define TRTLLM_MHC_PLUGINS_COMMON_GROUP_PLUGIN_H

#include <string>

#include "common/communication.h"
#include "common/plugin_base.h"

namespace trtllm_mhc {

class GroupPlugin : public PluginBase {
protected:
    // `timingText` is PluginBase's without the group.
    GroupPlugin(
        char const* name, Signature signature, GroupAttributes group, std::string const& timingText,
        nvinfer1::TensorRTPhase phase);
    GroupPlugin(GroupPlugin const&) = default;

    void serialize(FieldList& fields) const final;
    void attach(void const* resourceContext) final;
    void launch(Call const& call) final;

    // The plugin's own attributes.
    virtual void serializeOwn(FieldList& fields) const = 0;
    // Throw PluginError on failure.
    virtual void launchLocal(Call const& call) const = 0;
    virtual void launchGroup(Call const& call, mhcComm_t comm, int32_t lane) const = 0;
    // Rows that the bound communicator's mailbox holds at once. A published contribution has at most so many; the layer
    // that makes it and the boundary that consumes it decide by this alone.
    int32_t capacity() const { return binding_.capacity(); }

private:
    bool mayCommunicate() const;

    GroupAttributes group_;
    nvinfer1::TensorRTPhase phase_;
    ContextIdentity context_;
    CommunicatorBinding binding_;
};

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_COMMON_GROUP_PLUGIN_H
