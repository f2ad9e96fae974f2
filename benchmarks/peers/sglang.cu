// SPDX-License-Identifier: Apache-2.0
//
// A C interface to sglang's kernels for MHC_PEER_RANKS ranks, so that the benchmarks can call them on plain pointers.
// scripts/fetch_peers.sh compiles it with the headers of sglang's wheel; nothing of theirs is kept here.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distributed/all_reduce_fusion.cuh"
#include "distributed/custom_all_reduce.cuh"
#include "distributed/registry.cuh"

namespace {

using tvm::ffi::TensorView;

constexpr uint32_t kRanks = MHC_PEER_RANKS;
constexpr int64_t kHidden = 5120;
constexpr int64_t kStreams = 4;
constexpr int64_t kScaleRows = 128;

// Top-1 experts of weight 1 make the finalize step of their kernel a plain read of x.
template <bool kQuantized>
using Boundary = sglang::MoeFinalizeAllReduceKernel<kRanks, kHidden, 1, 5, true, float, true, kQuantized>;

constexpr DLDataType kBf16{kDLBfloat, 16, 1};
constexpr DLDataType kF32{kDLFloat, 32, 1};
constexpr DLDataType kI32{kDLInt, 32, 1};
constexpr DLDataType kU8{kDLUInt, 8, 1};
constexpr DLDataType kE4m3{kDLFloat8_e4m3fn, 8, 1};

// A tensor over somebody else's memory. Lives as long as the view that is taken of it.
class Array {
public:
    Array(void* data, DLDataType type, int device, std::initializer_list<int64_t> shape)
        : shape_(shape), strides_(shape.size(), 1) {
        for (size_t axis = shape_.size() - 1; axis > 0; --axis)
            strides_[axis - 1] = strides_[axis] * shape_[axis];
        tensor_ = {
            data, DLDevice{kDLCUDA, device}, static_cast<int32_t>(shape_.size()), type, shape_.data(), strides_.data(),
            0};
    }
    Array(Array const&) = delete;
    Array& operator=(Array const&) = delete;

    TensorView view() const { return TensorView(&tensor_); }

private:
    std::vector<int64_t> shape_;
    std::vector<int64_t> strides_;
    DLTensor tensor_{};
};

struct Rank {
    sglang::host::distributed::CommunicatorRef communicator;
    int device;
};

thread_local std::string lastError;

template <typename Work>
int guarded(Work const& work) {
    try {
        work();
        return 0;
    } catch (std::exception const& error) {
        lastError = error.what();
        return 1;
    }
}

}  // namespace

extern "C" {

// Pointers as in mhcBoundaryArgs; indices are 0 .. rows-1 and weights 1, total is the rank's sum that sglang keeps.
struct PeerBoundaryArgs {
    int32_t rows;
    int32_t quantized;
    double normEps;
    void *x, *indices, *weights, *total, *residual, *post, *comb, *pre, *gamma, *residualOut, *layerInput, *data,
        *scales;
};

__attribute__((visibility("default"))) char const* peerLastError() {
    return lastError.c_str();
}

// workspaces[r]: rank r's 2 * ranks slots of slotBytes zeroed bytes. counters: `blocks` zeroed 32-bit words.
__attribute__((visibility("default"))) int peerCreate(
    void** created, int rank, int device, void* const* workspaces, int64_t slotBytes, void* counters, int64_t blocks) {
    return guarded([&] {
        namespace distributed = sglang::host::distributed;
        std::vector<TensorView> views;
        std::vector<std::unique_ptr<Array>> arrays;
        for (uint32_t r = 0; r < kRanks; ++r) {
            arrays.push_back(
                std::make_unique<Array>(
                    workspaces[r], kU8, device, std::initializer_list<int64_t>{2 * int64_t{kRanks}, slotBytes}));
            views.push_back(arrays.back()->view());
        }
        Array const counter(counters, kU8, device, {blocks, 4});
        auto plane = tvm::ffi::make_object<distributed::PushPlaneObj>(
            static_cast<uint32_t>(rank), kRanks, views, counter.view(), intptr_t{0});
        auto communicator = tvm::ffi::make_object<distributed::CommunicatorObj>(
            tvm::ffi::details::ObjectUnsafe::ObjectRefFromObjectPtr<distributed::PushPlaneRef>(plane),
            tvm::ffi::Optional<distributed::PullPlaneRef>());
        *created = new Rank{
            tvm::ffi::details::ObjectUnsafe::ObjectRefFromObjectPtr<distributed::CommunicatorRef>(communicator),
            device};
    });
}

__attribute__((visibility("default"))) void peerDestroy(void* rank) {
    delete static_cast<Rank*>(rank);
}

__attribute__((visibility("default"))) int peerBoundary(void* handle, PeerBoundaryArgs const* args, void* stream) {
    return guarded([&] {
        Rank const& rank = *static_cast<Rank*>(handle);
        int64_t const rows = args->rows;
        int const device = rank.device;
        TVMFFIEnvSetStream(kDLCUDA, device, stream, nullptr);
        Array const x(args->x, kBf16, device, {rows, kHidden});
        Array const indices(args->indices, kI32, device, {rows});
        Array const weights(args->weights, kF32, device, {rows, 1});
        Array const total(args->total, kBf16, device, {rows, kHidden});
        Array const residual(args->residual, kBf16, device, {rows, kStreams, kHidden});
        Array const post(args->post, kF32, device, {rows, kStreams});
        Array const comb(args->comb, kF32, device, {rows, kStreams, kStreams});
        Array const pre(args->pre, kF32, device, {rows, kStreams});
        Array const gamma(args->gamma, kBf16, device, {kHidden});
        Array const residualOut(args->residualOut, kBf16, device, {rows, kStreams, kHidden});
        Array const layerInput(args->layerInput, kBf16, device, {rows, kHidden});
        if (args->quantized == 0) {
            Boundary<false>::run_mhc_post_combine_norm(
                rank.communicator, total.view(), x.view(), indices.view(), weights.view(), std::nullopt,
                residualOut.view(), residual.view(), post.view(), comb.view(), pre.view(), gamma.view(), args->normEps,
                layerInput.view());
            return;
        }
        Array const data(args->data, kE4m3, device, {rows, kHidden});
        Array const scales(args->scales, kU8, device, {kHidden / 32 * kScaleRows});
        Boundary<true>::run_mhc_post_combine_norm_quant(
            rank.communicator, total.view(), x.view(), indices.view(), weights.view(), std::nullopt, residualOut.view(),
            residual.view(), post.view(), comb.view(), pre.view(), gamma.view(), args->normEps, layerInput.view(),
            data.view(), scales.view());
    });
}

// Their one-shot push all-reduce, launched as their own entry does, on an output that the caller owns.
__attribute__((visibility("default"))) int peerAllReduce(void* handle, void* x, void* sum, int rows, void* stream) {
    return guarded([&] {
        auto const& plane = static_cast<Rank*>(handle)->communicator.get()->get_push_obj();
        auto const vectors = static_cast<uint32_t>(rows * kHidden / 8);
        sglang::AllReducePushParams<kRanks> const params{
            x, sum, vectors, plane.rank, plane.template get_workspace<kRanks>(int64_t{rows} * kHidden * 2)};
        sglang::host::LaunchKernel(
            plane.num_blocks, sglang::choose_block_size(vectors), static_cast<cudaStream_t>(stream))
            .enable_pdl(true)(sglang::all_reduce_1shot_push_kernel<__nv_bfloat16, kRanks, true>, params);
    });
}

}  // extern "C"
