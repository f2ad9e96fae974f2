# SPDX-License-Identifier: Apache-2.0
"""The group that deploy.py serves where there is no GPU: the fused networks, evaluated by the numpy interpreter.

Loaded by the model in the python backend's process (`Settings.group`).
"""

from __future__ import annotations

import json
from pathlib import Path

from trtllm_mhc.integrations.triton.network_ranks import NetworkRanks
from trtllm_mhc.integrations.triton.settings import Settings
from trtllm_mhc.integrations.triton.tensors import InputRange, specs_of_network
from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
from trtllm_mhc.verification.backends import NetworkMaker
from trtllm_mhc.verification.boundary_stack import StackJobs

DESCRIPTION = "stack.json"


class StackRanks(NetworkRanks):
    """The networks of all ranks, and the Builder that they belong to."""

    def __init__(self, jobs: StackJobs, maximum_rows: int, timeout_s: float) -> None:
        self._maker = NetworkMaker()
        networks = [self._maker.make(jobs.fused(), rank) for rank in range(jobs.tp_size)]
        ranges = {
            spec.name: InputRange(spec.dtype, (1, *spec.shape[1:]), (maximum_rows, *spec.shape[1:]))
            for spec in specs_of_network(networks[0])[0]
        }
        super().__init__(networks, ranges, timeout_s)


def open_group(settings: Settings, folder: Path) -> StackRanks:
    """Makes the networks that the model's `stack.json` describes."""
    described = json.loads((folder / DESCRIPTION).read_text())
    config = DeepseekV41Config(hidden_size=settings.hidden_size, num_hidden_layers=described["layers"])
    jobs = StackJobs(config, ModelWeights(config), settings.tp_size, described["sublayers"])
    return StackRanks(jobs, described["rows"], settings.deadline_s)
