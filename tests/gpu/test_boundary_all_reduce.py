# SPDX-License-Identifier: Apache-2.0
"""The boundary on torch tensors: every variant, captured by torch, and producers written in torch and in Triton."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.gpu.loopback import Array, Inputs, Loopback, bf16, make_inputs
from trtllm_mhc import reference
from trtllm_mhc.runtime import BoundaryAllReduce, empty_quantized_layer_input
from trtllm_mhc.runtime.communicator import Communicator, PublishTarget
from trtllm_mhc.runtime.cuda import Stream

torch = pytest.importorskip("torch", reason="torch is not installed")

TOP_K = 6
CONFIG = SimpleNamespace(hidden_size=5120, hc_mult=4, num_experts_per_tok=TOP_K)
DTYPES = {"bfloat16": (np.uint16, "bfloat16"), "float8_e4m3fn": (np.uint8, "float8_e4m3fn")}


def to_torch(array: Array, device: Any) -> Any:
    if array.dtype.name in DTYPES:
        words, name = DTYPES[array.dtype.name]
        return torch.from_numpy(array.view(words).copy()).to(device).view(getattr(torch, name))
    return torch.from_numpy(array.copy()).to(device)


def to_numpy(tensor: Any) -> Array:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).cpu().numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).cpu().numpy().view(ml_dtypes.float8_e4m3fn)
    return np.asarray(tensor.cpu().numpy())


class Tensors:
    """One rank's tensors of one boundary."""

    def __init__(self, inputs: Inputs, rank: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.x = to_torch(inputs.xs[rank], device)
        self.residual = to_torch(inputs.residual, device)
        self.post, self.comb = to_torch(inputs.post, device), to_torch(inputs.comb, device)
        self.pre = None if inputs.pre is None else to_torch(inputs.pre, device)
        self.gamma = None if inputs.gamma is None else to_torch(inputs.gamma, device)
        self.eps = inputs.eps if inputs.pre is not None else 0.0

    @property
    def rest(self) -> tuple[Any, ...]:
        return self.residual, self.post, self.comb, self.pre, self.gamma, self.eps


def check(outputs: tuple[Any, Any], expected: tuple[Array, Array | None], what: str) -> None:
    torch.cuda.current_stream().synchronize()
    reference.assert_bits_equal(to_numpy(outputs[0]), expected[0], f"residual_out {what}")
    assert (outputs[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        reference.assert_bits_equal(to_numpy(outputs[1]), expected[1], f"layer_input {what}")


Work = Callable[[int, BoundaryAllReduce, Loopback], None]


def run(tp: int, work: Work, **options: Any) -> None:
    """`work` on every rank, on a torch stream of its own."""

    def on_rank(rank: int, communicator: Communicator, stream: Stream) -> None:
        torch.cuda.set_device(communicator.info.device)
        all_reduce = BoundaryAllReduce(CONFIG, quantize_layer_input=True, communicator=communicator)
        with torch.cuda.stream(torch.cuda.Stream()):
            work(rank, all_reduce, group)
            torch.cuda.current_stream().synchronize()

    with Loopback(tp, **options) as group:
        group.run(on_rank)


def synchronised(group: Loopback) -> None:
    """Everything is there on all ranks, with memory for the outputs in torch's pools: from here on ranks may wait for
    each other, and an allocation may then wait for a kernel that waits for the allocating rank."""
    blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in 12 * [1 << 20] + 8 * [9 << 20]]
    del blocks
    torch.cuda.current_stream().synchronize()
    group.barrier()


@pytest.mark.parametrize(("tp", "wait_mode"), [(2, "auto"), (4, "auto"), (2, "spin")])
def test_calls_equal_the_reference(tp: int, wait_mode: str) -> None:
    rng = np.random.default_rng(tp)
    # Where ranks share a GPU and every CTA waits, those of larger calls leave the peers no room.
    calls = [make_inputs(rng, tp, rows, 5120) for rows in ((1, 5, 16) if wait_mode == "spin" else (1, 5, 64, 90))]
    calls += [calls[1].residual_only()]
    expected = [inputs.expected() for inputs in calls]
    quantized = [None if want[1] is None else reference.quantize(want[1]) for want in expected]

    def work(rank: int, all_reduce: BoundaryAllReduce, group: Loopback) -> None:
        tensors = [Tensors(inputs, rank) for inputs in calls]
        outs = [None if want is None else empty_quantized_layer_input(len(want[0]), 5120, "cuda") for want in quantized]
        synchronised(group)
        for mine, want in zip(tensors, expected, strict=True):
            check(all_reduce(mine.x, *mine.rest), want, f"on rank {rank}")
        for mine, want, out, quantised in zip(tensors, expected, outs, quantized, strict=True):
            given = None if out is None else (out.data, out.scale)
            check(all_reduce(mine.x, *mine.rest, given), want, f"with mxfp8 on rank {rank}")
            if out is not None and quantised is not None:
                np.testing.assert_array_equal(to_numpy(out.data).view(np.uint8), quantised[0].view(np.uint8))
                np.testing.assert_array_equal(to_numpy(out.scale), quantised[1])

    run(tp, work, wait_mode=wait_mode)


@pytest.mark.parametrize("tp", [2, 4])
def test_finalize_equals_the_plain_path(tp: int) -> None:
    rng = np.random.default_rng(tp)
    rows, permuted_rows = 9, 80
    index = rng.permutation(permuted_rows)[: rows * TOP_K].reshape(rows, TOP_K).astype(np.int32)
    owner = rng.integers(0, tp, index.shape)
    mine = [np.where(owner == rank, index, -1).astype(np.int32) for rank in range(tp)]
    experts = [bf16(rng, permuted_rows, 5120) for _ in range(tp)]
    weights = [rng.random((rows, TOP_K), np.float32) for _ in range(tp)]
    shared = [bf16(rng, rows, 5120) for _ in range(tp)]
    inputs = make_inputs(rng, tp, rows, 5120)
    inputs.xs[:] = [reference.finalize(*parts) for parts in zip(experts, weights, mine, shared, strict=True)]
    expected = [inputs.expected(), inputs.residual_only().expected()]

    def work(rank: int, all_reduce: BoundaryAllReduce, group: Loopback) -> None:
        tensors = [Tensors(inputs, rank), Tensors(inputs.residual_only(), rank)]
        parts = [to_torch(part[rank], "cuda") for part in (experts, weights, mine, shared)]
        synchronised(group)
        for form, want in zip(tensors, expected, strict=True):
            check(all_reduce.finalize(*parts, *form.rest), want, f"on rank {rank}")

    run(tp, work)


@pytest.mark.parametrize("tp", [2, 4])
def test_captured_by_torch(tp: int) -> None:
    """Plain and published boundaries in one torch graph; each replay has other inputs."""
    rng = np.random.default_rng(tp)
    sets = [[make_inputs(rng, tp, rows, 5120) for rows in (3, 8)] for _ in range(6)]
    captures = threading.Lock()  # torch synchronises the device when a capture begins
    expected = [[inputs.expected() for inputs in calls] for calls in sets]

    def work(rank: int, all_reduce: BoundaryAllReduce, group: Loopback) -> None:
        sources = [[Tensors(inputs, rank) for inputs in calls] for calls in sets]
        statics = [Tensors(inputs, rank) for inputs in sets[0]]
        stream = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        torch_producer(all_reduce.publish_target(), statics[1].x, all_reduce.tp)  # torch's kernels are loaded by now
        stream.synchronize()
        all_reduce.reset()
        with captures, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outputs = [all_reduce(statics[0].x, *statics[0].rest)]
            torch_producer(all_reduce.publish_target(), statics[1].x, all_reduce.tp)
            all_reduce.mark_published(statics[1].x)
            outputs.append(all_reduce(statics[1].x, *statics[1].rest))
        synchronised(group)
        for replay in range(24):
            which = replay % len(sets)
            for static, source in zip(statics, sources[which], strict=True):
                for name in ("x", "residual", "post", "comb", "pre", "gamma"):
                    getattr(static, name).copy_(getattr(source, name))
            graph.replay()
            for output, want in zip(outputs, expected[which], strict=True):
                check(output, want, f"of replay {replay}, rank {rank}")
            if replay % 5 == 0:
                check(all_reduce(statics[0].x, *statics[0].rest), expected[which][0], "between replays")

    run(tp, work)


class _Memory:
    """Device memory as torch finds it: `__cuda_array_interface__`."""

    def __init__(self, address: int, items: int, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (items,),
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def torch_producer(target: PublishTarget, x: Any, tp: int) -> None:
    """A producer in torch operations, without a ticket: reads the rows' numbers and stores the rows at every rank."""
    rows = x.shape[0]
    device = x.device
    state = torch.as_tensor(_Memory(target.state, 4 * target.capacity, "<i4"), device=device).view(-1, 4)
    slot = 3 * target.generation_stride // 2
    elements = torch.arange(target.hidden_size, device=device)
    generation = torch.remainder(state[:rows, 0], 3).long()
    row = torch.arange(rows, device=device)
    begin = (
        generation * (target.generation_stride // 2)
        + target.rank * (target.rank_stride // 2)
        + row * (target.row_stride // 2)
    )
    at = (begin[:, None] + elements[None, :]).flatten()
    words = x.view(torch.int16)
    words = torch.where(words == -32768, torch.zeros_like(words), words).flatten()
    for rank in range(tp):
        torch.as_tensor(_Memory(target.slots[rank], slot, "<i2"), device=device).index_copy_(0, at, words)


def triton_producer() -> Callable[[PublishTarget, Any, int], None]:
    """A producer in Triton, which takes the tickets itself: one program a row."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    tl = pytest.importorskip("triton.language")

    @triton.jit
    def kernel(
        x,
        state,
        slots,
        owner,
        rank,
        generation_stride,
        rank_stride,
        row_stride,
        hidden: tl.constexpr,
        tp: tl.constexpr,
        block: tl.constexpr,
    ):
        row = tl.program_id(0)
        holder = tl.atomic_cas(state + 4 * row + 1, 0, owner)
        free = (holder == 0) | (holder == owner)
        number = tl.load(state + 4 * row, volatile=True)
        generation = (number % 3).to(tl.int64)
        column = tl.arange(0, block)
        mask = (column < hidden) & free
        words = tl.load(x + row * hidden + column, mask=mask, other=0)
        words = tl.where(words == -32768, 0, words).to(tl.int16)
        offset = generation * generation_stride + rank * rank_stride + row * row_stride
        for peer in tl.static_range(tp):
            slot = tl.load(slots + peer).to(tl.pointer_type(tl.int16))
            tl.store(slot + offset + column, words, mask=mask)

    slots: dict[int, Any] = {}

    def produce(target: PublishTarget, x: Any, tp: int) -> None:
        state = torch.as_tensor(_Memory(target.state, 4 * target.capacity, "<i4"), device=x.device)
        if target.owner not in slots:
            slots[target.owner] = torch.tensor(target.slots, dtype=torch.int64, device=x.device)
        strides = (target.generation_stride // 2, target.rank_stride // 2, target.row_stride // 2)
        kernel[(x.shape[0],)](
            x.view(torch.int16), state, slots[target.owner], target.owner, target.rank, *strides, 5120, tp, 8192
        )

    return produce


@pytest.mark.parametrize("language", ["torch", "triton"])
@pytest.mark.parametrize("tp", [2, 4])
def test_producers_of_others(tp: int, language: str) -> None:
    rng = np.random.default_rng(tp)
    calls = [make_inputs(rng, tp, rows, 5120) for rows in (1, 6, 64)]
    calls += [calls[1].residual_only()]
    expected = [inputs.expected() for inputs in calls]
    produce = torch_producer if language == "torch" else triton_producer()

    def work(rank: int, all_reduce: BoundaryAllReduce, group: Loopback) -> None:
        tensors = [Tensors(inputs, rank) for inputs in calls]
        target = all_reduce.publish_target()
        assert all_reduce.publish_target() is target
        # Loaded before ranks wait for each other; the lane is cleared again.
        produce(target, tensors[0].x, tp)
        torch.cuda.current_stream().synchronize()
        all_reduce.reset()
        synchronised(group)
        for round_number in range(8):
            for mine, want in zip(tensors, expected, strict=True):
                produce(target, mine.x, tp)
                all_reduce.mark_published(mine.x)
                outputs = all_reduce(mine.x, *mine.rest)
                check(outputs, want, f"of {language}'s producer, round {round_number}, rank {rank}")
            check(all_reduce(tensors[0].x, *tensors[0].rest), expected[0], "in between")

    run(tp, work)


def test_an_aborted_step_is_reset() -> None:
    """Published on all ranks, reduced on none; the reset makes the lane usable, and its data do not come back."""
    rng = np.random.default_rng(1)
    lost, good = make_inputs(rng, 2, 6, 5120), make_inputs(rng, 2, 6, 5120)
    expected = good.expected()

    def work(rank: int, all_reduce: BoundaryAllReduce, group: Loopback) -> None:
        aborted, mine = Tensors(lost, rank), Tensors(good, rank)
        torch_producer(all_reduce.publish_target(), aborted.x, 2)
        all_reduce.mark_published(aborted.x)
        with pytest.raises(RuntimeError, match="a published contribution is still unreduced"):
            all_reduce.mark_published(mine.x)
        torch.cuda.current_stream().synchronize()
        all_reduce.reset()
        synchronised(group)
        for _ in range(4):
            check(all_reduce(mine.x, *mine.rest), expected, f"after the reset on rank {rank}")

    run(2, work)


def test_a_handle_is_known_by_its_mark() -> None:
    """Another tensor at the same address is not the published one; nor is an unmarked view."""
    inputs = make_inputs(np.random.default_rng(2), 2, 4, 5120)

    def work(rank: int, all_reduce: BoundaryAllReduce, group: Loopback) -> None:
        mine = Tensors(inputs, rank)
        for other in (mine.x.view(4, 5120), mine.x.detach(), torch.empty_like(mine.x)):
            torch_producer(all_reduce.publish_target(), mine.x, 2)
            all_reduce.mark_published(mine.x)
            with pytest.raises(RuntimeError, match="reducing a tensor other than the published one"):
                all_reduce(other, *mine.rest)
            torch.cuda.current_stream().synchronize()
            all_reduce.reset()

    run(2, work)
