# SPDX-License-Identifier: Apache-2.0
"""ONNX nodes of domain trtllm_mhc, as TensorRT's own parser imports them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from trtllm_mhc.plugin_control import take_error

onnx = pytest.importorskip("onnx")

HIDDEN = 5120


def parse(trt: ModuleType, network: Any, op: str, **attributes: Any) -> bool:
    """Parse a model of one node into `network`, whose layers it becomes."""
    bf16, f32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    inputs: dict[str, tuple[int, list[Any]]] = {"x": (bf16, ["M", HIDDEN])}
    outputs: dict[str, tuple[int, list[Any]]] = {"sum": (bf16, ["M", HIDDEN])}
    if op == "MhcBoundary":
        inputs |= {
            "residual": (bf16, ["M", 4, HIDDEN]),
            "post": (f32, ["M", 4]),
            "comb": (f32, ["M", 4, 4]),
            "pre": (f32, ["M", 4]),
            "gamma": (bf16, [HIDDEN]),
        }
        outputs = {"residual_out": (bf16, ["M", 4, HIDDEN]), "layer_input": (bf16, ["M", HIDDEN])}
    node = onnx.helper.make_node(op, list(inputs), list(outputs), domain="trtllm_mhc", **attributes)

    def values(specs: dict[str, tuple[int, list[Any]]]) -> list[Any]:
        return [onnx.helper.make_tensor_value_info(name, *spec) for name, spec in specs.items()]

    graph = onnx.helper.make_graph([node], "g", values(inputs), values(outputs))
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("trtllm_mhc", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.INTERNAL_ERROR))
    return bool(parser.parse(model.SerializeToString()))


def test_boundary_node(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network.plugins import is_plugin_layer, read_fields

    assert parse(trt, network, "MhcBoundary", tp_size=2, norm_eps=1e-20, group=[4, 6], rank=1)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    (layer,) = [layer for layer in layers if is_plugin_layer(layer, "MhcBoundary")]
    fields = read_fields(layer)
    assert fields == fields | {"tp_size": 2, "group": (4, 6), "rank": 1, "norm_eps": float(np.float32(1e-20))}
    assert [tuple(layer.get_output(i).shape) for i in range(2)] == [(-1, 4, HIDDEN), (-1, HIDDEN)]


def test_all_reduce_node(trt: ModuleType, network: Any) -> None:
    from trtllm_mhc.network.plugins import is_plugin_layer, read_fields

    assert parse(trt, network, "MhcAllReduce", tp_size=4, strategy="oneshot")
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    (layer,) = [layer for layer in layers if is_plugin_layer(layer, "MhcAllReduce")]
    assert read_fields(layer) == {"format": 1, "tp_size": 4, "rank": -1, "group": (), "strategy": "oneshot"}


def test_bad_node_says_why(trt: ModuleType, network: Any) -> None:
    assert not parse(trt, network, "MhcBoundary", tp_size=2)
    assert 'MhcBoundary: field "norm_eps" is required' in (take_error(any_thread=True) or "")
