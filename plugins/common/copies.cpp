// SPDX-License-Identifier: Apache-2.0
#include "common/copies.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <vector>

#include "common/tensorrt_process.h"
#include "creators.h"

namespace trtllm_mhc {
namespace {

using OwnCreators = nvinfer1::IPluginCreatorInterface* const* (*)(int32_t*);

struct Copy {
    std::string path;
    std::string version;
    OwnCreators creators;
};

int collectPath(dl_phdr_info* info, size_t, void* paths) {
    if (*info->dlpi_name != '\0') {
        static_cast<std::vector<std::string>*>(paths)->emplace_back(info->dlpi_name);
    }
    return 0;
}

// In the order in which they were loaded.
std::vector<Copy> loadedCopies() {
    // The walk holds a lock of the loader that dlopen takes too: collect first, open afterwards.
    std::vector<std::string> paths;
    dl_iterate_phdr(collectPath, &paths);
    std::vector<Copy> copies;
    for (std::string const& path : paths) {
        LoadedLibrary const library(path.c_str());
        if (!library) {
            continue;
        }
        auto* const creators = reinterpret_cast<OwnCreators>(library.symbol("mhcOwnCreators"));
        auto* const version = reinterpret_cast<char const* (*)()>(library.symbol("mhcVersion"));
        Dl_info where{};
        // A library that depends on a copy finds the symbols too.
        bool const own = creators != nullptr && version != nullptr &&
                         dladdr(reinterpret_cast<void*>(creators), &where) != 0 && path == where.dli_fname;
        if (own) {
            copies.push_back({path, version(), creators});
        }
    }
    return copies;
}

// Found once: which copy is the first does not change, since none is ever unloaded (-z nodelete).
Copy const& firstCopy() {
    static Copy const* const first = [] {
        for (Copy const& copy : loadedCopies()) {
            if (copy.version == mhcVersion()) {
                return new Copy(copy);
            }
        }
        return new Copy{"", mhcVersion(), &mhcOwnCreators};  // linked into a program
    }();
    return *first;
}

}  // namespace

nvinfer1::IPluginCreatorInterface* const* pluginCreators(int32_t& count) noexcept {
    return firstCopy().creators(&count);
}

std::string otherVersions() {
    std::string text;
    for (Copy const& copy : loadedCopies()) {
        if (copy.version != mhcVersion()) {
            text += (text.empty() ? "" : ", ") + copy.path + " in version " + copy.version;
        }
    }
    return text.empty() ? text
                        : "; this process has another version of the library, whose communicators are not seen by this "
                          "one, " +
                              std::string(mhcVersion()) + ": " + text;
}

}  // namespace trtllm_mhc

char const* mhcFirstCopy(void) {
    return trtllm_mhc::firstCopy().path.c_str();
}

nvinfer1::IPluginCreatorInterface* const* mhcOwnCreators(int32_t* count) {
    return trtllm_mhc::ownCreators(*count);
}
