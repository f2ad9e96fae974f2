// SPDX-License-Identifier: Apache-2.0
//
// The PTX instructions that CUDA C++ has no function for, wrapped once.
#pragma once

#include <cstdint>

namespace mhc::ptx {

// Returns once every kernel this one depends on has completed and its writes are visible. A kernel that was launched
// without programmatic dependent launch returns at once.
__device__ __forceinline__ void gridDependencyWait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel of the stream start; it still has to wait before it reads what this one writes.
__device__ __forceinline__ void launchDependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// 16 bytes at system scope: what peers write while a kernel polls, and what it writes to them. Each 4-byte part is
// single-copy atomic, which is all the protocol needs: every 16-bit half says by itself whether it has arrived.
__device__ __forceinline__ uint4 loadRelaxedSystem(uint4 const* address) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ void storeRelaxedSystem(uint4* address, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ uint32_t loadRelaxedDevice(uint32_t const* address) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint2 loadRelaxedDevice(uint2 const* address) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint4 loadRelaxedDevice(uint4 const* address) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

// Nanoseconds; ticks coarsely, which is enough for a time-out.
__device__ __forceinline__ uint64_t globalTimer() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ uint32_t clusterRank() {
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

// Stores a float into the shared memory of another CTA of the cluster, at the address `local` has in this one.
__device__ __forceinline__ void storeCluster(float* local, uint32_t ctaRank, float value) {
    auto const address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(ctaRank));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
}

__device__ __forceinline__ void clusterArrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void clusterWait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace mhc::ptx
