# SPDX-License-Identifier: Apache-2.0
"""The runner of a whole group, Polygraphy's comparison over it, and fp32 at a network's edge."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("polygraphy")

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS, WIDTH = 3, 5


class Adder:
    """A group whose rank r gives x + r, and what it was fed."""

    def __init__(self, offset: float = 0.0, wrong: tuple[int, int] | None = None) -> None:
        self.offset = offset
        self.wrong = wrong
        self.fed: list[Sequence[Mapping[str, Array]]] = []
        self.open = 0

    @contextlib.contextmanager
    def make(self) -> Iterator[Adder]:
        self.open += 1
        yield self
        self.open -= 1

    def run(self, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
        assert self.open == 1
        self.fed.append(feeds)
        outputs = []
        for rank, feed in enumerate(feeds):
            y = (feed["x"].astype(np.float32) + rank + self.offset).astype(BF16)
            if self.wrong is not None and self.wrong[0] == rank:
                y[self.wrong[1]] += BF16.type(1)
            outputs.append({"y": y, "n": np.array([rank + 1], np.int32)})
        return outputs


def group_runner(name: str, group: Adder, **options: Any) -> Any:
    from trtllm_mhc.integrations.polygraphy.runners import GroupRunner, Input

    shape = (-1, WIDTH)
    return GroupRunner(name, group.make, {"x": Input(BF16, shape, shape)}, 2, **options)


def feeds(count: int = 2) -> list[dict[str, Array]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.integers(-9, 9, (ROWS, WIDTH)).astype(np.float32)} for _ in range(count)]


def compared(first: Adder, second: Adder) -> Any:
    from trtllm_mhc.integrations.polygraphy.comparison import Tolerance, compare, run_lockstep

    results = run_lockstep([group_runner("first", first), group_runner("second", second)], feeds())
    return compare(results, Tolerance(atol=0.25, rtol=0.0)), results


def test_group_speaks_fp32_outside_and_bf16_inside(trt: Any) -> None:
    from trtllm_mhc.integrations.polygraphy.comparison import outputs_of

    group = Adder()
    _, results = compared(group, Adder())
    assert (group.open, len(group.fed)) == (0, 2)
    assert all(feed["x"].dtype == BF16 for pair in group.fed for feed in pair)
    outputs = outputs_of(results, "first", 2)
    for given, ranks in zip(feeds(), outputs, strict=True):
        for rank, found in enumerate(ranks):
            assert found["y"].dtype == np.float32
            np.testing.assert_array_equal(found["y"], given["x"] + rank)
            np.testing.assert_array_equal(found["n"], [rank + 1])


def test_equal_groups_pass(trt: Any) -> None:
    comparisons, _ = compared(Adder(), Adder())
    assert len(comparisons) == 2 * 2 * 2  # inputs, ranks, outputs
    assert all(comparison.passed for comparison in comparisons)
    assert max(comparison.max_absdiff for comparison in comparisons) == 0


def test_one_wrong_row_on_one_rank_is_named(trt: Any) -> None:
    comparisons, _ = compared(Adder(wrong=(1, 2)), Adder())
    failed = [comparison for comparison in comparisons if not comparison.passed]
    assert [(c.output, c.rank, c.iteration, c.row) for c in failed] == [("y", 1, 0, 2), ("y", 1, 1, 2)]
    assert failed[0].max_absdiff == 1
    assert str(failed[0]).startswith("y of rank 1, input 0: differs most in row 2, by 1 ")


def test_inputs_of_each_rank(trt: Any) -> None:
    group = Adder()
    runner = group_runner("one", group, per_rank=["x"])
    x = feeds(1)[0]["x"]
    with runner:
        outputs = runner.infer({"x@rank0": x, "x@rank1": 2 * x})
    np.testing.assert_array_equal(outputs["y@rank0"], x)
    np.testing.assert_array_equal(outputs["y@rank1"], 2 * x + 1)


def test_a_failed_activation_leaves_nothing_open(trt: Any) -> None:
    from trtllm_mhc.integrations.polygraphy.runners import GroupRunner

    def fail() -> Any:
        raise RuntimeError("no engine")

    runner = GroupRunner("broken", fail, {}, 1)
    with pytest.raises(RuntimeError, match="no engine"):
        runner.activate()
    assert not runner.is_active


def test_wrong_shape_is_refused_by_polygraphy(trt: Any) -> None:
    from polygraphy.exception import PolygraphyException

    with group_runner("one", Adder()) as runner, pytest.raises(PolygraphyException, match="incompatible shape"):
        runner.infer({"x": np.zeros((2, WIDTH + 1), np.float32)})


def test_output_names(trt: Any) -> None:
    from trtllm_mhc.integrations.polygraphy.runners import rank_output, split_output

    assert rank_output("y", 3) == "y@rank3"
    assert split_output("a@rank1@rank12") == ("a@rank1", 12)


# ---- fp32 at the edge ------------------------------------------------------------------------------------------------


def test_widened_edge_computes_the_same(trt: Any, builder: Any) -> None:
    from trtllm_mhc.integrations.polygraphy.network import float32_io
    from trtllm_mhc.network import CommunicatorSpec, build_single_boundary
    from trtllm_mhc.reference.interpreter import evaluate
    from trtllm_mhc.runtime.build import make_network

    hidden, tp = 4096, 2
    rng = np.random.default_rng(2)

    def bf16(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(BF16)

    shared = {
        "residual": bf16(ROWS, 4, hidden),
        "post": rng.random((ROWS, 4), np.float32),
        "comb": rng.random((ROWS, 4, 4), np.float32),
        "pre": rng.random((ROWS, 4), np.float32),
        "gamma": bf16(hidden),
    }
    given = [{**shared, "x": bf16(ROWS, hidden)} for _ in range(tp)]
    narrow, wide = make_network(builder), make_network(builder)
    for network in (narrow, wide):
        build_single_boundary(network, CommunicatorSpec(tp), hidden=hidden, norm_eps=1e-6)
    float32_io(wide)
    inputs = [wide.get_input(index) for index in range(wide.num_inputs)]
    outputs = [wide.get_output(index) for index in range(wide.num_outputs)]
    assert {tensor.name for tensor in inputs} == set(given[0])
    assert {tensor.dtype for tensor in [*inputs, *outputs]} == {trt.float32}
    expected = evaluate([narrow] * tp, given)
    widened = [{name: array.astype(np.float32) for name, array in feed.items()} for feed in given]
    for ours, theirs in zip(evaluate([wide] * tp, widened), expected, strict=True):
        assert set(ours) == set(theirs) == {"residual_out", "layer_input"}
        for name in ours:
            assert ours[name].dtype == np.float32
            np.testing.assert_array_equal(ours[name], theirs[name].astype(np.float32))


def test_settings_come_from_the_environment() -> None:
    from trtllm_mhc.integrations.polygraphy.settings import Settings

    given = {"MHC_STACK_TP": "4", "MHC_STACK_RANK": "3", "MHC_STACK_IO": "float32", "OTHER": "x"}
    assert Settings.read(given) == Settings(tp=4, rank=3, io="float32")
    for variable, value, message in [
        ("MHC_STACK_LAYER", "1", "nothing reads it"),
        ("MHC_STACK_LAYERS", "many", "expected a whole number, got 'many'"),
        ("MHC_STACK_ROWS", "0", "expected 1 or more, got 0"),
        ("MHC_STACK_RANK", "1", "expected 0 to 0, got 1"),
        ("MHC_STACK_IO", "fp8", r"expected one of \['bfloat16', 'float32'\], got 'fp8'"),
    ]:
        with pytest.raises(ValueError, match=f"{variable}: {message}"):
            Settings.read({variable: value})
