// SPDX-License-Identifier: Apache-2.0
// An `AllReduce` plugin of the interface that TensorRT-LLM's has: IPluginV2DynamicExt, one output per fusion kind.
// It is for networks only and computes nothing. Fields: outputs (INT32), namespace decided at compile time.
#include <NvInfer.h>

#include <cstring>
#include <string>

namespace {

class AllReduce : public nvinfer1::IPluginV2DynamicExt {
public:
    explicit AllReduce(int32_t outputs) : outputs_(outputs) {}

    char const* getPluginType() const noexcept override { return "AllReduce"; }
    char const* getPluginVersion() const noexcept override { return "1"; }
    int32_t getNbOutputs() const noexcept override { return outputs_; }
    int32_t initialize() noexcept override { return 0; }
    void terminate() noexcept override {}
    size_t getSerializationSize() const noexcept override { return sizeof(outputs_); }
    void serialize(void* buffer) const noexcept override { std::memcpy(buffer, &outputs_, sizeof(outputs_)); }
    void destroy() noexcept override { delete this; }
    void setPluginNamespace(char const* name) noexcept override { namespace_ = name; }
    char const* getPluginNamespace() const noexcept override { return namespace_.c_str(); }
    nvinfer1::DataType getOutputDataType(int32_t, nvinfer1::DataType const* types, int32_t) const noexcept override {
        return types[0];
    }
    nvinfer1::IPluginV2DynamicExt* clone() const noexcept override { return new AllReduce(*this); }
    nvinfer1::DimsExprs getOutputDimensions(
        int32_t, nvinfer1::DimsExprs const* inputs, int32_t, nvinfer1::IExprBuilder&) noexcept override {
        return inputs[0];
    }
    bool supportsFormatCombination(int32_t, nvinfer1::PluginTensorDesc const*, int32_t, int32_t) noexcept override {
        return true;
    }
    void configurePlugin(
        nvinfer1::DynamicPluginTensorDesc const*, int32_t, nvinfer1::DynamicPluginTensorDesc const*,
        int32_t) noexcept override {}
    size_t getWorkspaceSize(nvinfer1::PluginTensorDesc const*, int32_t, nvinfer1::PluginTensorDesc const*, int32_t)
        const noexcept override {
        return 0;
    }
    int32_t enqueue(
        nvinfer1::PluginTensorDesc const*, nvinfer1::PluginTensorDesc const*, void const* const*, void* const*, void*,
        cudaStream_t) noexcept override {
        return -1;
    }

private:
    int32_t outputs_;
    std::string namespace_;
};

class Creator : public nvinfer1::IPluginCreator {
public:
    explicit Creator(char const* name) : namespace_(name) {}

    char const* getPluginName() const noexcept override { return "AllReduce"; }
    char const* getPluginVersion() const noexcept override { return "1"; }
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &fields_; }
    nvinfer1::IPluginV2* createPlugin(char const*, nvinfer1::PluginFieldCollection const* fields) noexcept override {
        int32_t outputs = 1;
        for (int32_t i = 0; i < fields->nbFields; ++i) {
            if (std::strcmp(fields->fields[i].name, "outputs") == 0) {
                outputs = *static_cast<int32_t const*>(fields->fields[i].data);
            }
        }
        auto* plugin = new AllReduce(outputs);
        plugin->setPluginNamespace(namespace_.c_str());
        return plugin;
    }
    nvinfer1::IPluginV2* deserializePlugin(char const*, void const*, size_t) noexcept override { return nullptr; }
    void setPluginNamespace(char const* name) noexcept override { namespace_ = name; }
    char const* getPluginNamespace() const noexcept override { return namespace_.c_str(); }

private:
    std::string namespace_;
    nvinfer1::PluginFieldCollection fields_{0, nullptr};
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& count) {
    static Creator tensorrtLlm("tensorrt_llm");
    static Creator other("somebody_else");
    static nvinfer1::IPluginCreatorInterface* const creators[] = {&tensorrtLlm, &other};
    count = 2;
    return creators;
}
