# SPDX-License-Identifier: Apache-2.0
"""What an engine is made of, as TensorRT's inspector tells it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
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
        inputs: names of its input tensors.
        outputs: names of its output tensors.
    """

    name: str
    kind: str
    tactic: str
    plugin: str | None
    inputs: tuple[str, ...] = field(default=(), compare=False)
    outputs: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_all_reduce(self) -> bool:
        """Whether it sums over ranks, and does nothing else: this project's, TensorRT-LLM's or TensorRT's own layer."""
        return self.plugin in ("MhcAllReduce", "AllReduce") or "collective" in self.kind.lower()


@dataclass(frozen=True)
class Leftover:
    """An all-reduce that runs beside the boundary that replaced it.

    Attributes:
        name: the all-reduce's name.
        boundary: the name of the boundary that sums the same tensor.
        kept_by: the engine's outputs and debug tensors that are computed from it.
    """

    name: str
    boundary: str
    kept_by: tuple[str, ...]


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
    inputs, outputs = (_tensor_names(layer.get(key)) for key in ("Inputs", "Outputs"))
    return EngineLayer(str(layer.get("Name", "")), kind, tactic, plugin, inputs, outputs)


def _tensor_names(tensors: Any) -> tuple[str, ...]:
    listed = tensors if isinstance(tensors, list) else []
    return tuple(str(tensor["Name"]) for tensor in listed if isinstance(tensor, dict) and "Name" in tensor)


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


def find_leftovers(layers: Sequence[EngineLayer], kept: Collection[str]) -> list[Leftover]:
    """The all-reduces whose summand a boundary sums as well.

    The rewrite pass leaves none. One that is marked as an output or debug tensor after the pass, or whose sum is, stays
    in the engine, and the ranks exchange the same tensor twice.

    Args:
        layers: an engine's, of `parse_layers`.
        kept: the names of the engine's outputs and debug tensors.
    """
    producer = {name: layer for layer in layers for name in layer.outputs}
    boundaries = {
        _origin(layer.inputs[0], producer): layer.name
        for layer in layers
        if layer.plugin == "MhcBoundary" and layer.inputs
    }
    found = []
    for layer in layers:
        if layer.is_all_reduce and layer.inputs:
            boundary = boundaries.get(_origin(layer.inputs[0], producer))
            if boundary is not None:
                found.append(Leftover(layer.name, boundary, _reached(layer, layers, kept)))
    return found


def _origin(name: str, producer: dict[str, EngineLayer]) -> str:
    """The tensor under the copies that TensorRT makes to change a format."""
    seen = set()
    while name in producer and producer[name].kind in ("Reformat", "NoOp") and name not in seen:
        seen.add(name)
        if len(producer[name].inputs) != 1:
            break
        name = producer[name].inputs[0]
    return name


def _reached(start: EngineLayer, layers: Sequence[EngineLayer], kept: Collection[str]) -> tuple[str, ...]:
    """Those of the tensors ``kept`` that are computed from the outputs of ``start``, not through a boundary."""
    consumers: dict[str, list[EngineLayer]] = {}
    for layer in layers:
        for name in layer.inputs:
            consumers.setdefault(name, []).append(layer)
    reached = dict.fromkeys(start.outputs)
    stack = list(start.outputs)
    while stack:
        for layer in consumers.get(stack.pop(), []):
            for name in layer.outputs if layer.plugin != "MhcBoundary" else ():
                if name not in reached:
                    reached[name] = None
                    stack.append(name)
    return tuple(name for name in reached if name in kept)
