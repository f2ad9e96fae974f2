// SPDX-License-Identifier: Apache-2.0
//
// The TensorRTs of this process: which are loaded, and their plugin registries, reached without linking against any of
// them.
#ifndef TRTLLM_MHC_PLUGINS_COMMON_TENSORRT_PROCESS_H
#define TRTLLM_MHC_PLUGINS_COMMON_TENSORRT_PROCESS_H

#include <NvInferRuntime.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace trtllm_mhc {

// A reference to a library that is loaded already; never loads one.
class LoadedLibrary {
public:
    explicit LoadedLibrary(char const* path) noexcept;
    ~LoadedLibrary();
    LoadedLibrary(LoadedLibrary&& other) noexcept;
    LoadedLibrary(LoadedLibrary const&) = delete;
    LoadedLibrary& operator=(LoadedLibrary const&) = delete;
    LoadedLibrary& operator=(LoadedLibrary&&) = delete;

    explicit operator bool() const noexcept { return handle_ != nullptr; }
    // The symbol in the library or in one that it depends on; nullptr when there is none.
    void* symbol(char const* name) const noexcept;

private:
    void* handle_;
};

// Every libnvinfer that is loaded, in load order.
std::vector<LoadedLibrary> loadedTensorRts();

// The plugin registry of one TensorRT. Its virtual functions moved between TensorRT 10 and 11, so they are called by
// position, and one binary serves both. This is the only place that knows the positions.
class PluginRegistry {
public:
    // Nothing when the library is no TensorRT 10 or 11: the positions are not known there.
    static std::optional<PluginRegistry> of(LoadedLibrary const& tensorRt) noexcept;

    void* identity() const noexcept { return registry_; }
    bool add(nvinfer1::IPluginCreatorV3One& creator) const noexcept;
    bool remove(nvinfer1::IPluginCreatorInterface& creator) const noexcept;
    // The registered creator of the same kind, name, version and namespace; nullptr when there is none.
    nvinfer1::IPluginCreatorInterface* find(nvinfer1::IPluginCreatorV3One& creator) const noexcept;

private:
    struct Slots {
        int registerCreator, getAllCreators, deregisterCreator;
    };
    PluginRegistry(void* registry, Slots slots) noexcept : registry_(registry), slots_(slots) {}

    template <typename Result, typename... Arguments>
    Result call(int slot, Arguments... arguments) const noexcept;

    void* registry_;
    Slots slots_;
};

}  // namespace trtllm_mhc
#endif  // TRTLLM_MHC_PLUGINS_COMMON_TENSORRT_PROCESS_H
