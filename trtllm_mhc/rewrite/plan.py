# SPDX-License-Identifier: Apache-2.0
"""What the caller says about a network, and what is decided about each of its boundaries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trtllm_mhc.network import plugins
from trtllm_mhc.rewrite.finalize import Finalize
from trtllm_mhc.rewrite.graph import Array
from trtllm_mhc.rewrite.linear import Linear
from trtllm_mhc.rewrite.match import Boundary, Collapse
from trtllm_mhc.rewrite.norm import Norm
from trtllm_mhc.rewrite.report import Contribution, Reason, Status


@dataclass(frozen=True)
class FuseOptions:
    """What a network does not say itself.

    Attributes:
        tp_size: ranks that an all-reduce sums over, where the layer does not tell; checked against it where it does.
        rank: this engine's index in the group, where the layer does not tell; -1 leaves it to the communicator.
        group: world ranks of the group in order; empty means 0 .. tp_size - 1 where the layer does not tell.
        unlabelled_collectives: what a DIST_COLLECTIVE layer is that `label_all_reduce_sum` was not called on. TensorRT
            does not give its operation back, so it is refused unless the caller vouches for it.
        separate_collapse: what to do with a collapse whose products are added one by one by elementwise layers. That
            is the arithmetic of the collapse after the last layer, in which every product and sum is rounded:
            ``"keep"`` fuses such a boundary up to its streams, ``"fuse"`` takes it for a delayed collapse.
        finalize: whether the end of a MoE (expert rows gathered, weighted and summed, plus the shared experts) before
            an all-reduce becomes part of its boundary.
        publish_linear: whether the row-parallel linear layer before an all-reduce becomes an ``MhcPublishLinear``,
            which stores its output into the mailbox: ``"bf16"`` for weights as they are, ``"e4m3"`` for bfloat16
            weights that are exactly E4M3 in blocks of 32 x 32 with a power of two each, that is, dequantised ones.
        coefficients: whether the layers that compute a sublayer's mixes become an ``MhcCoefficients``, which takes its
            sums in another order than TensorRT's layers do.
    """

    tp_size: int | None = None
    rank: int = -1
    group: tuple[int, ...] = ()
    unlabelled_collectives: Literal["refuse", "all_reduce_sum"] = "refuse"
    separate_collapse: Literal["keep", "fuse"] = "keep"
    finalize: bool = True
    publish_linear: Literal["off", "bf16", "e4m3"] = "off"
    coefficients: bool = False

    def __post_init__(self) -> None:
        if self.tp_size is not None and self.tp_size not in plugins.TP_SIZES:
            raise ValueError(f"FuseOptions: tp_size: expected one of {list(plugins.TP_SIZES)}, got {self.tp_size}")
        if self.group and self.tp_size is not None and len(self.group) != self.tp_size:
            raise ValueError(f"FuseOptions: group: expected {self.tp_size} ranks as in tp_size, got {self.group}")
        if len(set(self.group)) != len(self.group):
            raise ValueError(f"FuseOptions: group: expected distinct ranks, got {self.group}")
        if self.rank < -1 or (self.tp_size is not None and self.rank >= self.tp_size):
            raise ValueError(
                f"FuseOptions: rank: expected -1 (the communicator's) or an index in the group, got {self.rank}"
            )
        if self.unlabelled_collectives not in ("refuse", "all_reduce_sum"):
            raise ValueError(
                "FuseOptions: unlabelled_collectives: expected 'refuse' or 'all_reduce_sum', "
                f"got {self.unlabelled_collectives!r}"
            )
        if self.publish_linear not in ("off", "bf16", "e4m3"):
            raise ValueError(
                f"FuseOptions: publish_linear: expected 'off', 'bf16' or 'e4m3', got {self.publish_linear!r}"
            )
        if self.separate_collapse not in ("keep", "fuse"):
            raise ValueError(
                f"FuseOptions: separate_collapse: expected 'keep' or 'fuse', got {self.separate_collapse!r}"
            )


@dataclass(frozen=True)
class PublishedLinear:
    """A linear layer that is to publish.

    Attributes:
        linear: as found.
        weight: [H, K], of bfloat16 or E4M3; None where the network's own constant will do.
        scales: uint8 [H / 32, K / 32], UE8M0, of E4M3 weights.
    """

    linear: Linear
    weight: Array | None
    scales: Array | None = None


@dataclass
class Plan:
    """A boundary, and what is to be done with it."""

    boundary: Boundary
    tp_size: int | None
    rank: int
    group: tuple[int, ...]
    reasons: list[Reason] = field(default_factory=list)
    notes: list[Reason] = field(default_factory=list)
    exactness: list[str] = field(default_factory=list)
    collapse: Collapse | None = None
    norm: Norm | None = None
    finalize: Finalize | None = None
    linear: PublishedLinear | None = None

    @property
    def group_field(self) -> tuple[int, ...]:
        """The plugins' attribute: empty for 0 .. tp_size - 1."""
        return () if self.group == tuple(range(self.tp_size or 0)) else self.group

    @property
    def contribution(self) -> Contribution:
        """What the new layer takes from this rank."""
        if self.linear is not None:
            return "published"
        return "plain" if self.finalize is None else "finalize"

    @property
    def depth(self) -> int:
        """Of the streams."""
        node = self.boundary.post.streams.producer
        return 0 if node is None else node.depth

    @property
    def status(self) -> Status:
        """What is to be done."""
        if self.reasons:
            return "refused"
        return "full" if self.norm is not None else "residual_only"
