# SPDX-License-Identifier: Apache-2.0
"""Writes what a run of the GPU tests found to `$TRTLLM_MHC_RESULTS/gpu_tests_<device>.json`, where that is set.

`GIT_COMMIT` names the commit where there is no git (the tests often run on a copy of the tree).
"""

from __future__ import annotations

import collections
import datetime
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

_outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
_failures: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.split("::")[0]
    if report.when == "call" or report.outcome != "passed":
        _outcomes[file][report.outcome] += 1
    if report.failed:
        _failures.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    folder = os.environ.get("TRTLLM_MHC_RESULTS")
    if not folder or not _outcomes:
        return
    from trtllm_mhc.cli.findings import environment
    from trtllm_mhc.runtime import cuda

    device = cuda.device_info(0).name
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "devices": cuda.device_count(),
        **environment(_tensorrt_version(), os.environ.get("GIT_COMMIT")),
        "files": {file: dict(outcomes) for file, outcomes in sorted(_outcomes.items())},
        "failures": _failures,
    }
    path = Path(folder) / f"gpu_tests_{device.split()[-1].lower()}_x{result['devices']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def _tensorrt_version() -> str | None:
    if importlib.util.find_spec("tensorrt") is None:
        return None
    import tensorrt

    return str(tensorrt.__version__)
