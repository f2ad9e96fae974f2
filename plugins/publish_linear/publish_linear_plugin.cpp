// SPDX-License-Identifier: Apache-2.0
#include "publish_linear/publish_linear_plugin.h"

#include <string>
#include <utility>

namespace trtllm_mhc {
namespace {

using nvinfer1::DataType;
using nvinfer1::PluginFieldType;

std::vector<FieldSpec> publishLinearFieldSpecs() {
    std::vector<FieldSpec> specs = GroupAttributes::fieldSpecs();
    specs.insert(specs.begin(), formatFieldSpec());
    specs.push_back(
        {"weight_type", PluginFieldType::kINT32, 1, false, "0 (BF16) or 1 (E4M3 with block scales)", isFlag});
    return specs;
}

Signature publishLinearSignature(int32_t weightType) {
    Signature signature;
    signature.inputs = {{"activation", DataType::kBF16, {Axis::kRows, Axis::kFeatures}}};
    if (weightType == MHC_WEIGHT_BF16) {
        signature.inputs.push_back({"weight", DataType::kBF16, {Axis::kHidden, Axis::kFeatures}});
    } else {
        signature.inputs.push_back({"weight", DataType::kFP8, {Axis::kHidden, Axis::kFeatures}});
        signature.inputs.push_back({"scales", DataType::kINT32, {Axis::kWeightBlockRows, Axis::kWeightScaleWords}});
    }
    signature.outputs = {{"x", DataType::kBF16, {Axis::kRows, Axis::kHidden}}};
    return signature;
}

}  // namespace

PublishLinearPlugin::PublishLinearPlugin(GroupAttributes group, int32_t weightType, nvinfer1::TensorRTPhase phase)
    : GroupPlugin(
          kName, publishLinearSignature(weightType), std::move(group), "weight_type=" + std::to_string(weightType),
          phase),
      weightType_(weightType) {}

std::unique_ptr<PluginBase> PublishLinearPlugin::copy() const {
    return std::make_unique<PublishLinearPlugin>(*this);
}

void PublishLinearPlugin::serializeOwn(FieldList& fields) const {
    fields.add("weight_type", weightType_);
}

mhcPublishLinearArgs PublishLinearPlugin::arguments(Call const& call) const {
    mhcPublishLinearArgs args{};
    args.struct_size = sizeof(args);
    args.rows = static_cast<int32_t>(call.extents.rows);
    args.in_features = static_cast<int32_t>(call.extents.features);
    args.weight_type = weightType_;
    args.activation = call.inputs[0];
    args.weight = call.inputs[1];
    args.weight_scales = weightType_ == MHC_WEIGHT_BF16 ? nullptr : call.inputs[2];
    args.out = call.outputs[0];
    return args;
}

void PublishLinearPlugin::launchLocal(Call const& call) const {
    mhcPublishLinearArgs const args = arguments(call);
    checkStatus(
        "mhcPublishLinearLocal", mhcPublishLinearLocal(static_cast<int32_t>(call.extents.hidden), &args, call.stream));
}

void PublishLinearPlugin::launchGroup(Call const& call, mhcComm_t comm, int32_t lane) const {
    // The boundary that follows knows as well that so many rows are not in the mailbox.
    if (call.extents.rows > capacity()) {
        launchLocal(call);
        return;
    }
    mhcPublishLinearArgs const args = arguments(call);
    checkStatus("mhcPublishLinear", mhcPublishLinear(comm, lane, &args, call.stream));
}

PublishLinearCreator::PublishLinearCreator() : CreatorBase(PublishLinearPlugin::kName, publishLinearFieldSpecs()) {}

std::unique_ptr<PluginBase> PublishLinearCreator::create(
    FieldValues const& values, nvinfer1::TensorRTPhase phase) const {
    return std::make_unique<PublishLinearPlugin>(
        GroupAttributes(values), values.integer("weight_type", MHC_WEIGHT_BF16), phase);
}

}  // namespace trtllm_mhc
