# SPDX-License-Identifier: Apache-2.0
"""What goes wrong ends within the time-out, with a name, NaN outputs and a working reset."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.kernels import kernels
from tests.gpu.loopback import BF16, DeviceInputs, Loopback, bf16, make_inputs
from trtllm_mhc.runtime.communicator import Communicator, Finalize
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.library import ErrorKind, HeaderField, MailboxError

TIMEOUT_S = 0.5
ROOT = Path(__file__).parents[2]


def assert_poisoned(call: DeviceInputs, stream: Stream) -> None:
    assert np.isnan(call.residual_out.to_numpy(stream).astype(np.float32)).all()
    assert call.layer_input is not None
    assert np.isnan(call.layer_input.to_numpy(stream).astype(np.float32)).all()


def works_after_reset(group: Loopback) -> None:
    inputs = make_inputs(np.random.default_rng(11), group.tp, 5, 5120)
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        communicator.reset()
        assert communicator.status() is None
        call = DeviceInputs(inputs, rank)
        group.barrier()
        for _ in range(4):
            call.poison()
            call.boundary(communicator, stream)
            call.check(expected, stream, " after the reset")

    group.run(work)


@pytest.mark.parametrize("wait_mode", ["spin", "split", "gate"])
@pytest.mark.parametrize("tp", [2, 4])
def test_a_peer_that_never_arrives(tp: int, wait_mode: str) -> None:
    """The others see rank, token and generation within one time-out, however many boundaries are queued."""
    inputs = make_inputs(np.random.default_rng(0), tp, 3, 5120)
    absent = tp - 1

    def work(rank: int, communicator: Communicator, stream: Stream) -> float:
        call = DeviceInputs(inputs, rank)
        group.barrier()
        call.boundary(communicator, stream)
        stream.synchronize()
        group.barrier()
        if rank == absent:
            return 0.0
        start = time.monotonic()
        call.poison()
        for _ in range(10):
            call.boundary(communicator, stream)
        stream.synchronize()
        elapsed = time.monotonic() - start
        assert_poisoned(call, stream)
        with pytest.raises(MailboxError) as raised:
            call.boundary(communicator, stream)
        record = raised.value.record
        assert record is not None
        assert record.kind == ErrorKind.TIMEOUT
        assert (record.rank, record.generation, record.sequence) == (absent, 1, 1)
        assert record.token in range(3)
        assert f"rank {absent}" in str(raised.value)
        assert "generation 1" in str(raised.value)
        return elapsed

    with Loopback(tp, timeout_s=TIMEOUT_S, wait_mode=wait_mode) as group:
        elapsed = group.run(work)
        # One time-out for all ten; the allowance is for a loaded machine, not for a second time-out.
        assert max(elapsed) < 1.8 * TIMEOUT_S
        works_after_reset(group)


@pytest.mark.parametrize("wait_mode", ["spin", "split", "gate"])
def test_other_rows_on_another_rank(wait_mode: str) -> None:
    rng = np.random.default_rng(1)
    by_rank = [make_inputs(rng, 2, 4, 5120), make_inputs(rng, 2, 7, 5120)]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(by_rank[rank], rank)
        group.barrier()
        start = time.monotonic()
        call.boundary(communicator, stream)
        stream.synchronize()
        assert time.monotonic() - start < 2  # seen from the header, not from the time-out of 5 s
        assert_poisoned(call, stream)
        with pytest.raises(MailboxError, match=r"another rows \(M\)") as raised:
            call.boundary(communicator, stream)
        record = raised.value.record
        assert record is not None
        assert record.kind == ErrorKind.HEADER_MISMATCH
        assert (record.field, record.rank) == (HeaderField.ROWS, 1 - rank)
        assert (record.expected, record.got) == ((4, 7) if rank == 0 else (7, 4))

    with Loopback(2, wait_mode=wait_mode) as group:
        group.run(work)
        works_after_reset(group)


def test_another_operation_on_another_rank() -> None:
    inputs = make_inputs(np.random.default_rng(2), 2, 4, 5120)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        total = DeviceArray(call.x.shape, BF16)
        group.barrier()
        if rank == 0:
            call.boundary(communicator, stream)
        else:
            communicator.all_reduce(call.x, out=total, stream=stream)
        stream.synchronize()
        with pytest.raises(MailboxError, match="another operation") as raised:
            call.boundary(communicator, stream)
        assert raised.value.record is not None
        assert raised.value.record.field == HeaderField.OPERATION

    with Loopback(2) as group:
        group.run(work)
        works_after_reset(group)


def test_one_lane_from_two_streams() -> None:
    """The second enqueue finds the ticket taken while the first still waits for its peer."""
    inputs = make_inputs(np.random.default_rng(3), 2, 2, 5120)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        if rank == 1:
            return
        with Stream() as second:
            calls = [DeviceInputs(inputs, rank) for _ in range(2)]
            calls[0].boundary(communicator, stream)
            time.sleep(0.2)
            calls[1].boundary(communicator, second)
            stream.synchronize()
            second.synchronize()
            for call, of in zip(calls, (stream, second), strict=True):
                assert_poisoned(call, of)
        record = communicator.status()
        assert record is not None
        assert record.kind == ErrorKind.TICKET

    with Loopback(2, timeout_s=5.0) as group:
        group.run(work)
        works_after_reset(group)


def test_published_boundary_without_a_publish() -> None:
    inputs = make_inputs(np.random.default_rng(4), 2, 2, 5120)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        group.barrier()
        call.boundary(communicator, stream, x=None, published=True)
        stream.synchronize()
        assert_poisoned(call, stream)
        record = communicator.status()
        assert record is not None
        assert record.kind == ErrorKind.NOT_PUBLISHED

    with Loopback(2) as group:
        group.run(work)
        works_after_reset(group)


@pytest.mark.parametrize("bad", [450, -2, 2**31 - 1])
def test_finalize_index_outside_the_tensor(bad: int) -> None:
    """The rank that has it stops; the other gets that row as NaN, and the other rows right."""
    rng = np.random.default_rng(5)
    inputs = make_inputs(rng, 2, 3, 5120)
    index = np.arange(18, dtype=np.int32).reshape(3, 6)
    index[1, 4] = bad
    permuted = bf16(rng, 450, 5120)
    weights = rng.random((3, 6), np.float32)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        mine = index if rank == 0 else np.full_like(index, -1)
        parts = (permuted, weights, mine, inputs.xs[rank])
        moe_output = Finalize(*(DeviceArray.from_numpy(part) for part in parts))
        group.barrier()
        call.boundary(communicator, stream, x=moe_output)
        streams = call.residual_out.to_numpy(stream).astype(np.float32)
        assert np.isnan(streams[1]).all()
        record = communicator.status()
        if rank == 0:
            assert record is not None
            assert record.kind == ErrorKind.INDEX
            assert (record.token, record.expected) == (1, 450)
            assert np.int32(np.uint32(record.got)) == bad
        else:
            assert record is None
            assert not np.isnan(streams[[0, 2]]).any()

    with Loopback(2) as group:
        group.run(work)
        works_after_reset(group)


def test_a_rank_that_does_not_join() -> None:
    from trtllm_mhc.runtime.library import CollectiveTimeoutError

    with pytest.raises(CollectiveTimeoutError, match=r"rank\(s\) 1 of 2 did not come within 300 ms"):
        Communicator.threads("lonely", tp_size=2, rank=0, device=0, hidden_size=5120, timeout_s=0.3)


def test_wrong_arguments_never_reach_a_kernel() -> None:
    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        x = DeviceArray((2, 5120), BF16)
        with pytest.raises(Exception, match=r"lane must be in 0 \.\. 0, got 3"):
            communicator.all_reduce(x, stream=stream, lane=3)
        with pytest.raises(Exception, match="sum must be another tensor than x"):
            communicator.all_reduce(x, stream=stream, out=x)
        assert communicator.status() is None

    with Loopback(2) as group:
        group.run(work)
        works_after_reset(group)


@pytest.mark.parametrize("wait_mode", ["spin", "gate"])
def test_a_peer_that_never_arrives_at_replays(wait_mode: str) -> None:
    """Five replays of ten boundaries are queued: all end within one time-out, and so does what is queued after it."""
    inputs = make_inputs(np.random.default_rng(6), 2, 3, 5120)

    def work(rank: int, communicator: Communicator, stream: Stream) -> float:
        call = DeviceInputs(inputs, rank)
        with stream.capture() as graph:
            for _ in range(10):
                call.boundary(communicator, stream)
        group.barrier()
        graph.launch(stream)
        stream.synchronize()
        group.barrier()
        if rank == 1:
            return 0.0
        start = time.monotonic()
        call.poison()
        for _ in range(5):
            graph.launch(stream)
        stream.synchronize()
        elapsed = time.monotonic() - start
        assert_poisoned(call, stream)
        record = communicator.status()
        assert record is not None
        assert (record.kind, record.rank, record.sequence) == (ErrorKind.TIMEOUT, 1, 10)
        call.layer_input.fill_bytes(0)  # type: ignore[union-attr]
        call.residual_out.fill_bytes(0)
        start = time.monotonic()
        graph.launch(stream)
        stream.synchronize()
        assert time.monotonic() - start < TIMEOUT_S / 2  # a stopped lane is not waited at
        assert_poisoned(call, stream)
        return elapsed

    with Loopback(2, timeout_s=TIMEOUT_S, wait_mode=wait_mode) as group:
        assert max(group.run(work)) < 1.8 * TIMEOUT_S
        works_after_reset(group)


def test_other_rows_in_replays() -> None:
    by_rank = [make_inputs(np.random.default_rng(rank), 2, 4 + 3 * rank, 5120) for rank in range(2)]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(by_rank[rank], rank)
        with stream.capture() as graph:
            for _ in range(5):
                call.boundary(communicator, stream)
        group.barrier()
        start = time.monotonic()
        graph.launch(stream)
        stream.synchronize()
        assert time.monotonic() - start < 2
        assert_poisoned(call, stream)
        record = communicator.status()
        assert record is not None
        assert (record.kind, record.field) == (ErrorKind.HEADER_MISMATCH, HeaderField.ROWS)

    with Loopback(2) as group:
        group.run(work)
        works_after_reset(group)


@pytest.mark.parametrize("wait_mode", ["spin", "gate"])
def test_a_peer_that_is_late(wait_mode: str) -> None:
    """Late by less than the time-out is right. By more: the others have given up; the late rank still gets what they
    had sent, and an error for the call after it."""
    inputs = make_inputs(np.random.default_rng(7), 2, 3, 5120)
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        own = kernels()
        call = DeviceInputs(inputs, rank)
        group.barrier()
        if rank == 1:
            own.sleep(0.5 * TIMEOUT_S, stream)
        call.boundary(communicator, stream)
        call.check(expected, stream, f" of rank {rank}, late by half a time-out")
        group.barrier()
        call.poison()
        if rank == 1:
            own.sleep(1.5 * TIMEOUT_S, stream)
        call.boundary(communicator, stream)
        if rank == 1:
            call.check(expected, stream, " of the late rank")
            start = time.monotonic()
            for _ in range(5):
                call.boundary(communicator, stream)
            stream.synchronize()
            assert time.monotonic() - start < 1.8 * TIMEOUT_S
        stream.synchronize()
        assert_poisoned(call, stream)
        record = communicator.status()
        assert record is not None
        assert (record.kind, record.rank, record.sequence) == (ErrorKind.TIMEOUT, 1 - rank, 1 + rank)

    with Loopback(2, timeout_s=TIMEOUT_S, wait_mode=wait_mode) as group:
        group.run(work)
        works_after_reset(group)


TRAPPING = """
import sys
import time

import numpy as np

from tests.gpu.loopback import DeviceInputs, Loopback, make_inputs
from trtllm_mhc.runtime.cuda import CudaError, CudaTimeoutError

inputs = make_inputs(np.random.default_rng(0), 2, 3, 5120)
group = Loopback(2, timeout_s=0.5, on_error="trap", wait_mode=sys.argv[1])
calls = []  # stay: freeing memory fails after a trap


def work(rank, communicator, stream):
    call = DeviceInputs(inputs, rank)
    calls.append(call)
    with stream.capture() as graph:
        call.boundary(communicator, stream)
    group.barrier()
    if rank == 0:
        start = time.monotonic()
        graph.launch(stream)
        while communicator.status() is None:
            assert time.monotonic() - start < 2, "no error on record"
            time.sleep(0.01)
        try:
            stream.synchronize(30)  # the driver takes seconds to end what is left of the device's context
        except CudaTimeoutError:
            raise
        except CudaError as error:
            print(f"trapped: {error.name}, {communicator.status()}")
            return
        raise AssertionError("the kernel ended as if all were well")


group.run(work)
"""


@pytest.mark.parametrize("wait_mode", ["spin", "gate"])
def test_a_kernel_traps_where_it_was_told_to(wait_mode: str) -> None:
    """In a process of its own: after a trap its device can do nothing more for it."""
    done = subprocess.run(
        [sys.executable, "-c", TRAPPING, wait_mode], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trapped: cudaError" in done.stdout
    assert "nothing from rank 1" in done.stdout
