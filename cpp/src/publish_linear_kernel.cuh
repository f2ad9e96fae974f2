// SPDX-License-Identifier: Apache-2.0
//
// The linear layer that publishes: out[m,n] = sum over k of activation[m,k] * weight[n,k], for few rows m.
//
// Reading the weights once is all that counts. H/128 output columns and the whole of K belong to a CTA, or C times as
// many columns and 1/C of K to each CTA of a cluster of C: the activations that each CTA reads shrink by C. Every warp
// streams H/128 weight rows through a ring of its own in shared memory, 128 bytes of each row at a time, with cp.async;
// no barrier is needed until the end. The rings are filled before the grid-dependency wait: weights are constants.
//
// Order of the sums, which depends neither on M nor on C. K is cut into blocks of 128 bytes of a weight row (64 bf16,
// 128 E4M3); block b belongs to slice b mod 8, which one warp adds up, block after block, with mma.m16n8k16 into one
// fp32 accumulator. Step q of a block multiplies 16 k's: of each thread t of a quad the k's at 16t + 4q .. +3 (bf16) or
// 32t + 4q .. +3 (E4M3). The eight slices are added in order, slice 0 first. One rounding to bf16 follows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels.h"
#include "mhc/mailbox.cuh"
#include "mhc/publish_linear.h"

namespace mhc {
namespace {

constexpr int kLinearWarps = 8;
constexpr int kLinearThreads = 32 * kLinearWarps;
constexpr int kSlices = 8;
constexpr int kLinearCtas = 128;               // columns are divided by this many
constexpr int kBlockBytes = 128;               // of a weight row, in one ring slot
constexpr int kScaleSlotWords = 8;             // at least as many as n-tiles of a warp
constexpr uint32_t kNotGranted = 0xFFFFFFFFu;  // no sequence number

// Sizes that follow from the kernel's template parameters.
template <bool kE4m3, int kColumns>
struct LinearShape {
    static constexpr int kElementsPerBlock = kE4m3 ? kBlockBytes : kBlockBytes / 2;
    static constexpr int kColumnTiles = kColumns / 8;  // n8 tiles of a warp
    static constexpr int kSlotBytes = kColumns * kBlockBytes;
    static constexpr int kFragments = kColumns / kFragment;  // 16-byte pieces of a row that a CTA writes
    // Floats between the rows of a partial sum: 8 or 24 modulo 32, so that the accumulators' stores hit all banks.
    static constexpr int kPartialStride = kColumns % 32 == 0 ? kColumns + 8 : kColumns;
    static constexpr int sharedBytes(int stages) {
        return kLinearWarps * stages * (kSlotBytes + (kE4m3 ? kScaleSlotWords * 4 : 0));
    }
};

__device__ __forceinline__ uint32_t sharedAddress(void const* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Weights are read once: what else is in the L2 cache should outlive them.
__device__ __forceinline__ uint64_t evictFirst() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copyAsync16(uint32_t to, void const* from, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copyAsync4(uint32_t to, void const* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copyCommit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void copyWait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ uint4 loadShared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// Of the CTA `ctaRank` of the cluster, at the address `local` has in this one.
__device__ __forceinline__ float4 loadCluster(uint32_t local, uint32_t ctaRank) {
    uint32_t remote;
    float4 v;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(ctaRank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(remote)
                 : "memory");
    return v;
}

__device__ __forceinline__ void multiplyAdd(float (&sum)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two E4M3 as bf16, which holds them exactly, times a power of two.
__device__ __forceinline__ uint32_t dequantise(uint32_t pair, __nv_bfloat162 scale) {
    uint32_t halves;
    asm("{.reg .b16 low;\n cvt.u16.u32 low, %1;\n cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(halves) : "r"(pair));
    float2 const values = __half22float2(*reinterpret_cast<__half2 const*>(&halves));
    __nv_bfloat162 const scaled = __hmul2(__floats2bfloat162_rn(values.x, values.y), scale);
    return *reinterpret_cast<uint32_t const*>(&scaled);
}

// A UE8M0 byte as bf16, twice: 2^(byte - 127); 255 is NaN.
__device__ __forceinline__ __nv_bfloat162 scalePair(uint32_t byte) {
    uint32_t const bits = byte == 0 ? 0x0040u : byte == 255 ? 0x7FC0u : byte << 7;
    uint32_t const pair = bits | bits << 16;
    return *reinterpret_cast<__nv_bfloat162 const*>(&pair);
}

// Activations of one half of a block: of each row tile the rows g and g + 8, as the mma's A operand.
template <bool kE4m3, int kRowTiles>
struct Activations {
    static constexpr int kVectors = kE4m3 ? 2 : 1;  // of 16 bytes
    uint4 v[kRowTiles][2][kVectors];

    // `at`: this thread's k's in row g; rows that are not there are zero.
    __device__ __forceinline__ void load(uint4 const* at, int row, int rows, size_t rowVectors) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                int const token = 16 * m + 8 * upper;
#pragma unroll
                for (int i = 0; i < kVectors; ++i) {
                    v[m][upper][i] = row + token < rows ? at[token * rowVectors + i] : uint4{0, 0, 0, 0};
                }
            }
        }
    }

    __device__ __forceinline__ void operand(int m, int step, uint32_t (&a)[4]) const {
        uint4 const low = v[m][0][step / 2];
        uint4 const high = v[m][1][step / 2];
        a[0] = step % 2 == 0 ? low.x : low.z;
        a[1] = step % 2 == 0 ? high.x : high.z;
        a[2] = step % 2 == 0 ? low.y : low.w;
        a[3] = step % 2 == 0 ? high.y : high.w;
    }
};

// kRowTiles * 16 tokens at most; kColumns = H/128.
template <bool kE4m3, int kRowTiles, int kCluster, int kColumns, int kStages>
__global__ void __launch_bounds__(kLinearThreads, kRowTiles == 1 ? 2 : 1) publishLinearKernel(
    __grid_constant__ Mailbox const box, __grid_constant__ LinearInput const input,
    __grid_constant__ Chunk const chunk) {
    using Shape = LinearShape<kE4m3, kColumns>;
    constexpr int kCtaSlices = kSlices / kCluster;
    extern __shared__ __align__(1024) uint8_t ring[];
    __shared__ uint32_t sequences[kLinearTileRows];

    int const lane = static_cast<int>(threadIdx.x % 32);
    int const warp = static_cast<int>(threadIdx.x / 32);
    int const g = lane / 4;
    int const t = lane % 4;
    int const ctaRank = static_cast<int>(blockIdx.x) % kCluster;
    int const cluster = static_cast<int>(blockIdx.x) / kCluster;
    int const passes = static_cast<int>(gridDim.x) / kLinearCtas;
    int const firstRow = cluster % passes * kLinearTileRows;
    int const firstColumn = cluster / passes * kCluster * kColumns;
    int const rows = min(input.rows - firstRow, kLinearTileRows);
    int const slice = ctaRank * kCtaSlices + warp % kCtaSlices;
    int const column = firstColumn + warp / kCtaSlices * kColumns;  // of this warp
    bool const publishes = chunk.owner != 0;
    int const blocks = input.features / Shape::kElementsPerBlock;
    int const steps = (blocks - slice + kSlices - 1) / kSlices;

    uint32_t const myRing = sharedAddress(ring) + static_cast<uint32_t>(warp * kStages * Shape::kSlotBytes);
    uint32_t const myScales = sharedAddress(ring) + kLinearWarps * kStages * Shape::kSlotBytes +
                              static_cast<uint32_t>(warp * kStages * kScaleSlotWords * 4);
    size_t const rowBytes = static_cast<size_t>(blocks) * kBlockBytes;
    uint8_t const* const weightAt = reinterpret_cast<uint8_t const*>(input.weight) + (column + lane / 8) * rowBytes +
                                    slice * kBlockBytes + lane % 8 * 16;
    uint64_t const policy = evictFirst();
    auto const request = [&](int step) {
        if (step < steps) {
            uint8_t const* from = weightAt + static_cast<size_t>(step) * kSlices * kBlockBytes;
            uint32_t const slot = myRing + static_cast<uint32_t>(step % kStages * Shape::kSlotBytes);
#pragma unroll
            for (int i = 0; i < kColumns / 4; ++i) {
                int const row = 4 * i + lane / 8;
                copyAsync16(
                    slot + static_cast<uint32_t>(row * kBlockBytes + ((lane % 8) ^ (row & 7)) * 16),
                    from + 4 * i * rowBytes, policy);
            }
            if constexpr (kE4m3) {
                if (lane < Shape::kColumnTiles) {
                    copyAsync4(
                        myScales + static_cast<uint32_t>((step % kStages * kScaleSlotWords + lane) * 4),
                        input.scales + (column + 8 * lane) / kWeightBlock * static_cast<size_t>(blocks) + slice +
                            step * kSlices);
                }
            }
        }
        copyCommit();
    };

    if constexpr (kCluster > 1)
        ptx::clusterArrive();
#pragma unroll
    for (int i = 0; i < kStages; ++i)
        request(i);
    ptx::launchDependents();
    ptx::gridDependencyWait();
    if constexpr (kCluster > 1)
        ptx::clusterWait();
    if (publishes && ctaRank == 0 && static_cast<int>(threadIdx.x) < rows) {
        uint32_t sequence;
        int const token = static_cast<int>(threadIdx.x);
        bool granted = takeTicket(box, token, chunk.owner, sequence);
        // Once for a row, by whoever publishes its header.
        if (!box.headerLast && cluster == token / kCluster)
            granted = enterLane(box, token, chunk.owner, chunk.rows) && granted;
        if (!granted)
            sequence = kNotGranted;
        if constexpr (kCluster == 1) {
            sequences[token] = sequence;
        } else {
#pragma unroll
            for (uint32_t i = 0; i < kCluster; ++i)
                ptx::storeCluster(reinterpret_cast<float*>(&sequences[token]), i, __uint_as_float(sequence));
        }
    }

    // Activations are loaded ahead of their use: a whole block where they fit into registers, else half a block.
    using Half = Activations<kE4m3, kRowTiles>;
    constexpr bool kBlockAhead = kRowTiles == 1;
    constexpr int kBlockVectors = kSlices * Shape::kElementsPerBlock / 8;
    size_t const rowVectors = static_cast<size_t>(input.features) / 8;
    uint4 const* const activationAt = input.activation + (firstRow + g) * rowVectors +
                                      slice * (Shape::kElementsPerBlock / 8) + t * (2 * Half::kVectors);
    auto const load = [&](Half& into, int step, int half) {
        into.load(activationAt + step * kBlockVectors + half * Half::kVectors, g, rows, rowVectors);
    };
    float sums[kRowTiles][Shape::kColumnTiles][4] = {};
    Half now[kBlockAhead ? 2 : 1];
    Half next[kBlockAhead ? 2 : 1];
    if (steps > 0) {
        load(now[0], 0, 0);
        if constexpr (kBlockAhead)
            load(now[1], 0, 1);
    }
    for (int step = 0; step < steps; ++step) {
        if constexpr (kBlockAhead) {
            if (step + 1 < steps) {
                load(next[0], step + 1, 0);
                load(next[1], step + 1, 1);
            }
        }
        copyWait<kStages - 1>();
        __syncwarp();
        uint32_t const slot = myRing + static_cast<uint32_t>(step % kStages * Shape::kSlotBytes);
        [[maybe_unused]] __nv_bfloat162 scales[Shape::kColumnTiles];
        if constexpr (kE4m3) {
#pragma unroll
            for (int n = 0; n < Shape::kColumnTiles; ++n) {
                uint32_t byte;
                asm volatile("ld.shared.u8 %0, [%1];"
                             : "=r"(byte)
                             : "r"(myScales + static_cast<uint32_t>((step % kStages * kScaleSlotWords + n) * 4 + t))
                             : "memory");
                scales[n] = scalePair(byte);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (!kBlockAhead) {
                if (half == 0) {
                    load(next[0], step, 1);
                } else if (step + 1 < steps) {
                    load(next[0], step + 1, 0);
                }
            }
            Half const& activations = now[kBlockAhead ? half : 0];
            uint32_t const chunkAt = slot + static_cast<uint32_t>(g * kBlockBytes + (((2 * t + half) ^ g) * 16));
#pragma unroll
            for (int n = 0; n < Shape::kColumnTiles; ++n) {
                uint4 const raw = loadShared(chunkAt + static_cast<uint32_t>(n * 8 * kBlockBytes));
                uint32_t const words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
                for (int q = 0; q < (kE4m3 ? 4 : 2); ++q) {
                    uint32_t const b0 = kE4m3 ? dequantise(words[q], scales[n]) : words[2 * q % 4];
                    uint32_t const b1 = kE4m3 ? dequantise(words[q] >> 16, scales[n]) : words[(2 * q + 1) % 4];
#pragma unroll
                    for (int m = 0; m < kRowTiles; ++m) {
                        uint32_t a[4];
                        activations.operand(m, q, a);
                        multiplyAdd(sums[m][n], a, b0, b1);
                    }
                }
            }
            if constexpr (!kBlockAhead)
                now[0] = next[0];
        }
        if constexpr (kBlockAhead) {
            now[0] = next[0];
            now[1] = next[1];
        }
        __syncwarp();
        request(step + kStages);
    }

    // Every warp's partial sums go where its ring was.
    copyWait<0>();
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            int const token = 16 * m + 8 * upper + g;
            if (token < rows) {
#pragma unroll
                for (int n = 0; n < Shape::kColumnTiles; ++n) {
                    uint32_t const at =
                        myRing + static_cast<uint32_t>((token * Shape::kPartialStride + 8 * n + 2 * t) * 4);
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(sums[m][n][2 * upper]),
                                 "f"(sums[m][n][2 * upper + 1])
                                 : "memory");
                }
            }
        }
    }
    if constexpr (kCluster > 1) {
        ptx::clusterArrive();
        ptx::clusterWait();
    } else {
        __syncthreads();
    }

    // This CTA finishes the columns of one warp group.
    int const rowFragments = kLinearCtas * kColumns / kFragment;
    int const firstFragment = (firstColumn + ctaRank * kColumns) / kFragment;
    for (int i = static_cast<int>(threadIdx.x); i < rows * Shape::kFragments; i += kLinearThreads) {
        int const token = i / Shape::kFragments;
        int const fragment = i % Shape::kFragments;
        float total[kFragment];
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
            int const source = ctaRank * kCtaSlices + s % kCtaSlices;
            uint32_t const at = sharedAddress(ring) + static_cast<uint32_t>(
                                                          source * kStages * Shape::kSlotBytes +
                                                          (token * Shape::kPartialStride + fragment * kFragment) * 4);
            float4 parts[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                if constexpr (kCluster > 1) {
                    parts[j] = loadCluster(at + 16 * j, static_cast<uint32_t>(s / kCtaSlices));
                } else {
                    uint4 const v = loadShared(at + 16 * j);
                    parts[j] = *reinterpret_cast<float4 const*>(&v);
                }
            }
            float const values[kFragment] = {parts[0].x, parts[0].y, parts[0].z, parts[0].w,
                                             parts[1].x, parts[1].y, parts[1].z, parts[1].w};
#pragma unroll
            for (int j = 0; j < kFragment; ++j)
                total[j] = s == 0 ? values[j] : __fadd_rn(total[j], values[j]);
        }
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            __nv_bfloat162 const pair = __floats2bfloat162_rn(total[2 * j], total[2 * j + 1]);
            words[j] = *reinterpret_cast<uint32_t const*>(&pair);
        }
        uint4 const v = clearNegativeZero(uint4{words[0], words[1], words[2], words[3]});
        input.out[static_cast<size_t>(firstRow + token) * rowFragments + firstFragment + fragment] = v;
        if (publishes && sequences[token] != kNotGranted)
            storeFragment(box, sequences[token], token, firstFragment + fragment, v);
    }
    // One CTA for each row tells of it; where headers come last, a kernel of their own follows.
    int const token = static_cast<int>(blockIdx.x);
    if (publishes && !box.headerLast && token < rows && sequences[token] != kNotGranted) {
        announceRow(box, token, sequences[token], chunk.totalRows, chunk.operation);
    }
    if constexpr (kCluster > 1) {
        // Others may still read this CTA's shared memory.
        ptx::clusterArrive();
        ptx::clusterWait();
    }
}

}  // namespace
}  // namespace mhc
