# SPDX-License-Identifier: Apache-2.0
"""Polygraphy's command line, in processes of its own, on the TensorRT that is on the path."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.registry_script import RECORD
from trtllm_mhc import plugin

pytest.importorskip("polygraphy")

from trtllm_mhc.integrations.polygraphy import SCRIPTS

CREATORS = {"MhcAllReduce": 1, "MhcBoundary": 1, "MhcCoefficients": 1, "MhcPublishLinear": 1}

# A "network script" that says what the registry has and what was complained about, and then ends the process.
REGISTRY_SCRIPT = (
    """
import json, os
import tensorrt
"""
    + RECORD
    + """
def report():
    counts = {}
    for creator in registry.all_creators:
        if creator.plugin_namespace == "trtllm_mhc":
            counts[creator.name] = counts.get(creator.name, 0) + 1
    registry.error_recorder = None
    print("REPORT", json.dumps({"creators": counts, "errors": recorder.errors}), flush=True)
    os._exit(0)

def load_plugins():
    # What Polygraphy does with the paths of --plugins.
    from polygraphy.backend.trt import LoadPlugins
    LoadPlugins(os.environ["LIBRARIES"].split(":"))()

def load_library():
    assert registry.load_library(os.environ["LIBRARIES"].split(":")[0]) is not None

def plugins_only():
    load_plugins()
    report()

def plugins_then_load_library():
    load_plugins()
    load_library()
    report()

def load_library_then_plugins():
    load_library()
    load_plugins()
    report()

def nothing():
    report()
"""
)


def polygraphy(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "import sys; from polygraphy.tools import main; sys.exit(main())",
        *(os.fspath(argument) for argument in arguments),
    ]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def registry_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("registry") / "registry.py"
    path.write_text(REGISTRY_SCRIPT)
    return path


def registry_report(script: Path, function: str, **environment: str) -> dict[str, Any]:
    done = polygraphy(
        *("inspect", "model", f"{script}:{function}", "--model-type", "trt-network-script"), **environment
    )
    found = re.search(r"^REPORT (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    assert "[E]" not in done.stdout + done.stderr
    report: dict[str, Any] = json.loads(found[1])
    return report


@pytest.mark.parametrize("order", ["plugins_only", "plugins_then_load_library", "load_library_then_plugins"])
def test_plugins_and_load_library(trt: Any, registry_script: Path, order: str) -> None:
    report = registry_report(registry_script, order, LIBRARIES=os.fspath(plugin.library_path()))
    assert report == {"creators": CREATORS, "errors": []}


def test_plugins_with_a_copy(trt: Any, registry_script: Path, tmp_path: Path) -> None:
    library = plugin.library_path()
    copy = shutil.copy(library, tmp_path)
    report = registry_report(registry_script, "plugins_then_load_library", LIBRARIES=f"{library}:{copy}")
    assert report == {"creators": CREATORS, "errors": []}


def test_preloaded(trt: Any, registry_script: Path) -> None:
    report = registry_report(registry_script, "nothing", LD_PRELOAD=os.fspath(plugin.library_path()))
    assert report == {"creators": CREATORS, "errors": []}


def test_without_the_library_there_are_no_creators(trt: Any, registry_script: Path) -> None:
    """The cases above can fail."""
    assert registry_report(registry_script, "nothing") == {"creators": {}, "errors": []}


def test_preloaded_where_polygraphy_loads_no_tensorrt() -> None:
    done = polygraphy("--version", LD_PRELOAD=os.fspath(plugin.library_path()))
    assert (done.returncode, done.stderr) == (0, "")
    assert "Polygraphy" in done.stdout


@pytest.mark.parametrize("tensorrt", ["no TensorRT", "TensorRT before", "TensorRT after"])
def test_get_creators_by_hand(trt: Any, tensorrt: str) -> None:
    """As trtexec's way to a creator begins: open the library, look up getCreators, call it."""
    look = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.getCreators.restype = ctypes.POINTER(ctypes.c_void_p)
count = ctypes.c_int32()
first = library.getCreators(ctypes.byref(count))
again = library.getCreators(ctypes.byref(count))
assert count.value == 4 and all(first[i] and first[i] == again[i] for i in range(4)), count
"""
    names = """
found = [c.name for c in tensorrt.get_plugin_registry().all_creators if c.plugin_namespace == "trtllm_mhc"]
assert sorted(found) == ["MhcAllReduce", "MhcBoundary", "MhcCoefficients", "MhcPublishLinear"], found
"""
    script = {
        "no TensorRT": look + "assert 'tensorrt' not in sys.modules",
        "TensorRT before": "import tensorrt\n" + look + names,
        "TensorRT after": look + "import tensorrt\n" + names,
    }[tensorrt]
    command = [sys.executable, "-c", script, os.fspath(plugin.library_path())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- the scripts ----------------------------------------------------------------------------------------------------


def inspect_stack(*post: str, function: str = "load_stack", **settings: str) -> str:
    variables = {"MHC_STACK_LAYERS": "1", "MHC_STACK_TP": "2", "MHC_STACK_SUBLAYERS": "none", **settings}
    scripts = [f"{SCRIPTS}:{name}" for name in post]
    done = polygraphy(
        *("inspect", "model", f"{SCRIPTS}:{function}", "--model-type", "trt-network-script", "--show", "layers"),
        *("--plugins", plugin.library_path()),
        *(["--trt-network-postprocess-script", *scripts] if scripts else []),
        **variables,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_network_script(builder: Any) -> None:
    text = inspect_stack(MHC_STACK_IO="bfloat16")
    assert "{embeddings [dtype=bfloat16, shape=(-1, 5120)]}" in text
    assert "{hidden_states [dtype=bfloat16, shape=(-1, 5120)]}" in text
    assert text.count("LayerType.PLUGIN_V3") == 4  # MhcAllReduce and MhcCoefficients
    native = inspect_stack(MHC_STACK_COEFFICIENTS="native")
    assert native.count("LayerType.PLUGIN_V3") == 2  # MhcAllReduce


def test_network_script_with_the_pass_and_an_fp32_edge(builder: Any) -> None:
    text = inspect_stack("fuse", MHC_STACK_IO="float32")
    assert "2 of 2 boundaries fused (1 full, 1 residual-only)" in text
    assert "{embeddings [dtype=float32, shape=(-1, 5120)]}" in text
    assert "{hidden_states [dtype=float32, shape=(-1, 5120)]}" in text
    for name in ("mhc_boundary_0/residual_out", "mhc_boundary_0/layer_input", "mhc_boundary_1/residual_out"):
        assert f"{name} [dtype=bfloat16" in text


def test_the_edge_after_the_pass(builder: Any) -> None:
    text = inspect_stack("fuse", "float32_io", MHC_STACK_IO="bfloat16")
    assert "{embeddings [dtype=float32, shape=(-1, 5120)]}" in text
    assert "2 of 2 boundaries fused" in text


def test_names_that_polygraphy_looks_for(builder: Any) -> None:
    done = polygraphy(
        *("inspect", "model", SCRIPTS, "--model-type", "trt-network-script", "--trt-npps", SCRIPTS),
        MHC_STACK_LAYERS="1",
        MHC_STACK_SUBLAYERS="none",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 boundaries fused" in done.stdout


def test_tensorrt_s_all_reduce(trt: Any, builder: Any) -> None:
    if not hasattr(trt.INetworkDefinition, "add_dist_collective"):
        pytest.skip(f"TensorRT {trt.__version__} has no IDistCollectiveLayer")
    text = inspect_stack("fuse", MHC_STACK_ALL_REDUCE="dist_collective")
    assert text.count("LayerType.DIST_COLLECTIVE") == 2  # they stay in the definition, unused
    assert "2 of 2 boundaries fused" in text


def test_plugins_option_for_an_onnx_model(builder: Any, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    bf16 = onnx.TensorProto.BFLOAT16
    x, total = (onnx.helper.make_tensor_value_info(name, bf16, ["M", 5120]) for name in ("x", "sum"))
    node = onnx.helper.make_node("MhcAllReduce", ["x"], ["sum"], domain="trtllm_mhc", tp_size=2)
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("trtllm_mhc", 1)]
    graph = onnx.helper.make_graph([node], "g", [x], [total])
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "model.onnx")
    command = [
        "inspect",
        "model",
        tmp_path / "model.onnx",
        "--convert-to",
        "trt",
        "--strongly-typed",
        "--show",
        "layers",
    ]
    without = polygraphy(*command)
    assert without.returncode != 0
    done = polygraphy(
        *command, "--plugins", plugin.library_path(), "--trt-network-postprocess-script", f"{SCRIPTS}:float32_io"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "{sum [dtype=float32, shape=(-1, 5120)]}" in done.stdout
    assert "[Op: LayerType.PLUGIN_V3]" in done.stdout


def test_a_bad_setting_is_named(builder: Any) -> None:
    done = polygraphy(
        *("inspect", "model", SCRIPTS, "--model-type", "trt-network-script"), MHC_STACK_TP="3", MHC_STACK_LAYERS="1"
    )
    assert done.returncode != 0
    assert "MHC_STACK_TP: expected 1, 2, 4 or 8, got 3" in done.stdout + done.stderr


def test_a_pass_that_fuses_nothing_fails(builder: Any, tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text(
        "import tensorrt as trt\n"
        "from polygraphy.backend.trt import create_network\n"
        "def load_network():\n"
        "    builder, network = create_network(strongly_typed=not trt.__version__.startswith('11'))\n"
        "    x = network.add_input('x', trt.float32, (1, 2))\n"
        "    network.mark_output(network.add_identity(x).get_output(0))\n"
        "    return builder, network\n"
    )
    done = polygraphy("inspect", "model", script, "--model-type", "trt-network-script", "--trt-npps", SCRIPTS)
    assert done.returncode != 0
    assert "the pass fused no boundary: 0 of 0" in done.stdout + done.stderr


def test_data_script_reaches_a_run(builder: Any, tmp_path: Path) -> None:
    """`polygraphy run` as far as no GPU is needed: the script that it would execute takes all of ours."""
    generated = tmp_path / "run.py"
    done = polygraphy(
        *("run", f"{SCRIPTS}:load_stack", "--model-type", "trt-network-script", "--trt"),
        *("--plugins", plugin.library_path(), "--trt-network-postprocess-script", f"{SCRIPTS}:fuse"),
        *("--data-loader-script", SCRIPTS, "--gen", generated),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = generated.read_text()
    assert f"mod.import_from_script({str(SCRIPTS)!r}, name='load_data')" in text
    loader = (
        "from polygraphy import mod\n"
        f"inputs = list(mod.import_from_script({str(SCRIPTS)!r}, name='load_data')())\n"
        "print([(sorted(feed), feed['embeddings'].shape, str(feed['embeddings'].dtype)) for feed in inputs])\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", loader],
        env={**os.environ, "MHC_STACK_INPUTS": "2", "MHC_STACK_ROWS": "3", "MHC_STACK_IO": "float32"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout.strip() == str([(["embeddings"], (3, 5120), "float32")] * 2)
