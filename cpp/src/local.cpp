// SPDX-License-Identifier: Apache-2.0
//
// Operations that need no communicator.
#include <algorithm>
#include <utility>

#include "arguments.h"
#include "communicator.h"
#include "kernels.h"
#include "status.h"

namespace mhc {
namespace {

void launchLocally(Consumer consumer, int hidden, BoundaryArgs args, int rows, cudaStream_t stream) {
    require(hiddenSizeSupported(hidden), "hidden_size must be 4096, 5120 or 7168, got ", hidden);
    for (int begin = 0; begin < rows; begin += kMaxLaunchRows) {
        args.chunk = {begin, std::min(kMaxLaunchRows, rows - begin), rows, 0, 0};
        checkCuda(
            launchBoundary({Source::kLocal, consumer, hidden, 1}, Mailbox{}, args, Launch::kOverlapped, stream),
            "launching the local boundary");
    }
}

}  // namespace

void boundaryLocal(int hidden, mhcBoundaryArgs const& args, cudaStream_t stream) {
    checkBoundaryArgs(args);
    launchLocally(consumerOf(args), hidden, kernelArgs(args), args.rows, stream);
}

void allReduceLocal(void const* x, void* sum, int rows, int hidden, cudaStream_t stream) {
    launchLocally(Consumer::kAllReduce, hidden, allReduceArgs(x, sum, rows), rows, stream);
}

void publishLinearLocal(int hidden, mhcPublishLinearArgs const& args, cudaStream_t stream) {
    LinearInput const input = linearInput(args, hidden);
    if (input.rows > 0)
        checkCuda(launchLinear(input, hidden, stream), "launching the linear layer");
}

size_t coefficientsWorkspaceBytes(int rows, int hidden, bool broadcast) {
    if (rows <= 0 || hidden <= 0)
        return 0;
    return coefficientsPartialBytes(rows, broadcast ? hidden : MHC_STREAMS * hidden);
}

void coefficients(mhcCoefficientsArgs const& args, cudaStream_t stream) {
    require(
        args.struct_size == sizeof(mhcCoefficientsArgs), "mhcCoefficientsArgs.struct_size is ", args.struct_size,
        ", expected ", sizeof(mhcCoefficientsArgs), ": header and library differ");
    require(
        args.rows >= 0 && args.rows <= kMaxLaunchRows, "rows must be in 0 .. ", kMaxLaunchRows, ", got ", args.rows);
    require(hiddenSizeSupported(args.hidden_size), "hidden_size must be 4096, 5120 or 7168, got ", args.hidden_size);
    require(args.sinkhorn_iters >= 1, "sinkhorn_iters must be at least 1, got ", args.sinkhorn_iters);
    require(args.rms_norm_eps >= 0.0F, "rms_norm_eps must be a number >= 0, got ", args.rms_norm_eps);
    require(args.hc_eps >= 0.0F, "hc_eps must be a number >= 0, got ", args.hc_eps);
    if (args.rows == 0)
        return;
    requireAligned(args.streams, "streams");
    requireAligned(args.fn, "fn");
    requireAligned(args.workspace, "workspace");
    for (auto const& [pointer, name] :
         {std::pair{static_cast<void const*>(args.scale), "scale"},
          {args.base, "base"},
          {args.post, "post"},
          {args.comb, "comb"},
          {args.pre, "pre"}})
        require(pointer != nullptr, name, " is NULL");
    bool const broadcast = args.broadcast != 0;
    size_t const needed = coefficientsWorkspaceBytes(args.rows, args.hidden_size, broadcast);
    require(
        args.workspace_bytes >= needed, "workspace_bytes must be at least ", needed, ", got ", args.workspace_bytes);
    CoefficientsInput input{};
    input.x = static_cast<uint4 const*>(args.streams);
    input.fn = args.fn;
    input.scale = args.scale;
    input.base = args.base;
    input.partial = static_cast<float*>(args.workspace);
    input.rows = args.rows;
    input.features = broadcast ? args.hidden_size : MHC_STREAMS * args.hidden_size;
    input.sinkhornIterations = args.sinkhorn_iters;
    input.rmsNormEps = args.rms_norm_eps;
    input.hcEps = args.hc_eps;
    input.postAlpha = args.post_alpha;
    input.post = args.post;
    input.comb = args.comb;
    input.pre = args.pre;
    checkCuda(launchCoefficients(input, stream), "launching the coefficients");
}

}  // namespace mhc
