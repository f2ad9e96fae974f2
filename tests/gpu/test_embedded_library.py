# SPDX-License-Identifier: Apache-2.0
"""An engine that carries the plugin library, in a process that loads the library only after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def embedded(trt: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedded") / "with_library.engine"
    run_script("build", path)
    return path


def run_script(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.embedded_library", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engine_that_brings_the_library_in_first(embedded: Path) -> None:
    """The package then uses the engine's copy (the other order: test_contexts.py)."""
    report = json.loads(run_script("run", embedded).splitlines()[-1])
    assert report["copies"] >= 2  # otherwise TensorRT has unpacked none, and nothing was tested
