// SPDX-License-Identifier: Apache-2.0
#include "common/registration.h"

#include <NvInfer.h>
#include <NvInferRuntime.h>
#include <dlfcn.h>
#include <link.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "common/copies.h"
#include "common/tensorrt_process.h"

namespace trtllm_mhc {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

// Everything here is constant-initialised and never destroyed: the constructor below runs among the library's other
// static initialisers, and TensorRT may call in while the process ends.

// The right to change registrations. Not a mutex: the thread that waits for it may hold the loader's lock (our
// constructor) or TensorRT's (setLoggerFinder), which the holder may need to go on. So the wait is bounded, and who
// waited in vain leaves the registration to the holder.
class Turn {
public:
    Turn() noexcept {
        if (mine_) {
            return;  // TensorRT has called back into us
        }
        for (auto const deadline = Clock::now() + 100ms; !(taken_ = !busy_.test_and_set(std::memory_order_acquire));) {
            if (Clock::now() > deadline) {
                return;
            }
            std::this_thread::sleep_for(100us);
        }
        mine_ = true;
    }
    ~Turn() {
        if (taken_) {
            mine_ = false;
            busy_.clear(std::memory_order_release);
        }
    }
    Turn(Turn const&) = delete;
    Turn& operator=(Turn const&) = delete;
    explicit operator bool() const noexcept { return taken_; }

private:
    static inline std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    static inline thread_local bool mine_ = false;
    bool taken_ = false;
};

// Between setLoggerFinder and TensorRT's own registration the creators are missing, and nobody else may add them.
constexpr auto kHandOver = 50ms;
std::atomic<int64_t> handOverEnd{0};  // Clock ticks

void beginHandOver() noexcept {
    handOverEnd.store((Clock::now() + kHandOver).time_since_epoch().count(), std::memory_order_release);
}

bool handingOver() noexcept {
    return Clock::now().time_since_epoch().count() < handOverEnd.load(std::memory_order_acquire);
}

// The registries that have had our creators, and whether this library added them. Guarded by Turn.
class Served {
public:
    bool contains(void* registry) const noexcept { return find(registry) != size_; }
    void insert(void* registry, bool addedHere) noexcept {
        size_t const at = find(registry);
        if (at < size_) {
            entries_[at].addedHere |= addedHere;
        } else if (size_ < entries_.size()) {
            entries_[size_++] = {registry, addedHere};
        }
    }
    // Forgets the registry; true if this library had added the creators.
    bool erase(void* registry) noexcept {
        size_t const at = find(registry);
        if (at == size_) {
            return false;
        }
        bool const addedHere = entries_[at].addedHere;
        entries_[at] = entries_[--size_];
        return addedHere;
    }

private:
    struct Entry {
        void* registry;
        bool addedHere;
    };
    size_t find(void* registry) const noexcept {
        size_t at = 0;
        while (at < size_ && entries_[at].registry != registry) {
            ++at;
        }
        return at;
    }
    std::array<Entry, 16> entries_{};
    size_t size_ = 0;
};
Served served;

template <typename Action>
void forEachCreator(Action action) {
    int32_t count = 0;
    auto* const* const creators = pluginCreators(count);
    for (int32_t i = 0; i < count; ++i) {
        action(*static_cast<nvinfer1::IPluginCreatorV3One*>(creators[i]));
    }
}

// Adds what is missing; false if something still is.
bool complete(PluginRegistry const& registry) {
    bool addedHere = false;
    bool all = true;
    auto const deadline = Clock::now() + 2 * kHandOver;
    forEachCreator([&](nvinfer1::IPluginCreatorV3One& creator) {
        while (!registry.find(creator)) {
            if (handingOver() && Clock::now() < deadline) {
                std::this_thread::sleep_for(1ms);
                continue;
            }
            // Another thread's loadLibrary may have come between: then TensorRT refuses ours and has its own.
            bool const added = registry.add(creator);
            addedHere |= added;
            all &= added || registry.find(creator);
            return;
        }
    });
    if (addedHere || all) {
        served.insert(registry.identity(), addedHere);
    }
    return all;
}

enum class Which { kNew, kAll };

// Returns the number of TensorRTs that lack creators. kNew passes over registries that have had them: whoever
// deregistered the library there meant it.
int32_t registerPlugins(Which which) noexcept {
    Turn const turn;
    if (!turn) {
        return 0;
    }
    int32_t lacking = 0;
    for (LoadedLibrary const& tensorRt : loadedTensorRts()) {
        auto const registry = PluginRegistry::of(tensorRt);
        if (registry && (which == Which::kAll || !served.contains(registry->identity()))) {
            lacking += complete(*registry) ? 0 : 1;
        }
    }
    return lacking;
}

void withdrawPlugins() noexcept {
    beginHandOver();
    Turn const turn;
    if (!turn) {
        return;
    }
    for (LoadedLibrary const& tensorRt : loadedTensorRts()) {
        auto const registry = PluginRegistry::of(tensorRt);
        if (registry && served.erase(registry->identity())) {
            forEachCreator([&](nvinfer1::IPluginCreatorV3One& creator) {
                if (registry->find(creator) == &creator) {
                    registry->remove(creator);
                }
            });
        }
    }
    beginHandOver();
}

// In the global scope, our exports also catch calls that other libraries mean for their own. These two find who was
// meant.

// What `caller` would have called without us: the symbol in its own library or in one that this depends on.
template <typename Function>
Function* callersOwn(char const* name, Function* ours, void* caller) noexcept {
    Dl_info where{};
    link_map* library = nullptr;
    if (!dladdr1(caller, &where, reinterpret_cast<void**>(&library), RTLD_DL_LINKMAP) || !library ||
        !*library->l_name) {
        return nullptr;  // the program itself
    }
    LoadedLibrary const loaded(library->l_name);
    auto* const found = loaded ? reinterpret_cast<Function*>(loaded.symbol(name)) : nullptr;
    return found == ours ? nullptr : found;
}

// For TensorRT's entry points: also what comes after us in the global scope, or any TensorRT that is loaded.
template <typename Function>
Function* tensorRts(char const* name, Function* ours, void* caller) noexcept {
    if (Function* const own = callersOwn(name, ours, caller)) {
        return own;
    }
    auto* const next = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
    if (next && next != ours) {
        return next;
    }
    for (LoadedLibrary const& tensorRt : loadedTensorRts()) {
        if (void* const found = tensorRt.symbol(name)) {
            return reinterpret_cast<Function*>(found);
        }
    }
    return nullptr;
}

__attribute__((constructor)) void onLoad() {
    registerPlugins(Which::kNew);
    Dl_info self{};
    if (loadedTensorRts().empty() && dladdr(reinterpret_cast<void*>(&onLoad), &self)) {
        // Never closed: the library stays (-z nodelete), and so must its place in the global scope.
        dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
    }
}

}  // namespace
}  // namespace trtllm_mhc

using namespace trtllm_mhc;

int32_t mhcRegisterPlugins(void) {
    return registerPlugins(Which::kAll);
}

extern "C" {

MHC_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    if (auto* const own = callersOwn("setLoggerFinder", &setLoggerFinder, __builtin_return_address(0))) {
        own(finder);
        return;
    }
    withdrawPlugins();
}

MHC_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    if (auto* const own = callersOwn("getCreators", &getCreators, __builtin_return_address(0))) {
        return own(count);
    }
    return pluginCreators(count);
}

MHC_API nvinfer1::IPluginRegistry* getPluginRegistry() noexcept {
    auto* const next = tensorRts("getPluginRegistry", &getPluginRegistry, __builtin_return_address(0));
    if (!next) {
        return nullptr;
    }
    registerPlugins(Which::kNew);
    return next();
}

MHC_API void* createInferRuntime_INTERNAL(void* logger, int32_t version) noexcept {
    auto* const next =
        tensorRts("createInferRuntime_INTERNAL", &createInferRuntime_INTERNAL, __builtin_return_address(0));
    if (!next) {
        return nullptr;
    }
    registerPlugins(Which::kNew);
    return next(logger, version);
}

MHC_API void* createInferBuilder_INTERNAL(void* logger, int32_t version) noexcept {
    auto* const next =
        tensorRts("createInferBuilder_INTERNAL", &createInferBuilder_INTERNAL, __builtin_return_address(0));
    if (!next) {
        return nullptr;
    }
    registerPlugins(Which::kNew);
    return next(logger, version);
}

}  // extern "C"
