# SPDX-License-Identifier: Apache-2.0
"""Boundary stacks whose fused form has an error in it, for tests of what finds it (without a GPU and with)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from trtllm_mhc.models.deepseek_v41 import ModelWeights
from trtllm_mhc.models.deepseek_v41.weights import ElementwiseWeights
from trtllm_mhc.verification.backends import Job
from trtllm_mhc.verification.boundary_stack import StackJobs

RANK = 1
WRONG_EPS = 1e-5
CORRUPTED_SUBLAYER, CORRUPTED_COLUMN = 1, 77


class CorruptedWeights(ModelWeights):
    """One weight of one sublayer on one rank has another exponent."""

    def elementwise(self, sublayer: int, rank: int, tp_size: int) -> ElementwiseWeights:
        weights = super().elementwise(sublayer, rank, tp_size)
        if (sublayer, rank) == (CORRUPTED_SUBLAYER, RANK):
            out = weights.out.copy()
            out[0, CORRUPTED_COLUMN] = ml_dtypes.bfloat16(4)
            return ElementwiseWeights(weights.gain, out)
        return weights


class PlantedJobs(StackJobs):
    """The fused forms come from elsewhere; the unfused ones are right."""

    planted: Callable[[], StackJobs]
    rank_of: Callable[[int], int] = staticmethod(lambda rank: rank)

    def fused(self) -> Job:
        return self._planted(StackJobs.fused, "reports")

    def probed(self) -> Job:
        return self._planted(StackJobs.probed, "probes")

    def _planted(self, form: Callable[[StackJobs], Job], filled: str) -> Job:
        other = self.planted()
        other.coefficients = self.coefficients  # chosen by the command
        job = form(other)

        def populate(network: Any, rank: int) -> object:
            made = job.populate(network, self.rank_of(rank))
            if rank == 0:
                setattr(self, filled, getattr(other, filled))
            return made

        return dataclasses.replace(job, populate=populate)


def _jobs(right: StackJobs) -> PlantedJobs:
    return PlantedJobs(right.config, right.weights, right.tp_size, right.sublayers, right.all_reduce)


def swapped_rank(right: StackJobs) -> StackJobs:
    """Rank 1 got rank 0's engine."""
    jobs = _jobs(right)
    jobs.planted = lambda: right
    jobs.rank_of = lambda rank: 0 if rank == RANK else rank
    return jobs


def wrong_eps(right: StackJobs) -> StackJobs:
    """The norms have another epsilon, too small to be seen in any sum."""
    config = dataclasses.replace(right.config, rms_norm_eps=WRONG_EPS)
    jobs = _jobs(right)
    jobs.planted = lambda: StackJobs(config, ModelWeights(config, right.weights.seed), right.tp_size, right.sublayers)
    return jobs


def corrupted_weight(right: StackJobs) -> StackJobs:
    """One weight of the second sublayer on rank 1 is wrong."""
    jobs = _jobs(right)
    weights = CorruptedWeights(right.config, right.weights.seed)
    jobs.planted = lambda: StackJobs(right.config, weights, right.tp_size, right.sublayers)
    return jobs


PLANTED = {"swapped rank": swapped_rank, "wrong eps": wrong_eps, "corrupted weight": corrupted_weight}


def found(name: str, failures: list[str]) -> bool:
    """Whether the failures name the output, the rank and the row of a planted error."""
    wanted = {
        # Its contribution, from the first boundary on.
        "swapped rank": ["fused: x of boundary 0 (mhc_boundary_0) is off on rank 1 in row", "on rank 1 in row"],
        "wrong eps": [
            "mhc_boundary_0: the norm's epsilon is 9.999999747378752e-06, expected 9.999999682655225e-21",
            "mhc_boundary_0 differs from the reference: rank 0, layer_input: ",
        ],
        "corrupted weight": ["fused: x of boundary 1 (mhc_boundary_1) is off on rank 1 in row", "on rank 1 in row"],
    }[name]
    return all(any(text in failure for failure in failures) for text in wanted)


def a_right_stack(layers: int = 1, tp: int = 2, seed: int = 3) -> StackJobs:
    """Without matrices: quick."""
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config

    config = DeepseekV41Config(num_hidden_layers=layers)
    assert np.float32(config.rms_norm_eps) == np.float32(1e-20)
    return StackJobs(config, ModelWeights(config, seed), tp, "none")
