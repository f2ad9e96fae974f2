# SPDX-License-Identifier: Apache-2.0
"""What an engine is made of, as TensorRT's inspector tells it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class EngineMismatchError(ValueError):
    """Engines of one group differ in more than weights."""


@dataclass(frozen=True)
class EngineLayer:
    """One layer of an engine.

    Attributes:
        name: TensorRT's name of it.
        kind: TensorRT's layer type.
        tactic: the chosen implementation, as far as TensorRT tells.
        plugin: the plugin's name, for layers that are plugins.
    """

    name: str
    kind: str
    tactic: str
    plugin: str | None


def parse_layers(information: str, plugins: Sequence[str] = ("MhcBoundary", "MhcAllReduce")) -> list[EngineLayer]:
    """Reads the JSON of `EngineInspector.get_engine_information`.

    Args:
        information: of an engine built with detailed profiling verbosity.
        plugins: names of plugins to look for.

    Raises:
        ValueError: the text is not such JSON, or the engine was built without details.
    """
    try:
        layers = json.loads(information)["Layers"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'expected the inspector\'s JSON with a list "Layers": {error}') from None
    if any(not isinstance(layer, dict) for layer in layers):
        raise ValueError("the engine was built without ProfilingVerbosity.DETAILED: its layers have names only")
    return [_parse_layer(layer, plugins) for layer in layers]


def _parse_layer(layer: dict[str, Any], plugins: Sequence[str]) -> EngineLayer:
    kind = str(layer.get("LayerType", ""))
    tactic = ":".join(str(layer[key]) for key in ("TacticName", "TacticValue") if key in layer)
    plugin = None
    if "plugin" in kind.lower():
        # The key that holds a plugin's name differs between TensorRT versions and plugin interfaces.
        values = {value for key, value in layer.items() if isinstance(value, str) and key != "Name"}
        plugin = next((name for name in plugins if name in values), str(layer.get("PluginType", "unknown")))
    return EngineLayer(str(layer.get("Name", "")), kind, tactic, plugin)


def inspect(engine: Any) -> list[EngineLayer]:
    """The layers of an `ICudaEngine`. The first optimisation profile's, if there are several."""
    import tensorrt as trt

    inspector = engine.create_engine_inspector()
    return parse_layers(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def count_plugins(layers: Sequence[EngineLayer]) -> dict[str, int]:
    """How many layers of each plugin there are."""
    return dict(Counter(layer.plugin for layer in layers if layer.plugin is not None))


def require_same_layers(ranks: Sequence[Sequence[EngineLayer]]) -> None:
    """Checks that the engines of all ranks have the same layers with the same tactics.

    Raises:
        EngineMismatchError: names the first difference.
    """
    for rank, layers in enumerate(ranks[1:], start=1):
        if len(layers) != len(ranks[0]):
            raise EngineMismatchError(
                f"the engine of rank 0 has {len(ranks[0])} layers, that of rank {rank} {len(layers)}"
            )
        for index, (first, other) in enumerate(zip(ranks[0], layers, strict=True)):
            if first != other:
                raise EngineMismatchError(f"layer {index} differs: rank 0 has {first}, rank {rank} has {other}")
