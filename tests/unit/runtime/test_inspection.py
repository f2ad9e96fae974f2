# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest

from trtllm_mhc.runtime import inspection


def information(*layers: object) -> str:
    return json.dumps({"Layers": list(layers), "Bindings": []})


GEMM = {"Name": "linear", "LayerType": "gemm", "TacticName": "sm90_xmma", "TacticValue": "0x12"}
BOUNDARY = {"Name": "mhc_boundary_0", "LayerType": "PluginV3", "PluginType": "MhcBoundary", "TacticValue": "0x0"}
# Other versions of TensorRT put the name under another key.
OTHER_KEY = {"Name": "MhcAllReduce of layer 3", "LayerType": "PluginV3", "CreatorName": "MhcAllReduce"}
FOREIGN = {"Name": "someone", "LayerType": "PluginV2DynamicExt", "PluginType": "GatherND"}


def test_layers_are_read() -> None:
    layers = inspection.parse_layers(information(GEMM, BOUNDARY, OTHER_KEY, FOREIGN))
    assert layers[0] == inspection.EngineLayer("linear", "gemm", "sm90_xmma:0x12", None)
    assert inspection.count_plugins(layers) == {"MhcBoundary": 1, "MhcAllReduce": 1, "GatherND": 1}


def test_a_plugin_s_name_does_not_come_from_the_layer_s_name() -> None:
    layer = {"Name": "MhcBoundary", "LayerType": "PluginV3"}
    assert inspection.parse_layers(information(layer))[0].plugin == "unknown"


def test_engines_without_details_are_refused() -> None:
    with pytest.raises(ValueError, match="DETAILED"):
        inspection.parse_layers(information("linear"))
    with pytest.raises(ValueError, match="Layers"):
        inspection.parse_layers("not JSON")


def test_ranks_must_have_the_same_layers_and_tactics() -> None:
    layers = inspection.parse_layers(information(GEMM, BOUNDARY))
    inspection.require_same_layers([layers, list(layers)])
    with pytest.raises(inspection.EngineMismatchError, match="rank 0 has 2 layers, that of rank 1 1"):
        inspection.require_same_layers([layers, layers[:1]])
    other = inspection.parse_layers(information({**GEMM, "TacticValue": "0x13"}, BOUNDARY))
    with pytest.raises(inspection.EngineMismatchError, match=r"layer 0 differs.*rank 2"):
        inspection.require_same_layers([layers, layers, other])
