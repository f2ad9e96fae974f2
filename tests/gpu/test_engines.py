# SPDX-License-Identifier: Apache-2.0
"""Engines with the plugins in them, built here and run by ranks that are threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from rich.console import Console

from tests.gpu.loopback import Inputs, make_inputs
from tests.gpu.run_plan import pack, unpack
from trtllm_mhc import reference
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.library import ErrorKind, HeaderField, MailboxError
from trtllm_mhc.runtime.threads import ThreadGroup

Array = npt.NDArray[Any]
HIDDEN = 5120
EPS = float(np.float32(1e-20))
TIMEOUT_S = 20.0
MAXIMUM_ROWS = 128  # beyond the mailbox's capacity of 64

Plans = Callable[[int, str], list[Any]]


@pytest.fixture(scope="module")
def plans(trt: Any) -> Plans:
    """Builds, once for each, the engine of one boundary: "fused", "residual-only" or "unfused"."""
    from trtllm_mhc.runtime.build import RowRange, TimingCache, build_engine
    from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs

    cache = TimingCache()
    built: dict[tuple[int, str], Any] = {}

    def build(tp: int, form: str) -> list[Any]:
        if (tp, form) not in built:
            jobs = SingleBoundaryJobs(HIDDEN, tp, None if form == "residual-only" else EPS)
            job = jobs.unfused() if form == "unfused" else jobs.fused()
            rows = RowRange(1, 8, MAXIMUM_ROWS)
            built[tp, form] = build_engine(lambda network: job.populate(network, 0), rows=rows, timing_cache=cache)
        return [built[tp, form]] * tp

    return build


def feeds_of(inputs: Inputs) -> list[dict[str, Array]]:
    shared = {"residual": inputs.residual, "post": inputs.post, "comb": inputs.comb}
    if inputs.pre is not None and inputs.gamma is not None:
        shared |= {"pre": inputs.pre, "gamma": inputs.gamma}
    return [{**shared, "x": x} for x in inputs.xs]


def check(outputs: list[dict[str, Array]], inputs: Inputs, what: str) -> None:
    residual_out, layer_input = inputs.expected()
    for rank, out in enumerate(outputs):
        reference.assert_bits_equal(out["residual_out"], residual_out, f"{what}, rank {rank}, residual_out")
        if layer_input is not None:
            reference.assert_bits_equal(out["layer_input"], layer_input, f"{what}, rank {rank}, layer_input")


@pytest.fixture
def loaded(plans: Plans) -> Iterator[Callable[..., tuple[Any, list[Any]]]]:
    """Loads an engine group; gives it and its communicators."""
    from contextlib import ExitStack

    from trtllm_mhc.runtime.engine import EngineGroup, communicators

    with ExitStack() as stack:

        def load(tp: int, form: str, timeout_s: float = TIMEOUT_S) -> tuple[Any, list[Any]]:
            group = ThreadGroup.on_devices(tp)
            comms = stack.enter_context(
                communicators(group, f"engines {form}", hidden_size=HIDDEN, timeout_s=timeout_s)
            )
            return stack.enter_context(EngineGroup(plans(tp, form), comms, group)), comms

        yield load


@pytest.mark.parametrize("form", ["fused", "residual-only"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_engine_has_the_reference_s_bits(loaded: Any, tp: int, form: str) -> None:
    engines, _ = loaded(tp, form)
    rng = np.random.default_rng(tp)
    for rows in (8, 1, 64, 3, MAXIMUM_ROWS, 2):
        inputs = make_inputs(rng, tp, rows, HIDDEN)
        if form == "residual-only":
            inputs = inputs.residual_only()
        check(engines.run(feeds_of(inputs)), inputs, f"M = {rows}")


def test_engine_contains_the_plugin_and_no_all_reduce(loaded: Any) -> None:
    from trtllm_mhc.runtime.inspection import count_plugins

    assert count_plugins(loaded(2, "fused")[0].layers) == {"MhcBoundary": 1}
    assert count_plugins(loaded(2, "unfused")[0].layers) == {"MhcAllReduce": 1}


def test_unfused_engine_agrees(loaded: Any) -> None:
    from trtllm_mhc.verification.checks import check_agreement

    engines, _ = loaded(2, "unfused")
    rng = np.random.default_rng(2)
    for rows in (8, 1, 64):
        inputs = make_inputs(rng, 2, rows, HIDDEN)
        feeds = feeds_of(inputs)
        residual_out, layer_input = inputs.expected()
        assert layer_input is not None
        ours = [{"residual_out": residual_out, "layer_input": layer_input}] * 2
        assert check_agreement(feeds, ours, engines.run(feeds), EPS).agrees


@pytest.mark.parametrize("tp", [2, 4])
def test_capture_and_replay_with_fresh_inputs(loaded: Any, tp: int) -> None:
    engines, _ = loaded(tp, "fused")
    rng = np.random.default_rng(tp)
    for rows in (4, 8):
        sets = [make_inputs(rng, tp, rows, HIDDEN) for _ in range(5)]
        engines.run(feeds_of(sets[0]))
        engines.capture(passes=3)
        for replay in range(100):
            inputs = sets[replay % len(sets)]
            check(engines.replay(feeds_of(inputs)), inputs, f"M = {rows}, replay {replay}")
        timing = engines.time_replays(20, passes=3)
        assert len(timing.samples_us) == 20
        assert 0 < timing.median_us < 1e5
        check(engines.run(feeds_of(sets[1])), sets[1], "eager after graphs")


def test_two_contexts_of_one_engine(trt: Any, plans: Plans) -> None:
    """A lane each; used in turn and with both passes in flight at once."""
    from trtllm_mhc import plugin_control
    from trtllm_mhc.runtime import build
    from trtllm_mhc.runtime.engine import communicators

    tp, rows = 2, 5
    data = plans(tp, "fused")[0].data
    rng = np.random.default_rng(12)
    sets = [make_inputs(rng, tp, rows, HIDDEN) for _ in range(2)]
    group = ThreadGroup.on_devices(tp)

    def work(rank: int) -> list[dict[str, Array]]:
        runtime = trt.Runtime(build.logger())
        engine = runtime.deserialize_cuda_engine(data)
        lanes = []
        for lane, inputs in enumerate(sets):
            with comms[rank].bound(lane):
                context = engine.create_execution_context()
            arrays = {name: DeviceArray.from_numpy(array) for name, array in feeds_of(inputs)[rank].items()}
            for name, array in arrays.items():
                context.set_input_shape(name, array.shape)
            arrays["residual_out"] = DeviceArray((rows, 4, HIDDEN), inputs.residual.dtype)
            arrays["layer_input"] = DeviceArray((rows, HIDDEN), inputs.residual.dtype)
            for name, array in arrays.items():
                context.set_tensor_address(name, array.pointer)
            stream = Stream()
            with plugin_control.warmup():
                assert context.execute_async_v3(stream.handle)
            stream.synchronize(TIMEOUT_S)
            lanes.append((context, stream, arrays))
        group.barrier()
        for turn in range(20):
            # The ranks give the lanes their work in opposite orders.
            for context, stream, _ in lanes if (rank + turn) % 2 else reversed(lanes):
                assert context.execute_async_v3(stream.handle), plugin_control.take_error()
            for _, stream, _ in lanes:
                stream.synchronize(TIMEOUT_S)
            assert comms[rank].status() is None
        return [
            {name: arrays[name].to_numpy(stream) for name in ("residual_out", "layer_input")}
            for _, stream, arrays in lanes
        ]

    with communicators(group, "two contexts", hidden_size=HIDDEN, lanes=2, timeout_s=TIMEOUT_S) as comms:
        results = group.run(work, timeout_s=120)
    for lane, inputs in enumerate(sets):
        check([rank[lane] for rank in results], inputs, f"lane {lane}")


def test_plan_runs_in_a_fresh_process(plans: Plans, tmp_path: Path) -> None:
    tp = 2
    inputs = make_inputs(np.random.default_rng(8), tp, 6, HIDDEN)
    for rank, (plan, feed) in enumerate(zip(plans(tp, "fused"), feeds_of(inputs), strict=True)):
        (tmp_path / f"rank{rank}.engine").write_bytes(bytes(plan.data))
        np.savez(tmp_path / f"inputs{rank}.npz", **pack(feed))  # type: ignore[arg-type]
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.run_plan", str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    check([unpack(np.load(tmp_path / f"outputs{rank}.npz")) for rank in range(tp)], inputs, "fresh process")


def test_another_number_of_rows_is_an_error_on_every_rank(loaded: Any) -> None:
    engines, comms = loaded(2, "fused", timeout_s=5.0)
    rng = np.random.default_rng(3)
    eight, four = make_inputs(rng, 2, 8, HIDDEN), make_inputs(rng, 2, 4, HIDDEN)
    check(engines.run(feeds_of(eight)), eight, "before")
    with pytest.raises(MailboxError) as caught:
        engines.run([feeds_of(eight)[0], feeds_of(four)[1]])
    records = [communicator.status() for communicator in comms]
    assert caught.value.record in records
    for rank, record in enumerate(records):
        assert record is not None
        assert record.kind is ErrorKind.HEADER_MISMATCH
        assert record.field is HeaderField.ROWS
        assert record.rank == 1 - rank
        assert {record.expected, record.got} == {8, 4}
    with pytest.raises(MailboxError):
        engines.run(feeds_of(eight))  # closed until the reset
    ThreadGroup.on_devices(2).run(lambda rank: comms[rank].reset(), timeout_s=30)
    check(engines.run(feeds_of(four)), four, "after the reset")


def test_without_a_communicator_the_error_says_what_to_do(trt: Any, plans: Plans) -> None:
    from trtllm_mhc.runtime.build import EngineError
    from trtllm_mhc.runtime.engine import EngineGroup

    group = ThreadGroup.on_devices(2)
    inputs = make_inputs(np.random.default_rng(1), 2, 2, HIDDEN)
    with (
        EngineGroup(plans(2, "fused"), None, group) as engines,
        pytest.raises(EngineError, match="no communicator for world ranks \\[0, 1\\]"),
    ):
        engines.run(feeds_of(inputs))


def test_bad_feeds_are_refused_before_anything_waits(loaded: Any) -> None:
    engines, _ = loaded(2, "fused")
    inputs = make_inputs(np.random.default_rng(1), 2, 2, HIDDEN)
    good = feeds_of(inputs)
    bad: list[tuple[dict[str, Array], str]] = [
        ({name: array for name, array in good[1].items() if name != "post"}, r"missing \['post'\]"),
        ({**good[1], "other": good[1]["x"]}, r"unknown \['other'\]"),
        ({**good[1], "x": good[1]["x"].astype(np.float32)}, "expected bfloat16, got float32"),
        ({**good[1], "x": np.resize(good[1]["x"], (MAXIMUM_ROWS + 1, HIDDEN))}, "expected at most"),
    ]
    for feed, message in bad:
        with pytest.raises(ValueError, match=message):
            engines.run([good[0], feed])
    check(engines.run(good), inputs, "after refusals")


def test_demo_holds_on_a_small_stack(trt: Any, tmp_path: Path) -> None:
    from trtllm_mhc.cli import demo

    options = demo.DemoOptions(tp=2, layers=2, rows=4, inputs=16, sublayers="matmul", seed=1)
    with (tmp_path / "out").open("w") as file:
        console = Console(record=True, width=160, file=file)
        code = demo.run(options, tmp_path / "record.json", console)
    assert code == 0, console.export_text()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["boundaries_bit_equal_to_reference"] == record["boundaries_found"] == 4
    assert record["engine_plugins"]["fused"] == {"MhcBoundary": 4, "MhcCoefficients": 4}
    assert record["ranks_equal"] is True
    assert record["unfused_agreement"] == 1
    assert record["fused_us"] > 0
