// SPDX-License-Identifier: Apache-2.0
//
// What all plugins share: TensorRT's interfaces filled from a table of tensors. A plugin adds its attributes and its
// launch; one that communicates is a GroupPlugin.
#ifndef TRTLLM_MHC_PLUGINS_COMMON_PLUGIN_BASE_H
#define TRTLLM_MHC_PLUGINS_COMMON_PLUGIN_BASE_H

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <vector>

#include "common/fields.h"
#include "common/tensors.h"

namespace trtllm_mhc {

constexpr char kPluginNamespace[] = "trtllm_mhc";
constexpr char kPluginVersion[] = "1";

// One enqueue, checked.
struct Call {
    Extents extents;
    void const* const* inputs;
    void* const* outputs;
    void* workspace;
    cudaStream_t stream;
};

class PluginBase : public nvinfer1::IPluginV3,
                   public nvinfer1::IPluginV3OneCore,
                   public nvinfer1::IPluginV3OneBuild,
                   public nvinfer1::IPluginV3OneRuntime {
public:
    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept final;
    nvinfer1::IPluginV3* clone() noexcept final;

    nvinfer1::AsciiChar const* getPluginName() const noexcept final { return name_; }
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept final { return kPluginVersion; }
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept final { return kPluginNamespace; }

    int32_t getNbOutputs() const noexcept final { return static_cast<int32_t>(signature_.outputs.size()); }
    int32_t getOutputDataTypes(
        nvinfer1::DataType* outputTypes, int32_t nbOutputs, nvinfer1::DataType const* inputTypes,
        int32_t nbInputs) const noexcept final;
    int32_t getOutputShapes(
        nvinfer1::DimsExprs const* inputs, int32_t nbInputs, nvinfer1::DimsExprs const* shapeInputs,
        int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs, int32_t nbOutputs,
        nvinfer1::IExprBuilder& exprBuilder) noexcept final;
    bool supportsFormatCombination(
        int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
        int32_t nbOutputs) noexcept final;
    int32_t configurePlugin(
        nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs, nvinfer1::DynamicPluginTensorDesc const* out,
        int32_t nbOutputs) noexcept final;
    size_t getWorkspaceSize(
        nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t nbOutputs) const noexcept final;
    char const* getTimingCacheID() noexcept final { return timingCacheId_.c_str(); }
    // All attributes: the engine inspector shows them, and Python can read those of a layer in no other way.
    char const* getMetadataString() noexcept final;

    int32_t onShapeChange(
        nvinfer1::PluginTensorDesc const* in, int32_t nbInputs, nvinfer1::PluginTensorDesc const* out,
        int32_t nbOutputs) noexcept final;
    int32_t enqueue(
        nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept final;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept final;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept final;

protected:
    // `timingText` names every attribute that may change the choice of a kernel, and nothing of a rank.
    PluginBase(char const* name, Signature signature, std::string const& timingText);
    PluginBase(PluginBase const&) = default;

    virtual std::unique_ptr<PluginBase> copy() const = 0;
    virtual void serialize(FieldList& fields) const = 0;
    // Bytes that a launch with these extents may use; must not fall when the rows grow. Throws PluginError.
    virtual size_t workspaceBytes(Extents const& extents) const;
    // Called once on the object of an execution context, with TensorRT's IPluginResourceContext.
    virtual void attach(void const* resourceContext);
    // Throws PluginError on failure.
    virtual void launch(Call const& call) = 0;

private:
    Extents checkCall(nvinfer1::PluginTensorDesc const* in, nvinfer1::PluginTensorDesc const* out) const;

    char const* name_;
    Signature signature_;
    std::string timingCacheId_;
    FieldList fields_;
    std::string metadata_;
};

class CreatorBase : public nvinfer1::IPluginCreatorV3One {
public:
    nvinfer1::IPluginV3* createPlugin(
        nvinfer1::AsciiChar const* name, nvinfer1::PluginFieldCollection const* fields,
        nvinfer1::TensorRTPhase phase) noexcept final;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept final { return fieldNames_.collection(); }
    nvinfer1::AsciiChar const* getPluginName() const noexcept final { return name_; }
    nvinfer1::AsciiChar const* getPluginVersion() const noexcept final { return kPluginVersion; }
    nvinfer1::AsciiChar const* getPluginNamespace() const noexcept final { return kPluginNamespace; }

protected:
    CreatorBase(char const* name, std::vector<FieldSpec> specs);

    virtual std::unique_ptr<PluginBase> create(FieldValues const& values, nvinfer1::TensorRTPhase phase) const = 0;

private:
    char const* name_;
    std::vector<FieldSpec> specs_;
    FieldList fieldNames_;
};

// Every table starts with it.
FieldSpec formatFieldSpec();

}  // namespace trtllm_mhc

#endif  // TRTLLM_MHC_PLUGINS_COMMON_PLUGIN_BASE_H
