# SPDX-License-Identifier: Apache-2.0
"""Layers whose output needs the inputs of several ranks.

In ``"network"`` precision ``MhcAllReduce`` and ``MhcBoundary`` are the bit-exact operations of `trtllm_mhc.reference`,
and TensorRT's own ``DIST_COLLECTIVE`` all-reduce is a sum in fp32 (float64 for float64) in rank order, rounded once:
what TensorRT computes there is NCCL's choice, this is one of the permitted results. In ``"float64"`` all of them are
the same formulae without rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorrt as trt

from trtllm_mhc.network import plugins
from trtllm_mhc.network.collectives import read_collective
from trtllm_mhc.network.layers import layer_type
from trtllm_mhc.reference import float64, mxfp8, operations
from trtllm_mhc.reference._arrays import AnyArray

from .rules import Operation

# Where a rank stands in its group differs by rank; everything else of a plugin must agree over the group.
_PER_RANK_FIELDS = ("rank", "group")


@dataclass(frozen=True)
class Collective:
    """What a layer does with its group; equal on all ranks that meet at it.

    Attributes:
        kind: ``MhcBoundary``, ``MhcAllReduce`` or ``DIST_COLLECTIVE``.
        group: the ranks that meet, in the order in which they are summed.
        attributes: the plugin's fields but those that say where a rank stands.
        shapes: of the inputs.
    """

    kind: str
    group: tuple[int, ...]
    attributes: Mapping[str, Any]
    shapes: tuple[tuple[int, ...] | None, ...]

    def __str__(self) -> str:
        attributes = ", ".join(f"{name}={value}" for name, value in sorted(self.attributes.items()))
        shapes = ", ".join("absent" if shape is None else str(list(shape)) for shape in self.shapes)
        return f"{self.kind}({attributes}) over ranks {list(self.group)} with inputs {shapes}"


def is_collective(op: Operation) -> bool:
    """Whether the layer may need more than its own rank's values: any that nothing here says otherwise of."""
    kind = layer_type(op.layer).name
    return kind == "DIST_COLLECTIVE" or (
        kind == "PLUGIN_V3" and not any(plugins.is_plugin_layer(op.layer, name) for name in plugins.LOCAL)
    )


def read(op: Operation, rank: int, ranks: int) -> Collective:
    """What the layer of ``op`` does, seen from ``rank`` of ``ranks``.

    Raises:
        NotImplementedError: a plugin or a collective that the interpreter does not know.
        ValueError: a group that does not fit the rank or the number of ranks.
    """
    layer = op.layer
    shapes = tuple(None if value is None else value.shape for value in op.inputs)
    if layer_type(layer).name == "DIST_COLLECTIVE":
        found = read_collective(layer)
        if found is None:
            raise op.unsupported(
                "a collective that nothing describes (TensorRT gives neither its operation nor its group back; "
                "see trtllm_mhc.network.collectives)"
            )
        if not found.is_all_reduce_sum:
            raise op.unsupported(f"{found.operation} with reduction {found.reduction}")
        collective = Collective("DIST_COLLECTIVE", found.group or tuple(range(ranks)), {}, shapes)
        index = -1
    else:
        kind = _plugin_kind(op)
        fields = plugins.read_fields(layer)
        tp_size = int(fields["tp_size"])
        group = tuple(fields["group"]) or tuple(range(tp_size))
        if len(group) != tp_size:
            raise ValueError(f"layer {layer.name!r}: expected a group of tp_size {tp_size} ranks, got {list(group)}")
        attributes = {name: value for name, value in fields.items() if name not in _PER_RANK_FIELDS}
        collective = Collective(kind, group, attributes, shapes)
        index = int(fields["rank"])
    members = collective.group
    if rank not in members or max(members) >= ranks or len(set(members)) != len(members):
        raise ValueError(
            f"layer {layer.name!r}: expected a group of distinct ranks below {ranks} (the number of networks) that "
            f"contains rank {rank}, got {list(members)}"
        )
    if index not in (-1, members.index(rank)):
        raise ValueError(
            f"layer {layer.name!r} of network {rank}: expected rank {members.index(rank)} in group {list(members)} "
            f"or -1, got {index}"
        )
    return collective


def combine(collective: Collective, members: Sequence[Operation]) -> list[tuple[AnyArray, ...]]:
    """The outputs of the layer on each rank, from the operations of all ranks in the group's order."""
    if collective.kind == plugins.BOUNDARY:
        return _boundary(collective, members)
    if collective.kind == plugins.ALL_REDUCE and not members[0].arithmetic.exact:
        total = operations.all_reduce([op.value(0) for op in members])
    else:
        total = np.zeros_like(members[0].operand(0))
        for op in members:
            total = total + op.operand(0)
    return [(total,)] * len(members)


def _boundary(collective: Collective, members: Sequence[Operation]) -> list[tuple[AnyArray, ...]]:
    fields, exact = collective.attributes, members[0].arithmetic.exact
    if fields["quantize"] and exact:
        raise members[0].unsupported("quantize=1 in float64")
    reference: Any = float64 if exact else operations
    inputs = [[op.value(i) for i in range(len(op.inputs))] for op in members]
    if fields["top_k"]:
        xs = [reference.finalize(*values[:4]) for values in inputs]
        inputs = [values[3:] for values in inputs]
    else:
        xs = [values[0] for values in inputs]
    results: list[tuple[AnyArray, ...]] = []
    for values in inputs:
        _, residual, post, comb, *collapse = values
        norm = (*collapse, float(fields["norm_eps"])) if fields["collapse"] else ()
        streams, layer_input = reference.boundary(xs, residual, post, comb, *norm)
        outputs = [streams] if layer_input is None else [streams, layer_input]
        if fields["quantize"]:
            data, scales = mxfp8.quantize(layer_input)
            outputs += [data, scales.view(np.int32)]
        results.append(tuple(outputs))
    return results


def _plugin_kind(op: Operation) -> str:
    for name in (plugins.BOUNDARY, plugins.ALL_REDUCE):
        if plugins.is_plugin_layer(op.layer, name):
            return name
    core = op.layer.plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    raise op.unsupported(f"plugin {core.plugin_namespace}::{core.plugin_name} version {core.plugin_version}")
