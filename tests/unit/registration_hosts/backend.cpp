// SPDX-License-Identifier: Apache-2.0
//
// A shared library that is linked to libnvinfer (its path is TENSORRT) and knows nothing of our plugins, like an
// inference server's backend. It has a plugin entry point of its own, which must go on answering it while ours is in
// the global scope.
#include <dlfcn.h>

#include <cstdint>

#define EXPORT __attribute__((visibility("default")))

extern "C" {

void* getPluginRegistry();
int32_t getInferLibVersion();
void* createInferRuntime_INTERNAL(void* logger, int32_t version);

EXPORT void* const* getCreators(int32_t& count) {
    static void* const none = nullptr;
    count = 0;
    return &none;
}

static bool hasCreators(void* registry) {
    int const slot = getInferLibVersion() / 10000 == 11 ? 10 : 14;
    auto* const get = reinterpret_cast<void* (*)(void*, char const*, char const*, char const*)>(
        (*static_cast<void***>(registry))[slot]);
    return get(registry, "MhcBoundary", "1", "trtllm_mhc") && get(registry, "MhcAllReduce", "1", "trtllm_mhc");
}

// Through the entry point that every plugin user calls.
EXPORT int findCreators() {
    int32_t count = -1;
    getCreators(count);
    return count == 0 && hasCreators(getPluginRegistry());
}

// Through the runtime alone: the registry is taken from libnvinfer itself, past anything that could register at that
// moment.
EXPORT int findCreatorsAfterRuntime() {
    createInferRuntime_INTERNAL(nullptr, getInferLibVersion());
    void* const tensorRt = dlopen(TENSORRT, RTLD_NOW | RTLD_NOLOAD);
    return hasCreators(reinterpret_cast<void* (*)()>(dlsym(tensorRt, "getPluginRegistry"))());
}
}
