# SPDX-License-Identifier: Apache-2.0
"""The boundaries of a model's layer loop, as layers of a TensorRT network.

Every decoder sublayer ends in a tensor-parallel partial output. The next boundary sums it over the ranks, mixes it
into the residual streams (post) and collapses and normalises the streams into the next sublayer's input (pre).
`Boundaries` appends that to a network with native layers, in the unfused form that the rewrite pass recognises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import tensorrt as trt

from trtllm_mhc.network import functional
from trtllm_mhc.network.functional import Array

Coefficients = Literal["native", "plugin"]
"""How the mixes are computed: by TensorRT's own layers, or by ``MhcCoefficients``. TensorRT takes minutes to build the
some hundred small layers of a native one, and there is one for every sublayer."""


@dataclass(frozen=True)
class CommunicatorSpec:
    """The ranks that a boundary sums over, and the layer that does it in the unfused form.

    Attributes:
        tp_size: ranks in the group.
        rank: index of this engine's rank in the group; -1 leaves it to the communicator at run time, so that one
            plan serves every rank.
        group: world ranks of the group in order; empty means 0 .. tp_size - 1.
        all_reduce: ``"plugin"`` (this project's) or ``"dist_collective"`` (TensorRT's own, 11.0 and newer).
    """

    tp_size: int
    rank: int = -1
    group: tuple[int, ...] = ()
    all_reduce: Literal["plugin", "dist_collective"] = "plugin"

    def __post_init__(self) -> None:
        if self.tp_size < 1:
            raise ValueError(f"CommunicatorSpec: tp_size: expected 1 or more, got {self.tp_size}")
        if not -1 <= self.rank < self.tp_size:
            raise ValueError(f"CommunicatorSpec: rank: expected -1 to {self.tp_size - 1}, got {self.rank}")
        if self.group and (len(self.group) != self.tp_size or len(set(self.group)) != self.tp_size):
            raise ValueError(f"CommunicatorSpec: group: expected {self.tp_size} distinct ranks, got {self.group}")
        if self.all_reduce not in ("plugin", "dist_collective"):
            raise ValueError(
                f"CommunicatorSpec: all_reduce: expected 'plugin' or 'dist_collective', got {self.all_reduce!r}"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks of the group."""
        return self.group or tuple(range(self.tp_size))


@dataclass(frozen=True)
class LayerWeights:
    """What the boundaries of one decoder layer need. ``C = (2 + hc) * hc`` coefficients, in the order pre, post, comb.

    Attributes:
        hc_attn_fn, hc_ffn_fn: [C, hc * H] f32, projections of the streams at each sublayer's entry.
        hc_attn_scale, hc_ffn_scale: [3] f32.
        hc_attn_base, hc_ffn_base: [C] f32.
        attn_norm, ffn_norm: [H] bf16, weights of the RMSNorm before each sublayer.
        norm_eps: epsilon of both norms.
        rms_norm_eps: epsilon of the mean square under the coefficients.
        hc_eps: epsilon of the pre-mix and of the Sinkhorn normalisation.
        hc_post_alpha: factor of the post-mix.
        hc_sinkhorn_iters: iterations of the Sinkhorn normalisation.
        hc_mult: residual streams.
        hc_attn_fn_broadcast: [C, H] f32, ``hc_attn_fn`` summed over the streams; the first layer only.
    """

    hc_attn_fn: Array
    hc_attn_scale: Array
    hc_attn_base: Array
    hc_ffn_fn: Array
    hc_ffn_scale: Array
    hc_ffn_base: Array
    attn_norm: Array
    ffn_norm: Array
    norm_eps: float
    rms_norm_eps: float
    hc_eps: float = 1e-6
    hc_post_alpha: float = 2.0
    hc_sinkhorn_iters: int = 20
    hc_mult: int = 4
    hc_attn_fn_broadcast: Array | None = None


@dataclass(frozen=True)
class Step:
    """One pass through the layers.

    Attributes:
        rows: tokens of the step; -1 when the network takes any number.
        side_stream: whether the coefficients may run beside the sublayer. Has no effect in a network: TensorRT
            schedules by data dependence.
    """

    rows: int = -1
    side_stream: bool = False


@dataclass
class BoundaryState:
    """The residual streams and the mixes carried to the next boundary.

    Attributes:
        residual: [M, hc, H] bf16.
        post: [M, hc] f32, post-mix of the sublayer that makes ``pending``.
        comb: [M, hc, hc] f32, residual mix of that sublayer, indexed [source, target].
        pre: [M, hc] f32, the pre-mix of the next collapse.
        pending: [M, H] bf16, the sublayer's partial output; set by the caller once the sublayer is there.
    """

    residual: trt.ITensor
    post: trt.ITensor
    comb: trt.ITensor
    pre: trt.ITensor
    pending: trt.ITensor | None = None


@dataclass(frozen=True)
class QuantizedActivation:
    """A layer input as MXFP8: ``data`` [M, H] FP8 E4M3 and ``scale`` [M, H / 32] E8M0, row-major."""

    data: trt.ITensor
    scale: trt.ITensor


class Boundaries:
    """Appends the boundaries of a layer loop to ``network``.

    The loop: ``first`` once, then for each sublayer run it on the layer input, set ``state.pending`` to its partial
    output, and call ``sublayer``; where something needs the streams themselves (an injection, the final collapse)
    call ``post_only`` instead, and ``pre`` to go on.

    Args:
        network: strongly typed.
        spec: the ranks to sum over.
        coefficients: ``"native"`` or ``"plugin"``, how the mixes are computed.

    Raises:
        ValueError: ``coefficients`` is something else.
    """

    def __init__(
        self, network: trt.INetworkDefinition, spec: CommunicatorSpec, *, coefficients: Coefficients = "native"
    ) -> None:
        if coefficients not in get_args(Coefficients):
            raise ValueError(f"Boundaries: coefficients: expected 'native' or 'plugin', got {coefficients!r}")
        self.network = network
        self.spec = spec
        self.coefficients = coefficients

    def first(self, layer: LayerWeights, x: trt.ITensor, step: Step) -> tuple[BoundaryState, trt.ITensor]:
        """The first layer's attention entry: the embedding ``x`` [M, H] bf16 on every stream, no reduction.

        Returns:
            The state, and the attention's input [M, H] bf16, which is the norm of stream 0.
        """
        if layer.hc_attn_fn_broadcast is None:
            raise ValueError("first: the layer has no hc_attn_fn_broadcast, which the first layer needs")
        _check_rows(x, step)
        residual = functional.broadcast_streams(self.network, x, layer.hc_mult)
        return self._enter(layer, False, residual, None, broadcast=x)

    def sublayer(
        self,
        layer: LayerWeights,
        ffn: bool,
        state: BoundaryState,
        step: Step,
        *,
        quantize: bool = False,
        capture_aux: bool = False,
    ) -> tuple[BoundaryState, trt.ITensor, QuantizedActivation | None, trt.ITensor | None]:
        """Reduces ``state.pending`` into the streams and prepares the attention (with ``ffn``: the MoE) of ``layer``.

        Returns:
            The new state; the sublayer's input [M, H] bf16; with ``quantize`` the same input as MXFP8, else None;
            with ``capture_aux`` the mean of the streams [M, H] bf16, else None.

        Raises:
            RuntimeError: ``quantize`` on a TensorRT without native MXFP8 quantisation.
        """
        residual = self._reduce(state, step)
        new_state, layer_input = self._enter(layer, ffn, residual, state.pre)
        quant = QuantizedActivation(*functional.mxfp8_quantize(self.network, layer_input)) if quantize else None
        aux = functional.mean_streams(self.network, residual) if capture_aux else None
        return new_state, layer_input, quant, aux

    def post_only(self, state: BoundaryState) -> trt.ITensor:
        """Reduces ``state.pending`` into the streams and returns them: [M, hc, H] bf16."""
        return self._reduce(state, Step())

    def pre(
        self, layer: LayerWeights, residual: trt.ITensor, state: BoundaryState, step: Step
    ) -> tuple[BoundaryState, trt.ITensor]:
        """An attention entry on streams changed since ``post_only``; ``state`` carries the pre-mix. No reduction.

        Returns:
            The new state on ``residual`` [M, hc, H] bf16, and the attention's input [M, H] bf16.
        """
        _check_rows(residual, step)
        return self._enter(layer, False, residual, state.pre)

    def join(self, layer: LayerWeights, step: Step) -> None:
        """Does nothing: in a network the coefficients are ordered by data, on whatever stream TensorRT puts them.

        It exists so that a layer loop written for eager execution builds a network unchanged.
        """

    def _enter(
        self,
        layer: LayerWeights,
        ffn: bool,
        residual: trt.ITensor,
        pre: trt.ITensor | None,
        *,
        broadcast: trt.ITensor | None = None,
    ) -> tuple[BoundaryState, trt.ITensor]:
        """A sublayer's entry: its input by the carried ``pre``, and the mixes for its exit and for the next entry."""
        if ffn:
            fn, scale, base, gamma = layer.hc_ffn_fn, layer.hc_ffn_scale, layer.hc_ffn_base, layer.ffn_norm
        else:
            fn, scale, base, gamma = layer.hc_attn_fn, layer.hc_attn_scale, layer.hc_attn_base, layer.attn_norm
        if broadcast is not None:
            assert layer.hc_attn_fn_broadcast is not None
            fn = layer.hc_attn_fn_broadcast
        layer_input = functional.mhc_pre_delayed(self.network, residual, pre, gamma, layer.norm_eps)
        streams = residual if broadcast is None else broadcast
        post, comb, next_pre = self._mixes(layer, streams, fn, scale, base)
        return BoundaryState(residual, post, comb, next_pre), layer_input

    def _mixes(
        self, layer: LayerWeights, streams: trt.ITensor, fn: Array, scale: Array, base: Array
    ) -> tuple[trt.ITensor, trt.ITensor, trt.ITensor]:
        if self.coefficients == "native":
            return functional.mhc_coefficients(
                self.network,
                streams,
                fn,
                scale,
                base,
                rms_norm_eps=layer.rms_norm_eps,
                hc_eps=layer.hc_eps,
                post_alpha=layer.hc_post_alpha,
                sinkhorn_iters=layer.hc_sinkhorn_iters,
            )
        from trtllm_mhc.network import plugins  # needs the plugin library, which native coefficients do not

        return plugins.add_coefficients(
            self.network,
            streams,
            *(functional.constant(self.network, array) for array in (fn, scale, base)),
            rms_norm_eps=layer.rms_norm_eps,
            hc_eps=layer.hc_eps,
            post_alpha=layer.hc_post_alpha,
            sinkhorn_iters=layer.hc_sinkhorn_iters,
        )

    def _reduce(self, state: BoundaryState, step: Step) -> trt.ITensor:
        if state.pending is None:
            raise ValueError("boundary: state.pending is not set; set it to the sublayer's partial output [M, H]")
        _check_rows(state.pending, step)
        reduced = functional.all_reduce(self.network, state.pending, self.spec)
        return functional.mhc_post(self.network, reduced, state.residual, state.post, state.comb)


def _check_rows(x: trt.ITensor, step: Step) -> None:
    rows = x.shape[0]
    if step.rows >= 0 and rows >= 0 and rows != step.rows:
        raise ValueError(f"boundary: the step has {step.rows} rows, the tensor {rows}")
