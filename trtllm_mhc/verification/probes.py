# SPDX-License-Identifier: Apache-2.0
"""Making a fused network show what goes into and comes out of each of its boundaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import tensorrt as trt

from trtllm_mhc import reference
from trtllm_mhc.network import plugins
from trtllm_mhc.network.layers import constant_array, layer_type
from trtllm_mhc.rewrite.report import Report

Array = npt.NDArray[Any]

_FINALIZE_ROLES = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx", "shared_output")
_INPUT_ROLES = ("residual", "post", "comb", "pre", "gamma")
_OUTPUT_ROLES = ("residual_out", "layer_input")


@dataclass(frozen=True)
class BoundaryProbe:
    """One `MhcBoundary` layer whose tensors can be read.

    Attributes:
        index: position among the network's boundaries, in network order.
        layer: the layer's name.
        norm_eps: epsilon of the norm; None for a residual-only boundary.
        tensors: role ("x" or the names of `FinalizeInputs`, "residual", "post", "comb", "pre", "gamma", "residual_out",
            "layer_input") to the name of the network output or input that holds it.
        constants: role to value, for inputs that are constants.
    """

    index: int
    layer: str
    norm_eps: float | None
    tensors: dict[str, str] = field(repr=False)
    constants: dict[str, Array] = field(repr=False)

    @property
    def residual_only(self) -> bool:
        """Whether the boundary ends with the streams."""
        return self.norm_eps is None

    def read(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Role to array, from one rank's inputs and outputs by name; what a boundary finalizes is there as "x" too."""
        found = self.constants | {role: values[name] for role, name in self.tensors.items()}
        if all(role in found for role in _FINALIZE_ROLES):
            found["x"] = reference.finalize(*(found[role] for role in _FINALIZE_ROLES))
        return found


def probe_boundaries(network: trt.INetworkDefinition) -> list[BoundaryProbe]:
    """Marks inputs and outputs of every `MhcBoundary` as outputs of `network`; constants and inputs are left."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    producers = {layer.get_output(slot).name: layer for layer in layers for slot in range(layer.num_outputs)}
    probes: list[BoundaryProbe] = []
    for layer in layers:
        if not plugins.is_plugin_layer(layer, plugins.BOUNDARY):
            continue
        fields = plugins.read_fields(layer)
        contribution = _FINALIZE_ROLES if fields.get("top_k") else ("x",)
        tensors: dict[str, str] = {}
        constants: dict[str, Array] = {}
        for role, slot in zip((*contribution, *_INPUT_ROLES), range(layer.num_inputs), strict=False):
            tensor = layer.get_input(slot)
            producer = producers.get(tensor.name)
            if producer is not None and layer_type(producer) == trt.LayerType.CONSTANT:
                constants[role] = constant_array(producer)
                continue
            _expose(network, tensor)
            tensors[role] = tensor.name
        for role, slot in zip(_OUTPUT_ROLES, range(layer.num_outputs), strict=False):
            _expose(network, layer.get_output(slot))
            tensors[role] = layer.get_output(slot).name
        eps = fields["norm_eps"] if fields.get("collapse", 1) else None
        probes.append(BoundaryProbe(len(probes), layer.name, eps, tensors, constants))
    return probes


def probe_unfused(network: trt.INetworkDefinition, report: Report) -> list[BoundaryProbe]:
    """Marks the same tensors of an unfused network as outputs: contributions, streams and layer inputs.

    Args:
        network: defined exactly as the one that `report` is about was before the pass, so that names agree.
        report: what the pass said of the other one.

    Raises:
        LookupError: the network is another one: a layer or tensor of the report is missing.
    """
    layers = {layer.name: layer for layer in (network.get_layer(index) for index in range(network.num_layers))}
    tensors = {
        layer.get_output(slot).name: layer.get_output(slot)
        for layer in layers.values()
        for slot in range(layer.num_outputs)
    }
    probes = []
    for index, entry in enumerate(report.fused):
        wanted = {"residual_out": entry.streams}
        if entry.layer_input is not None:
            wanted["layer_input"] = entry.layer_input
        missing = [name for name in (entry.all_reduce,) if name not in layers]
        missing += [name for name in wanted.values() if name not in tensors]
        if missing:
            raise LookupError(f"{entry.name}: the network has no {missing}; expected it as it was before the pass")
        found = {"x": layers[entry.all_reduce].get_input(0)}
        found |= {role: tensors[name] for role, name in wanted.items()}
        for tensor in found.values():
            _expose(network, tensor)
        names = {role: tensor.name for role, tensor in found.items()}
        probes.append(BoundaryProbe(index, entry.all_reduce, None, names, {}))
    return probes


def _expose(network: trt.INetworkDefinition, tensor: trt.ITensor) -> None:
    if not tensor.is_network_input and not tensor.is_network_output:
        network.mark_output(tensor)
