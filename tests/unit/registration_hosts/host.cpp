// SPDX-License-Identifier: Apache-2.0
//
// A program that uses TensorRT without Python, in the ways that test_registration.py names:
//
//   host no_tensorrt LIBRARY              opens the plugin library where there is no TensorRT
//   host tensorrt_first LIBRARY TENSORRT  opens TensorRT, then the plugin library
//   host backend BACKEND [LIBRARY]        opens the plugin library, if named, then a backend that is linked to TensorRT
//   host runtime BACKEND [LIBRARY]        the same, but the backend makes a runtime before it asks for the registry
//   host threads LIBRARY TENSORRT LOADS   loads and unloads the library LOADS times while another thread registers it
//   host hand_over LIBRARY TENSORRT       begins a load as TensorRT does, and registers before TensorRT would have
//   host race LIBRARY TENSORRT            one thread opens the library while another has TensorRT load it
//
// Every handle is RTLD_LOCAL. Prints one line; exit status 0 means that the creators were found (or rightly not).
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

namespace {

void* open(char const* path) {
    void* const handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        std::printf("dlopen: %s\n", dlerror());
        std::exit(2);
    }
    return handle;
}

template <typename Function>
Function* symbol(void* handle, char const* name) {
    void* const found = dlsym(handle, name);
    if (!found) {
        std::printf("no symbol %s\n", name);
        std::exit(2);
    }
    return reinterpret_cast<Function*>(found);
}

// Calls by position in the virtual table; the positions are TensorRT 10's and 11's.
struct Registry {
    explicit Registry(void* tensorRt)
        : object(symbol<void*()>(tensorRt, "getPluginRegistry")()),
          eleven(symbol<int32_t()>(tensorRt, "getInferLibVersion")() / 10000 == 11) {}

    template <typename Result, typename... Arguments>
    Result call(int slotOfTen, Arguments... arguments) const {
        void** const table = *static_cast<void***>(object);
        int const slot = eleven ? slotOfTen - 4 : slotOfTen;
        return reinterpret_cast<Result (*)(void*, Arguments...)>(table[slot])(object, arguments...);
    }
    void* loadLibrary(char const* path) const { return call<void*>(10, path); }
    void deregisterLibrary(void* handle) const { call<void>(11, handle); }
    void* creator(char const* name) const { return call<void*>(14, name, "1", "trtllm_mhc"); }

    void* object;
    bool eleven;
};

int report(Registry const& registry) {
    bool const found = registry.creator("MhcBoundary") && registry.creator("MhcAllReduce");
    std::printf("creators %s\n", found ? "found" : "missing");
    return found ? 0 : 1;
}

int noTensorRt(char const* library) {
    void* const handle = open(library);
    int const lacking = symbol<int32_t()>(handle, "mhcRegisterPlugins")();
    void* const registry = symbol<void*()>(handle, "getPluginRegistry")();
    std::printf("lacking %d registry %s\n", lacking, registry ? "present" : "absent");
    return lacking == 0 && !registry ? 0 : 1;
}

int tensorRtFirst(char const* library, char const* tensorRt) {
    void* const handle = open(tensorRt);
    open(library);
    return report(Registry(handle));
}

int backend(char const* path, char const* library, char const* entry) {
    if (library) {
        open(library);
    }
    int const found = symbol<int()>(open(path), entry)();
    std::printf("creators %s\n", found ? "found" : "missing");
    return found ? 0 : 1;
}

int threads(char const* library, char const* tensorRt, int loads) {
    Registry const registry(open(tensorRt));
    auto* const registerPlugins = symbol<int32_t()>(open(library), "mhcRegisterPlugins");
    std::atomic<bool> done{false};
    std::thread other([&] {
        while (!done) {
            registerPlugins();
        }
    });
    int refused = 0;
    for (int i = 0; i < loads; ++i) {
        void* const handle = registry.loadLibrary(library);
        refused += handle ? 0 : 1;
        if (handle) {
            registry.deregisterLibrary(handle);
        }
    }
    done = true;
    other.join();
    registerPlugins();
    std::printf("refused %d of %d\n", refused, loads);
    return report(registry) + refused;
}

// Within the 50 ms that a load is given, nobody may put the creators back; after it they must not stay lost.
int handOver(char const* library, char const* tensorRt) {
    Registry const registry(open(tensorRt));
    void* const handle = open(library);
    symbol<void(void*)>(handle, "setLoggerFinder")(nullptr);
    auto const begin = std::chrono::steady_clock::now();
    symbol<int32_t()>(handle, "mhcRegisterPlugins")();
    bool const heldBack = std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(40);
    std::printf("registration %s\n", heldBack ? "held back" : "at once");
    return report(registry) + (heldBack ? 0 : 1);
}

int race(char const* library, char const* tensorRt) {
    Registry const registry(open(tensorRt));
    std::atomic<int> ready{0};
    auto const meet = [&] {
        ++ready;
        while (ready < 2) {
        }
    };
    std::thread other([&] {
        meet();
        symbol<int32_t()>(open(library), "mhcRegisterPlugins")();
    });
    meet();
    void* const handle = registry.loadLibrary(library);
    other.join();
    std::printf("library %s\n", handle ? "loaded" : "refused");
    return report(registry) + (handle ? 0 : 1);
}

}  // namespace

int main(int argc, char** argv) {
    auto const argument = [&](int i) { return i < argc ? argv[i] : nullptr; };
    std::string const mode = argc > 1 ? argv[1] : "";
    if (mode == "no_tensorrt" && argc == 3) {
        return noTensorRt(argv[2]);
    }
    if (mode == "tensorrt_first" && argc == 4) {
        return tensorRtFirst(argv[2], argv[3]);
    }
    if (mode == "backend" && argc >= 3) {
        return backend(argv[2], argument(3), "findCreators");
    }
    if (mode == "runtime" && argc >= 3) {
        return backend(argv[2], argument(3), "findCreatorsAfterRuntime");
    }
    if (mode == "threads" && argc == 5) {
        return threads(argv[2], argv[3], std::atoi(argv[4]));
    }
    if (mode == "hand_over" && argc == 4) {
        return handOver(argv[2], argv[3]);
    }
    if (mode == "race" && argc == 4) {
        return race(argv[2], argv[3]);
    }
    std::printf("expected a mode and its arguments, got '%s'\n", mode.c_str());
    return 2;
}
