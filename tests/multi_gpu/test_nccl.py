# SPDX-License-Identifier: Apache-2.0
"""NCCL's all-reduce between GPUs, in place of the mailbox and beside it. Ranks are threads, a GPU each."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.gpu.kernels import kernels
from tests.gpu.loopback import BF16, DeviceInputs, Loopback, all_bf16_patterns, bf16, make_inputs
from tests.multi_gpu.conftest import ranks_may_share_a_gpu
from trtllm_mhc import reference
from trtllm_mhc.runtime.communicator import Communicator, Finalize
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.library import ErrorKind, MailboxError, NcclFailure, Transport

THRESHOLD = 128
TIMEOUT_S = 2.0


def with_nccl(tp: int = 2, hidden: int = 5120, **options: Any) -> Loopback:
    group = Loopback(tp, hidden, nccl_rows=THRESHOLD, **({"timeout_s": 20.0} | options))
    for communicator, _ in group.ranks:
        assert communicator.info.transport is Transport.MAILBOX_NCCL, communicator.info.transport_reason
    return group


def rounding_bound(xs: list[np.ndarray]) -> np.ndarray:
    """How far from the exact sum any order of len(xs) - 1 additions may be, each rounded to bf16: by 2^-8 at most."""
    total = sum(np.abs(x.astype(np.float64)) for x in xs)
    return ((1 + 2.0**-8) ** (len(xs) - 1) - 1) * total


@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
@pytest.mark.parametrize("rows", [127, 128, 512, 2048, 2049, 5000])
def test_two_ranks_have_the_references_bits(rows: int, hidden: int) -> None:
    """2048 rows go through NCCL at once. The mailbox takes the same inputs in chunks of 64."""
    if rows > 512 and hidden != 5120:
        pytest.skip("the largest M with one hidden size only: the reference takes its time")
    inputs = make_inputs(np.random.default_rng(rows), 2, rows, hidden)
    expected = inputs.expected()
    total = reference.all_reduce(inputs.xs)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        alone = DeviceInputs(inputs.residual_only(), rank)
        sums = [DeviceArray(call.x.shape, BF16) for _ in range(2)]
        group.barrier()
        call.boundary(communicator, stream)
        alone.boundary(communicator, stream)
        communicator.all_reduce(call.x, out=sums[0], stream=stream)
        communicator.all_reduce_nccl(call.x, out=sums[1], stream=stream)
        call.check(expected, stream, f" of rank {rank}")
        alone.check(expected, stream, f" of rank {rank}, residual-only")
        for which, found in enumerate(sums):
            # -0 where both have -0: NCCL's sum is not touched.
            found_sum = found.to_numpy(stream) + BF16(0)
            reference.assert_bits_equal(found_sum, total, f"sum {which} of rank {rank}")

    def through_mailbox(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        group.barrier()
        call.boundary(communicator, stream)
        call.check(expected, stream, f" of rank {rank} through the mailbox")

    with with_nccl(hidden=hidden) as group:
        group.run(work)
    with Loopback(2, hidden, nccl_rows=-1, timeout_s=20.0) as group:
        group.run(through_mailbox)


def test_every_bf16_pattern_of_two_ranks() -> None:
    """Subnormals, infinities and both zeros included; NaN stays NaN."""
    patterns = all_bf16_patterns(2, 5120)
    xs = [np.concatenate([np.roll(x, 131 * shift, axis=0) for shift in range(16)]) for x in patterns]
    assert xs[0].shape[0] >= THRESHOLD
    inputs = replace(make_inputs(np.random.default_rng(7), 2, xs[0].shape[0], 5120), xs=xs)
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        group.barrier()
        call.boundary(communicator, stream)
        call.check(expected, stream, f" of rank {rank}")

    with with_nccl() as group:
        group.run(work)


def test_finalize_and_mxfp8() -> None:
    rng = np.random.default_rng(1)
    rows, top_k, permuted_rows = 300, 6, 2000
    index = rng.permutation(permuted_rows)[: rows * top_k].reshape(rows, top_k).astype(np.int32)
    owner = rng.integers(0, 2, index.shape)
    parts = []
    for rank in range(2):
        mine = np.where(owner == rank, index, -1).astype(np.int32)
        weights = rng.random(index.shape, np.float32)
        parts.append((bf16(rng, permuted_rows, 5120), weights, mine, bf16(rng, rows, 5120)))
    inputs = replace(make_inputs(rng, 2, rows, 5120), xs=[reference.finalize(*part) for part in parts])
    expected = inputs.expected()
    assert expected[1] is not None
    data, swizzled = reference.quantize(expected[1])

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        outputs = DeviceArray(data.shape, data.dtype), DeviceArray(swizzled.shape, np.uint8)
        moe_output = Finalize(*(DeviceArray.from_numpy(part) for part in parts[rank]))
        group.barrier()
        call.boundary(communicator, stream, x=moe_output, mxfp8=outputs)
        call.check(expected, stream, f" of rank {rank}")
        np.testing.assert_array_equal(outputs[0].to_numpy(stream).view(np.uint8), data.view(np.uint8))
        np.testing.assert_array_equal(outputs[1].to_numpy(stream), swizzled)

    with with_nccl(nccl_workspace_rows=128) as group:
        group.run(work)


def test_published_boundaries_on_both_sides_of_the_threshold() -> None:
    rng = np.random.default_rng(2)
    cases = [make_inputs(rng, 2, rows, 5120) for rows in (8, 200, 64, 128)]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        calls = [DeviceInputs(inputs, rank) for inputs in cases]
        group.barrier()
        for call in calls:
            communicator.publish(call.x, stream=stream)
            call.boundary(communicator, stream, published=True)
        for inputs, call in zip(cases, calls, strict=True):
            call.check(inputs.expected(), stream, f" of rank {rank}")

    with with_nccl(capacity=256) as group:
        group.run(work)


@pytest.mark.parametrize("tp", [4, 8])
def test_more_ranks_agree_and_are_within_the_bound(gpus: int, tp: int) -> None:
    if gpus < tp and not ranks_may_share_a_gpu():
        pytest.skip(f"needs {tp} GPUs, this machine has {gpus}")
    rng = np.random.default_rng(tp)
    xs = [bf16(rng, 512, 5120) for _ in range(tp)]
    exact = sum(x.astype(np.float64) for x in xs)
    bound = rounding_bound(xs)

    def work(rank: int, communicator: Communicator, stream: Stream) -> np.ndarray:
        x = DeviceArray.from_numpy(xs[rank])
        group.barrier()
        return communicator.all_reduce(x, stream=stream).to_numpy(stream)

    with with_nccl(tp) as group:
        found = group.run(work)
    for rank, total in enumerate(found):
        assert (np.abs(total.astype(np.float64) - exact) <= bound).all(), rank
        reference.assert_bits_equal(total, found[0], f"rank {rank} and rank 0")


def test_both_ways_inside_one_graph_sequence() -> None:
    """Mailbox, NCCL, mailbox in chunks, NCCL: captured, replayed with fresh inputs, eager calls in between."""
    rng = np.random.default_rng(3)
    rows = [8, 128, 100, 300, 1]
    sets = [[make_inputs(rng, 2, m, 5120) for m in rows] for _ in range(3)]
    expected = [[inputs.expected() for inputs in calls] for calls in sets]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        calls = [DeviceInputs(inputs, rank) for inputs in sets[0]]
        group.barrier()
        with stream.capture() as graph:
            for call in calls:
                call.boundary(communicator, stream)
        for replay in range(60):
            which = replay % len(sets)
            for call, inputs in zip(calls, sets[which], strict=True):
                call.load(inputs, rank, stream)
                call.poison()
            graph.launch(stream)
            for i, call in enumerate(calls):
                call.check(expected[which][i], stream, f" of call {i}, replay {replay}, rank {rank}")
            if replay % 7 == 0:
                calls[1].boundary(communicator, stream)
                calls[0].boundary(communicator, stream)
        graph.close()

    with with_nccl() as group:
        group.run(work)


@pytest.mark.parametrize("late", [0, 1])
def test_skew_on_either_rank(late: int) -> None:
    """One rank's stream sleeps before each call, by another time each."""
    rng = np.random.default_rng(4)
    cases = [make_inputs(rng, 2, rows, 5120) for rows in (1, 128, 64, 512, 8, 200)]
    expected = [inputs.expected() for inputs in cases]
    naps = rng.random(len(cases)) * 0.02

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        sleep = kernels().sleep
        calls = [DeviceInputs(inputs, rank) for inputs in cases]
        group.barrier()
        for _ in range(10):
            for call, nap in zip(calls, naps, strict=True):
                call.poison()
                if rank == late:
                    sleep(float(nap), stream)
                call.boundary(communicator, stream)
            for i, call in enumerate(calls):
                call.check(expected[i], stream, f" of call {i}, rank {rank}")

    with with_nccl() as group:
        group.run(work)


def test_lanes_in_another_order_on_each_rank() -> None:
    """Each lane has an NCCL communicator of its own, so the ranks need not enqueue lanes in the same order."""
    rng = np.random.default_rng(5)
    cases = [make_inputs(rng, 2, 256, 5120) for _ in range(2)]
    expected = [inputs.expected() for inputs in cases]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        with Stream() as second:
            streams = stream, second
            calls = [DeviceInputs(inputs, rank) for inputs in cases]
            group.barrier()
            for _ in range(30):
                for lane in (0, 1) if rank == 0 else (1, 0):
                    calls[lane].boundary(communicator, streams[lane], lane=lane)
            for lane in range(2):
                calls[lane].check(expected[lane], streams[lane], f" of lane {lane}, rank {rank}")

    with with_nccl(lanes=2) as group:
        group.run(work)


@pytest.mark.parametrize("captured", [False, True])
def test_a_peer_that_never_arrives(captured: bool) -> None:
    """NCCL's kernel is ended, the outputs are NaN; after the reset everything works but graphs from before it."""
    inputs = make_inputs(np.random.default_rng(6), 2, 128, 5120)
    small = make_inputs(np.random.default_rng(7), 2, 4, 5120)
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call, other = DeviceInputs(inputs, rank), DeviceInputs(small, rank)
        group.barrier()
        with stream.capture() as graph:
            call.boundary(communicator, stream)
        graph.launch(stream)
        call.check(expected, stream)
        group.barrier()
        if rank == 0:
            call.poison()
            start = time.monotonic()
            if captured:
                graph.launch(stream)
            else:
                call.boundary(communicator, stream)
            other.boundary(communicator, stream)
            stream.synchronize(20)
            assert TIMEOUT_S <= time.monotonic() - start < 1.8 * TIMEOUT_S
            assert np.isnan(call.residual_out.to_numpy(stream).astype(np.float32)).all()
            assert np.isnan(other.residual_out.to_numpy(stream).astype(np.float32)).all()
            with pytest.raises(MailboxError, match="a rank did not take part in time") as raised:
                other.boundary(communicator, stream)
            assert raised.value.record is not None
            assert (raised.value.record.kind, raised.value.record.field) == (ErrorKind.NCCL, NcclFailure.TIMEOUT)
        group.barrier()
        communicator.reset()
        call.poison()
        call.boundary(communicator, stream)
        call.check(expected, stream, " after the reset")
        group.barrier()
        call.poison()
        graph.launch(stream)
        stream.synchronize(20)
        assert np.isnan(call.residual_out.to_numpy(stream).astype(np.float32)).all()
        record = communicator.status()
        assert record is not None
        assert (record.kind, record.field) == (ErrorKind.NCCL, NcclFailure.STALE_GRAPH)
        graph.close()

    with with_nccl(timeout_s=TIMEOUT_S) as group:
        group.run(work)


def test_closing_with_a_graph_and_a_call_that_waits() -> None:
    """Rank 1 leaves; rank 0's call ends with the time-out and closing does not hang, though its graph is alive."""
    inputs = make_inputs(np.random.default_rng(8), 2, 128, 5120)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        group.barrier()
        with stream.capture() as graph:
            call.boundary(communicator, stream)
        if rank == 0:
            graph.launch(stream)
        start = time.monotonic()
        communicator.close()
        assert time.monotonic() - start < 3 * TIMEOUT_S + 4
        graph.close()
        stream.close()

    group = with_nccl(timeout_s=TIMEOUT_S)
    group.run(work)
