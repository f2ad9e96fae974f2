# SPDX-License-Identifier: Apache-2.0
"""Layers of the hyper-connection boundary, made of native TensorRT layers.

Every function appends layers to a strongly typed ``INetworkDefinition`` and returns its output tensors. Together they
are the *unfused* form of the boundary: what a model looks like before the rewrite pass replaces it by plugins.

Shapes: ``M`` rows (tokens; usually dynamic, ``-1``), ``H`` hidden size, ``hc`` residual streams. Only ``M`` may be
dynamic. Sums are taken in float32 and rounded to bfloat16 where the fused boundary rounds: after the all-reduce,
after the post-mix, after the collapse and after the norm. Mixes (``post``, ``comb``, ``pre``) stay float32.

Arguments that do not fit raise ``TypeError`` (dtype) or ``ValueError`` (rank or size), naming expected and got.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import tensorrt as trt

from trtllm_mhc.network import ops
from trtllm_mhc.network.collectives import label_all_reduce_sum
from trtllm_mhc.network.ops import Array, cast, constant

if TYPE_CHECKING:
    from trtllm_mhc.network.boundaries import CommunicatorSpec

__all__ = [
    "Array",
    "all_reduce",
    "broadcast_streams",
    "cast",
    "constant",
    "inverse_rms",
    "linear",
    "mean_streams",
    "mhc_coefficients",
    "mhc_collapse",
    "mhc_final_collapse",
    "mhc_post",
    "mhc_pre_delayed",
    "moe_finalize",
    "mxfp8_quantize",
    "rms_norm",
    "select_stream",
]


def linear(network: trt.INetworkDefinition, x: trt.ITensor, weight: Array) -> trt.ITensor:
    """``x @ weight.T`` for ``x`` [M, K] and ``weight`` [N, K] of one dtype; returns [M, N] of that dtype."""
    if weight.ndim != 2:
        raise ValueError(f"linear: weight: expected shape [N, K], got {weight.shape}")
    ops.check(x, "linear: x", ops.TRT_DTYPES.get(weight.dtype), (None, weight.shape[1]))
    w = constant(network, weight)
    layer = network.add_matrix_multiply(x, trt.MatrixOperation.NONE, w, trt.MatrixOperation.TRANSPOSE)
    return ops.output(layer, "linear")


def all_reduce(network: trt.INetworkDefinition, x: trt.ITensor, spec: CommunicatorSpec) -> trt.ITensor:
    """The sum of ``x`` [M, H] bf16 over the ranks of ``spec``, rounded to bf16.

    ``spec.all_reduce`` chooses the layer: ``"plugin"`` is this project's ``MhcAllReduce``, ``"dist_collective"`` is
    TensorRT's own (11.0 and newer; its order of summation is NCCL's).

    Raises:
        RuntimeError: this TensorRT has no such layer.
    """
    ops.check(x, "all_reduce: x", trt.bfloat16, (None, None))
    if spec.all_reduce == "plugin":
        from trtllm_mhc.network import plugins  # needs the plugin library, which a dist_collective network does not

        return plugins.add_all_reduce(network, x, tp_size=spec.tp_size, rank=spec.rank, group=spec.group)
    if not hasattr(network, "add_dist_collective"):
        raise RuntimeError(
            f"all_reduce: 'dist_collective' needs TensorRT 11.0 or newer, got {trt.__version__}; use 'plugin'"
        )
    layer = network.add_dist_collective(
        x, trt.CollectiveOperation.ALL_REDUCE, trt.ReduceOperation.SUM, -1, np.asarray(spec.ranks, dtype=np.int64)
    )
    out = ops.output(layer, "all_reduce")
    layer.num_ranks = spec.tp_size
    label_all_reduce_sum(layer, spec.ranks)
    return out


def moe_finalize(
    network: trt.INetworkDefinition,
    gemm2_permuted: trt.ITensor,
    expert_weights: trt.ITensor,
    expanded_idx_to_permuted_idx: trt.ITensor,
    shared_output: trt.ITensor,
) -> trt.ITensor:
    """This rank's MoE output: its experts' rows weighted and summed, and the shared experts' output added.

    ``bf16((sum over k of rows[idx[t, k]] * weight[t, k]) + shared[t])``, taken in float32 in the order of the routes
    and rounded once. Where the index is -1 (the expert is on another rank) neither row nor weight counts, whatever
    they are.

    Args:
        gemm2_permuted: [P, H] bf16, rows of the second expert GEMM in permuted order.
        expert_weights: [M, K] f32.
        expanded_idx_to_permuted_idx: [M, K] int32, rows of ``gemm2_permuted`` or -1.
        shared_output: [M, H] bf16, this rank's partial of the shared experts.

    Returns:
        [M, H] bf16.
    """
    ops.check(gemm2_permuted, "moe_finalize: gemm2_permuted", trt.bfloat16, (None, None))
    ops.check(expert_weights, "moe_finalize: expert_weights", trt.float32, (None, None))
    hidden, top_k = gemm2_permuted.shape[1], expert_weights.shape[1]
    ops.check(expanded_idx_to_permuted_idx, "moe_finalize: expanded_idx_to_permuted_idx", trt.int32, (None, top_k))
    ops.check(shared_output, "moe_finalize: shared_output", trt.bfloat16, (None, hidden))
    index = expanded_idx_to_permuted_idx
    zero, none = (constant(network, np.array([[value]], np.int32)) for value in (0, -1))
    rows = network.add_gather(
        gemm2_permuted, ops.elementwise(network, index, zero, trt.ElementWiseOperation.MAX), axis=0
    )
    weights = ops.reshape(network, expert_weights, (0, top_k, 1))
    products = ops.mul(network, cast(network, ops.output(rows, "moe_finalize"), trt.float32), weights)
    held = ops.reshape(network, ops.elementwise(network, index, none, trt.ElementWiseOperation.GREATER), (0, top_k, 1))
    # After the product, so that what is not finite stays out whichever of the two it is.
    products = ops.select(network, held, products, constant(network, np.zeros((1, 1, 1), np.float32)))
    total = select_stream(network, products, 0)
    for route in range(1, top_k):
        total = ops.add(network, total, select_stream(network, products, route))
    return cast(network, ops.add(network, total, cast(network, shared_output, trt.float32)), trt.bfloat16)


def broadcast_streams(network: trt.INetworkDefinition, x: trt.ITensor, hc_mult: int) -> trt.ITensor:
    """``x`` [M, H] copied to every stream: [M, hc, H]."""
    ops.check(x, "broadcast_streams: x", None, (None, None))
    one = ops.reshape(network, x, (0, 1, x.shape[1]))
    layer = network.add_concatenation([one] * hc_mult)
    layer.axis = 1
    return ops.output(layer, "broadcast_streams")


def select_stream(network: trt.INetworkDefinition, streams: trt.ITensor, index: int) -> trt.ITensor:
    """Stream ``index`` of ``streams`` [M, hc, H]: [M, H]."""
    return ops.gather(network, streams, np.array(index, np.int32), 1)


def mean_streams(network: trt.INetworkDefinition, streams: trt.ITensor) -> trt.ITensor:
    """The mean of ``streams`` [M, hc, H] bf16 over the streams, added in float32 in their order: [M, H] bf16."""
    ops.check(streams, "mean_streams: streams", trt.bfloat16, (None, None, None))
    hc = streams.shape[1]
    # Not by a reduction: a network with one beside the collapse did not compile on TensorRT 10.6 (an internal error).
    total = cast(network, select_stream(network, streams, 0), trt.float32)
    for i in range(1, hc):
        total = ops.add(network, total, cast(network, select_stream(network, streams, i), trt.float32))
    return cast(network, ops.mul(network, total, constant(network, np.full((1, 1), 1 / hc, np.float32))), trt.bfloat16)


def mhc_post(
    network: trt.INetworkDefinition, x: trt.ITensor, residual: trt.ITensor, post: trt.ITensor, comb: trt.ITensor
) -> trt.ITensor:
    """The post-mix: ``out[:, i] = bf16(x * post[i] + sum over j of residual[:, j] * comb[j, i])``.

    Args:
        x: [M, H] bf16, the reduced sublayer output.
        residual: [M, hc, H] bf16, the streams before the sublayer's output is mixed in.
        post: [M, hc] f32, per target stream.
        comb: [M, hc, hc] f32, indexed [source, target].

    Returns:
        [M, hc, H] bf16, the streams after.
    """
    ops.check(residual, "mhc_post: residual", trt.bfloat16, (None, None, None))
    _, hc, hidden = residual.shape
    ops.check(x, "mhc_post: x", trt.bfloat16, (None, hidden))
    ops.check(post, "mhc_post: post", trt.float32, (None, hc))
    ops.check(comb, "mhc_post: comb", trt.float32, (None, hc, hc))
    output = ops.reshape(network, cast(network, x, trt.float32), (0, 1, hidden))
    output = ops.mul(network, output, ops.reshape(network, post, (0, hc, 1)))
    sources = ops.reshape(network, cast(network, residual, trt.float32), (0, hc, 1, hidden))
    mixed = ops.mul(network, sources, ops.reshape(network, comb, (0, hc, hc, 1)))
    mixed = ops.reduce(network, mixed, trt.ReduceOperation.SUM, 1, keep=False)
    return cast(network, ops.add(network, output, mixed), trt.bfloat16)


def mhc_collapse(network: trt.INetworkDefinition, streams: trt.ITensor, pre: trt.ITensor) -> trt.ITensor:
    """The collapse to one stream: ``bf16(sum over i of streams[:, i] * pre[i])``.

    Args:
        streams: [M, hc, H] bf16.
        pre: [M, hc] f32.

    Returns:
        [M, H] bf16.
    """
    hc = _check_collapse("mhc_collapse", streams, pre)
    weighted = ops.mul(network, cast(network, streams, trt.float32), ops.reshape(network, pre, (0, hc, 1)))
    return cast(network, ops.reduce(network, weighted, trt.ReduceOperation.SUM, 1, keep=False), trt.bfloat16)


def mhc_final_collapse(network: trt.INetworkDefinition, streams: trt.ITensor, pre: trt.ITensor) -> trt.ITensor:
    """The collapse after the last layer, with its own arithmetic: products and sums rounded one by one, in order.

    The delayed collapse of a boundary may contract to fused multiply-adds; this one may not, so it is written as a
    chain of separate products and sums, and the rewrite pass must not take it for a boundary's.

    Args and result: as `mhc_collapse`.
    """
    hc = _check_collapse("mhc_final_collapse", streams, pre)
    total = None
    for i in range(hc):
        stream = cast(network, select_stream(network, streams, i), trt.float32)
        column = ops.gather(network, pre, np.array([i], np.int32), 1)
        product = ops.mul(network, stream, column)
        total = product if total is None else ops.add(network, total, product)
    return cast(network, total, trt.bfloat16)


def rms_norm(network: trt.INetworkDefinition, x: trt.ITensor, gamma: Array | trt.ITensor, eps: float) -> trt.ITensor:
    """RMSNorm over the last dimension, in float32: ``bf16((x * rsqrt(mean(x^2) + eps)) * gamma)``.

    Args:
        x: [M, H] bf16.
        gamma: [H] bf16, an array or a tensor.
        eps: kept as a float32 constant; 1e-20 is a normal float32 number and keeps an all-zero row finite.

    Returns:
        [M, H] bf16.
    """
    ops.check(x, "rms_norm: x", trt.bfloat16, (None, None))
    hidden = x.shape[1]
    if isinstance(gamma, np.ndarray):
        ops.check_array(gamma, "rms_norm: gamma", ml_dtypes.bfloat16, (hidden,))
        gamma = constant(network, gamma)
    ops.check(gamma, "rms_norm: gamma", trt.bfloat16, (hidden,))
    weight = ops.reshape(network, gamma, (1, hidden))
    wide = cast(network, x, trt.float32)
    normed = ops.mul(network, wide, inverse_rms(network, wide, eps))
    return cast(network, ops.mul(network, normed, cast(network, weight, trt.float32)), trt.bfloat16)


def mhc_pre_delayed(
    network: trt.INetworkDefinition,
    streams: trt.ITensor,
    pre: trt.ITensor | None,
    gamma: Array | trt.ITensor,
    eps: float,
) -> trt.ITensor:
    """The sublayer's input: the collapse with the carried ``pre``, then RMSNorm.

    Args:
        streams: [M, hc, H] bf16.
        pre: [M, hc] f32, computed one sublayer earlier; None selects stream 0 (the first layer).
        gamma: [H] bf16.
        eps: the norm's epsilon.

    Returns:
        [M, H] bf16.
    """
    collapsed = select_stream(network, streams, 0) if pre is None else mhc_collapse(network, streams, pre)
    return rms_norm(network, collapsed, gamma, eps)


def mhc_coefficients(
    network: trt.INetworkDefinition,
    streams: trt.ITensor,
    fn: Array,
    scale: Array,
    base: Array,
    *,
    rms_norm_eps: float,
    hc_eps: float,
    post_alpha: float,
    sinkhorn_iters: int,
) -> tuple[trt.ITensor, trt.ITensor, trt.ITensor]:
    """The mixes that a sublayer computes from its entry streams; all arithmetic in float32.

    Args:
        streams: [M, hc, H] bf16; or [M, H] where all streams are equal, with ``fn`` summed over the streams.
        fn: [(2 + hc) * hc, hc * H] f32 (or [(2 + hc) * hc, H]), rows in the order pre, post, comb.
        scale: [3] f32, for pre, post and comb.
        base: [(2 + hc) * hc] f32.
        rms_norm_eps: added to the mean square of the streams.
        hc_eps: added to ``pre`` and to every divisor of the Sinkhorn normalisation.
        post_alpha: factor of ``post``.
        sinkhorn_iters: column normalisations of ``comb``; one less of its rows.

    Returns:
        ``(post [M, hc], comb [M, hc, hc], pre [M, hc])``, all f32; ``comb`` indexed [source, target] and close to
        doubly stochastic.
    """
    rows = base.shape[0] if base.ndim == 1 else 0
    hc = math.isqrt(rows + 1) - 1
    if hc < 1 or hc * (hc + 2) != rows:
        raise ValueError(f"mhc_coefficients: base: expected [hc * (hc + 2)] values, got shape {base.shape}")
    if sinkhorn_iters < 1:
        raise ValueError(f"mhc_coefficients: sinkhorn_iters: expected 1 or more, got {sinkhorn_iters}")
    broadcast = len(streams.shape) == 2
    ops.check(streams, "mhc_coefficients: streams", trt.bfloat16, (None, None) if broadcast else (None, hc, None))
    features = streams.shape[1] if broadcast else hc * streams.shape[2]
    ops.check_array(fn, "mhc_coefficients: fn", np.float32, (rows, features))
    ops.check_array(scale, "mhc_coefficients: scale", np.float32, (3,))
    ops.check_array(base, "mhc_coefficients: base", np.float32, (rows,))

    wide = cast(network, streams, trt.float32)
    if not broadcast:
        wide = ops.reshape(network, wide, (0, features))
    mixes = ops.mul(network, linear(network, wide, fn), inverse_rms(network, wide, rms_norm_eps))
    mixes = ops.mul(network, mixes, constant(network, np.repeat(scale, (hc, hc, hc * hc))[None]))
    mixes = ops.add(network, mixes, constant(network, base[None]))
    # Rows of hc values: pre, post, then one for every source of comb.
    groups = ops.reshape(network, mixes, (0, hc + 2, hc))
    eps = constant(network, np.full((1, 1), hc_eps, np.float32))
    alpha = constant(network, np.full((1, 1), post_alpha, np.float32))
    pre, post = (
        ops.activation(network, select_stream(network, groups, row), trt.ActivationType.SIGMOID) for row in (0, 1)
    )
    pre = ops.add(network, pre, eps)
    post = ops.mul(network, post, alpha)
    logits = ops.gather(network, groups, np.arange(2, hc + 2, dtype=np.int32), 1)
    return post, _sinkhorn(network, logits, hc_eps, sinkhorn_iters), pre


def mxfp8_quantize(network: trt.INetworkDefinition, x: trt.ITensor) -> tuple[trt.ITensor, trt.ITensor]:
    """``x`` [M, H] bf16 in blocks of 32 as ``(data [M, H] FP8 E4M3, scales [M, H / 32] E8M0)``, scales row-major.

    Raises:
        RuntimeError: this TensorRT cannot quantise to MXFP8 natively.
    """
    ops.check(x, "mxfp8_quantize: x", trt.bfloat16, (None, None))
    if x.shape[1] % 32:
        raise ValueError(f"mxfp8_quantize: x: expected a multiple of 32 columns, got {x.shape[1]}")
    if not hasattr(network, "add_dynamic_quantize") or not hasattr(trt.DataType, "E8M0"):
        raise RuntimeError(f"mxfp8_quantize: TensorRT {trt.__version__} has no MXFP8 dynamic quantisation")
    layer = network.add_dynamic_quantize(x, 1, 32, trt.fp8, trt.DataType.E8M0)
    return ops.output(layer, "mxfp8_quantize"), layer.get_output(1)


def inverse_rms(network: trt.INetworkDefinition, x: trt.ITensor, eps: float) -> trt.ITensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last dimension of ``x`` f32, which stays as a 1."""
    rank = len(x.shape)
    mean = ops.reduce(network, ops.mul(network, x, x), trt.ReduceOperation.AVG, rank - 1, keep=True)
    shifted = ops.add(network, mean, constant(network, np.full((1,) * rank, eps, np.float32)))
    return ops.unary(network, ops.unary(network, shifted, trt.UnaryOperation.SQRT), trt.UnaryOperation.RECIP)


def _sinkhorn(network: trt.INetworkDefinition, logits: trt.ITensor, hc_eps: float, iterations: int) -> trt.ITensor:
    """Softmax over the targets of ``logits`` [M, source, target], then columns and rows in turn divided by sums."""
    layer = network.add_softmax(logits)
    layer.axes = 1 << 2
    eps = constant(network, np.full((1, 1, 1), hc_eps, np.float32))
    matrix = ops.add(network, ops.output(layer, "sinkhorn"), eps)
    for axis in [1] + [2, 1] * (iterations - 1):
        divisor = ops.add(network, ops.reduce(network, matrix, trt.ReduceOperation.SUM, axis, keep=True), eps)
        matrix = ops.elementwise(network, matrix, divisor, trt.ElementWiseOperation.DIV)
    return matrix


def _check_collapse(what: str, streams: trt.ITensor, pre: trt.ITensor) -> int:
    ops.check(streams, f"{what}: streams", trt.bfloat16, (None, None, None))
    hc: int = streams.shape[1]
    ops.check(pre, f"{what}: pre", trt.float32, (None, hc))
    return hc
