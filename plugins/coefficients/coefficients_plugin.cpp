// SPDX-License-Identifier: Apache-2.0
#include "coefficients/coefficients_plugin.h"

#include <cmath>

#include "common/communication.h"
#include "mhc/mhc.h"

namespace trtllm_mhc {
namespace {

using nvinfer1::DataType;
using nvinfer1::PluginFieldType;

constexpr char kEpsilon[] = "a finite number of 0 or more";

bool isEpsilon(double value) {
    return std::isfinite(value) && value >= 0;
}

std::vector<FieldSpec> coefficientsFieldSpecs() {
    return {
        formatFieldSpec(),
        {"hc_mult", PluginFieldType::kINT32, 1, false, "4", [](double value) { return value == MHC_STREAMS; }},
        {"rms_norm_eps", PluginFieldType::kFLOAT32, 1, true, kEpsilon, isEpsilon},
        {"hc_eps", PluginFieldType::kFLOAT32, 1, true, kEpsilon, isEpsilon},
        {"post_alpha", PluginFieldType::kFLOAT32, 1, true, "a finite number",
         [](double value) { return std::isfinite(value); }},
        {"sinkhorn_iters", PluginFieldType::kINT32, 1, true, "1 or more", [](double value) { return value >= 1; }},
        {"broadcast", PluginFieldType::kINT32, 1, false, "0 or 1", isFlag},
    };
}

Signature coefficientsSignature(bool broadcast) {
    Signature signature;
    if (broadcast) {
        signature.inputs = {
            {"x", DataType::kBF16, {Axis::kRows, Axis::kHidden}},
            {"fn", DataType::kFLOAT, {Axis::kCoefficients, Axis::kHidden}},
        };
    } else {
        signature.inputs = {
            {"streams", DataType::kBF16, {Axis::kRows, Axis::kStreams, Axis::kHidden}},
            {"fn", DataType::kFLOAT, {Axis::kCoefficients, Axis::kStreamHidden}},
        };
    }
    signature.inputs.push_back({"scale", DataType::kFLOAT, {Axis::kMixes}});
    signature.inputs.push_back({"base", DataType::kFLOAT, {Axis::kCoefficients}});
    signature.outputs = {
        {"post", DataType::kFLOAT, {Axis::kRows, Axis::kStreams}},
        {"comb", DataType::kFLOAT, {Axis::kRows, Axis::kStreams, Axis::kStreams}},
        {"pre", DataType::kFLOAT, {Axis::kRows, Axis::kStreams}},
    };
    return signature;
}

std::string timingText(CoefficientsAttributes const& attributes) {
    return "broadcast=" + std::to_string(attributes.broadcast) +
           " sinkhorn_iters=" + std::to_string(attributes.sinkhornIters);
}

}  // namespace

CoefficientsAttributes::CoefficientsAttributes(FieldValues const& values)
    : hcMult(values.integer("hc_mult", MHC_STREAMS)),
      rmsNormEps(values.real("rms_norm_eps", 0.0F)),
      hcEps(values.real("hc_eps", 0.0F)),
      postAlpha(values.real("post_alpha", 0.0F)),
      sinkhornIters(values.integer("sinkhorn_iters", 0)),
      broadcast(values.integer("broadcast", 0)) {}

CoefficientsPlugin::CoefficientsPlugin(CoefficientsAttributes const& attributes)
    : PluginBase(kName, coefficientsSignature(attributes.broadcast != 0), timingText(attributes)),
      attributes_(attributes) {}

std::unique_ptr<PluginBase> CoefficientsPlugin::copy() const {
    return std::make_unique<CoefficientsPlugin>(*this);
}

void CoefficientsPlugin::serialize(FieldList& fields) const {
    fields.add("hc_mult", attributes_.hcMult);
    fields.add("rms_norm_eps", attributes_.rmsNormEps);
    fields.add("hc_eps", attributes_.hcEps);
    fields.add("post_alpha", attributes_.postAlpha);
    fields.add("sinkhorn_iters", attributes_.sinkhornIters);
    fields.add("broadcast", attributes_.broadcast);
}

size_t CoefficientsPlugin::workspaceBytes(Extents const& extents) const {
    return mhcCoefficientsWorkspaceBytes(
        static_cast<int32_t>(extents.rows), static_cast<int32_t>(extents.hidden), attributes_.broadcast);
}

void CoefficientsPlugin::launch(Call const& call) {
    mhcCoefficientsArgs args{};
    args.struct_size = sizeof(args);
    args.rows = static_cast<int32_t>(call.extents.rows);
    args.hidden_size = static_cast<int32_t>(call.extents.hidden);
    args.broadcast = attributes_.broadcast;
    args.sinkhorn_iters = attributes_.sinkhornIters;
    args.rms_norm_eps = attributes_.rmsNormEps;
    args.hc_eps = attributes_.hcEps;
    args.post_alpha = attributes_.postAlpha;
    args.streams = call.inputs[0];
    args.fn = static_cast<float const*>(call.inputs[1]);
    args.scale = static_cast<float const*>(call.inputs[2]);
    args.base = static_cast<float const*>(call.inputs[3]);
    args.post = static_cast<float*>(call.outputs[0]);
    args.comb = static_cast<float*>(call.outputs[1]);
    args.pre = static_cast<float*>(call.outputs[2]);
    args.workspace = call.workspace;
    args.workspace_bytes = workspaceBytes(call.extents);
    checkStatus("mhcCoefficients", mhcCoefficients(&args, call.stream));
}

CoefficientsCreator::CoefficientsCreator() : CreatorBase(CoefficientsPlugin::kName, coefficientsFieldSpecs()) {}

std::unique_ptr<PluginBase> CoefficientsCreator::create(
    FieldValues const& values, nvinfer1::TensorRTPhase /*phase*/) const {
    return std::make_unique<CoefficientsPlugin>(CoefficientsAttributes(values));
}

}  // namespace trtllm_mhc
