# SPDX-License-Identifier: Apache-2.0
"""Weights for the boundary stack, generated from a seed and sharded by rank.

They are random and keep the activations sane: sublayer outputs are about a quarter of the streams, which stay of order
one over 40 layers, and the mixes are spread over their ranges without saturating.

Forty layers' matrices drawn one by one would take minutes. Each kind of matrix is drawn once, somewhat larger than
needed, and layer ``n`` sees it through a window that starts a few rows, columns or elements later than that of layer
``n - 1``: no two layers multiply an activation by the same number, and most weights are views that cost no memory.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from trtllm_mhc.models.deepseek_v41.config import DeepseekV41Config
from trtllm_mhc.network.boundaries import LayerWeights
from trtllm_mhc.network.ops import Array

# How far each kind's window moves from one layer to the next. Odd, so that windows do not line up with heads or vector
# widths, and different, so that no unit of an MLP finds its rows and its column together again in the next layer.
_SHIFTS = {"wo_b": 61, "gate_up": 67, "down": 71, "fn": 73}
# Root mean square of a reduced sublayer output; the streams enter with 1 and add up 2 * num_hidden_layers of these.
_OUTPUT_RMS = 0.25
# Root mean square of tanh(u) and of silu(g) * u for standard normal g and u.
_TANH_RMS = 0.63
_GATED_RMS = 0.6


@dataclass(frozen=True)
class AttentionWeights:
    """One rank's stand-in for an attention, with ``K = attention_size / tp_size`` columns.

    Attributes:
        columns: [K] i32, the column of the layer input that each column of the attention's output follows.
        gain: [1, K] bf16.
        wo_b: [H, K] bf16, row-parallel.
    """

    columns: Array
    gain: Array
    wo_b: Array


@dataclass(frozen=True)
class MlpWeights:
    """One rank's gated MLP, with ``I = mlp_size / tp_size``.

    Attributes:
        gate, up: [I, H] bf16, column-parallel.
        down: [H, I] bf16, row-parallel.
    """

    gate: Array
    up: Array
    down: Array


@dataclass(frozen=True)
class ElementwiseWeights:
    """One rank's stand-in for a sublayer without its matrices: ``gain`` and ``out``, each [1, H] bf16."""

    gain: Array
    out: Array


@dataclass(frozen=True)
class EngramWeights:
    """A stand-in for an Engram injection, the same on every rank: a constant key and value instead of looked-up rows.

    Attributes:
        norm: [1, 1, H] bf16, weight of the streams' norm.
        key: [1, 1, H] bf16, normalised and weighted.
        value: [1, 1, H] bf16.
    """

    norm: Array
    key: Array
    value: Array


class ModelWeights:
    """All weights of the stack. The same ``config`` and ``seed`` give the same weights, whatever the ranks.

    Sharded matrices are kept once made, so that all networks of a rank share their memory. A network keeps what it
    refers to alive; nothing here has to outlive the build.
    """

    def __init__(self, config: DeepseekV41Config, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self._pools: dict[str, Array] = {}
        self._wo_b: dict[tuple[int, int, int], Array] = {}

    def layer(self, index: int) -> LayerWeights:
        """What the boundaries of layer ``index`` need; replicated on every rank."""
        config = self.config
        fn, scale, base, norm = zip(*(self._boundary(2 * index + sublayer) for sublayer in (0, 1)), strict=True)
        broadcast = None
        if index == 0:
            broadcast = fn[0].reshape(-1, config.hc_mult, config.hidden_size).sum(axis=1)
        return LayerWeights(
            hc_attn_fn=fn[0],
            hc_attn_scale=scale[0],
            hc_attn_base=base[0],
            hc_ffn_fn=fn[1],
            hc_ffn_scale=scale[1],
            hc_ffn_base=base[1],
            attn_norm=norm[0],
            ffn_norm=norm[1],
            norm_eps=config.rms_norm_eps,
            rms_norm_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            hc_post_alpha=config.hc_post_alpha,
            hc_sinkhorn_iters=config.hc_sinkhorn_iters,
            hc_mult=config.hc_mult,
            hc_attn_fn_broadcast=broadcast,
        )

    def attention(self, index: int, rank: int, tp_size: int) -> AttentionWeights:
        """The attention of layer ``index`` on ``rank``."""
        total, hidden = self.config.attention_size, self.config.hidden_size
        mine = _shard(total, rank, tp_size, "attention_size")
        rng = self._rng("attention", index)
        columns = rng.permutation(total).astype(np.int32) % hidden
        gain = rng.normal(1, 0.25, (1, total))
        key = (index, rank, tp_size)
        if key not in self._wo_b:
            whole = self._window("wo_b", index, (hidden, total), 1, _OUTPUT_RMS / _TANH_RMS / total**0.5)
            self._wo_b[key] = np.ascontiguousarray(whole[:, mine])
        return AttentionWeights(columns[mine], _bf16(gain[:, mine]), self._wo_b[key])

    def mlp(self, index: int, rank: int, tp_size: int) -> MlpWeights:
        """The gated MLP of layer ``index`` on ``rank``."""
        size, hidden = self.config.mlp_size, self.config.hidden_size
        mine = _shard(size, rank, tp_size, "mlp_size")
        gate, up = np.split(self._window("gate_up", index, (2 * size, hidden), 0, hidden**-0.5), 2)
        down = self._window("down", index, (hidden, size), 1, _OUTPUT_RMS / _GATED_RMS / size**0.5)
        return MlpWeights(gate[mine], up[mine], np.ascontiguousarray(down[:, mine]))

    def elementwise(self, sublayer: int, rank: int, tp_size: int) -> ElementwiseWeights:
        """The stand-in of sublayer ``sublayer`` (2 * layer, plus 1 for the MoE) on ``rank``."""
        rng = self._rng("elementwise", sublayer, rank, tp_size)
        shape = (1, self.config.hidden_size)
        out = rng.normal(0, _OUTPUT_RMS / _TANH_RMS / tp_size**0.5, shape)
        return ElementwiseWeights(_bf16(rng.normal(1, 0.25, shape)), _bf16(out))

    def engram(self, index: int) -> EngramWeights:
        """The injection before the attention of layer ``index``."""
        rng = self._rng("engram", index)
        shape = (1, 1, self.config.hidden_size)
        norm, key, value = rng.normal(1, 0.1, shape), rng.normal(0, 1, shape), rng.normal(0, 0.5, shape)
        return EngramWeights(_bf16(norm), _bf16(key), _bf16(value))

    def final_norm(self) -> Array:
        """[H] bf16, the weight of the norm after the final collapse."""
        return _bf16(self._rng("final_norm").normal(1, 0.1, self.config.hidden_size))

    def _boundary(self, sublayer: int) -> tuple[Array, Array, Array, Array]:
        """Coefficient weights fn, scale and base, and the norm, of one sublayer's entry."""
        hc, hidden = self.config.hc_mult, self.config.hidden_size
        shape = ((2 + hc) * hc, hc * hidden)
        # Such that the projections of normalised streams, hence the logits, are of order one.
        fn = self._window("fn", sublayer, (shape[0] * shape[1],), 0, shape[1] ** -0.5, np.float32).reshape(shape)
        rng = self._rng("boundary", sublayer)
        scale = rng.uniform(0.5, 1.0, 3).astype(np.float32)
        base = rng.normal(0, 0.5, shape[0])
        # Streams take up outputs in different measure and mostly stay themselves; else all would soon be their mean.
        base[hc : 2 * hc] = rng.uniform(-1.5, 1.5, hc)
        base[2 * hc :] += 4 * np.eye(hc).reshape(-1)
        return fn, scale, base.astype(np.float32), _bf16(rng.normal(1, 0.1, hidden))

    def _window(
        self,
        name: str,
        index: int,
        shape: tuple[int, ...],
        axis: int,
        deviation: float,
        dtype: type = ml_dtypes.bfloat16,
    ) -> Array:
        """Weights of the given shape: what window ``index`` shows of its kind's numbers.

        The numbers are uniform and of the given standard deviation; the windows move along ``axis``.
        """
        if name not in self._pools:
            margin = _SHIFTS[name] * (self.config.boundaries - 1)
            whole = tuple(size + margin * (i == axis) for i, size in enumerate(shape))
            values = self._rng(name).random(whole, dtype=np.float32)
            values -= 0.5
            values *= 12**0.5 * deviation
            self._pools[name] = values.astype(dtype, copy=False)
        start = index * _SHIFTS[name]
        return self._pools[name][(slice(None),) * axis + (slice(start, start + shape[axis]),)]

    def _rng(self, name: str, *indices: int) -> np.random.Generator:
        entropy = (self.seed, zlib.crc32(name.encode()), *indices)
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def _shard(total: int, rank: int, tp_size: int, what: str) -> slice:
    if total % tp_size:
        raise ValueError(f"weights: {what}: expected a multiple of tp_size {tp_size}, got {total}")
    if not 0 <= rank < tp_size:
        raise ValueError(f"weights: rank: expected 0 to {tp_size - 1}, got {rank}")
    size = total // tp_size
    return slice(rank * size, (rank + 1) * size)


def _bf16(values: Array) -> Array:
    return values.astype(ml_dtypes.bfloat16)
