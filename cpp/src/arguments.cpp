// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <cstdint>

#include "status.h"

namespace mhc {
namespace {

FinalizeInput finalizeInput(mhcBoundaryArgs const& args) {
    return {static_cast<uint4 const*>(args.gemm2_permuted), args.expert_weights, args.expanded_idx_to_permuted_idx,
            static_cast<uint4 const*>(args.shared_output),  args.top_k,          args.permuted_rows};
}

}  // namespace

void requireAligned(void const* pointer, char const* name) {
    require(pointer != nullptr, name, " is NULL");
    require(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, name, " is not 16-byte aligned: ", pointer);
}

void checkBoundaryArgs(mhcBoundaryArgs const& args) {
    require(
        args.struct_size == sizeof(mhcBoundaryArgs), "mhcBoundaryArgs.struct_size is ", args.struct_size, ", expected ",
        sizeof(mhcBoundaryArgs), ": header and library differ");
    require(args.rows >= 0, "rows must not be negative, got ", args.rows);
    if (args.rows == 0)
        return;
    require(args.top_k >= 0, "top_k must not be negative, got ", args.top_k);
    requireAligned(args.residual, "residual");
    requireAligned(args.post, "post");
    requireAligned(args.comb, "comb");
    requireAligned(args.residual_out, "residual_out");
    require(args.residual != args.residual_out, "residual_out must be another tensor than residual");
    bool const collapses = args.pre != nullptr;
    require(
        collapses == (args.gamma != nullptr) && collapses == (args.layer_input != nullptr),
        "pre, gamma and layer_input are given together, or none of them for a residual-only boundary");
    if (collapses) {
        requireAligned(args.pre, "pre");
        requireAligned(args.gamma, "gamma");
        requireAligned(args.layer_input, "layer_input");
        require(args.norm_eps >= 0.0F, "norm_eps must be a number >= 0, got ", args.norm_eps);
    }
    require(
        (args.mxfp8_data != nullptr) == (args.mxfp8_scales != nullptr),
        "mxfp8_data and mxfp8_scales are given together");
    if (args.mxfp8_data != nullptr) {
        require(collapses, "MXFP8 output needs a layer input: pre, gamma and layer_input are NULL");
        requireAligned(args.mxfp8_data, "mxfp8_data");
        requireAligned(args.mxfp8_scales, "mxfp8_scales");
    }
    if (args.top_k > 0) {
        require(
            args.published == 0,
            "a published contribution cannot be finalized: published = 1 with top_k = ", args.top_k);
        requireAligned(args.gemm2_permuted, "gemm2_permuted");
        requireAligned(args.shared_output, "shared_output");
        require(args.expert_weights != nullptr, "expert_weights is NULL");
        require(args.expanded_idx_to_permuted_idx != nullptr, "expanded_idx_to_permuted_idx is NULL");
        require(args.permuted_rows >= 0, "permuted_rows must not be negative, got ", args.permuted_rows);
    } else if (args.published == 0) {
        requireAligned(args.x, "x");
    }
}

Consumer consumerOf(mhcBoundaryArgs const& args) {
    return args.pre != nullptr ? Consumer::kBoundary : Consumer::kResidualOnly;
}

BoundaryArgs kernelArgs(mhcBoundaryArgs const& args) {
    BoundaryArgs out{};
    out.x = static_cast<uint4 const*>(args.x);
    if (args.top_k > 0)
        out.finalize = finalizeInput(args);
    out.residual = static_cast<uint4 const*>(args.residual);
    out.post = args.post;
    out.comb = args.comb;
    out.pre = args.pre;
    out.gamma = static_cast<uint4 const*>(args.gamma);
    out.eps = args.norm_eps;
    out.residualOut = static_cast<uint4*>(args.residual_out);
    out.layerInput = static_cast<uint4*>(args.layer_input);
    out.quantised = static_cast<uint2*>(args.mxfp8_data);
    out.scales = static_cast<uint8_t*>(args.mxfp8_scales);
    return out;
}

LinearInput linearInput(mhcPublishLinearArgs const& args, int hidden) {
    require(
        args.struct_size == sizeof(mhcPublishLinearArgs), "mhcPublishLinearArgs.struct_size is ", args.struct_size,
        ", expected ", sizeof(mhcPublishLinearArgs), ": header and library differ");
    require(hiddenSizeSupported(hidden), "hidden_size must be 4096, 5120 or 7168, got ", hidden);
    require(args.rows >= 0, "rows must not be negative, got ", args.rows);
    require(
        args.in_features > 0 && args.in_features <= kLinearMaxFeatures && args.in_features % kLinearFeatureStep == 0,
        "in_features must be a multiple of ", kLinearFeatureStep, " up to ", kLinearMaxFeatures, ", got ",
        args.in_features);
    bool const scaled = args.weight_type == MHC_WEIGHT_E4M3_BLOCK32;
    require(
        scaled || args.weight_type == MHC_WEIGHT_BF16, "weight_type must be ", MHC_WEIGHT_BF16, " (bf16) or ",
        MHC_WEIGHT_E4M3_BLOCK32, " (E4M3 with block scales), got ", args.weight_type);
    require(scaled == (args.weight_scales != nullptr), "weight_scales are given with E4M3 weights and with no others");
    if (args.rows > 0) {
        requireAligned(args.activation, "activation");
        requireAligned(args.weight, "weight");
        requireAligned(args.out, "out");
        if (scaled)
            requireAligned(args.weight_scales, "weight_scales");
        require(args.activation != args.out, "out must be another tensor than activation");
    }
    return {
        args.rows,
        args.in_features,
        static_cast<uint4 const*>(args.activation),
        static_cast<uint4 const*>(args.weight),
        static_cast<uint32_t const*>(args.weight_scales),
        static_cast<uint4*>(args.out)};
}

BoundaryArgs allReduceArgs(void const* x, void* sum, int rows) {
    require(rows >= 0, "rows must not be negative, got ", rows);
    if (rows > 0) {
        requireAligned(x, "x");
        requireAligned(sum, "sum");
        require(x != sum, "sum must be another tensor than x");
    }
    BoundaryArgs args{};
    args.x = static_cast<uint4 const*>(x);
    args.residualOut = static_cast<uint4*>(sum);
    return args;
}

}  // namespace mhc
