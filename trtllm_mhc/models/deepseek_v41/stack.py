# SPDX-License-Identifier: Apache-2.0
"""The boundaries of DeepSeek V4.1 in a network, with cheap stand-ins for the sublayers between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import tensorrt as trt

from trtllm_mhc.models.deepseek_v41.config import DeepseekV41Config
from trtllm_mhc.models.deepseek_v41.weights import AttentionWeights, ElementwiseWeights, EngramWeights, MlpWeights
from trtllm_mhc.network import functional, ops
from trtllm_mhc.network.boundaries import Boundaries, Coefficients, CommunicatorSpec, LayerWeights, Step

Sublayers = Literal["matmul", "none", "routed"]

#: Routes of a token of the stand-in for a routed MoE.
TOP_K = 6


class BoundaryWeights(Protocol):
    """What the boundaries themselves are made of; replicated on every rank."""

    def layer(self, index: int) -> LayerWeights:
        """The boundaries of layer ``index``."""

    def engram(self, index: int) -> EngramWeights:
        """The injection before the attention of layer ``index``."""

    def final_norm(self) -> ops.Array:
        """[H] bf16, the weight of the norm after the final collapse."""


class StackWeights(BoundaryWeights, Protocol):
    """The boundaries and the stand-ins between them, sharded by rank. `ModelWeights` has them from a seed."""

    @property
    def config(self) -> DeepseekV41Config:
        """The dimensions that they were made for."""

    def attention(self, index: int, rank: int, tp_size: int) -> AttentionWeights:
        """The attention of layer ``index`` on ``rank``."""

    def mlp(self, index: int, rank: int, tp_size: int) -> MlpWeights:
        """The gated MLP of layer ``index`` on ``rank``."""

    def elementwise(self, sublayer: int, rank: int, tp_size: int) -> ElementwiseWeights:
        """The stand-in without matrices of sublayer ``sublayer`` (2 * layer, plus 1 for the MoE) on ``rank``."""


class Sublayer(Protocol):
    """From a sublayer's input [M, H] bf16 to what `Boundaries` reduces: this rank's partial output [M, H] bf16."""

    def __call__(self, index: int, x: trt.ITensor) -> trt.ITensor:
        """The sublayer of layer ``index``."""


@dataclass(frozen=True)
class BoundaryStack:
    """What `build_boundary_stack` made.

    Attributes:
        input: ``embeddings`` [M, H] bf16.
        routes: ``routes`` [M, 6] int32, which row of the experts' outputs (row ``6 * m + k`` is token m's, of its route
            k) each route of a token takes on this rank, -1 for none; only with routed sublayers.
        output: ``hidden_states`` [M, H] bf16, after the final norm.
        streams: the streams after each boundary in order, [M, hc, H] bf16; outputs of the network only on request.
    """

    input: trt.ITensor
    output: trt.ITensor
    streams: tuple[trt.ITensor, ...]
    routes: trt.ITensor | None = None


def build_boundary_stack(
    network: trt.INetworkDefinition,
    config: DeepseekV41Config,
    weights: StackWeights,
    spec: CommunicatorSpec,
    *,
    rank: int,
    sublayers: Sublayers = "matmul",
    coefficients: Coefficients = "native",
    rows: int = -1,
    output_streams: bool = False,
) -> BoundaryStack:
    """Makes ``network`` (empty, strongly typed) one rank's stack of unfused boundaries.

    Per layer: the attention's entry (the first layer's broadcast, or an injection into the streams at Engram layers),
    a stand-in for the attention, the MoE's entry, a stand-in for the MoE; at the end the final collapse and norm.
    The number of boundaries is ``config.boundaries``.

    Args:
        network: where the layers go. It refers to the weights' memory and keeps it alive.
        config: the dimensions; ``weights`` must have been made for them.
        weights: the weights of all ranks.
        spec: the ranks to sum over.
        rank: index in the group, whose shard of the weights is built in. ``spec.rank`` must agree unless it is -1.
        sublayers: ``"matmul"``: a row-parallel linear (wo_b) for the attention and a gated MLP for the MoE;
            ``"none"``: a few elementwise layers for each, to time the boundaries alone; ``"routed"``: as ``"matmul"``,
            but the MoE's outputs are several rows a token that are finalized before the all-reduce.
        coefficients: ``"native"`` or ``"plugin"``, how the mixes are computed, see `Boundaries`.
        rows: M; -1 leaves it dynamic, for an optimisation profile over ``embeddings``.
        output_streams: also mark the streams after each boundary as outputs ``streams_0``, ``streams_1``, ...

    Raises:
        ValueError: arguments that do not fit together.
    """
    if weights.config != config:
        raise ValueError(f"build_boundary_stack: weights: expected those of {config}, got {weights.config}")
    if not 0 <= rank < spec.tp_size:
        raise ValueError(f"build_boundary_stack: rank: expected 0 to {spec.tp_size - 1}, got {rank}")
    if spec.rank not in (-1, rank):
        raise ValueError(f"build_boundary_stack: rank: expected {spec.rank} as in the communicator spec, got {rank}")
    if sublayers not in get_args(Sublayers):
        raise ValueError(f"build_boundary_stack: sublayers: expected one of {get_args(Sublayers)}, got {sublayers!r}")

    routes = network.add_input("routes", trt.int32, (rows, TOP_K)) if sublayers == "routed" else None
    standins = SublayerStandIns(network, weights, rank, spec.tp_size, sublayers, routes)
    embeddings = network.add_input("embeddings", trt.bfloat16, (rows, config.hidden_size))
    boundaries = Boundaries(network, spec, coefficients=coefficients)
    output, streams = layer_loop(boundaries, config, weights, embeddings, Step(rows), standins.attention, standins.moe)
    output.name = "hidden_states"
    network.mark_output(output)
    if output_streams:
        for index, tensor in enumerate(streams):
            tensor.name = f"streams_{index}"
            network.mark_output(tensor)
    return BoundaryStack(embeddings, output, streams, routes)


def layer_loop(
    boundaries: Boundaries,
    config: DeepseekV41Config,
    weights: BoundaryWeights,
    embeddings: trt.ITensor,
    step: Step,
    attention: Sublayer,
    moe: Sublayer,
) -> tuple[trt.ITensor, tuple[trt.ITensor, ...]]:
    """The layers of DeepSeek V4.1 around whatever ``attention`` and ``moe`` are.

    Args:
        boundaries: appends to the network that ``embeddings`` [M, H] bf16 belongs to.
        config: the dimensions.
        weights: of the boundaries.
        embeddings: what enters the first layer.
        step: the rows.
        attention, moe: the sublayers.

    Returns:
        The result of the final norm [M, H] bf16, and the streams after each boundary in order [M, hc, H] bf16.
    """
    network = boundaries.network
    streams = []
    layer = weights.layer(0)
    state, x = boundaries.first(layer, embeddings, step)
    for index in range(config.num_hidden_layers):
        if index > 0:
            layer = weights.layer(index)
            if index in config.engram_layers:
                residual = boundaries.post_only(state)
                streams.append(residual)
                residual = inject_engram(network, residual, weights.engram(index), config.rms_norm_eps)
                state, x = boundaries.pre(layer, residual, state, step)
            else:
                state, x, _, _ = boundaries.sublayer(layer, False, state, step)
                streams.append(state.residual)
        state.pending = attention(index, x)
        boundaries.join(layer, step)
        state, x, _, _ = boundaries.sublayer(layer, True, state, step)
        streams.append(state.residual)
        state.pending = moe(index, x)
        boundaries.join(layer, step)

    residual = boundaries.post_only(state)
    streams.append(residual)
    collapsed = functional.mhc_final_collapse(network, residual, state.pre)
    return functional.rms_norm(network, collapsed, weights.final_norm(), config.rms_norm_eps), tuple(streams)


def inject_engram(
    network: trt.INetworkDefinition, streams: trt.ITensor, weights: EngramWeights, eps: float
) -> trt.ITensor:
    """``bf16(h + gate * value)`` for each stream ``h``, with the gate a sigmoid of a signed square root.

    The gate is ``sigmoid(sign(d) * sqrt(max(|d|, 1e-6)))``, and ``d`` the dot product of the RMS-normalised stream,
    weighted, and the key, divided by ``sqrt(H)``.

    Args:
        network: where the layers go.
        streams: [M, hc, H] bf16.
        weights: norm, key and value.
        eps: epsilon of the streams' RMS.

    Returns:
        [M, hc, H] bf16.
    """
    norm, key, value = (
        ops.cast(network, ops.constant(network, array), trt.float32)
        for array in (weights.norm, weights.key, weights.value)
    )
    wide = ops.cast(network, streams, trt.float32)
    normed = ops.mul(network, ops.mul(network, wide, functional.inverse_rms(network, wide, eps)), norm)
    dot = ops.reduce(network, ops.mul(network, normed, key), trt.ReduceOperation.SUM, 2, keep=True)
    dot = ops.mul(network, dot, ops.constant(network, np.full((1, 1, 1), streams.shape[2] ** -0.5, np.float32)))
    floor = ops.constant(network, np.full((1, 1, 1), 1e-6, np.float32))
    size = ops.elementwise(
        network, ops.unary(network, dot, trt.UnaryOperation.ABS), floor, trt.ElementWiseOperation.MAX
    )
    root = ops.unary(network, size, trt.UnaryOperation.SQRT)
    signed = ops.mul(network, ops.unary(network, dot, trt.UnaryOperation.SIGN), root)
    gate = ops.activation(network, signed, trt.ActivationType.SIGMOID)
    return ops.cast(network, ops.add(network, wide, ops.mul(network, gate, value)), trt.bfloat16)


class SublayerStandIns:
    """The stand-ins: from a sublayer's input [M, H] bf16 to this rank's partial output [M, H] bf16.

    All arithmetic is bf16, as in a model: every layer's result is rounded. Where the matrices are linears of somebody
    else's, a subclass replaces `row_parallel`.
    """

    def __init__(
        self,
        network: trt.INetworkDefinition,
        weights: StackWeights,
        rank: int,
        tp_size: int,
        kind: Sublayers,
        routes: trt.ITensor | None = None,
    ) -> None:
        self.network = network
        self.weights = weights
        self.rank = rank
        self.tp_size = tp_size
        self.kind = kind
        self.routes = routes

    def attention(self, index: int, x: trt.ITensor) -> trt.ITensor:
        """The attention of layer ``index``."""
        if self.kind == "none":
            return self._elementwise(2 * index, x)
        weights = self.weights.attention(index, self.rank, self.tp_size)
        heads = ops.gather(self.network, x, weights.columns, 1)
        heads = ops.mul(self.network, heads, ops.constant(self.network, weights.gain))
        heads = ops.activation(self.network, heads, trt.ActivationType.TANH)
        return self.row_parallel(f"layers.{index}.attention.wo_b", heads, weights.wo_b)

    def moe(self, index: int, x: trt.ITensor) -> trt.ITensor:
        """The MoE of layer ``index``."""
        if self.kind == "none":
            return self._elementwise(2 * index + 1, x)
        weights = self.weights.mlp(index, self.rank, self.tp_size)
        gate = functional.linear(self.network, x, weights.gate)
        gate = ops.mul(self.network, gate, ops.activation(self.network, gate, trt.ActivationType.SIGMOID))
        up = functional.linear(self.network, x, weights.up)
        if self.routes is not None:
            return self._routed(index, x, ops.mul(self.network, gate, up), weights.down, self.routes)
        return self.row_parallel(f"layers.{index}.mlp.down", ops.mul(self.network, gate, up), weights.down)

    def row_parallel(self, name: str, x: trt.ITensor, weight: ops.Array) -> trt.ITensor:
        """``x`` [M, K] bf16 through the row-parallel linear ``name``, whose shard ``weight`` is [H, K]."""
        return functional.linear(self.network, x, weight)

    def _routed(self, index: int, x: trt.ITensor, hidden: trt.ITensor, down: ops.Array, routes: trt.ITensor) -> Any:
        """Rows of as many experts as a token has routes, weighted, summed and added to the shared experts' output."""
        network, features = self.network, hidden.shape[1]
        gains = np.linspace(0.5, 1.5, TOP_K, dtype=np.float32).astype(down.dtype).reshape(1, TOP_K, 1)
        each = ops.mul(network, ops.reshape(network, hidden, (0, 1, features)), ops.constant(network, gains))
        rows = functional.linear(network, ops.reshape(network, each, (-1, features)), down)
        logits = ops.gather(network, x, np.arange(TOP_K, dtype=np.int32), 1)
        weights = ops.activation(network, ops.cast(network, logits, trt.float32), trt.ActivationType.SIGMOID)
        return functional.moe_finalize(network, rows, weights, routes, self._elementwise(2 * index + 1, x))

    def _elementwise(self, sublayer: int, x: trt.ITensor) -> trt.ITensor:
        weights = self.weights.elementwise(sublayer, self.rank, self.tp_size)
        x = ops.mul(self.network, x, ops.constant(self.network, weights.gain))
        x = ops.activation(self.network, x, trt.ActivationType.TANH)
        return ops.mul(self.network, x, ops.constant(self.network, weights.out))
