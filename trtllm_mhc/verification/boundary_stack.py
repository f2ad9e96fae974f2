# SPDX-License-Identifier: Apache-2.0
"""The networks that a comparison of fused with unfused boundaries needs, for DeepSeek V4.1's boundary stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt
import tensorrt as trt

from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights, build_boundary_stack
from trtllm_mhc.models.deepseek_v41.stack import Sublayers
from trtllm_mhc.network import CommunicatorSpec, build_single_boundary
from trtllm_mhc.network.boundaries import Coefficients
from trtllm_mhc.rewrite import Report, fuse_boundaries
from trtllm_mhc.verification import checks
from trtllm_mhc.verification.backends import Job, Runner
from trtllm_mhc.verification.probes import BoundaryProbe, probe_boundaries, probe_unfused

Array = npt.NDArray[Any]

INPUT, OUTPUT = "embeddings", "hidden_states"
UNFUSED, FUSED = "unfused", "fused"
PROBED, PROBED_UNFUSED = "fused, every boundary shown", "unfused, every boundary shown"


@dataclass
class StackJobs:
    """The stack in two forms, unfused and fused, and both also with every boundary's tensors as outputs.

    Attributes:
        config: dimensions.
        weights: of all ranks.
        tp_size: number of ranks.
        sublayers: what stands between the boundaries.
        all_reduce: the layer of the unfused all-reduce, see `CommunicatorSpec`.
        coefficients: how all forms compute the mixes, see `Boundaries`.
        reports: what the pass said for each rank of the fused form, filled as networks are made.
        probes: the boundaries of the probed fused form, filled as networks are made.
        unfused_probes: the same of the probed unfused form.
    """

    config: DeepseekV41Config
    weights: ModelWeights
    tp_size: int
    sublayers: Sublayers
    all_reduce: Literal["plugin", "dist_collective"] = "plugin"
    coefficients: Coefficients = "native"
    reports: dict[int, Report] = field(default_factory=dict)
    probes: list[BoundaryProbe] = field(default_factory=list)
    unfused_probes: list[BoundaryProbe] = field(default_factory=list)

    def unfused(self) -> Job:
        """The network as it is defined."""
        return Job(UNFUSED, self._define, timed=True)

    def fused(self) -> Job:
        """The network after the pass."""

        def populate(network: trt.INetworkDefinition, rank: int) -> None:
            self._define(network, rank)
            self.reports[rank] = fuse_boundaries(network)

        return Job(FUSED, populate, timed=True)

    def probed(self) -> Job:
        """The network after the pass, with every boundary's tensors as outputs."""

        def populate(network: trt.INetworkDefinition, rank: int) -> None:
            self._define(network, rank)
            fuse_boundaries(network)
            probes = probe_boundaries(network)
            if rank == 0:
                self.probes = probes

        return Job(PROBED, populate)

    def probed_unfused(self) -> Job:
        """The network as it is defined, with every boundary's tensors as outputs; rank 0's fused one is made first."""

        def populate(network: trt.INetworkDefinition, rank: int) -> None:
            self._define(network, rank)
            probes = probe_unfused(network, self.reports[0])
            if rank == 0:
                self.unfused_probes = probes

        return Job(PROBED_UNFUSED, populate)

    def _define(self, network: trt.INetworkDefinition, rank: int) -> None:
        spec = CommunicatorSpec(self.tp_size, all_reduce=self.all_reduce)
        build_boundary_stack(
            network,
            self.config,
            self.weights,
            spec,
            rank=rank,
            sublayers=self.sublayers,
            coefficients=self.coefficients,
        )


@dataclass(frozen=True)
class SingleBoundaryJobs:
    """One boundary alone, fused and unfused, for one epsilon of the norm (None: residual-only).

    All weights are inputs, so one engine serves every boundary of its kind and every rank.
    """

    hidden_size: int
    tp_size: int
    norm_eps: float | None

    @property
    def kind(self) -> str:
        """For messages."""
        return "residual-only" if self.norm_eps is None else f"eps {self.norm_eps:g}"

    def unfused(self) -> Job:
        """TensorRT's own layers and an all-reduce."""
        return Job(f"single boundary ({self.kind}), unfused", self._define, per_rank=False)

    def fused(self) -> Job:
        """After the pass.

        Raises (when populated):
            RuntimeError: the pass did not fuse the boundary.
        """

        def populate(network: trt.INetworkDefinition, rank: int) -> None:
            self._define(network, rank)
            report = fuse_boundaries(network)
            if len(report.fused) != 1:
                raise RuntimeError(f"the single boundary ({self.kind}) was not fused:\n{report.to_text()}")

        return Job(f"single boundary ({self.kind}), fused", populate, per_rank=False)

    def compare(
        self, fused: Runner, unfused: Runner, ranks: Sequence[Mapping[str, Array]]
    ) -> tuple[checks.Agreement, checks.BoundaryCheck]:
        """Runs both forms on one boundary's inputs.

        Args:
            fused: runs the job `fused`.
            unfused: runs the job `unfused`.
            ranks: the boundary's tensors on each rank, by role.

        Returns:
            The unfused form against the fused one, and the fused one against the reference.
        """
        roles = ["x", "residual", "post", "comb"] + ([] if self.norm_eps is None else ["pre", "gamma"])
        feeds = [{role: rank[role] for role in roles} for rank in ranks]
        ours, theirs = fused.run(feeds), unfused.run(feeds)
        check = checks.check_boundary([{**feed, **out} for feed, out in zip(feeds, ours, strict=True)], self.norm_eps)
        return checks.check_agreement(feeds, ours, theirs, self.norm_eps), check

    def _define(self, network: trt.INetworkDefinition, rank: int) -> None:
        build_single_boundary(
            network,
            CommunicatorSpec(self.tp_size),
            hidden=self.hidden_size,
            norm_eps=self.norm_eps or 0.0,
            collapse=self.norm_eps is not None,
        )
