# SPDX-License-Identifier: Apache-2.0
"""What runs at once: fine with a lane each; on one lane right bits or an error on record, and never a hang."""

from __future__ import annotations

import collections
import functools
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.kernels import kernels
from tests.gpu.loopback import Array, DeviceInputs, Inputs, Loopback, make_inputs
from trtllm_mhc import reference
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import Graph, Stream
from trtllm_mhc.runtime.library import MailboxError

LANES = 3


@pytest.mark.parametrize("wait_mode", ["auto", "spin"])
@pytest.mark.parametrize("tp", [2, 4])
def test_graphs_with_a_lane_each_run_at_once(tp: int, wait_mode: str) -> None:
    """Every graph has its own stream and lane; they start in another order on every rank, and run into each other."""
    rng = np.random.default_rng(tp)
    chains = [[make_inputs(rng, tp, rows, 5120) for rows in (4, 1, 8)] for _ in range(LANES)]
    expected = [[inputs.expected() for inputs in chain] for chain in chains]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        streams = [stream, *(Stream() for _ in range(LANES - 1))]
        calls = [[DeviceInputs(inputs, rank) for inputs in chain] for chain in chains]
        own = kernels()
        graphs: list[Graph] = []
        for lane in range(LANES):
            with streams[lane].capture() as graph:
                own.sleep(1e-6 * (1 + 20 * ((rank + lane) % 3)), streams[lane])
                for call in calls[lane]:
                    call.boundary(communicator, streams[lane], lane=lane)
            graphs.append(graph)
        group.barrier()
        order = random.Random(rank)
        for _ in range(30):
            for call in (call for chain in calls for call in chain):
                call.poison()
            group.barrier()
            for _ in range(10):
                for lane in order.sample(range(LANES), LANES):
                    graphs[lane].launch(streams[lane])
            for lane in range(LANES):
                for step, call in enumerate(calls[lane]):
                    call.check(expected[lane][step], streams[lane], f" of lane {lane}, call {step}, rank {rank}")
        for graph, of in zip(graphs, streams, strict=True):
            graph.close()
            if of is not stream:
                of.close()

    with Loopback(tp, lanes=LANES, wait_mode=wait_mode) as group:
        group.run(work)


ROUNDS = 16


@functools.cache
def _pairs() -> list[tuple[tuple[Inputs, Inputs], list[tuple[Array, Array | None]]]]:
    """Two boundaries of 2 to 8 rows for each round, and what they give."""
    rng = np.random.default_rng(7)
    sizes = rng.integers(2, 9, (ROUNDS, 2))
    sizes[::3, 1] = sizes[::3, 0]  # where M differs, the headers help to find what went wrong
    result = []
    for a, b in sizes:
        pair = (make_inputs(rng, 2, int(a), 5120), make_inputs(rng, 2, int(b), 5120))
        result.append((pair, [inputs.expected() for inputs in pair]))
    return result


def _equal(call: DeviceInputs, expected: tuple[Array, Array | None], stream: Stream) -> bool:
    assert call.layer_input is not None
    assert expected[1] is not None
    return bool(
        reference.bits_equal(call.residual_out.to_numpy(stream), expected[0]).all()
        and reference.bits_equal(call.layer_input.to_numpy(stream), expected[1]).all()
    )


def _met_the_other(pair: tuple[Inputs, Inputs], which: int, rank: int) -> tuple[Array, Array | None]:
    """What call `which` of `rank` gives when it meets the peer's other call. Which of two calls comes first on a rank
    is the caller's affair, and calls that look alike cannot be told apart; but a call is met as a whole."""
    xs = [pair[which].xs[0], pair[1 - which].xs[1]] if rank == 0 else [pair[1 - which].xs[0], pair[which].xs[1]]
    return replace(pair[which], xs=xs).expected()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("wait_mode", ["spin", "split", "gate"])
def test_two_streams_on_one_lane(wait_mode: str, captured: bool) -> None:
    """Each of both ranks enqueues two boundaries of 2 to 8 rows on one lane at once, from two streams."""
    rounds = _pairs()
    counted: collections.Counter[str] = collections.Counter()

    def work(rank: int, communicator: Communicator, first: Stream) -> None:
        chance = random.Random(rank)
        own = kernels()
        with Stream() as second:
            streams = (first, second)
            for number, (pair, expected) in enumerate(rounds):
                calls = [DeviceInputs(inputs, rank) for inputs in pair]
                graphs: list[Graph] = []
                for call, stream in zip(calls, streams, strict=True) if captured else ():
                    with stream.capture() as graph:
                        call.boundary(communicator, stream)
                    graphs.append(graph)
                group.barrier()
                refused = False
                for which in chance.sample((0, 1), 2):
                    own.sleep(chance.uniform(0, 30e-6), streams[which])
                    try:
                        if captured:
                            graphs[which].launch(streams[which])
                        else:
                            calls[which].boundary(communicator, streams[which])
                    except MailboxError:
                        refused = True  # the other call has stopped the lane already
                for stream in streams:
                    stream.synchronize(10.0)
                record = communicator.status()
                if record is None:
                    assert not refused
                    for which in (0, 1):
                        right = _equal(calls[which], expected[which], streams[which])
                        alike = pair[0].xs[0].shape == pair[1].xs[0].shape
                        if not right and alike:
                            right = _equal(calls[which], _met_the_other(pair, which, rank), streams[which])
                        assert right, f"round {number}, call {which}, rank {rank}: wrong, and no error on record"
                counted["right" if record is None else record.kind.name] += 1
                for graph in graphs:
                    graph.close()
                group.barrier()
                communicator.reset()

    with Loopback(2, timeout_s=0.3, wait_mode=wait_mode) as group:
        group.run(work)
    print(f"{wait_mode}: {dict(counted)}")


def test_another_lane_goes_on_when_one_has_stopped() -> None:
    """Rank 1 leaves lane 0 out: lane 0 ends in an error on rank 0, lane 1 works on both."""
    inputs = make_inputs(np.random.default_rng(1), 2, 3, 5120)
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        with Stream() as second:
            lost, good = DeviceInputs(inputs, rank), DeviceInputs(inputs, rank)
            group.barrier()
            if rank == 0:
                lost.boundary(communicator, second, lane=0)
            for _ in range(20):
                good.poison()
                good.boundary(communicator, stream, lane=1)
                good.check(expected, stream, f" of lane 1 on rank {rank}")
            second.synchronize()
            assert (communicator.status(lane=0) is None) == (rank == 1)
            assert communicator.status(lane=1) is None
            communicator.reset()
            good.boundary(communicator, stream, lane=0)
            good.check(expected, stream, f" of lane 0 after the reset, rank {rank}")

    with Loopback(2, timeout_s=0.5, lanes=2) as group:
        group.run(work)
