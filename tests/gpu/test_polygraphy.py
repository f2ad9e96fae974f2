# SPDX-License-Identifier: Apache-2.0
"""Polygraphy with real engines: `trtllm-mhc verify`, its own runners, its command line; writes the record of it all.

The record goes to tests/gpu/results/polygraphy_<device>.json, or to the folder that TRTLLM_MHC_RESULTS names.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.gpu.loopback import make_inputs
from tests.gpu.test_engines import feeds_of
from tests.unit.integrations.polygraphy.planted_errors import PLANTED, a_right_stack, found
from trtllm_mhc import plugin, reference
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.threads import ThreadGroup

pytest.importorskip("polygraphy")

from trtllm_mhc.cli.findings import Findings
from trtllm_mhc.cli.steps import Steps
from trtllm_mhc.cli.verify import EXIT_DIFFERS, EXIT_HOLDS, VerifyOptions, run, verify_stack
from trtllm_mhc.integrations.polygraphy import SCRIPTS

pytestmark = pytest.mark.timeout(900)  # several stacks are built

TP, LAYERS, ROWS = 2, 4, 8
RESULTS = Path(os.environ.get("TRTLLM_MHC_RESULTS", Path(__file__).parent / "results"))
# What the tests found, in the order of this file; the last one writes it.
RECORD: dict[str, Any] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("polygraphy")


def verify(options: VerifyOptions, folder: Path) -> tuple[int, dict[str, Any], str]:
    console = Console(record=True, width=200, file=io.StringIO())
    path = folder / "record.json"
    path.unlink(missing_ok=True)
    code = run(options, path, console)
    return code, json.loads(path.read_text()) if path.exists() else {}, console.export_text()


def test_verify_holds(trt: Any, folder: Path) -> None:
    options = VerifyOptions(tp=TP, layers=LAYERS, rows=ROWS, save_engines=folder, timing_cache=folder / "timing.cache")
    code, record, text = verify(options, folder)
    assert code == EXIT_HOLDS, text
    assert record["outputs"] == record["polygraphy_passed"] == 16 * TP
    assert record["boundaries_bit_equal_to_reference"] == record["boundaries_found"] == 2 * LAYERS
    assert record["ranks_equal"] is True
    assert record["first_deviation"] is None
    RECORD.update(record)


def test_verify_takes_engines(trt: Any, folder: Path) -> None:
    """The ones that the test before has saved; then with rank 0's engine in the place of rank 1's."""
    options = VerifyOptions(tp=TP, rows=ROWS, unfused=folder / "unfused", fused=folder / "fused")
    code, record, text = verify(options, folder)
    assert code == EXIT_HOLDS, text
    assert record["outputs"] == 16 * TP
    swapped = folder / "swapped"
    shutil.copytree(folder / "fused", swapped)
    shutil.copy(folder / "fused" / "rank0.engine", swapped / "rank1.engine")
    code, _, text = verify(VerifyOptions(tp=TP, rows=ROWS, unfused=folder / "unfused", fused=swapped), folder)
    assert code == EXIT_DIFFERS, text
    assert re.search(r"Polygraphy: hidden_states of rank 1, input \d+: differs most in row \d", text), text


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_found_and_named(trt: Any, folder: Path, name: str) -> None:
    findings = Findings()
    options = VerifyOptions(rows=4, inputs=2, sublayers="none", timing_cache=folder / "planted.cache")
    verify_stack(PLANTED[name](a_right_stack(tp=TP)), options, findings, Steps(Console(file=io.StringIO())))
    assert found(name, findings.failures), findings.failures
    RECORD.setdefault("planted_errors", {})[name] = findings.failures[:8]


def test_nothing_is_found_where_nothing_is_planted(trt: Any, folder: Path) -> None:
    findings = Findings()
    options = VerifyOptions(rows=4, inputs=4, sublayers="none", timing_cache=folder / "planted.cache")
    verify_stack(a_right_stack(tp=TP), options, findings, Steps(Console(file=io.StringIO())))
    assert findings.failures == []


def test_polygraphy_s_own_runners_in_lockstep(trt: Any) -> None:
    """A `TrtRunner` for each rank gives the reference's bits, whatever M does from pass to pass."""
    from trtllm_mhc.integrations.polygraphy.runners import TrtRanks
    from trtllm_mhc.runtime.build import RowRange, build_engine
    from trtllm_mhc.runtime.engine import communicators
    from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs

    job = SingleBoundaryJobs(5120, TP, float(np.float32(1e-20))).fused()
    plan = build_engine(lambda network: job.populate(network, 0), rows=RowRange(1, 8, 64))
    group = ThreadGroup.on_devices(TP)
    rng = np.random.default_rng(5)
    with (
        communicators(group, "TrtRunner", hidden_size=5120, timeout_s=20.0) as comms,
        TrtRanks([plan] * TP, comms, group) as ranks,
    ):
        for rows in (8, 1, 64, 3, 8):
            inputs = make_inputs(rng, TP, rows, 5120)
            residual_out, layer_input = inputs.expected()
            assert layer_input is not None
            for rank, out in enumerate(ranks.run(feeds_of(inputs))):
                what = f"M = {rows}, rank {rank}"
                reference.assert_bits_equal(out["residual_out"], residual_out, what)
                reference.assert_bits_equal(out["layer_input"], layer_input, what)
        with pytest.raises(ValueError, match="expected bfloat16, got float32"):
            ranks.run([{**feed, "x": feed["x"].astype(np.float32)} for feed in feeds_of(inputs)])


# ---- the command line: one rank --------------------------------------------------------------------------------------


def polygraphy_run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    shapes = [f"--trt-{which}-shapes=embeddings:[{rows},5120]" for which, rows in (("min", 1), ("opt", 8), ("max", 8))]
    command = [
        *(sys.executable, "-c", "import sys; from polygraphy.tools import main; sys.exit(main())", "run"),
        *(os.fspath(argument) for argument in arguments),
        *("--trt", "--plugins", os.fspath(plugin.library_path()), "--data-loader-script", os.fspath(SCRIPTS)),
        *([] if "engine" in arguments else shapes),
    ]
    settings = {"MHC_STACK_LAYERS": "2", "MHC_STACK_IO": "float32", "MHC_STACK_INPUTS": "4", **environment}
    return subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.fixture(scope="module")
def network() -> tuple[str, str, str]:
    return (f"{SCRIPTS}:load_stack", "--model-type", "trt-network-script")


@pytest.fixture(scope="module")
def saved(trt: Any, folder: Path, network: tuple[str, str, str]) -> Path:
    """The unfused form's outputs, by Polygraphy's command line."""
    outputs = folder / "unfused.json"
    done = polygraphy_run(*network, "--save-outputs", outputs)
    assert done.returncode == 0, done.stdout + done.stderr
    return outputs


FUSE = ("--trt-network-postprocess-script", f"{SCRIPTS}:fuse")
TOLERANCE = ("--atol", "0.1", "--rtol", "0")


def test_command_line_compares_fused_with_unfused(saved: Path, network: tuple[str, str, str], folder: Path) -> None:
    engine = folder / "one_rank.engine"
    done = polygraphy_run(*network, *FUSE, "--load-outputs", saved, *TOLERANCE, "--save-engine", engine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 boundaries fused" in done.stdout
    assert "PASSED" in done.stdout
    again = polygraphy_run(engine, "--model-type", "engine", "--load-outputs", saved, *TOLERANCE)
    assert again.returncode == 0, again.stdout + again.stderr


def test_command_line_finds_other_weights(saved: Path, folder: Path) -> None:
    script = folder / "other_weights.py"
    script.write_text(
        "import os\n"
        "from trtllm_mhc.integrations.polygraphy.command_line import load_stack\n"
        "def load_network():\n"
        "    os.environ['MHC_STACK_SEED'] = '1'\n"
        "    try:\n"
        "        return load_stack()\n"
        "    finally:\n"
        "        del os.environ['MHC_STACK_SEED']\n"
    )
    done = polygraphy_run(script, "--model-type", "trt-network-script", *FUSE, "--load-outputs", saved, *TOLERANCE)
    assert done.returncode != 0
    assert "FAILED" in done.stdout + done.stderr


def test_command_line_without_a_group_says_so(network: tuple[str, str, str]) -> None:
    """Two ranks, of which this is one: it must end, with an error."""
    done = polygraphy_run(*network, *FUSE, MHC_STACK_TP="2", MHC_STACK_RANK="1", MHC_STACK_LAYERS="1")
    assert done.returncode != 0
    assert "execute_async_v3" in done.stdout + done.stderr


def test_record(trt: Any) -> None:
    """Last: everything above has left its part."""
    record = {**RECORD, "planted_errors_found": len(RECORD["planted_errors"])}
    assert record["planted_errors_found"] == len(PLANTED)
    device = cuda.device_info(0).name
    label = re.sub(r"[^a-z0-9]+", "_", device.lower().removeprefix("nvidia ")).strip("_")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"polygraphy_{label}.json").write_text(json.dumps(record, indent=2) + "\n")
