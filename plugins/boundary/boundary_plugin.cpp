// SPDX-License-Identifier: Apache-2.0
#include "boundary/boundary_plugin.h"

#include <cmath>
#include <utility>

#include "common/errors.h"

namespace trtllm_mhc {
namespace {

using nvinfer1::DataType;
using nvinfer1::PluginFieldType;

constexpr int32_t kMaxTopK = 64;

std::vector<FieldSpec> boundaryFieldSpecs() {
    std::vector<FieldSpec> specs = GroupAttributes::fieldSpecs();
    specs.insert(specs.begin(), formatFieldSpec());
    std::vector<FieldSpec> const own{
        {"hc_mult", PluginFieldType::kINT32, 1, false, "4", [](double value) { return value == MHC_STREAMS; }},
        {"norm_eps", PluginFieldType::kFLOAT32, 1, false, "a finite number of 0 or more",
         [](double value) { return std::isfinite(value) && value >= 0; }},
        {"collapse", PluginFieldType::kINT32, 1, false, "0 or 1", isFlag},
        {"published", PluginFieldType::kINT32, 1, false, "0 or 1", isFlag},
        {"top_k", PluginFieldType::kINT32, 1, false, "0 to 64",
         [](double value) { return value >= 0 && value <= kMaxTopK; }},
        {"quantize", PluginFieldType::kINT32, 1, false, "0 or 1", isFlag},
    };
    specs.insert(specs.end(), own.begin(), own.end());
    return specs;
}

Signature boundarySignature(BoundaryAttributes const& attributes) {
    Signature signature;
    signature.topK = attributes.topK;
    if (attributes.topK > 0) {
        signature.inputs = {
            {"gemm2_permuted", DataType::kBF16, {Axis::kPermutedRows, Axis::kHidden}},
            {"expert_weights", DataType::kFLOAT, {Axis::kRows, Axis::kTopK}},
            {"expanded_idx_to_permuted_idx", DataType::kINT32, {Axis::kRows, Axis::kTopK}},
            {"shared_output", DataType::kBF16, {Axis::kRows, Axis::kHidden}},
        };
    } else {
        signature.inputs = {{"x", DataType::kBF16, {Axis::kRows, Axis::kHidden}}};
    }
    signature.inputs.push_back({"residual", DataType::kBF16, {Axis::kRows, Axis::kStreams, Axis::kHidden}});
    signature.inputs.push_back({"post", DataType::kFLOAT, {Axis::kRows, Axis::kStreams}});
    signature.inputs.push_back({"comb", DataType::kFLOAT, {Axis::kRows, Axis::kStreams, Axis::kStreams}});
    signature.outputs = {{"residual_out", DataType::kBF16, {Axis::kRows, Axis::kStreams, Axis::kHidden}}};
    if (attributes.collapse != 0) {
        signature.inputs.push_back({"pre", DataType::kFLOAT, {Axis::kRows, Axis::kStreams}});
        signature.inputs.push_back({"gamma", DataType::kBF16, {Axis::kHidden}});
        signature.outputs.push_back({"layer_input", DataType::kBF16, {Axis::kRows, Axis::kHidden}});
    }
    if (attributes.quantize != 0) {
        signature.outputs.push_back({"mxfp8_data", DataType::kFP8, {Axis::kRows, Axis::kHidden}});
        signature.outputs.push_back({"mxfp8_scales", DataType::kINT32, {Axis::kScaleWords}});
    }
    return signature;
}

std::string attributesText(BoundaryAttributes const& attributes) {
    return "collapse=" + std::to_string(attributes.collapse) + " published=" + std::to_string(attributes.published) +
           " top_k=" + std::to_string(attributes.topK) + " quantize=" + std::to_string(attributes.quantize);
}

}  // namespace

BoundaryAttributes::BoundaryAttributes(FieldValues const& values)
    : hcMult(values.integer("hc_mult", MHC_STREAMS)),
      normEps(values.real("norm_eps", 0.0F)),
      collapse(values.integer("collapse", 1)),
      published(values.integer("published", 0)),
      topK(values.integer("top_k", 0)),
      quantize(values.integer("quantize", 0)) {
    if (collapse != 0 && !values.has("norm_eps")) {
        throw PluginError(
            "field \"norm_eps\" is required (FLOAT32, a finite number of 0 or more) with collapse=1, but missing");
    }
    if (quantize != 0 && collapse == 0) {
        throw PluginError("field \"quantize\": expected 0 with collapse=0 (there is no layer input), got 1");
    }
    if (published != 0 && topK != 0) {
        throw PluginError("field \"published\": expected 0 with top_k > 0 (finalize publishes by itself), got 1");
    }
}

BoundaryPlugin::BoundaryPlugin(
    GroupAttributes group, BoundaryAttributes const& attributes, nvinfer1::TensorRTPhase phase)
    : GroupPlugin(kName, boundarySignature(attributes), std::move(group), attributesText(attributes), phase),
      attributes_(attributes) {}

std::unique_ptr<PluginBase> BoundaryPlugin::copy() const {
    return std::make_unique<BoundaryPlugin>(*this);
}

void BoundaryPlugin::serializeOwn(FieldList& fields) const {
    fields.add("hc_mult", attributes_.hcMult);
    fields.add("collapse", attributes_.collapse);
    fields.add("published", attributes_.published);
    fields.add("top_k", attributes_.topK);
    fields.add("quantize", attributes_.quantize);
    if (attributes_.collapse != 0) {
        fields.add("norm_eps", attributes_.normEps);
    }
}

mhcBoundaryArgs BoundaryPlugin::arguments(Call const& call) const {
    mhcBoundaryArgs args{};
    args.struct_size = sizeof(args);
    args.rows = static_cast<int32_t>(call.extents.rows);
    void const* const* input = call.inputs;
    if (attributes_.topK > 0) {
        args.top_k = attributes_.topK;
        args.permuted_rows = static_cast<int32_t>(call.extents.permutedRows);
        args.gemm2_permuted = *input++;
        args.expert_weights = static_cast<float const*>(*input++);
        args.expanded_idx_to_permuted_idx = static_cast<int32_t const*>(*input++);
        args.shared_output = *input++;
    } else {
        args.x = *input++;
    }
    args.residual = *input++;
    args.post = static_cast<float const*>(*input++);
    args.comb = static_cast<float const*>(*input++);
    void* const* output = call.outputs;
    args.residual_out = *output++;
    if (attributes_.collapse != 0) {
        args.pre = static_cast<float const*>(*input++);
        args.gamma = *input++;
        args.norm_eps = attributes_.normEps;
        args.layer_input = *output++;
    }
    if (attributes_.quantize != 0) {
        args.mxfp8_data = *output++;
        args.mxfp8_scales = *output++;
    }
    return args;
}

void BoundaryPlugin::launchLocal(Call const& call) const {
    // A producer whose own gate is closed leaves its values in x and publishes nothing.
    mhcBoundaryArgs const args = arguments(call);
    checkStatus("mhcBoundaryLocal", mhcBoundaryLocal(static_cast<int32_t>(call.extents.hidden), &args, call.stream));
}

void BoundaryPlugin::launchGroup(Call const& call, mhcComm_t comm, int32_t lane) const {
    mhcBoundaryArgs args = arguments(call);
    // More rows than a slot holds are not published by their producer, only computed: x has them.
    args.published = attributes_.published != 0 && args.rows <= capacity() ? 1 : 0;
    checkStatus("mhcBoundary", mhcBoundary(comm, lane, &args, call.stream));
}

BoundaryCreator::BoundaryCreator() : CreatorBase(BoundaryPlugin::kName, boundaryFieldSpecs()) {}

std::unique_ptr<PluginBase> BoundaryCreator::create(FieldValues const& values, nvinfer1::TensorRTPhase phase) const {
    return std::make_unique<BoundaryPlugin>(GroupAttributes(values), BoundaryAttributes(values), phase);
}

}  // namespace trtllm_mhc
