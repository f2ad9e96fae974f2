# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc rewrite` and `trtllm-mhc inspect`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trtllm_mhc.cli.app import app
from trtllm_mhc.runtime import inspection

FILES = Path(__file__).parents[1] / "rewrite/onnx_files"

SCRIPT = """
import sys
import tensorrt as trt
from trtllm_mhc.network import CommunicatorSpec
from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights, build_boundary_stack

def load_network():
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(FLAGS)
    config = DeepseekV41Config(hidden_size=4096, num_hidden_layers=2)
    weights = ModelWeights(config, 0)
    build_boundary_stack(network, config, weights, CommunicatorSpec(2), rank=0, sublayers="none")
    return builder, network, weights

def nothing():
    return 1
"""


def invoke(*arguments):
    result = CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)
    return result.exit_code, " ".join(result.output.split())  # however wide the terminal


@pytest.fixture
def model(tmp_path):
    pytest.importorskip("onnx_ir")
    return Path(shutil.copy(FILES / "nemo_layer.onnx", tmp_path / "in.onnx"))


@pytest.fixture
def script(trt, builder, tmp_path):
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    path = tmp_path / "network.py"
    path.write_text(SCRIPT.replace("FLAGS", str(flags)))
    return path


def test_inspect_then_rewrite_then_inspect(trt, model):
    before = model.read_bytes()
    code, text = invoke("inspect", model)
    assert code == 0
    assert "2 of 2 boundaries" in text
    assert model.read_bytes() == before
    out = model.with_name("out.onnx")
    code, text = invoke("rewrite", model, out, "--require", 2, "--json", model.with_name("report.json"))
    assert code == 0
    assert json.loads(model.with_name("report.json").read_text())["boundaries_full"] == 2
    code, text = invoke("inspect", out, "--json", "-")
    record = json.loads(text)
    assert (code, record["kind"], record["boundaries_found"], record["already_fused"]) == (0, "onnx", 0, 2)
    assert invoke("inspect", out, "--require", 2)[0] == 0
    assert invoke("inspect", out, "--require", 3)[0] == 1


def test_rewrite_says_what_is_missing(trt, model):
    out = model.with_name("out.onnx")
    assert invoke("rewrite", model, out, "--require", 3)[0] == 1
    assert out.exists()
    out.unlink()
    code, text = invoke("rewrite", model, out, "--group", "0,x")
    assert code == 2
    assert "--group: expected ranks separated by commas, got '0,x'" in text
    code, text = invoke("rewrite", model.with_name("nothing.onnx"), out)
    assert code == 2
    assert "does not exist" in text
    assert not out.exists()
    code, text = invoke("rewrite", model, out, "--tp-size", 4)
    assert code == 1
    assert "2 ranks" in text


def test_dot_of_a_boundary(trt, model):
    code, text = invoke("inspect", model, "--dot", "mhc_boundary_1")
    assert code == 0
    assert text.startswith("digraph")
    assert "MhcAllReduce" in text
    code, text = invoke("inspect", model, "--dot", "someone")
    assert code == 2
    assert "someone" in text


def test_network_of_a_script(script):
    code, text = invoke("inspect", script)
    assert code == 0
    assert "4 of 4 boundaries" in text
    code, text = invoke("inspect", f"{script}:nothing")
    assert code == 2
    assert "got int" in text
    code, text = invoke("inspect", f"{script}:other")
    assert code == 2
    assert "FILE:FUNCTION" in text


def test_files_of_no_known_kind(trt, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"")
    code, text = invoke("inspect", tmp_path / "a.bin")
    assert code == 2
    assert "'a.bin'" in text


# Engines, by what TensorRT's inspector says of them.


def layer(name, kind, inputs, outputs, plugin=None):
    tensors = [[{"Name": each} for each in names] for names in (inputs, outputs)]
    found = {"Name": name, "LayerType": kind, "Inputs": tensors[0], "Outputs": tensors[1]}
    return found | ({"PluginType": plugin} if plugin else {})


LINEAR = layer("linear", "gemm", ["hidden"], ["partial"])
REFORMAT = layer("copy", "Reformat", ["partial"], ["partial_copied"])
BOUNDARY = layer("mhc_boundary_0", "PluginV3", ["partial_copied", "residual"], ["streams", "input"], "MhcBoundary")
OLD = layer("all_reduce", "PluginV3", ["partial"], ["sum"], "MhcAllReduce")
WIDEN = layer("widen", "cast", ["sum"], ["sum_f32"])
NEXT = layer("last", "PluginV3", ["input"], ["total"], "MhcAllReduce")


def parse_layers(*layers):
    return inspection.parse_layers(json.dumps({"Layers": list(layers)}))


def test_all_reduce_kept_by_a_debug_tensor_is_found():
    layers = parse_layers(LINEAR, REFORMAT, BOUNDARY, OLD, WIDEN, NEXT)
    assert inspection.find_leftovers(layers, {"sum_f32", "total", "streams"}) == [
        inspection.Leftover("all_reduce", "mhc_boundary_0", ("sum_f32",))
    ]


def test_all_reduces_without_a_boundary_of_their_own_are_none():
    assert inspection.find_leftovers(parse_layers(LINEAR, REFORMAT, BOUNDARY, NEXT), {"total"}) == []
    assert inspection.find_leftovers(parse_layers(LINEAR, OLD, WIDEN), {"sum_f32"}) == []


@pytest.mark.parametrize(("require", "code"), [(None, 0), (1, 1)])
def test_engine_with_a_leftover(trt, monkeypatch, tmp_path, require, code):
    from trtllm_mhc.cli import inspect

    layers = parse_layers(LINEAR, BOUNDARY | {"Inputs": [{"Name": "partial"}]}, OLD)
    monkeypatch.setattr(inspect, "_engine_layers", lambda path: (layers, {"sum"}))
    (tmp_path / "rank0.engine").write_bytes(b"")
    arguments = ["inspect", tmp_path / "rank0.engine"] + ([] if require is None else ["--require", require])
    got, text = invoke(*arguments)
    assert got == code
    assert "1 fused boundaries, 1 all-reduces" in text
    assert "kept alive by 'sum'" in text
    record = json.loads(invoke(*arguments, "--json", "-")[1])
    assert record["leftovers"] == [{"name": "all_reduce", "boundary": "mhc_boundary_0", "kept_by": ["sum"]}]


def test_engine_without_a_gpu(trt, monkeypatch, tmp_path):
    from trtllm_mhc.runtime import cuda

    monkeypatch.setattr(cuda, "device_count", lambda: 0)
    (tmp_path / "rank0.engine").write_bytes(b"")
    code, text = invoke("inspect", tmp_path / "rank0.engine")
    assert code == 2
    assert "needs a CUDA device" in text
