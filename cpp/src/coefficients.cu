// SPDX-License-Identifier: Apache-2.0
//
// The mHC coefficients: a projection of a token's streams onto 24 rows with their mean square in one pass, then
// sigmoid, softmax and Sinkhorn.
//
// Two kernels. The first spreads the 2 MB of the projection over the device: a CTA sums one group of 256 features, four
// warps six rows each, for a few tokens. The second adds a token's groups and finishes it, a warp per token. Sums have
// the order of the norm (rms_norm.cuh) whatever M is, so that the result depends on nothing but the token.
#include "mhc/coefficients.h"

#include "kernels.h"
#include "launch.h"
#include "mhc/mix.cuh"
#include "mhc/ptx.cuh"
#include "mhc/rms_norm.cuh"

namespace mhc {
namespace {

constexpr int kWarps = 4;
constexpr int kRowsPerWarp = kCoefficients / kWarps;

// fma in index order over a fragment, then the warp's butterfly; every lane gets the sum.
__device__ __forceinline__ float groupDot(uint4 const& x, float4 const& first, float4 const& second) {
    float sum = __fmaf_rn(lowHalf(x.x), first.x, 0.0F);
    sum = __fmaf_rn(highHalf(x.x), first.y, sum);
    sum = __fmaf_rn(lowHalf(x.y), first.z, sum);
    sum = __fmaf_rn(highHalf(x.y), first.w, sum);
    sum = __fmaf_rn(lowHalf(x.z), second.x, sum);
    sum = __fmaf_rn(highHalf(x.z), second.y, sum);
    sum = __fmaf_rn(lowHalf(x.w), second.z, sum);
    sum = __fmaf_rn(highHalf(x.w), second.w, sum);
#pragma unroll
    for (int distance = 16; distance > 0; distance >>= 1)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, distance));
    return sum;
}

template <int kTokens>
__global__ void __launch_bounds__(kWarps * 32) projectKernel(__grid_constant__ CoefficientsInput const input) {
    int const lane = static_cast<int>(threadIdx.x & 31u);
    int const warp = static_cast<int>(threadIdx.x >> 5u);
    int const group = static_cast<int>(blockIdx.x);
    int const groups = static_cast<int>(gridDim.x);
    int const firstToken = static_cast<int>(blockIdx.y) * kTokens;
    int const fragment = group * 32 + lane;

    // The projection is a weight: no kernel writes it, so it is fetched before the wait.
    float4 weights[kRowsPerWarp][2];
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
        size_t const row = static_cast<size_t>(warp * kRowsPerWarp + r) * input.features;
        auto const* at = reinterpret_cast<float4 const*>(input.fn + row) + fragment * 2;
        weights[r][0] = at[0];
        weights[r][1] = at[1];
    }
    ptx::gridDependencyWait();
    ptx::launchDependents();

    uint4 x[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
        int const token = min(firstToken + t, input.rows - 1);
        x[t] = input.x[static_cast<size_t>(token) * (input.features / kFragment) + fragment];
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
        if (firstToken + t >= input.rows)
            break;
        float* out = input.partial + static_cast<size_t>(firstToken + t) * kSums * groups + group;
#pragma unroll
        for (int r = 0; r < kRowsPerWarp; ++r) {
            float const sum = groupDot(x[t], weights[r][0], weights[r][1]);
            if (lane == 0)
                out[(warp * kRowsPerWarp + r) * groups] = sum;
        }
        if (warp == 0) {
            float const sum = sumOfSquares(x[t]);
            if (lane == 0)
                out[kCoefficients * groups] = sum;
        }
    }
}

__device__ __forceinline__ float sigmoid(float v) {
    return __fdiv_rn(1.0F, __fadd_rn(1.0F, expf(-v)));
}

// Four values in index order.
__device__ __forceinline__ float sumOfFour(float value, int first, int stride) {
    float sum = __shfl_sync(0xFFFFFFFFu, value, first);
#pragma unroll
    for (int i = 1; i < MHC_STREAMS; ++i)
        sum = __fadd_rn(sum, __shfl_sync(0xFFFFFFFFu, value, first + i * stride));
    return sum;
}

__global__ void __launch_bounds__(32) finishKernel(__grid_constant__ CoefficientsInput const input) {
    int const lane = static_cast<int>(threadIdx.x);
    int const token = static_cast<int>(blockIdx.x);
    int const groups = input.features / kGroupElements;
    // Weights, so before the wait. Lanes: 0-3 pre, 4-7 post, 8-23 comb [source][target], 24 the sum of squares.
    int const coefficient = min(lane, kCoefficients - 1);
    float const scale = input.scale[coefficient < MHC_STREAMS ? 0 : coefficient < 2 * MHC_STREAMS ? 1 : 2];
    float const base = input.base[coefficient];
    ptx::gridDependencyWait();
    ptx::launchDependents();

    float const* partial = input.partial + (static_cast<size_t>(token) * kSums + min(lane, kSums - 1)) * groups;
    float sum = 0.0F;
#pragma unroll 10  // so many loads at once: the additions wait for each other, the loads need not
    for (int g = 0; g < groups; g += 4) {  // a group count that 4 divides: H is a multiple of 1024
        float4 const four = *reinterpret_cast<float4 const*>(partial + g);
        sum = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(sum, four.x), four.y), four.z), four.w);
    }
    float const inverse = inverseRms(__shfl_sync(0xFFFFFFFFu, sum, kCoefficients), input.features, input.rmsNormEps);
    float const logit = __fmaf_rn(__fmul_rn(sum, inverse), scale, base);

    if (lane < MHC_STREAMS)
        input.pre[token * MHC_STREAMS + lane] = __fadd_rn(sigmoid(logit), input.hcEps);
    else if (lane < 2 * MHC_STREAMS)
        input.post[token * MHC_STREAMS + lane - MHC_STREAMS] = __fmul_rn(sigmoid(logit), input.postAlpha);

    // Lanes without a matrix element compute along with those of lanes 8 to 23, so that the shuffles are whole.
    int const element = (lane - 2 * MHC_STREAMS) & (MHC_STREAMS * MHC_STREAMS - 1);
    int const matrix = 2 * MHC_STREAMS;
    int const rowStart = matrix + element / MHC_STREAMS * MHC_STREAMS;
    int const columnStart = matrix + element % MHC_STREAMS;
    float const own = __shfl_sync(0xFFFFFFFFu, logit, matrix + element);
    float largest = __shfl_sync(0xFFFFFFFFu, own, rowStart);
#pragma unroll
    for (int i = 1; i < MHC_STREAMS; ++i)
        largest = fmaxf(largest, __shfl_sync(0xFFFFFFFFu, own, rowStart + i));
    float a = expf(__fsub_rn(own, largest));
    a = __fadd_rn(__fdiv_rn(a, sumOfFour(a, rowStart, 1)), input.hcEps);
    a = __fdiv_rn(a, __fadd_rn(sumOfFour(a, columnStart, MHC_STREAMS), input.hcEps));
    for (int i = 1; i < input.sinkhornIterations; ++i) {
        a = __fdiv_rn(a, __fadd_rn(sumOfFour(a, rowStart, 1), input.hcEps));
        a = __fdiv_rn(a, __fadd_rn(sumOfFour(a, columnStart, MHC_STREAMS), input.hcEps));
    }
    if (lane >= matrix && lane < kCoefficients)
        input.comb[token * MHC_STREAMS * MHC_STREAMS + element] = a;
}

// More tokens a CTA fetch the projection less often; fewer fill the device.
constexpr int kFewRows = 4;

}  // namespace

cudaError_t launchCoefficients(CoefficientsInput const& input, cudaStream_t stream) {
    unsigned const groups = static_cast<unsigned>(input.features / kGroupElements);
    unsigned const rows = static_cast<unsigned>(input.rows);
    cudaError_t status = cudaSuccess;
    if (input.rows <= kFewRows) {
        status = launchKernel(projectKernel<1>, dim3(groups, rows), kWarps * 32, 1, Launch::kOverlapped, stream, input);
    } else {
        constexpr unsigned kTokens = 4;
        status = launchKernel(
            projectKernel<kTokens>, dim3(groups, (rows + kTokens - 1) / kTokens), kWarps * 32, 1, Launch::kOverlapped,
            stream, input);
    }
    if (status != cudaSuccess)
        return status;
    return launchKernel(finishKernel, dim3(rows), 32, 1, Launch::kOverlapped, stream, input);
}

cudaError_t loadCoefficientsKernels() {
    return loadKernels({kernelAddress(projectKernel<1>), kernelAddress(projectKernel<4>), kernelAddress(finishKernel)});
}

}  // namespace mhc
