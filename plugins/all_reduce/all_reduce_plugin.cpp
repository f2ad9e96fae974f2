// SPDX-License-Identifier: Apache-2.0
#include "all_reduce/all_reduce_plugin.h"

#include <utility>

#include "common/errors.h"

namespace trtllm_mhc {
namespace {

using nvinfer1::DataType;
using nvinfer1::PluginFieldType;

constexpr char kOneShot[] = "oneshot";
constexpr char kNccl[] = "nccl";
constexpr int32_t kMaxStrategyLength = 32;

std::vector<FieldSpec> allReduceFieldSpecs() {
    std::vector<FieldSpec> specs = GroupAttributes::fieldSpecs();
    specs.insert(specs.begin(), formatFieldSpec());
    specs.push_back(
        {"strategy", PluginFieldType::kCHAR, kMaxStrategyLength, false, "\"oneshot\" or \"nccl\"", nullptr});
    return specs;
}

Signature allReduceSignature() {
    Signature signature;
    signature.inputs = {{"x", DataType::kBF16, {Axis::kRows, Axis::kHidden}}};
    signature.outputs = {{"sum", DataType::kBF16, {Axis::kRows, Axis::kHidden}}};
    return signature;
}

}  // namespace

AllReducePlugin::AllReducePlugin(GroupAttributes group, std::string strategy, nvinfer1::TensorRTPhase phase)
    : GroupPlugin(kName, allReduceSignature(), std::move(group), "strategy=" + strategy, phase),
      strategy_(std::move(strategy)) {
    if (strategy_ != kOneShot && strategy_ != kNccl) {
        throw PluginError("field \"strategy\": expected \"oneshot\" or \"nccl\", got \"" + strategy_ + "\"");
    }
}

std::unique_ptr<PluginBase> AllReducePlugin::copy() const {
    return std::make_unique<AllReducePlugin>(*this);
}

void AllReducePlugin::serializeOwn(FieldList& fields) const {
    fields.add("strategy", strategy_);
}

void AllReducePlugin::launchLocal(Call const& call) const {
    checkStatus(
        "mhcAllReduceLocal", mhcAllReduceLocal(
                                 call.inputs[0], call.outputs[0], static_cast<int32_t>(call.extents.rows),
                                 static_cast<int32_t>(call.extents.hidden), call.stream));
}

void AllReducePlugin::launchGroup(Call const& call, mhcComm_t comm, int32_t lane) const {
    bool const nccl = strategy_ == kNccl;
    auto* const allReduce = nccl ? mhcAllReduceNccl : mhcAllReduce;
    checkStatus(
        nccl ? "mhcAllReduceNccl" : "mhcAllReduce",
        allReduce(comm, lane, call.inputs[0], call.outputs[0], static_cast<int32_t>(call.extents.rows), call.stream));
}

AllReduceCreator::AllReduceCreator() : CreatorBase(AllReducePlugin::kName, allReduceFieldSpecs()) {}

std::unique_ptr<PluginBase> AllReduceCreator::create(FieldValues const& values, nvinfer1::TensorRTPhase phase) const {
    return std::make_unique<AllReducePlugin>(GroupAttributes(values), values.text("strategy", kOneShot), phase);
}

}  // namespace trtllm_mhc
