# SPDX-License-Identifier: Apache-2.0
"""Dimensions of DeepSeek V4.1, as far as its boundaries go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeepseekV41Config:
    """The defaults are DeepSeek-V4.1-Flash's, except for the MLP, which stands in for its experts.

    Attributes:
        hidden_size: H.
        num_hidden_layers: decoder layers, each an attention and an MoE.
        o_groups, o_lora_rank: groups of the attention's output projection, and the rank of each.
        mlp_size: intermediate size of the gated MLP that stands in for the MoE.
        hc_mult: residual streams.
        hc_eps: epsilon of the pre-mix and of the Sinkhorn normalisation.
        hc_sinkhorn_iters: iterations of the Sinkhorn normalisation.
        hc_post_alpha: factor of the post-mix.
        rms_norm_eps: epsilon of every RMS.
        engram_layers: layers whose streams are injected into before attention; those past the last layer, which a
            stack of fewer layers has, are ignored.
    """

    hidden_size: int = 5120
    num_hidden_layers: int = 40
    o_groups: int = 8
    o_lora_rank: int = 1024
    mlp_size: int = 512
    hc_mult: int = 4
    hc_eps: float = 1e-6
    hc_sinkhorn_iters: int = 20
    hc_post_alpha: float = 2.0
    rms_norm_eps: float = 1e-20
    engram_layers: tuple[int, ...] = (1, 14)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_hidden_layers", "o_groups", "o_lora_rank", "mlp_size", "hc_mult"):
            if getattr(self, name) < 1:
                raise ValueError(f"DeepseekV41Config: {name}: expected 1 or more, got {getattr(self, name)}")
        if any(layer < 1 for layer in self.engram_layers):
            raise ValueError(
                f"DeepseekV41Config: engram_layers: expected layers after the first (0), got {self.engram_layers}"
            )

    @property
    def attention_size(self) -> int:
        """Columns of the attention's output projection wo_b, over all ranks."""
        return self.o_groups * self.o_lora_rank

    @property
    def boundaries(self) -> int:
        """Reductions of one step: one after every attention and one after every MoE."""
        return 2 * self.num_hidden_layers

    @property
    def boundaries_residual_only(self) -> int:
        """Boundaries that end with the streams: before each injection, and before the final collapse."""
        return len({layer for layer in self.engram_layers if layer < self.num_hidden_layers}) + 1

    @property
    def boundaries_full(self) -> int:
        """Boundaries that end with the next sublayer's input."""
        return self.boundaries - self.boundaries_residual_only
