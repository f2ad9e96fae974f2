// SPDX-License-Identifier: Apache-2.0
#include "common/plugin_base.h"

#include <algorithm>
#include <utility>

#include "common/errors.h"
#include "mhc/mhc.h"

namespace trtllm_mhc {
namespace {

using nvinfer1::DimensionOperation;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::IDimensionExpr;
using nvinfer1::IExprBuilder;
using nvinfer1::PluginTensorDesc;

constexpr int32_t kSuccess = 0;
constexpr int32_t kFailure = -1;

int32_t status(bool ok) {
    return ok ? kSuccess : kFailure;
}

// The expression of an axis, taken from an input that has it.
IDimensionExpr const* inputExpression(std::vector<TensorSpec> const& specs, DimsExprs const* inputs, Axis axis) {
    for (size_t i = 0; i < specs.size(); ++i) {
        auto const& shape = specs[i].shape;
        auto const found = std::find(shape.begin(), shape.end(), axis);
        if (found != shape.end()) {
            return inputs[i].d[found - shape.begin()];
        }
    }
    throw PluginError("no input has the axis of an output");
}

IDimensionExpr const* outputExpression(
    std::vector<TensorSpec> const& specs, DimsExprs const* inputs, Axis axis, IExprBuilder& builder) {
    if (axis == Axis::kStreams) {
        return builder.constant(MHC_STREAMS);
    }
    if (axis != Axis::kScaleWords) {
        return inputExpression(specs, inputs, axis);
    }
    auto const tiles = [&](Axis of, int64_t tile) {
        return builder.operation(
            DimensionOperation::kCEIL_DIV, *inputExpression(specs, inputs, of), *builder.constant(tile));
    };
    IDimensionExpr const* rows = builder.operation(
        DimensionOperation::kPROD, *tiles(Axis::kRows, kScaleTileRows), *builder.constant(kScaleTileRows));
    return builder.operation(DimensionOperation::kPROD, *rows, *tiles(Axis::kHidden, kScaleTileColumns));
}

}  // namespace

PluginBase::PluginBase(char const* name, Signature signature, std::string const& timingText)
    : name_(name),
      signature_(std::move(signature)),
      timingCacheId_(std::string(name) + " " + kPluginVersion + " " + timingText) {}

nvinfer1::IPluginCapability* PluginBase::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
        case nvinfer1::PluginCapabilityType::kCORE:
            return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case nvinfer1::PluginCapabilityType::kBUILD:
            return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME:
            return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* PluginBase::clone() noexcept {
    std::unique_ptr<PluginBase> copied;
    guarded(name_, [&] { copied = copy(); });
    return copied.release();
}

int32_t PluginBase::getOutputDataTypes(
    nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
    int32_t nbInputs) const noexcept {
    return status(guarded(name_, [&] {
        signature_.checkCounts(nbInputs, nbOutputs);
        for (int32_t i = 0; i < nbInputs; ++i) {
            signature_.checkInputType(i, inputTypes[i]);
        }
        for (int32_t i = 0; i < nbOutputs; ++i) {
            outputTypes[i] = signature_.outputs[static_cast<size_t>(i)].type;
        }
    }));
}

int32_t PluginBase::getOutputShapes(
    DimsExprs const* inputs, int32_t nbInputs, DimsExprs const* /*shapeInputs*/, int32_t nbShapeInputs,
    DimsExprs* outputs, int32_t nbOutputs, IExprBuilder& exprBuilder) noexcept {
    return status(guarded(name_, [&] {
        signature_.checkCounts(nbInputs, nbOutputs);
        if (nbShapeInputs != 0) {
            throw PluginError("expected no shape inputs, got " + std::to_string(nbShapeInputs));
        }
        Extents extents;
        for (int32_t i = 0; i < nbInputs; ++i) {
            signature_.checkInputShape(i, Shape(inputs[i]), extents);
        }
        for (int32_t i = 0; i < nbOutputs; ++i) {
            std::vector<Axis> const& shape = signature_.outputs[static_cast<size_t>(i)].shape;
            outputs[i].nbDims = static_cast<int32_t>(shape.size());
            for (size_t axis = 0; axis < shape.size(); ++axis) {
                outputs[i].d[axis] = outputExpression(signature_.inputs, inputs, shape[axis], exprBuilder);
            }
        }
    }));
}

bool PluginBase::supportsFormatCombination(
    int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept {
    bool supported = false;
    // TensorRT tries formats out here: a refusal is an answer, not an error.
    guarded(name_, [&] {
        signature_.checkCounts(nbInputs, nbOutputs);
        auto const& specs = pos < nbInputs ? signature_.inputs : signature_.outputs;
        TensorSpec const& spec = specs.at(static_cast<size_t>(pos < nbInputs ? pos : pos - nbInputs));
        PluginTensorDesc const& desc = inOut[pos].desc;
        supported = desc.format == nvinfer1::TensorFormat::kLINEAR && desc.type == spec.type;
    });
    return supported;
}

int32_t PluginBase::configurePlugin(
    DynamicPluginTensorDesc const* in, int32_t nbInputs, DynamicPluginTensorDesc const* out,
    int32_t nbOutputs) noexcept {
    return status(guarded(name_, [&] {
        signature_.checkCounts(nbInputs, nbOutputs);
        Extents extents;
        for (int32_t i = 0; i < nbInputs; ++i) {
            signature_.checkInputType(i, in[i].desc.type);
            signature_.checkInputShape(i, Shape(in[i].desc.dims), extents);
        }
        signature_.checkProfiles(in);
        for (int32_t i = 0; i < nbOutputs; ++i) {
            signature_.checkOutputShape(i, Shape(out[i].desc.dims), extents);
        }
    }));
}

size_t PluginBase::getWorkspaceSize(
    DynamicPluginTensorDesc const* inputs, int32_t nbInputs, DynamicPluginTensorDesc const* /*outputs*/,
    int32_t nbOutputs) const noexcept {
    size_t bytes = 0;
    guarded(name_, [&] {
        signature_.checkCounts(nbInputs, nbOutputs);
        Extents extents;
        for (int32_t i = 0; i < nbInputs; ++i) {
            signature_.checkInputShape(i, Shape(inputs[i].desc.dims), extents);
        }
        if (extents.rows == kUnknownExtent) {
            extents.rows = signature_.checkProfiles(inputs);
        }
        Signature::requireKnown(extents);
        bytes = workspaceBytes(extents);
    });
    return bytes;
}

int32_t PluginBase::onShapeChange(
    PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out, int32_t nbOutputs) noexcept {
    return status(guarded(name_, [&] {
        signature_.checkCounts(nbInputs, nbOutputs);
        checkCall(in, out);
    }));
}

int32_t PluginBase::enqueue(
    PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc, void const* const* inputs,
    void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    return status(
        guarded(name_, [&] { launch({checkCall(inputDesc, outputDesc), inputs, outputs, workspace, stream}); }));
}

nvinfer1::IPluginV3* PluginBase::attachToContext(nvinfer1::IPluginResourceContext* context) noexcept {
    std::unique_ptr<PluginBase> attached;
    guarded(name_, [&] {
        std::unique_ptr<PluginBase> copied = copy();
        copied->attach(context);
        attached = std::move(copied);
    });
    return attached.release();
}

nvinfer1::PluginFieldCollection const* PluginBase::getFieldsToSerialize() noexcept {
    bool const ok = guarded(name_, [&] {
        fields_.clear();
        fields_.add("format", kFieldFormat);
        serialize(fields_);
    });
    return ok ? fields_.collection() : nullptr;
}

char const* PluginBase::getMetadataString() noexcept {
    bool const ok = getFieldsToSerialize() != nullptr && guarded(name_, [&] { metadata_ = fields_.text(); });
    return ok ? metadata_.c_str() : nullptr;
}

Extents PluginBase::checkCall(PluginTensorDesc const* in, PluginTensorDesc const* out) const {
    Extents extents;
    for (size_t i = 0; i < signature_.inputs.size(); ++i) {
        signature_.checkInputType(static_cast<int32_t>(i), in[i].type);
        signature_.checkInputShape(static_cast<int32_t>(i), Shape(in[i].dims), extents);
    }
    for (size_t i = 0; i < signature_.outputs.size(); ++i) {
        signature_.checkOutputShape(static_cast<int32_t>(i), Shape(out[i].dims), extents);
    }
    Signature::requireKnown(extents);
    return extents;
}

size_t PluginBase::workspaceBytes(Extents const& /*extents*/) const {
    return 0;
}

void PluginBase::attach(void const* /*resourceContext*/) {}

CreatorBase::CreatorBase(char const* name, std::vector<FieldSpec> specs) : name_(name), specs_(std::move(specs)) {
    for (FieldSpec const& spec : specs_) {
        fieldNames_.declare(spec);
    }
}

nvinfer1::IPluginV3* CreatorBase::createPlugin(
    nvinfer1::AsciiChar const* /*name*/, nvinfer1::PluginFieldCollection const* fields,
    nvinfer1::TensorRTPhase phase) noexcept {
    std::unique_ptr<PluginBase> plugin;
    guarded(name_, [&] { plugin = create(FieldValues(fields, specs_), phase); });
    return plugin.release();
}

FieldSpec formatFieldSpec() {
    return {
        "format", nvinfer1::PluginFieldType::kINT32, 1, false, "1", [](double value) { return value == kFieldFormat; }};
}

}  // namespace trtllm_mhc
