// SPDX-License-Identifier: Apache-2.0
#include "common/tensorrt_process.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace trtllm_mhc {
namespace {

int collectTensorRt(dl_phdr_info* info, size_t, void* paths) {
    std::string_view const path = info->dlpi_name;
    std::string_view const file = path.substr(path.rfind('/') + 1);
    constexpr std::string_view kName = "libnvinfer.so";
    if (file == kName || file.substr(0, kName.size() + 1) == "libnvinfer.so.") {
        static_cast<std::vector<std::string>*>(paths)->emplace_back(path);
    }
    return 0;
}

// 10.6.0 reports 100600, where 8.6.1 reported 8601.
int majorVersion(int32_t version) {
    return version >= 100000 ? version / 10000 : version / 1000;
}

bool sameText(char const* a, char const* b) {
    return std::strcmp(a ? a : "", b ? b : "") == 0;
}

}  // namespace

LoadedLibrary::LoadedLibrary(char const* path) noexcept : handle_(dlopen(path, RTLD_LAZY | RTLD_NOLOAD)) {}

LoadedLibrary::LoadedLibrary(LoadedLibrary&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}

LoadedLibrary::~LoadedLibrary() {
    if (handle_) {
        dlclose(handle_);
    }
}

void* LoadedLibrary::symbol(char const* name) const noexcept {
    return dlsym(handle_, name);
}

std::vector<LoadedLibrary> loadedTensorRts() {
    // The walk holds a lock of the loader that dlopen takes too: collect first, open afterwards.
    std::vector<std::string> paths;
    dl_iterate_phdr(collectTensorRt, &paths);
    std::vector<LoadedLibrary> libraries;
    for (std::string const& path : paths) {
        LoadedLibrary library(path.c_str());
        if (library) {
            libraries.push_back(std::move(library));
        }
    }
    return libraries;
}

std::optional<PluginRegistry> PluginRegistry::of(LoadedLibrary const& tensorRt) noexcept {
    auto const version = reinterpret_cast<int32_t (*)()>(tensorRt.symbol("getInferLibVersion"));
    auto const registry = reinterpret_cast<void* (*)()>(tensorRt.symbol("getPluginRegistry"));
    if (!version || !registry) {
        return std::nullopt;
    }
    Slots slots{};
    switch (majorVersion(version())) {
        case 10:
            slots = {12, 13, 15};
            break;
        case 11:
            slots = {8, 9, 11};
            break;
        default:
            return std::nullopt;
    }
    void* const self = registry();
    return self ? std::optional(PluginRegistry(self, slots)) : std::nullopt;
}

template <typename Result, typename... Arguments>
Result PluginRegistry::call(int slot, Arguments... arguments) const noexcept {
    void* const* const table = *static_cast<void* const* const*>(registry_);
    return reinterpret_cast<Result (*)(void*, Arguments...)>(table[slot])(registry_, arguments...);
}

bool PluginRegistry::add(nvinfer1::IPluginCreatorV3One& creator) const noexcept {
    // Under its own namespace, where deregisterCreator and loadLibrary look for it.
    return call<bool>(
        slots_.registerCreator, static_cast<nvinfer1::IPluginCreatorInterface*>(&creator),
        creator.getPluginNamespace());
}

bool PluginRegistry::remove(nvinfer1::IPluginCreatorInterface& creator) const noexcept {
    return call<bool>(slots_.deregisterCreator, static_cast<nvinfer1::IPluginCreatorInterface const*>(&creator));
}

nvinfer1::IPluginCreatorInterface* PluginRegistry::find(nvinfer1::IPluginCreatorV3One& creator) const noexcept {
    // Not getCreator(): it logs an error for a name that is not there.
    int32_t count = 0;
    auto* const* const all = call<nvinfer1::IPluginCreatorInterface* const*>(slots_.getAllCreators, &count);
    for (int32_t i = 0; all && i < count; ++i) {
        if (all[i] == &creator) {
            return all[i];
        }
        if (!sameText(all[i]->getInterfaceInfo().kind, creator.getInterfaceInfo().kind)) {
            continue;
        }
        auto* const other = static_cast<nvinfer1::IPluginCreatorV3One*>(all[i]);
        if (sameText(other->getPluginName(), creator.getPluginName()) &&
            sameText(other->getPluginVersion(), creator.getPluginVersion()) &&
            sameText(other->getPluginNamespace(), creator.getPluginNamespace())) {
            return other;
        }
    }
    return nullptr;
}

}  // namespace trtllm_mhc
