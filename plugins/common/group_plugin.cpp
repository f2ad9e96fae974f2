// SPDX-License-Identifier: Apache-2.0
#include "common/group_plugin.h"

#include <atomic>
#include <utility>

namespace trtllm_mhc {

namespace {

uint64_t nextOrigin() {
    static std::atomic<uint64_t> counter{0};
    return ++counter;
}

}  // namespace

GroupPlugin::GroupPlugin(
    char const* name, Signature signature, GroupAttributes group, std::string const& timingText,
    nvinfer1::TensorRTPhase phase)
    : PluginBase(name, std::move(signature), "tp_size=" + std::to_string(group.tpSize) + " " + timingText),
      group_(std::move(group)),
      phase_(phase),
      context_{nextOrigin(), nullptr} {}

void GroupPlugin::serialize(FieldList& fields) const {
    group_.serialize(fields);
    serializeOwn(fields);
}

void GroupPlugin::attach(void const* resourceContext) {
    context_.resource = resourceContext;
    ContextIdentity::learn(context_);
    if (phase_ == nvinfer1::TensorRTPhase::kRUNTIME && group_.tpSize > 1) {
        binding_.tryBind(group_);
    }
}

void GroupPlugin::launch(Call const& call) {
    if (!mayCommunicate()) {
        launchLocal(call);
        return;
    }
    binding_.tryBind(group_);
    if (!binding_.bound()) {
        binding_.bindFromEnvironment(group_, call.extents.hidden, context_, call.stream);
    }
    binding_.require(group_, call.extents.hidden);
    launchGroup(call, binding_.comm(), binding_.lane());
}

bool GroupPlugin::mayCommunicate() const {
    return phase_ == nvinfer1::TensorRTPhase::kRUNTIME && group_.tpSize > 1 && !warmupMode();
}

}  // namespace trtllm_mhc
