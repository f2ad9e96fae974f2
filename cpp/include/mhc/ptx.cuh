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

// Makes the compiler work the pointer out here and not where it is used.
template <typename T>
__device__ __forceinline__ T* pinned(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

// The address in another CTA of the cluster of what is at `local` in the shared memory of this one.
__device__ __forceinline__ uint32_t clusterAddress(void const* local, uint32_t ctaRank) {
    auto const address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(ctaRank));
    return remote;
}

// Stores a float there.
__device__ __forceinline__ void storeCluster(float* local, uint32_t ctaRank, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(clusterAddress(local, ctaRank)), "f"(value) : "memory");
}

// A barrier in shared memory, of one phase, that completes when `bytes` bytes have come by storeAsync. Called by one
// thread of each CTA; clusterArriveRelaxed and clusterWait then make it known to the others.
__device__ __forceinline__ void expectBytes(uint64_t* barrier, uint32_t bytes) {
    auto const address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
}

// Stores 8 bytes into the shared memory of CTA `ctaRank` of the cluster and counts them at its barrier. Nothing has to
// be fenced: a fence would wait for every store of the thread, those on their way to other devices too.
__device__ __forceinline__ void storeAsync(uint2* local, uint32_t ctaRank, uint2 value, uint64_t* barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                     clusterAddress(local, ctaRank)),
                 "r"(value.x), "r"(value.y), "r"(clusterAddress(barrier, ctaRank))
                 : "memory");
}

__device__ __forceinline__ void waitForBytes(uint64_t* barrier) {
    auto const address = static_cast<uint32_t>(__cvta_generic_to_shared(barrier));
    uint32_t done = 0;
    while (done == 0) {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done)
                     : "r"(address)
                     : "memory");
    }
}

// The barrier of all threads of the cluster. Arriving waits for every store of the thread, wherever it goes; arriving
// relaxed orders no memory.
__device__ __forceinline__ void clusterArrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void clusterArriveRelaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void clusterWait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace mhc::ptx
