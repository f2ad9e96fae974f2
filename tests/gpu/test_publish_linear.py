# SPDX-License-Identifier: Apache-2.0
"""The linear layer that publishes its output, and the boundary that consumes it.

Activations and weights are small integers, so that every partial sum is exact in fp32 and the outputs' bits are
defined; random values are checked against the bound of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.gpu.loopback import BF16, DeviceInputs, Inputs, Loopback, bf16, make_inputs
from trtllm_mhc import reference
from trtllm_mhc.runtime.communicator import Communicator, WaitMode
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.library import ErrorKind, HeaderField, InvalidArgumentError, MailboxError
from trtllm_mhc.runtime.threads import ThreadGroup

Array = npt.NDArray[Any]
E4M3 = ml_dtypes.float8_e4m3fn
ROWS = [1, 64, 3, 17, 16, 33, 8, 9, 2, 32, 63]
TYPES = ["bf16", "e4m3"]


@dataclass(frozen=True)
class Weights:
    """weight [H, K] bf16 or E4M3, scales [H/32, K/32] uint8 or None."""

    weight: Array
    scales: Array | None

    def of_rank(self, rank: int) -> Weights:
        """Others for every rank, without the cost of making them."""
        scales = None if self.scales is None else np.roll(self.scales, rank, axis=0)
        return Weights(np.roll(self.weight, 32 * rank, axis=0), scales)

    def tensors(self) -> tuple[DeviceArray, DeviceArray | None]:
        scales = None if self.scales is None else DeviceArray.from_numpy(self.scales)
        return DeviceArray.from_numpy(self.weight), scales


def integers(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(-8, 9, shape, np.int8).astype(np.float32).astype(BF16)


def integer_weights(rng: np.random.Generator, kind: str, hidden: int, features: int) -> Weights:
    if kind == "bf16":
        return Weights(integers(rng, hidden, features), None)
    table = np.arange(-8, 9).astype(np.float32).astype(E4M3)
    scales = rng.integers(126, 129, (hidden // 32, features // 32), np.uint8)
    return Weights(table[rng.integers(0, 17, (hidden, features), np.int8)], scales)


def random_weights(rng: np.random.Generator, kind: str, hidden: int, features: int) -> Weights:
    values = rng.standard_normal((hidden, features), np.float32)
    if kind == "bf16":
        return Weights((0.02 * values).astype(BF16), None)
    return Weights(values.astype(E4M3), rng.integers(110, 125, (hidden // 32, features // 32), np.uint8))


class Layers:
    """One group's layer: weights and activations of every rank, what it gives, and a boundary that follows it."""

    def __init__(self, seed: int, tp: int, kind: str, features: int, hidden: int = 5120, rows: int = 64) -> None:
        rng = np.random.default_rng(seed)
        base = integer_weights(rng, kind, hidden, features)
        self.weights = [base.of_rank(rank) for rank in range(tp)]
        self.activations = [integers(rng, rows, features) for _ in range(tp)]
        self.outs = [
            reference.publish_linear(activation, weights.weight, weights.scales)
            for activation, weights in zip(self.activations, self.weights, strict=True)
        ]
        self.inputs = replace(make_inputs(rng, tp, rows, hidden), xs=self.outs)
        self.full = self.inputs.expected()

    def expected(self, rows: int) -> tuple[Array, Array]:
        """What the boundary of the first `rows` rows gives: rows are independent."""
        residual_out, layer_input = self.full
        assert layer_input is not None
        return residual_out[:rows], layer_input[:rows]

    def boundary(self, rows: int) -> Inputs:
        """The boundary of the first `rows` rows."""
        full = self.inputs
        assert full.pre is not None
        return replace(
            full,
            xs=[x[:rows] for x in full.xs],
            residual=full.residual[:rows],
            post=full.post[:rows],
            comb=full.comb[:rows],
            pre=full.pre[:rows],
        )


def poisoned(rows: int, hidden: int = 5120) -> DeviceArray:
    out = DeviceArray((rows, hidden), BF16)
    out.fill_bytes(0xFF)
    return out


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("tp", "features", "hidden"), [(2, 4096, 5120), (4, 2048, 5120), (8, 1024, 5120)])
def test_values_and_what_the_peers_get(tp: int, features: int, hidden: int, kind: str) -> None:
    """`out` has the reference's bits, and the published boundary those of the plain one on `out`."""
    layers = Layers(tp, tp, kind, features, hidden)
    boundaries = [layers.boundary(rows) for rows in ROWS]
    expected = [layers.expected(rows) for rows in ROWS]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        weight, scales = layers.weights[rank].tensors()
        activations = [DeviceArray.from_numpy(layers.activations[rank][:rows]) for rows in ROWS]
        outs = [poisoned(rows, hidden) for rows in ROWS]
        calls = [DeviceInputs(inputs, rank) for inputs in boundaries]
        group.barrier()
        for activation, out, call in zip(activations, outs, calls, strict=True):
            communicator.publish_linear(activation, weight, scales, out=out, stream=stream)
            call.boundary(communicator, stream, x=None, published=True)
        stream.synchronize()
        assert communicator.status() is None
        for rows, out, call, wanted in zip(ROWS, outs, calls, expected, strict=True):
            reference.assert_bits_equal(out.to_numpy(stream), layers.outs[rank][:rows], f"out, M = {rows}, {rank}")
            call.check(wanted, stream, f" of the published boundary, M = {rows}, rank {rank}")
            call.poison()
        group.barrier()
        for rows, out, call, wanted in zip(ROWS, outs, calls, expected, strict=True):
            call.boundary(communicator, stream, x=out)
            call.check(wanted, stream, f" of the plain boundary, M = {rows}, rank {rank}")

    with Loopback(tp, hidden) as group:
        group.run(work)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("hidden", "features"), [(5120, 128), (4096, 384), (4096, 2048), (5120, 1024), (5120, 8192), (7168, 640)]
)
def test_values_alone(hidden: int, features: int, kind: str) -> None:
    """tp 1 and any M: exact on integers, within the bound on random values, a row's bits the same for every M."""
    rows = 200
    rng = np.random.default_rng(features)
    exact = integer_weights(rng, kind, hidden, features)
    rough = random_weights(rng, kind, hidden, features)
    whole, real = integers(rng, rows, features), bf16(rng, rows, features)
    wanted = reference.publish_linear(whole, exact.weight, exact.scales)
    name = f"alone {hidden} {features} {kind}"
    communicator = Communicator.threads(name, tp_size=1, rank=0, device=0, hidden_size=hidden)
    with communicator, Stream() as stream:
        for weights, activation in ((exact, whole), (rough, real)):
            weight, scales = weights.tensors()
            everything = None
            for count in (rows, 1, 8, 15, 16, 31, 48, 64, 65, 130):
                out = poisoned(count + 1, hidden)
                communicator.publish_linear(
                    DeviceArray.from_numpy(activation[:count]),
                    weight,
                    scales,
                    out=out.view((count, hidden)),
                    stream=stream,
                )
                got = out.to_numpy(stream)
                assert (got[count:].view(np.uint16) == 0xFFFF).all(), "a row beyond M was written"
                got = got[:count]
                if everything is None:
                    everything = got
                reference.assert_bits_equal(got, everything[:count], f"M = {count} against M = {rows}")
            assert everything is not None
            if weights is exact:
                reference.assert_bits_equal(everything, wanted, "out")
            else:
                inside = reference.publish_linear_agrees(everything, activation, weights.weight, weights.scales)
                assert inside.all(), f"{(~inside).sum()} elements lie outside the bound"


def test_special_weights() -> None:
    """Every E4M3 byte under scales at both ends of their range; NaN stays in its row of the weights."""
    features, hidden = 128, 5120
    rng = np.random.default_rng(1)
    patterns = np.resize(np.arange(256, dtype=np.uint8), (hidden, features))
    scales = np.resize(np.array([0, 1, 2, 9, 110, 127, 140, 230, 246], np.uint8), (hidden // 32, features // 32))
    scales[5, 1] = 255
    activation = np.zeros((4, features), np.float32)
    activation[np.arange(4), rng.integers(0, features, 4)] = [1, -1, 2, 0.5]  # one term a row: every sum is exact
    cases = [(patterns, scales), (np.where(patterns & 0x7F == 0x7F, 0, patterns), np.where(scales == 255, 0, scales))]
    communicator = Communicator.threads("special", tp_size=1, rank=0, device=0, hidden_size=hidden)
    with communicator, Stream() as stream:
        for weight, powers in cases:
            weights = Weights(weight.astype(np.uint8).view(E4M3), powers.astype(np.uint8))
            out = poisoned(4)
            data = DeviceArray.from_numpy(activation.astype(BF16))
            communicator.publish_linear(data, *weights.tensors(), out=out, stream=stream)
            with np.errstate(all="ignore"):
                wanted = reference.publish_linear(activation.astype(BF16), weights.weight, weights.scales)
            reference.assert_bits_equal(out.to_numpy(stream), wanted, "out")


@pytest.mark.parametrize("wait_mode", ["spin", "split", "gate"])
@pytest.mark.parametrize("kind", TYPES)
def test_every_way_of_waiting(kind: str, wait_mode: WaitMode) -> None:
    """Residual-only boundaries, plain ones and all-reduces in between on the same lane."""
    layers = Layers(3, 2, kind, 1024)
    rows = [5, 64, 1]
    boundaries = [layers.boundary(count) for count in rows]
    expected = [layers.expected(count) for count in rows]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        weight, scales = layers.weights[rank].tensors()
        activations = [DeviceArray.from_numpy(layers.activations[rank][:count]) for count in rows]
        calls = [DeviceInputs(inputs, rank) for inputs in boundaries]
        short = [DeviceInputs(inputs.residual_only(), rank) for inputs in boundaries]
        totals = [DeviceArray(call.x.shape, BF16) for call in calls]
        outs = [poisoned(count) for count in rows]
        group.barrier()
        for _ in range(5):
            for i, call in enumerate(calls):
                communicator.publish_linear(activations[i], weight, scales, out=outs[i], stream=stream)
                call.boundary(communicator, stream, x=None, published=True)
                communicator.all_reduce(call.x, out=totals[i], stream=stream)
                communicator.publish_linear(activations[i], weight, scales, out=outs[i], stream=stream)
                short[i].boundary(communicator, stream, x=None, published=True)
        stream.synchronize()
        for i, call in enumerate(calls):
            call.check(expected[i], stream)
            short[i].check(expected[i], stream, " of the residual-only boundary")
            reference.assert_bits_equal(totals[i].to_numpy(stream), reference.all_reduce(boundaries[i].xs), "sum")

    with Loopback(2, wait_mode=wait_mode) as group:
        group.run(work)


def test_capture_and_replay_with_fresh_inputs() -> None:
    sets = [Layers(20 + i, 2, "bf16", 1024, rows=9) for i in range(4)]
    sets = [replace_weights(each, sets[0]) for each in sets]
    boundaries = [each.boundary(9) for each in sets]
    expected = [each.expected(9) for each in sets]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        weight, _ = sets[0].weights[rank].tensors()
        activation = DeviceArray.from_numpy(sets[0].activations[rank])
        out = poisoned(9)
        call = DeviceInputs(boundaries[0], rank)
        group.barrier()

        def enqueue() -> None:
            communicator.publish_linear(activation, weight, out=out, stream=stream)
            call.boundary(communicator, stream, x=None, published=True)

        enqueue()  # a graph goes on from any generation
        with stream.capture() as graph:
            for _ in range(4):
                enqueue()
        for replay in range(40):
            which = replay * 7 % len(sets)
            activation.copy_from(sets[which].activations[rank], stream)
            call.load(boundaries[which], rank, stream)
            call.poison()
            graph.launch(stream)
            if replay % 5 == 0:
                enqueue()
            call.check(expected[which], stream, f" of replay {replay}, rank {rank}")
            reference.assert_bits_equal(out.to_numpy(stream), sets[which].outs[rank], "out")

    with Loopback(2) as group:
        group.run(work)


def replace_weights(layers: Layers, source: Layers) -> Layers:
    """`layers` with the weights of `source`."""
    layers.weights = source.weights
    layers.outs = [
        reference.publish_linear(activation, weights.weight, weights.scales)
        for activation, weights in zip(layers.activations, layers.weights, strict=True)
    ]
    layers.inputs = replace(layers.inputs, xs=layers.outs)
    layers.full = layers.inputs.expected()
    return layers


@pytest.mark.parametrize("capacity", [16, 128])
def test_rows_up_to_the_capacity_are_published_and_more_are_refused(capacity: int) -> None:
    layers = Layers(7, 2, "bf16", 384, rows=capacity)
    rows = [capacity, 3, capacity - 1]
    boundaries = [layers.boundary(count) for count in rows]
    expected = [layers.expected(count) for count in rows]

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        weight, _ = layers.weights[rank].tensors()
        activations = [DeviceArray.from_numpy(layers.activations[rank][:count]) for count in rows]
        outs = [poisoned(count) for count in rows]
        calls = [DeviceInputs(inputs, rank) for inputs in boundaries]
        more = DeviceArray((capacity + 1, 384), BF16)
        group.barrier()
        for activation, out, call in zip(activations, outs, calls, strict=True):
            communicator.publish_linear(activation, weight, out=out, stream=stream)
            call.boundary(communicator, stream, x=None, published=True)
        stream.synchronize()
        for call, wanted, out, count in zip(calls, expected, outs, rows, strict=True):
            call.check(wanted, stream)
            reference.assert_bits_equal(out.to_numpy(stream), layers.outs[rank][:count], "out")
        with pytest.raises(InvalidArgumentError, match=f"capacity = {capacity}, got {capacity + 1}"):
            communicator.publish_linear(more, weight, stream=stream)
        nothing = communicator.publish_linear(DeviceArray((0, 384), BF16), weight, stream=stream)
        assert nothing.shape == (0, 5120)

    with Loopback(2, capacity=capacity) as group:
        group.run(work)


@pytest.mark.parametrize("wait_mode", ["split", "gate"])
@pytest.mark.parametrize("first", ["linear", "publish"])
def test_two_producers_of_one_boundary(first: str, wait_mode: WaitMode) -> None:
    """The second finds the rows taken: an error on its rank, values in `out` all the same, and a lane that resets."""
    layers = Layers(8, 2, "bf16", 256, rows=6)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        weight, _ = layers.weights[rank].tensors()
        activation = DeviceArray.from_numpy(layers.activations[rank])
        out = poisoned(6)
        group.barrier()
        if first == "linear":
            communicator.publish_linear(activation, weight, out=out, stream=stream)
        else:
            communicator.publish(DeviceArray.from_numpy(layers.outs[rank]), stream=stream)
        out.fill_bytes(0xFF, stream)
        communicator.publish_linear(activation, weight, out=out, stream=stream)
        stream.synchronize()
        reference.assert_bits_equal(out.to_numpy(stream), layers.outs[rank], "out")
        with pytest.raises(MailboxError) as raised:
            communicator.publish_linear(activation, weight, out=out, stream=stream)
        assert raised.value.record is not None
        assert raised.value.record.kind is ErrorKind.TICKET
        group.barrier()
        communicator.reset()
        call = DeviceInputs(layers.boundary(6), rank)
        group.barrier()
        communicator.publish_linear(activation, weight, out=out, stream=stream)
        call.boundary(communicator, stream, x=None, published=True)
        call.check(layers.expected(6), stream, " after the reset")

    with Loopback(2, wait_mode=wait_mode) as group:
        group.run(work)


@pytest.mark.parametrize("wait_mode", ["split", "gate"])
def test_ranks_that_disagree_and_a_boundary_that_does_not_consume(wait_mode: WaitMode) -> None:
    layers = Layers(9, 2, "bf16", 256, rows=6)

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        weight, _ = layers.weights[rank].tensors()
        rows = 5 + rank
        activation = DeviceArray.from_numpy(layers.activations[rank][:rows])
        out = poisoned(rows)
        call = DeviceInputs(layers.boundary(rows), rank)
        group.barrier()
        communicator.publish_linear(activation, weight, out=out, stream=stream)
        call.boundary(communicator, stream, x=None, published=True)
        stream.synchronize()
        record = communicator.status()
        assert record is not None
        assert (record.kind, record.field) == (ErrorKind.HEADER_MISMATCH, HeaderField.ROWS)
        assert np.isnan(call.residual_out.to_numpy(stream).astype(np.float32)).all()
        group.barrier()
        communicator.reset()
        group.barrier()
        communicator.publish_linear(activation, weight, out=out, stream=stream)
        call.boundary(communicator, stream)  # not published: its own publish finds the rows taken
        stream.synchronize()
        record = communicator.status()
        assert record is not None
        assert record.kind is ErrorKind.TICKET

    with Loopback(2, wait_mode=wait_mode) as group:
        group.run(work)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("wait_mode", ["split", "gate"])
def test_self_loop(wait_mode: WaitMode, kind: str) -> None:
    """One rank that plays four, eager and in graphs: runs under compute-sanitizer."""
    tp, features = 4, 640
    rng = np.random.default_rng(4)
    weights = integer_weights(rng, kind, 5120, features)
    whole = integers(rng, 64, features)
    out = reference.publish_linear(whole, weights.weight, weights.scales)
    communicator = Communicator.self_loop(tp_size=tp, device=0, hidden_size=5120, wait_mode=wait_mode, timeout_s=10)
    with communicator, Stream() as stream:
        tensors = weights.tensors()
        for rows in (1, 9, 20, 64):
            inputs = replace(make_inputs(rng, tp, rows, 5120), xs=[out[:rows]] * tp).residual_only()
            check_replays(communicator, stream, DeviceArray.from_numpy(whole[:rows]), tensors, inputs)


def check_replays(
    communicator: Communicator,
    stream: Stream,
    activation: DeviceArray,
    tensors: tuple[DeviceArray, DeviceArray | None],
    inputs: Inputs,
) -> None:
    """One call, then graphs of four; `inputs` are of the boundary that consumes."""
    call = DeviceInputs(inputs, 0)
    out = poisoned(activation.shape[0])
    expected = inputs.expected()

    def enqueue() -> None:
        communicator.publish_linear(activation, *tensors, out=out, stream=stream)
        call.boundary(communicator, stream, x=None, published=True)

    def check(what: str) -> None:
        call.check(expected, stream, what)
        reference.assert_bits_equal(out.to_numpy(stream), inputs.xs[0], f"out{what}")

    enqueue()
    check(" of the first call")
    with stream.capture() as graph:
        for _ in range(4):
            enqueue()
    for replay in range(3):
        call.poison()
        out.fill_bytes(0xFF, stream)
        graph.launch(stream)
        check(f" of replay {replay}")


# ---- engines --------------------------------------------------------------------------------------------------------

HIDDEN = 5120
EPS = float(np.float32(1e-20))
MAXIMUM_ROWS = 128  # beyond the mailbox's capacity of 64


@pytest.fixture(params=TYPES)
def engines(request: pytest.FixtureRequest, trt: Any) -> Iterator[tuple[Any, Layers]]:
    """Engines of MhcPublishLinear and the boundary that follows, tp 2, each rank with weights of its own."""
    from trtllm_mhc.network import ops, plugins
    from trtllm_mhc.runtime.build import RowRange, TimingCache, build_engine
    from trtllm_mhc.runtime.engine import EngineGroup, communicators

    features = 1024
    layers = Layers(11, 2, request.param, features, rows=MAXIMUM_ROWS)
    cache = TimingCache()

    def populate(network: Any, rank: int) -> None:
        weights = layers.weights[rank]
        scales = None
        if weights.scales is not None:
            scales = ops.constant(network, reference.pack_weight_scales(weights.scales))
        x = plugins.add_publish_linear(
            network,
            network.add_input("activation", trt.bfloat16, (-1, features)),
            ops.constant(network, weights.weight),
            scales,
            tp_size=2,
        )
        outputs = plugins.add_boundary(
            network,
            x,
            network.add_input("residual", trt.bfloat16, (-1, 4, HIDDEN)),
            network.add_input("post", trt.float32, (-1, 4)),
            network.add_input("comb", trt.float32, (-1, 4, 4)),
            network.add_input("pre", trt.float32, (-1, 4)),
            network.add_input("gamma", trt.bfloat16, (HIDDEN,)),
            tp_size=2,
            norm_eps=EPS,
            published=True,
        )
        for name, tensor in zip(("residual_out", "layer_input", "x"), (*outputs, x), strict=True):
            tensor.name = name
            network.mark_output(tensor)

    def build(rank: int) -> Any:
        rows = RowRange(1, 8, MAXIMUM_ROWS)
        return build_engine(lambda network: populate(network, rank), rows=rows, timing_cache=cache)

    plans = [build(rank) for rank in range(2)]
    group = ThreadGroup.on_devices(2)
    with ExitStack() as stack:
        comms = stack.enter_context(communicators(group, "publish linear", hidden_size=HIDDEN, timeout_s=20.0))
        yield stack.enter_context(EngineGroup(plans, comms, group)), layers


def feeds(layers: Layers, rows: int) -> list[dict[str, Array]]:
    inputs = layers.boundary(rows)
    assert inputs.pre is not None
    assert inputs.gamma is not None
    shared = {
        "residual": inputs.residual,
        "post": inputs.post,
        "comb": inputs.comb,
        "pre": inputs.pre,
        "gamma": inputs.gamma,
    }
    return [{**shared, "activation": activation[:rows]} for activation in layers.activations]


def test_engine_eager_and_captured(engines: Any) -> None:
    """M of all sizes, beyond the capacity as well: there x goes through the mailbox in chunks, published by nobody."""
    from trtllm_mhc.runtime.inspection import count_plugins

    group, layers = engines
    assert count_plugins(group.layers) == {"MhcPublishLinear": 1, "MhcBoundary": 1}

    def check(outputs: list[dict[str, Array]], rows: int, what: str) -> None:
        residual_out, layer_input = layers.expected(rows)
        for rank, out in enumerate(outputs):
            where = f"{what}, M = {rows}, rank {rank}"
            reference.assert_bits_equal(out["x"], layers.outs[rank][:rows], f"x, {where}")
            reference.assert_bits_equal(out["residual_out"], residual_out, f"residual_out, {where}")
            reference.assert_bits_equal(out["layer_input"], layer_input, f"layer_input, {where}")

    for rows in (8, 1, 64, 65, 3, MAXIMUM_ROWS, 33, 2):
        check(group.run(feeds(layers, rows)), rows, "eager")
    for rows in (8, 100):
        group.run(feeds(layers, rows))
        group.capture(passes=3)
        for replay in range(10):
            check(group.replay(feeds(layers, rows)), rows, f"replay {replay}")


def test_engine_with_the_gate_closed(trt: Any) -> None:
    """An engine straight from the builder keeps its plugins closed: values, this rank alone, and no communicator."""
    from trtllm_mhc import plugin_control
    from trtllm_mhc.network import ops, plugins
    from trtllm_mhc.runtime import build

    layers = Layers(12, 2, "bf16", 256, rows=4)
    recorder = build.ErrorRecorder()
    builder = build.make_builder(recorder)
    network = build.make_network(builder)
    weight = ops.constant(network, layers.weights[0].weight)
    activation = network.add_input("activation", trt.bfloat16, (4, 256))
    x = plugins.add_publish_linear(network, activation, weight, tp_size=2)
    x.name = "x"
    network.mark_output(x)
    plan = builder.build_serialized_network(network, builder.create_builder_config())
    assert plan is not None, recorder.take()
    engine = trt.Runtime(build.logger()).deserialize_cuda_engine(plan)
    context = engine.create_execution_context()
    out = poisoned(4)
    data = DeviceArray.from_numpy(layers.activations[0])
    context.set_tensor_address("activation", data.pointer)
    context.set_tensor_address("x", out.pointer)
    with Stream() as stream:
        with plugin_control.warmup():
            assert context.execute_async_v3(stream.handle), plugin_control.take_error()
        reference.assert_bits_equal(out.to_numpy(stream), layers.outs[0], "x")
        out.fill_bytes(0xFF, stream)
        assert not context.execute_async_v3(stream.handle), "no communicator, yet an answer"
        assert "no communicator" in (plugin_control.take_error() or "")
