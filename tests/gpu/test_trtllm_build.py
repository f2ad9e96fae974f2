# SPDX-License-Identifier: Apache-2.0
"""examples/trtllm_build with engines: TensorRT-LLM's builds, or the contract double's where it is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOUBLE = ROOT / "tests/unit/integrations/tensorrt_llm/double"

pytestmark = pytest.mark.timeout(580)


@pytest.fixture
def environment(trt: Any, request: pytest.FixtureRequest) -> dict[str, str]:
    if importlib.util.find_spec("tensorrt_llm") is not None:
        return dict(os.environ)
    path = os.pathsep.join([str(DOUBLE), os.environ.get("PYTHONPATH", "")])
    library = request.getfixturevalue("all_reduce_library")
    return {**os.environ, "PYTHONPATH": path, "TRTLLM_DOUBLE_PLUGINS": str(library)}


def test_engines_of_trtllm_build_run_and_are_right(environment: dict[str, str], tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, ROOT / "examples/trtllm_build/run.py", "--out", tmp_path, "--json", record]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    found = json.loads(record.read_text())
    assert found["trtllm_engine_plugins"]["MhcBoundary"] == 6
    assert found["plain_engine_plugins"]["MhcAllReduce"] == 6
    # The fused layers have no use for the workspace, and the engine has it all the same.
    assert sorted(found["trtllm_engine_inputs"]) == ["all_reduce_workspace", "embeddings"]
    assert found["ranks_equal"]
    assert found["rms_error_fused"] < 0.02 * found["rms_output"]
