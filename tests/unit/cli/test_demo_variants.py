# SPDX-License-Identifier: Apache-2.0
"""`demo --variant` without a GPU: every variant's two forms in the interpreter, and that a wrong one is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from trtllm_mhc.cli import demo_variants
from trtllm_mhc.runtime import cuda

KEYS = {"variant", "tp", "m", "equal", "agrees", "max_ulp", "unfused_us", "fused_us", "mode", "device", "driver"}
KEYS |= {"tensorrt", "commit"}


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, builder: Any) -> None:
    monkeypatch.setattr(cuda, "device_count", lambda: 0)


def run(tmp_path: Path, variants: str, **changes: Any) -> tuple[int, list[dict[str, Any]], str]:
    options: dict[str, Any] = {"tp": 2, "rows": 2, "seed": 3, "commit": "abc"}
    console = Console(record=True, width=160, file=(tmp_path / "out").open("w"))
    path = tmp_path / "results" / "variants.json"
    code = demo_variants.run(demo_variants.Options(variants, **(options | changes)), path, console)
    return code, json.loads(path.read_text()) if path.exists() else [], console.export_text()


def test_all(no_gpu: None, trt: Any, tmp_path: Path) -> None:
    from trtllm_mhc.verification.variants import VARIANTS

    code, records, text = run(tmp_path, "all", tp=8)  # the smallest linear layer
    assert code == 0
    assert [record["variant"] for record in records] == list(VARIANTS)
    for record in records:
        assert set(record) >= KEYS
        assert (record["tp"], record["m"], record["mode"], record["commit"]) == (8, 2, "numpy", "abc")
        # Nothing is claimed of what only an engine can show.
        assert (record["equal"], record["agrees"], record["fused_us"]) == (None, True, None)
    assert "No engine was built" in text
    assert "Every comparison holds" in text


@pytest.mark.parametrize(("variants", "tp"), [("plain,other", 2), ("plain", 3)])
def test_bad_arguments(no_gpu: None, trt: Any, tmp_path: Path, variants: str, tp: int) -> None:
    code, records, text = run(tmp_path, variants, tp=tp)
    assert (code, records) == (1, [])
    assert "expected" in text


@pytest.mark.parametrize(
    ("name", "form", "tensor"),
    [
        ("plain", "fused", "residual_out"),
        ("plain", "fused", "layer_input"),
        ("plain", "unfused", "residual_out"),
        ("residual_only", "unfused", "residual_out"),
        ("finalize", "unfused", "contribution"),
        ("mxfp8", "fused", "mxfp8_scales"),
        ("mxfp8", "fused", "mxfp8_data"),
        ("capture_aux", "fused", "aux"),
        ("coefficients", "fused", "comb_out"),
        ("publish_linear_bf16", "fused", "contribution"),
        ("publish_linear_bf16", "fused", "residual_out"),
    ],
)
def test_a_wrong_element_is_found(trt: Any, builder: Any, name: str, form: str, tensor: str) -> None:
    from trtllm_mhc.verification.backends import NetworkMaker
    from trtllm_mhc.verification.variants import VARIANTS, Size

    maker, variant = NetworkMaker(), VARIANTS[name](Size(8 if "linear" in name else 2, rows=2))
    feeds, size = variant.feeds(1), variant.size
    outputs = {job: maker.runner(getattr(variant, job)(), size.tp_size).run(feeds) for job in ("fused", "unfused")}
    right = variant.compare(feeds, outputs["fused"], outputs["unfused"])
    assert (right.equal, right.agrees, right.details) == (True, True, [])
    array = outputs[form][1][tensor]
    bits = array.reshape(-1).view(np.uint8)
    # The highest byte of the largest element: another exponent. Scales: another byte.
    wide = array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array.astype(np.float64)
    place = int(np.argmax(np.abs(wide)))
    bits[(place + 1) * array.dtype.itemsize - 1] ^= 0x04
    wrong = variant.compare(feeds, outputs["fused"], outputs["unfused"])
    assert (wrong.equal, wrong.agrees) != (True, True)
    assert wrong.details


def test_in_the_command_line(no_gpu: None, trt: Any, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from trtllm_mhc.cli.app import app

    path = tmp_path / "variants.json"
    result = CliRunner().invoke(app, ["demo", "--variant", "residual_only", "--rows", "1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert [record["variant"] for record in json.loads(path.read_text())] == ["residual_only"]


class Interpreted:
    """What `EngineGroup` offers, with the interpreter in its place."""

    def __init__(self, runner: Any, us: float) -> None:
        self.runner, self.us = runner, us
        self.poisoned = self.captured = 0

    def prepare(self, feeds: Any) -> None:
        self.feeds = feeds

    def poison_outputs(self) -> None:
        self.poisoned += 1

    def run_prepared(self) -> Any:
        return self.runner.run(self.feeds)

    def capture(self, passes: int) -> None:
        self.captured += 1

    def replay(self, feeds: Any) -> Any:
        return self.runner.run(feeds)

    def time_replays(self, replays: int, passes: int) -> Any:
        from trtllm_mhc.runtime.engine import Timing

        return Timing(self.us, (self.us,) * replays, passes)


@pytest.mark.parametrize("name", ["residual_only", "coefficients"])
def test_comparison_and_times_of_engines(trt: Any, builder: Any, name: str) -> None:
    """Both forms; or the fused one alone, where TensorRT builds no other."""
    from trtllm_mhc.verification.backends import NetworkMaker
    from trtllm_mhc.verification.variants import VARIANTS, Size

    maker, variant = NetworkMaker(), VARIANTS[name](Size(2, rows=1))
    jobs = [variant.fused(), variant.unfused()][: 2 if variant.unfused_builds else 1]
    engines: list[Any] = [Interpreted(maker.runner(job, 2), us) for job, us in zip(jobs, (3.0, 7.0), strict=False)]
    outcome = demo_variants._compare(variant, engines, 0)
    assert (outcome.equal, outcome.agrees) == (True, True)
    assert [(each.poisoned, each.captured) for each in engines] == [(4, 1)] * len(jobs)
    assert demo_variants._time(engines) == [3.0, 7.0][: len(jobs)]
