// SPDX-License-Identifier: Apache-2.0
//
// In place of cpp/include/mhc/ptx.cuh: the same functions on a processor.
#pragma once

#include "emulation.h"

namespace mhc::ptx {

inline uint32_t load(uint32_t const* address) {
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}
inline uint4 load(uint4 const* address) {
    auto const* const words = reinterpret_cast<uint32_t const*>(address);
    return {load(words), load(words + 1), load(words + 2), load(words + 3)};
}

inline void gridDependencyWait() {
    emulation::waitForGridBefore();
}
inline void launchDependents() {
    emulation::letNextIn();
}
inline uint4 loadRelaxedSystem(uint4 const* address) {
    emulation::yield();
    return load(address);
}
inline void storeRelaxedSystem(uint4* address, uint4 v) {
    emulation::yield();
    auto* const words = reinterpret_cast<uint32_t*>(address);
    __atomic_store_n(words, v.x, __ATOMIC_RELAXED);
    __atomic_store_n(words + 1, v.y, __ATOMIC_RELAXED);
    __atomic_store_n(words + 2, v.z, __ATOMIC_RELAXED);
    __atomic_store_n(words + 3, v.w, __ATOMIC_RELAXED);
}
inline uint32_t loadRelaxedDevice(uint32_t const* address) {
    emulation::yield();
    return load(address);
}
inline uint4 loadRelaxedDevice(uint4 const* address) {
    emulation::yield();
    return load(address);
}
inline uint2 loadRelaxedDevice(uint2 const* address) {
    emulation::yield();
    auto const* const words = reinterpret_cast<uint32_t const*>(address);
    return {load(words), load(words + 1)};
}
inline uint64_t globalTimer() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
}
template <typename T>
T pinned(T value) {
    return value;
}
inline void storeCluster(float* local, uint32_t ctaRank, float value) {
    std::memcpy(emulation::inCta(local, ctaRank), &value, sizeof value);
}

// The barrier's 8 bytes count what is still to come.
inline void expectBytes(uint64_t* barrier, uint32_t bytes) {
    __atomic_store_n(barrier, bytes, __ATOMIC_RELEASE);
}
inline void storeAsync(uint2* local, uint32_t ctaRank, uint2 value, uint64_t* barrier) {
    emulation::yield();
    std::memcpy(emulation::inCta(local, ctaRank), &value, sizeof value);
    __atomic_fetch_sub(reinterpret_cast<uint64_t*>(emulation::inCta(barrier, ctaRank)), sizeof value, __ATOMIC_RELEASE);
}
inline void waitForBytes(uint64_t* barrier) {
    while (__atomic_load_n(barrier, __ATOMIC_ACQUIRE) != 0)
        emulation::yield();
}
inline void clusterArrive() {
    ++emulation::self().clusterArrivals;
    ++emulation::current->cluster->arrivals;
}
inline void clusterArriveRelaxed() {
    clusterArrive();
}
inline void clusterWait() {
    emulation::Cluster& cluster = *emulation::current->cluster;
    while (cluster.arrivals.load() < emulation::self().clusterArrivals * cluster.threads)
        emulation::yield();
}

}  // namespace mhc::ptx
