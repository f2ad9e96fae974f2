// SPDX-License-Identifier: Apache-2.0
//
// CUDA kernels on a processor, for tests: a CTA is an operating-system thread, its CUDA threads are coroutines of that
// thread, and they change places, in random order, wherever they meet or wait. Streams, programmatic dependent launch,
// clusters with each other's shared memory, and mbarriers are there; speed and the PTX memory model are not.
//
// Include this before any kernel source. Shared memory is thread-local memory, so it lies at the same distance from
// `anchor` in every CTA.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <ucontext.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __noinline__
#undef __grid_constant__
#undef __launch_bounds__
#undef __uint_as_float
#undef __float_as_uint
#define __global__
#define __device__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

namespace emulation {

struct Index {
    unsigned x = 0, y = 0;
};

// What 32 coroutines exchange in one collective.
struct Warp {
    int arrived = 0;
    uint64_t round = 0;
    uint32_t given[32] = {};
    uint32_t taken[32] = {};
};

struct Cta;

struct Cluster {
    std::atomic<uint64_t> arrivals{0};
    uint64_t threads = 0;
    std::vector<std::atomic<char*>> shared;  // each CTA's anchor
    explicit Cluster(size_t ctas) : shared(ctas) {}
};

// One launch.
struct Grid {
    std::function<void()> body;
    dim3 size;
    unsigned threads = 0;
    std::shared_ptr<Grid> before;
    bool overlapped = false;
    std::atomic<unsigned> lettingIn{0};  // CTAs that have let the next kernel in, or ended
    std::atomic<unsigned> ended{0};
    unsigned ctas() const { return size.x * size.y; }
    bool complete() const { return ended.load() == ctas(); }
};

struct Fiber {
    ucontext_t context{};
    std::vector<char> stack;
    Index thread;
    uint64_t clusterArrivals = 0;
    bool letIn = false;
    bool done = false;
};

struct Cta {
    Grid* grid = nullptr;
    Cluster* cluster = nullptr;
    Index block;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    unsigned live = 0;
    unsigned atBarrier = 0;
    uint64_t barrierRound = 0;
    unsigned letIn = 0;
    bool countedLetIn = false;
    ucontext_t scheduler{};
    Fiber* running = nullptr;
};

inline thread_local Cta* current = nullptr;
inline thread_local char anchor = 0;
inline std::atomic<unsigned> seed{1};

inline Fiber& self() {
    return *current->running;
}

// Lets the CTA's other threads go on.
inline void yield() {
    Fiber& fiber = self();
    swapcontext(&fiber.context, &current->scheduler);
}

inline uint32_t collective(uint32_t value, unsigned from) {
    Fiber& fiber = self();
    Warp& warp = current->warps[fiber.thread.x / 32];
    uint64_t const round = warp.round;
    warp.given[fiber.thread.x % 32] = value;
    if (++warp.arrived == 32) {
        std::memcpy(warp.taken, warp.given, sizeof warp.taken);
        warp.arrived = 0;
        ++warp.round;
    }
    while (warp.round == round)
        yield();
    return warp.taken[from % 32];
}

inline void syncCta() {
    uint64_t const round = current->barrierRound;
    if (++current->atBarrier == current->live) {
        current->atBarrier = 0;
        ++current->barrierRound;
    }
    while (current->barrierRound == round)
        yield();
}

inline void letNextIn() {
    Fiber& fiber = self();
    if (fiber.letIn)
        return;
    fiber.letIn = true;
    if (++current->letIn == current->fibers.size() && !current->countedLetIn) {
        current->countedLetIn = true;
        ++current->grid->lettingIn;
    }
}

inline void waitForGridBefore() {
    while (current->grid->before && !current->grid->before->complete())
        yield();
}

inline char* inCta(void const* local, uint32_t rank) {
    std::atomic<char*>& there = current->cluster->shared[rank];
    while (there.load() == nullptr)
        yield();
    return there.load() + (static_cast<char const*>(local) - &anchor);
}

inline void runFiber(unsigned high, unsigned low) {
    auto* const fiber = reinterpret_cast<Fiber*>(static_cast<uintptr_t>(high) << 32 | low);
    current->grid->body();
    fiber->done = true;
    swapcontext(&fiber->context, &current->scheduler);
}

inline void runCta(std::shared_ptr<Grid> grid, std::shared_ptr<Cluster> cluster, Index block, unsigned rank) {
    constexpr size_t kStack = 64 * 1024;
    Cta cta;
    cta.grid = grid.get();
    cta.cluster = cluster.get();
    cta.block = block;
    cta.fibers.resize(grid->threads);
    cta.warps.resize((grid->threads + 31) / 32);
    cta.live = grid->threads;
    current = &cta;
    cluster->shared[rank] = &anchor;
    for (unsigned i = 0; i < grid->threads; ++i) {
        Fiber& fiber = cta.fibers[i];
        fiber.stack.resize(kStack);
        fiber.thread.x = i;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        auto const address = reinterpret_cast<uintptr_t>(&fiber);
        makecontext(
            &fiber.context, reinterpret_cast<void (*)()>(runFiber), 2, static_cast<unsigned>(address >> 32),
            static_cast<unsigned>(address));
    }
    std::mt19937 random(seed++);
    while (cta.live > 0) {
        size_t const first = random() % cta.fibers.size();
        for (size_t i = 0; i < cta.fibers.size(); ++i) {
            Fiber& fiber = cta.fibers[(first + i) % cta.fibers.size()];
            if (fiber.done)
                continue;
            cta.running = &fiber;
            swapcontext(&cta.scheduler, &fiber.context);
            if (fiber.done)
                --cta.live;
        }
        std::this_thread::yield();
    }
    if (!cta.countedLetIn)
        ++grid->lettingIn;
    // Nobody's shared memory goes away while another CTA of the cluster may still store into it.
    ++grid->ended;
    while (!grid->complete())
        std::this_thread::yield();
}

// Runs its kernels one after the other; an overlapped one is there as soon as the one before has let it in.
class Stream {
public:
    Stream() : runner_([this] { run(); }) {}
    ~Stream() {
        {
            std::lock_guard const lock(mutex_);
            closed_ = true;
        }
        changed_.notify_all();
        runner_.join();
    }
    void launch(std::shared_ptr<Grid> grid, unsigned clusterSize) {
        {
            std::lock_guard const lock(mutex_);
            queue_.emplace_back(std::move(grid), clusterSize);
            ++pending_;
        }
        changed_.notify_all();
    }
    void synchronize() {
        std::unique_lock lock(mutex_);
        idle_.wait(lock, [this] { return pending_ == 0; });
    }
    cudaStream_t handle() { return reinterpret_cast<cudaStream_t>(this); }

private:
    void run() {
        std::shared_ptr<Grid> before;
        std::deque<std::pair<std::shared_ptr<Grid>, std::vector<std::thread>>> running;
        auto const retire = [&] {
            for (std::thread& thread : running.front().second)
                thread.join();
            running.pop_front();
            std::lock_guard const lock(mutex_);
            if (--pending_ == 0)
                idle_.notify_all();
        };
        while (true) {
            std::shared_ptr<Grid> grid;
            unsigned clusterSize = 1;
            {
                std::unique_lock lock(mutex_);
                if (queue_.empty() && !running.empty()) {
                    lock.unlock();
                    retire();
                    continue;
                }
                changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
                if (queue_.empty())
                    return;
                grid = queue_.front().first;
                clusterSize = queue_.front().second;
                queue_.pop_front();
            }
            grid->before = before;
            while (before && !(grid->overlapped ? before->lettingIn.load() == before->ctas() : before->complete()))
                std::this_thread::yield();
            running.emplace_back(grid, start(grid, clusterSize));
            if (before)
                before->before.reset();
            before = grid;
        }
    }

    static std::vector<std::thread> start(std::shared_ptr<Grid> const& grid, unsigned clusterSize) {
        std::vector<std::thread> threads;
        for (unsigned y = 0; y < grid->size.y; ++y) {
            std::shared_ptr<Cluster> cluster;
            for (unsigned x = 0; x < grid->size.x; ++x) {
                if (x % clusterSize == 0) {
                    cluster = std::make_shared<Cluster>(clusterSize);
                    cluster->threads = clusterSize * grid->threads;
                }
                threads.emplace_back(runCta, grid, cluster, Index{x, y}, x % clusterSize);
            }
        }
        return threads;
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::condition_variable idle_;
    std::deque<std::pair<std::shared_ptr<Grid>, unsigned>> queue_;
    int pending_ = 0;
    bool closed_ = false;
    std::thread runner_;
};

template <typename To, typename From>
To bits(From value) {
    To to;
    static_assert(sizeof to == sizeof value);
    std::memcpy(&to, &value, sizeof to);
    return to;
}

}  // namespace emulation

// Objects, since launches have members of these names.
namespace emulation {
struct Component {
    unsigned (*get)();
    operator unsigned() const { return get(); }
};
struct Components {
    Component x, y;
};
}  // namespace emulation
inline emulation::Components const threadIdx{
    {[] { return emulation::self().thread.x; }}, {[] { return emulation::self().thread.y; }}};
inline emulation::Components const blockIdx{
    {[] { return emulation::current->block.x; }}, {[] { return emulation::current->block.y; }}};
inline emulation::Components const gridDim{
    {[] { return emulation::current->grid->size.x; }}, {[] { return emulation::current->grid->size.y; }}};
inline emulation::Components const blockDim{{[] { return emulation::current->grid->threads; }}, {[] { return 1u; }}};

inline float __uint_as_float(uint32_t v) {
    return emulation::bits<float>(v);
}
inline uint32_t __float_as_uint(float v) {
    return emulation::bits<uint32_t>(v);
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fsub_rn(float a, float b) {
    return a - b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
    return std::fma(a, b, c);
}
inline float __frsqrt_rn(float v) {
    return static_cast<float>(1.0L / std::sqrt(static_cast<long double>(v)));
}
inline uint32_t __vcmpeq2(uint32_t a, uint32_t b) {
    uint32_t const x = a ^ b;
    return ((x & 0xFFFFu) == 0 ? 0xFFFFu : 0u) | ((x >> 16) == 0 ? 0xFFFF0000u : 0u);
}
using std::max;
using std::min;

template <typename T>
T __shfl_sync(uint32_t, T value, int from) {
    return emulation::bits<T>(emulation::collective(emulation::bits<uint32_t>(value), static_cast<unsigned>(from)));
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, int distance) {
    unsigned const lane = emulation::self().thread.x % 32;
    return emulation::bits<T>(
        emulation::collective(emulation::bits<uint32_t>(value), lane ^ static_cast<unsigned>(distance)));
}
inline bool __any_sync(uint32_t, bool value) {
    emulation::Warp& warp = emulation::current->warps[emulation::self().thread.x / 32];
    emulation::collective(value ? 1u : 0u, 0);
    for (uint32_t v : warp.taken) {
        if (v != 0)
            return true;
    }
    return false;
}
inline bool __all_sync(uint32_t mask, bool value) {
    return !__any_sync(mask, !value);
}
inline void __syncthreads() {
    emulation::syncCta();
}
inline void __threadfence_system() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
}
inline void __trap() {
    throw std::logic_error("the kernel traps");
}

template <typename T>
T atomicCAS(T* address, T compare, T value) {
    __atomic_compare_exchange_n(address, &compare, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return compare;
}
template <typename T>
T atomicAdd(T* address, T value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(
    cudaLaunchConfig_t const* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
    auto grid = std::make_shared<emulation::Grid>();
    grid->size = config->gridDim;
    grid->threads = config->blockDim.x;
    grid->body = [kernel, arguments...] { kernel(arguments...); };
    unsigned cluster = 1;
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            cluster = config->attrs[i].val.clusterDim.x;
        if (config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization)
            grid->overlapped = true;
    }
    reinterpret_cast<emulation::Stream*>(config->stream)->launch(std::move(grid), cluster);
    return cudaSuccess;
}
