# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that needs no GPU: networks with the numpy interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trtllm_mhc.integrations.triton.groups import Array, Feeds, Outputs
from trtllm_mhc.integrations.triton.tensors import InputRange
from trtllm_mhc.reference import interpreter
from trtllm_mhc.runtime.threads import ThreadGroup


class NetworkRanks:
    """Networks that are not built, with the numpy interpreter: the same answers without a GPU, slowly.

    Each rank is a thread; they meet before and after the evaluation, which one of them does for all.
    """

    def __init__(self, networks: Sequence[Any], inputs: Mapping[str, InputRange], timeout_s: float) -> None:
        """Keeps the networks of all ranks; `inputs` are the ranges that an engine's profile would have."""
        self.tp_size = len(networks)
        self.inputs = inputs
        self.outputs = [networks[0].get_output(index).name for index in range(networks[0].num_outputs)]
        self._networks = networks
        self._threads = ThreadGroup(self.tp_size)
        self._timeout_s = timeout_s
        self._feeds: dict[int, dict[str, Array]] = {}
        self._seen: set[object] = set()

    def prepare(self, feeds: Sequence[Feeds]) -> None:
        """See `RankGroup`. As engines do, the ranks go once through what they have not seen: inputs of new shapes."""

        def take(rank: int) -> None:
            self._feeds[rank] = {name: np.array(array) for name, array in feeds[rank].items()}

        self._threads.run(take, timeout_s=self._timeout_s)
        shapes = tuple((name, array.shape) for feed in self._feeds.values() for name, array in sorted(feed.items()))
        if shapes not in self._seen:
            self._threads.run(lambda rank: self._evaluate() if rank == 0 else [], timeout_s=self._timeout_s)
            self._seen.add(shapes)

    def run(self) -> list[Outputs]:
        """See `RankGroup`."""
        evaluated: list[Outputs] = []

        def work(rank: int) -> Outputs:
            self._meet()
            if rank == 0:
                evaluated.extend(self._evaluate())
            self._meet()
            return evaluated[rank]

        return self._threads.run(work, timeout_s=self._timeout_s)

    def close(self) -> None:
        """See `RankGroup`."""
        self._networks = []

    def _meet(self) -> None:
        # Longer than the run may take, so that the error names the rank that did not come, not those that waited.
        self._threads.barrier(2 * self._timeout_s)

    def _evaluate(self) -> list[Outputs]:
        return interpreter.evaluate(self._networks, [self._feeds[rank] for rank in range(self.tp_size)])
