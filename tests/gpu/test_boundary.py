# SPDX-License-Identifier: Apache-2.0
"""The kernels against the numpy reference, bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.loopback import BF16, DeviceInputs, Inputs, Loopback, all_bf16_patterns, bf16, make_inputs
from trtllm_mhc import reference
from trtllm_mhc.runtime.communicator import Communicator, Finalize
from trtllm_mhc.runtime.cuda import DeviceArray, Stream

ROWS = [1, 64, 3, 17, 64, 2, 150, 1, 33, 5]
"""M from call to call: small after large, odd, and beyond the capacity of 64 rows."""


@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_chain_of_boundaries(tp: int, hidden: int) -> None:
    """Each call's streams are the next one's residual where M stays; every third is residual-only."""
    rng = np.random.default_rng(hidden + tp)
    chain: list[tuple[Inputs, tuple]] = []
    for call, rows in enumerate(ROWS if hidden == 5120 else ROWS[:6]):
        inputs = make_inputs(rng, tp, rows, hidden)
        if call % 3 == 2:
            inputs = inputs.residual_only()
        repeats = 3 if rows <= 5 else 1
        for _ in range(repeats):
            expected = inputs.expected()
            chain.append((inputs, expected))
            inputs = replace(inputs, residual=expected[0], xs=[bf16(rng, rows, hidden) for _ in range(tp)])

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        calls = [DeviceInputs(inputs, rank) for inputs, _ in chain]
        group.barrier()
        for i, call in enumerate(calls):
            chained = i > 0 and chain[i][0].residual is chain[i - 1][1][0]
            call.boundary(communicator, stream, residual=calls[i - 1].residual_out if chained else call.residual)
        stream.synchronize()
        for i, (call, (_, expected)) in enumerate(zip(calls, chain, strict=True)):
            call.check(expected, stream, f" of call {i} on rank {rank}")

    with Loopback(tp, hidden) as group:
        group.run(work)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_bf16_pattern_as_payload(tp: int) -> None:
    xs = all_bf16_patterns(tp, 5120)
    inputs = replace(make_inputs(np.random.default_rng(7), tp, xs[0].shape[0], 5120), xs=xs)
    expected = inputs.expected()
    sums = reference.all_reduce(xs)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        total = DeviceArray(call.x.shape, BF16)
        group.barrier()
        call.boundary(communicator, stream)
        communicator.all_reduce(call.x, out=total, stream=stream)
        call.check(expected, stream, f" on rank {rank}")
        reference.assert_bits_equal(total.to_numpy(stream), sums, f"sum on rank {rank}")

    with Loopback(tp) as group:
        group.run(work)


@pytest.mark.parametrize("scale", [1e-38, 1e30, 1e38])
def test_extreme_magnitudes(scale: float) -> None:
    """Subnormals survive (no flush to zero); overflow gives infinities and NaN where the reference has them."""
    inputs = make_inputs(np.random.default_rng(3), 2, 4, 5120)
    with np.errstate(over="ignore"):
        xs = [(x.astype(np.float32) * np.float32(scale)).astype(BF16) for x in inputs.xs]
        residual = (inputs.residual.astype(np.float32) * np.float32(scale)).astype(BF16)
    inputs = replace(inputs, xs=xs, residual=residual)
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        group.barrier()
        call.boundary(communicator, stream)
        call.check(expected, stream, f" on rank {rank}")

    with Loopback(2) as group:
        group.run(work)


def test_all_zero_row_with_the_models_epsilon() -> None:
    """1e-20 must not become 0 on the way: 0 * rsqrt(0) would be NaN."""
    inputs = make_inputs(np.random.default_rng(5), 2, 3, 5120)
    zero = replace(inputs, xs=[x * BF16(0) for x in inputs.xs], residual=inputs.residual * BF16(0))

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(zero, rank)
        group.barrier()
        call.boundary(communicator, stream)
        assert call.layer_input is not None
        assert not np.any(call.layer_input.to_numpy(stream).astype(np.float32))

    with Loopback(2) as group:
        group.run(work)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_all_reduce(tp: int) -> None:
    rng = np.random.default_rng(tp)
    cases = [[bf16(rng, rows, 5120) for _ in range(tp)] for rows in (1, 5, 64, 200)]
    # Where the partial sums were bf16, or added in another order than the ranks', the 1 would be lost or kept wrongly.
    for order in itertools.permutations([1e4, -1e4, 1.0]):
        cases.append([np.full((2, 5120), value, BF16) for value in np.resize(order, tp)])

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        arrays = [DeviceArray.from_numpy(xs[rank]) for xs in cases]
        totals = [DeviceArray(array.shape, BF16) for array in arrays]
        group.barrier()
        for xs, array, total in zip(cases, arrays, totals, strict=True):
            communicator.all_reduce(array, out=total, stream=stream)
            reference.assert_bits_equal(total.to_numpy(stream), reference.all_reduce(xs), f"sum on rank {rank}")

    with Loopback(tp) as group:
        group.run(work)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("collapse", [True, False], ids=["full", "residual-only"])
def test_finalize_equals_plain_path_on_the_finalized_tensor(tp: int, collapse: bool) -> None:
    rng = np.random.default_rng(tp)
    rows, top_k, permuted_rows = 70, 6, 450
    index = rng.permutation(permuted_rows)[: rows * top_k].reshape(rows, top_k).astype(np.int32)
    owner = rng.integers(0, tp, (rows, top_k))
    permuted, weights, indices, shared, xs = [], [], [], [], []
    for rank in range(tp):
        mine = np.where(owner == rank, index, -1).astype(np.int32)
        experts = bf16(rng, permuted_rows, 5120)
        experts[np.setdiff1d(np.arange(permuted_rows), mine)] = np.nan  # padding and others' rows are never read
        weight = rng.random((rows, top_k), np.float32)
        weight[mine == -1] = np.nan
        permuted.append(experts)
        weights.append(weight)
        indices.append(mine)
        shared.append(bf16(rng, rows, 5120))
        xs.append(reference.finalize(experts, weight, mine, shared[-1]))
    inputs = replace(make_inputs(rng, tp, rows, 5120), xs=xs)
    if not collapse:
        inputs = inputs.residual_only()
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        parts = (permuted[rank], weights[rank], indices[rank], shared[rank])
        moe_output = Finalize(*(DeviceArray.from_numpy(part) for part in parts))
        group.barrier()
        call.boundary(communicator, stream, x=moe_output)
        call.check(expected, stream, f" of the finalize on rank {rank}")
        call.poison()
        call.boundary(communicator, stream)
        call.check(expected, stream, f" of the plain path on rank {rank}")

    with Loopback(tp) as group:
        group.run(work)


@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
@pytest.mark.parametrize("rows", [1, 7, 64, 130])
def test_mxfp8_layer_input(rows: int, hidden: int) -> None:
    rng = np.random.default_rng(rows)
    inputs = make_inputs(rng, 2, rows, hidden)
    assert inputs.gamma is not None
    gamma = inputs.gamma.copy()
    gamma[64:96] = 0.0  # a block of zeros has scale 0
    gamma[96:128] = np.float32(2.0**-126)
    inputs = replace(inputs, gamma=gamma)
    expected = inputs.expected()
    assert expected[1] is not None
    data, swizzled = reference.quantize(expected[1])

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        data_out = DeviceArray(data.shape, data.dtype)
        scales_out = DeviceArray(swizzled.shape, np.uint8)
        data_out.fill_bytes(0xFF)
        scales_out.fill_bytes(0xFF)
        group.barrier()
        call.boundary(communicator, stream, mxfp8=(data_out, scales_out))
        call.check(expected, stream)
        np.testing.assert_array_equal(data_out.to_numpy(stream).view(np.uint8), data.view(np.uint8))
        np.testing.assert_array_equal(scales_out.to_numpy(stream), swizzled)

    with Loopback(2, hidden) as group:
        group.run(work)


@pytest.mark.parametrize("wait_mode", ["spin", "split", "gate"])
@pytest.mark.parametrize("rows", [1, 8])
def test_every_way_of_waiting(rows: int, wait_mode: str) -> None:
    inputs = make_inputs(np.random.default_rng(1), 2, rows, 5120)
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        assert communicator.info.waits_at_gate == (wait_mode == "gate")
        call = DeviceInputs(inputs, rank)
        group.barrier()
        for _ in range(50):
            call.poison()
            call.boundary(communicator, stream)
            call.check(expected, stream)

    with Loopback(2, wait_mode=wait_mode) as group:
        group.run(work)


def test_lanes_are_independent() -> None:
    """Two streams, each with its own lane, in another order on each rank."""
    rng = np.random.default_rng(2)
    chains = [[make_inputs(rng, 2, rows, 5120) for rows in (4, 1, 9)] for _ in range(2)]
    expected = [[inputs.expected() for inputs in chain] for chain in chains]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        with Stream() as second:
            streams = [stream, second]
            calls = [[DeviceInputs(inputs, rank) for inputs in chain] for chain in chains]
            group.barrier()
            for _ in range(20):
                for step in range(3):
                    for lane in (0, 1) if rank == 0 else (1, 0):
                        calls[lane][step].boundary(communicator, streams[lane], lane=lane)
            for lane in range(2):
                for step in range(3):
                    calls[lane][step].check(expected[lane][step], streams[lane], f" of lane {lane}")

    with Loopback(2, lanes=2) as group:
        group.run(work)


def test_no_rows_is_nothing() -> None:
    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        empty = DeviceArray((0, 5120), BF16)
        assert communicator.all_reduce(empty, out=DeviceArray((0, 5120), BF16), stream=stream).shape == (0, 5120)

    with Loopback(2) as group:
        group.run(work)
