# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: what is captured once is right in every replay."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.gpu.loopback import DeviceInputs, Loopback, make_inputs
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import Stream

REPLAYS = int(os.environ.get("MHC_TEST_REPLAYS", "1000"))


@pytest.mark.parametrize("tp", [2, 4])
def test_six_captured_calls_with_fresh_inputs(tp: int) -> None:
    rng = np.random.default_rng(tp)
    rows = [1, 4, 2, 8, 1, 3]
    sets = [[make_inputs(rng, tp, m, 5120) for m in rows] for _ in range(12)]
    expected = [[inputs.expected() for inputs in calls] for calls in sets]
    order = rng.integers(0, len(sets), REPLAYS)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        calls = [DeviceInputs(inputs, rank) for inputs in sets[0]]
        group.barrier()
        for call in calls:
            call.boundary(communicator, stream)  # eager first: a graph must go on from any generation
        with stream.capture() as graph:
            for call in calls:
                call.boundary(communicator, stream)
        for replay, which in enumerate(order):
            for call, inputs in zip(calls, sets[which], strict=True):
                call.load(inputs, rank, stream)
            graph.launch(stream)
            if replay % 10 == 0:
                calls[0].boundary(communicator, stream)  # eager calls between replays
            for i, call in enumerate(calls):
                call.check(expected[which][i], stream, f" of call {i}, replay {replay}, rank {rank}")

    with Loopback(tp) as group:
        group.run(work, timeout_s=300)


def test_two_graphs_of_other_sizes_share_a_lane() -> None:
    rng = np.random.default_rng(9)
    small, large = make_inputs(rng, 2, 2, 5120), make_inputs(rng, 2, 100, 5120)
    expected = [small.expected(), large.expected()]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        calls = [DeviceInputs(inputs, rank) for inputs in (small, large)]
        group.barrier()
        graphs = []
        for call in calls:
            with stream.capture() as graph:
                call.boundary(communicator, stream)
            graphs.append(graph)
        for which in np.random.default_rng(4).integers(0, 2, 100):
            calls[which].poison()
            graphs[which].launch(stream)
            calls[which].check(expected[which], stream)

    with Loopback(2) as group:
        group.run(work)
