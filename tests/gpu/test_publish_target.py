# SPDX-License-Identifier: Apache-2.0
"""Producers that store into the mailbox themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.kernels import kernels
from tests.gpu.loopback import BF16, DeviceInputs, Loopback, make_inputs
from tests.gpu.test_failures import assert_poisoned, works_after_reset
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import Stream
from trtllm_mhc.runtime.library import ErrorKind, InvalidArgumentError


@pytest.mark.parametrize("takes_ticket", [True, False], ids=["ticket", "no-ticket"])
@pytest.mark.parametrize(("tp", "wait_mode"), [(2, "gate"), (4, "gate"), (2, "spin")])
def test_a_producer_of_ones_own(tp: int, wait_mode: str, takes_ticket: bool) -> None:
    """Eager and captured, between boundaries that publish for themselves."""
    rng = np.random.default_rng(tp)
    # Where ranks share a GPU and every CTA waits, those of larger calls leave the peers no room.
    calls = [make_inputs(rng, tp, rows, 5120) for rows in (1, 6, 16 if wait_mode == "spin" else 64)]
    expected = [inputs.expected() for inputs in calls]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        own = kernels()
        target = communicator.publish_target()
        mine = [DeviceInputs(inputs, rank) for inputs in calls]

        def boundaries() -> None:
            for call in mine:
                own.produce(target, call.x, stream, takes_ticket=takes_ticket)
                communicator.mark_published(target, call.x.shape[0], stream=stream.handle)
                call.boundary(communicator, stream, x=None, published=True)

        group.barrier()
        boundaries()
        for call, want in zip(mine, expected, strict=True):
            call.check(want, stream, f" on rank {rank}")
        with stream.capture() as graph:
            boundaries()
        group.barrier()
        for _ in range(20):
            for call in mine:
                call.poison()
            graph.launch(stream)
            for call, want in zip(mine, expected, strict=True):
                call.check(want, stream, f" of the replay on rank {rank}")
            mine[0].boundary(communicator, stream)

    with Loopback(tp, wait_mode=wait_mode) as group:
        group.run(work)


def test_ranks_that_launch_differently() -> None:
    """Rank 0 stores with one CTA a row, rank 1 with the library's clusters of five; then they change places."""
    inputs = make_inputs(np.random.default_rng(2), 2, 7, 5120)
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        own = kernels()
        target = communicator.publish_target()
        call = DeviceInputs(inputs, rank)
        group.barrier()
        for turn in range(20):
            call.poison()
            if (rank + turn) % 2 == 0:
                own.produce(target, call.x, stream)
                communicator.mark_published(target, 7, stream=stream.handle)
            else:
                communicator.publish(call.x, stream=stream)
            call.boundary(communicator, stream, x=None, published=True)
            call.check(expected, stream, f" in turn {turn} on rank {rank}")

    with Loopback(2) as group:
        group.run(work)


@pytest.mark.parametrize("wait_mode", ["spin", "gate"])
def test_a_fragment_that_comes_late(wait_mode: str) -> None:
    """16 bytes of one row come 2 ms after the others: all lanes of the polling warp wait for them."""
    inputs = make_inputs(np.random.default_rng(3), 2, 4, 5120)
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        own = kernels()
        target = communicator.publish_target()
        call = DeviceInputs(inputs, rank)
        group.barrier()
        for fragment in (0, 1, 31, 32, 333, 639):
            call.poison()
            own.produce(target, call.x, stream, late=(2, fragment, 2e-3) if rank == 1 else None)
            communicator.mark_published(target, 4, stream=stream.handle)
            call.boundary(communicator, stream, x=None, published=True)
            call.check(expected, stream, f" with fragment {fragment} late, rank {rank}")

    with Loopback(2, wait_mode=wait_mode) as group:
        group.run(work)


def test_negative_zero_from_a_producer() -> None:
    """The producer's part of the contract: -0 never reaches the mailbox."""
    inputs = make_inputs(np.random.default_rng(4), 2, 2, 5120)
    inputs = replace(inputs, xs=[np.full_like(x, BF16(-0.0)) for x in inputs.xs])
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        target = communicator.publish_target()
        call = DeviceInputs(inputs, rank)
        own = kernels()
        group.barrier()
        own.produce(target, call.x, stream)
        communicator.mark_published(target, 2, stream=stream.handle)
        call.boundary(communicator, stream, x=None, published=True)
        call.check(expected, stream)

    with Loopback(2) as group:
        group.run(work)


def test_a_producer_on_a_lane_in_use() -> None:
    """Rank 0's boundary waits for its peer when a producer comes from another stream: it stores nothing."""
    inputs = make_inputs(np.random.default_rng(5), 2, 3, 5120)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        own = kernels()
        if rank == 1:
            return
        call, other = DeviceInputs(inputs, rank), DeviceInputs(inputs, rank)
        with Stream() as second:
            call.boundary(communicator, stream)
            own.sleep(0.05, second)
            own.produce(communicator.publish_target(), other.x, second)
            communicator.mark_published(communicator.publish_target(), 3, stream=second.handle)
            second.synchronize()
            stream.synchronize()
        record = communicator.status()
        assert record is not None
        assert record.kind == ErrorKind.TICKET
        assert_poisoned(call, stream)

    with Loopback(2, timeout_s=5.0) as group:
        group.run(work)
        works_after_reset(group)


def test_an_aborted_publish_is_reset() -> None:
    """Stored and marked on all ranks, consumed on none: the reset forgets it."""
    inputs = make_inputs(np.random.default_rng(6), 2, 5, 5120)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        own = kernels()
        target = communicator.publish_target()
        group.barrier()
        own.produce(target, call.x, stream)
        communicator.mark_published(target, 5, stream=stream.handle)
        stream.synchronize()

    with Loopback(2) as group:
        group.run(work)
        works_after_reset(group)


def test_targets() -> None:
    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        one, two = communicator.publish_target(), communicator.publish_target(lane=1)
        assert one.owner != two.owner
        assert len(one.slots) == 2
        assert one.row_stride == 2 * 5120
        assert one.rank_stride == one.row_stride * one.capacity
        assert one.generation_stride == 2 * one.rank_stride
        assert two.slots[rank] - one.slots[rank] >= 3 * one.generation_stride
        with pytest.raises(InvalidArgumentError, match=r"lane must be in 0 \.\. 1, got 2"):
            communicator.publish_target(lane=2)
        with pytest.raises(InvalidArgumentError, match=r"0 \.\. 64, got 65"):
            communicator.mark_published(one, 65, stream=stream.handle)

    with Loopback(2, lanes=2) as group:
        group.run(work)
