# SPDX-License-Identifier: Apache-2.0
"""examples/polygraphy_compare, as far as it goes without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("polygraphy")

ROOT = Path(__file__).parents[4]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="with a GPU the example builds engines")
def test_example_runs_with_one_command(builder: Any, trt: Any, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [ROOT / "examples" / "polygraphy_compare" / "run.sh", tmp_path / "out"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert (record["tensorrt"], record["polygraphy_passed"]) == (trt.__version__, record["outputs"])
    unfused, fused = ((tmp_path / "out" / f"{form}.txt").read_text() for form in ("unfused", "fused"))
    assert "mhc_boundary_0/residual_out" not in unfused
    assert "mhc_boundary_0/residual_out" in fused
