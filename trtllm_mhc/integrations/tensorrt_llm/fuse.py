# SPDX-License-Identifier: Apache-2.0
"""The rewrite pass on a ``tensorrt_llm.Network``: the pass itself, and TensorRT-LLM's books kept true afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorrt as trt
from tensorrt_llm.functional import Tensor
from tensorrt_llm.graph_rewriting import Layer
from tensorrt_llm.network import PluginInfo, delete_plugin_info, net_guard, set_plugin_info

from trtllm_mhc import plugin
from trtllm_mhc.network import plugins
from trtllm_mhc.rewrite import FuseOptions, Report, fuse_boundaries

# Its stock passes ask for the class of every layer; TensorRT-LLM before 0.17 has none for plugins of the new interface.
Layer.TRT_LAYER_TYPE_TO_LAYER.setdefault(trt.LayerType.PLUGIN_V3, trt.IPluginV3Layer)


def fuse_network(network: Any, mapping: Any, model: Any = None) -> Report:
    """Replace the boundaries of ``network`` by fused plugin layers, and report on each.

    The groups are the mapping's tensor-parallel ones: an AllReduce layer does not tell its own. Run it when the
    network's outputs are marked, before or after TensorRT-LLM's ``optimize``. See `fuse_boundaries` for the rest.

    Afterwards the replaced layers are marked as removed and their plugin infos gone, the new layers have theirs, and
    the outputs that modules of ``model`` registered for ``--enable_debug_output`` are the tensors that are computed
    now. Registered tensors inside a boundary exist in the unfused form only: marking one as an output keeps the unfused
    layers beside the fused one.

    Args:
        network: a strongly typed ``tensorrt_llm.Network``.
        mapping: the rank's ``tensorrt_llm.Mapping``.
        model: the ``tensorrt_llm.Module`` that made the network; None if there is none.

    Raises:
        ValueError: the network has no outputs, or is not strongly typed.
        RuntimeError: see `fuse_boundaries`.
    """
    if not network.strongly_typed:
        raise ValueError(
            "fuse_network: expected a strongly typed network, as trtllm-build makes it, got a weakly typed"
        )
    definition = network.trt_network
    before = _Snapshot(definition)
    if mapping.tp_size in plugins.TP_SIZES:
        options = FuseOptions(mapping.tp_size, mapping.tp_rank, tuple(mapping.tp_group))
    else:
        options = FuseOptions(group=tuple(mapping.tp_group))  # refused, with the reason
    report = fuse_boundaries(definition, options)
    if report.fused:
        replaced = before.replaced(definition)
        with net_guard(network):
            _mark_removed(network, before)
            _describe_new_layers(network, before)
            if model is not None:
                _move_registered_outputs(network, model, replaced)
        network.is_graph_altered = True
    return report


class _Snapshot:
    """Who reads what in a network, and which of its layers lead to an output."""

    def __init__(self, definition: Any) -> None:
        self.layers = [definition.get_layer(k) for k in range(definition.num_layers)]
        self.inputs = [[layer.get_input(k) for k in range(layer.num_inputs)] for layer in self.layers]
        self.outputs = [definition.get_output(k) for k in range(definition.num_outputs)]
        self.live = _live_layers(definition)

    def replaced(self, definition: Any) -> dict[Any, Any]:
        """Tensors that something else is read for now, with what that is."""
        pairs = [
            (old, layer.get_input(k))
            for layer, inputs in zip(self.layers, self.inputs, strict=True)
            for k, old in enumerate(inputs)
        ]
        pairs += [(old, definition.get_output(k)) for k, old in enumerate(self.outputs)]
        return {old: new for old, new in pairs if old is not None and old is not new}


def _live_layers(definition: Any) -> set[int]:
    """Indices of the layers that an output depends on."""
    producers: dict[Any, int] = {}
    for index in range(definition.num_layers):
        layer = definition.get_layer(index)
        producers |= {layer.get_output(k): index for k in range(layer.num_outputs)}
    live: set[int] = set()
    stack = [definition.get_output(k) for k in range(definition.num_outputs)]
    while stack:
        found = producers.get(stack.pop())
        if found is not None and found not in live:
            live.add(found)
            layer = definition.get_layer(found)
            stack += [tensor for k in range(layer.num_inputs) if (tensor := layer.get_input(k)) is not None]
    return live


def _mark_removed(network: Any, before: _Snapshot) -> None:
    """TensorRT has no way to remove layers; TensorRT-LLM keeps a list of those that are to be ignored."""
    for index in sorted(before.live - _live_layers(network.trt_network)):
        layer = before.layers[index]
        delete_plugin_info(network.trt_network, layer.name)
        Layer(network, layer).mark_as_removed()


def _describe_new_layers(network: Any, before: _Snapshot) -> None:
    definition = network.trt_network
    for index in range(len(before.layers), definition.num_layers):
        layer = definition.get_layer(index)
        layer.metadata = layer.name  # what profilers show, as for TensorRT-LLM's own layers
        if plugins.is_plugin_layer(layer, plugins.BOUNDARY):
            set_plugin_info(definition, layer.name, _BoundaryInfo(layer))


class _BoundaryInfo(PluginInfo):  # type: ignore[misc]
    """The attributes of a boundary's layer, read from the plugin itself.

    TensorRT-LLM reads a plugin's attributes from a field collection, whose arrays must live for that, and which some
    bindings read wrongly. So this keeps the arrays and takes the values from them.
    """

    def __init__(self, layer: Any) -> None:
        values = {key: value for key, value in plugins.read_fields(layer).items() if value not in (None, ())}
        self._arrays = {
            key: np.atleast_1d(np.asarray(value, np.float32 if isinstance(value, float) else np.int32))
            for key, value in values.items()
        }
        types = {"f": trt.PluginFieldType.FLOAT32, "i": trt.PluginFieldType.INT32}
        fields = [trt.PluginField(key, array, types[array.dtype.kind]) for key, array in self._arrays.items()]
        super().__init__(plugin.creator(plugins.BOUNDARY), plugins.BOUNDARY, trt.PluginFieldCollection(fields))

    def _parse_pfc(self, pfc: Any) -> None:
        self.pfc_as_ndarray = {key: array.copy() for key, array in self._arrays.items()}
        self.pfc_as_list = {key: array.tolist() for key, array in self._arrays.items()}


def _move_registered_outputs(network: Any, model: Any, replaced: dict[Any, Any]) -> None:
    for _, module in model.named_modules():
        for name, tensor in list(module._network_outputs.items()):
            new = replaced.get(getattr(tensor, "trt_tensor", None))
            if new is not None:
                wrapped = Tensor(trt_tensor=new, network=network, is_network_input=False)
                module.register_network_output(name, wrapped)
