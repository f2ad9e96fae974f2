# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc inspect` on engines: with nothing but the boundary, and with an all-reduce kept alive beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

HIDDEN, TP, EPS = 4096, 2, 1e-20


def build(path: Path, mark: str | None) -> Path:
    """The engine of one fused boundary; the old sum may be marked as an output after the pass."""
    import tensorrt as trt

    from trtllm_mhc.network import plugins
    from trtllm_mhc.runtime.build import RowRange, build_engine
    from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs

    def populate(network: trt.INetworkDefinition) -> None:
        SingleBoundaryJobs(HIDDEN, TP, EPS).fused().populate(network, 0)
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        (old,) = (layer for layer in layers if plugins.is_plugin_layer(layer, plugins.ALL_REDUCE))
        total = old.get_output(0)
        total.name = "old_sum"
        if mark == "output":
            network.mark_output(total)

    path.write_bytes(build_engine(populate, rows=RowRange(1, 8, 8)).data)
    return path


@pytest.mark.parametrize("mark", [None, "output"])
def test_leftover_all_reduce(trt: Any, tmp_path: Path, mark: str | None) -> None:
    from trtllm_mhc.cli.app import app

    path = build(tmp_path / "rank0.engine", mark)
    arguments = ["inspect", str(path), "--require", "1", "--json", "-"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    record = json.loads(result.stdout[result.stdout.index("{") :])
    assert record["boundaries"] == 1
    assert result.exit_code == (1 if mark else 0)
    assert [leftover["kept_by"] for leftover in record["leftovers"]] == ([["old_sum"]] if mark else [])
