# SPDX-License-Identifier: Apache-2.0
import contextlib
from collections import defaultdict

import tensorrt as trt

from . import _common
from .plugin import PluginConfig

_infos = defaultdict(dict)  # by the network's identity; the original hangs them on the network object


class PluginInfo:
    def __init__(self, plugin_creator, plugin_name, pfc):
        self.plugin_creator = plugin_creator
        self.plugin_name = plugin_name
        self.pfc = pfc
        self._parse_pfc(pfc)

    def _parse_pfc(self, pfc):
        self.pfc_as_ndarray = {pfc[i].name: pfc[i].data.copy() for i in range(len(pfc))}
        self.pfc_as_list = {name: data.tolist() for name, data in self.pfc_as_ndarray.items()}


def get_plugin_info(trt_network, layer_name):
    return _infos[id(trt_network)].get(layer_name)


def set_plugin_info(trt_network, layer_name, plugin_info):
    _infos[id(trt_network)][layer_name] = plugin_info


def delete_plugin_info(trt_network, layer_name):
    _infos[id(trt_network)].pop(layer_name, None)


class Network:
    def __init__(self, **kwargs):
        self._removed_layers = set()
        self.is_graph_altered = False

    def _init(self, trt_network):
        self._trt_network = trt_network
        self._inputs = {}
        self._named_parameters = None
        self.plugin_config = PluginConfig()
        self._registered_ndarrays = []
        self._names = defaultdict(int)
        _infos.pop(id(trt_network), None)
        return self

    @property
    def trt_network(self):
        return self._trt_network

    @property
    def strongly_typed(self):
        return self._trt_network.get_flag(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def _add_input(self, tensor, name, dtype, shape, dim_range=None):
        tensor.trt_tensor = self._trt_network.add_input(name=name, shape=shape, dtype=dtype)
        self._inputs[name] = tensor

    def _mark_output(self, tensor, name, dtype):
        from .functional import cast

        if dtype is not None:
            tensor = cast(tensor, dtype)
        self._trt_network.mark_output(tensor.trt_tensor)
        tensor.trt_tensor.name = name or tensor.trt_tensor.name

    def _set_layer_name(self, layer):
        before = layer.name
        kind = str(layer.type).split(".")[-1]
        layer.name = f"{kind}_{self._names[kind]}"
        self._names[kind] += 1
        for k in range(layer.num_outputs):
            layer.get_output(k).name = f"{layer.name}_output_{k}"
        if layer.type == trt.LayerType.PLUGIN_V2 and (info := get_plugin_info(self._trt_network, before)):
            set_plugin_info(self._trt_network, layer.name, info)
            delete_plugin_info(self._trt_network, before)
        layer.metadata = layer.name

    def set_named_parameters(self, named_parameters):
        self._named_parameters = named_parameters

    @property
    def named_parameters(self):
        return self._named_parameters

    def register_ndarray(self, ndarray):
        self._registered_ndarrays.append(ndarray)

    def get_layers(self):
        from .graph_rewriting import Layer

        for k in range(self._trt_network.num_layers):
            yield Layer(network=self, trt_layer=self._trt_network.get_layer(k))

    def get_tensor_users(self, tensor):
        for layer in self.get_layers():
            if any(each.trt_tensor is tensor.trt_tensor for each in layer.get_inputs()):
                yield layer

    def mark_removed_layer(self, layer):
        self._removed_layers.add(layer.name)

    def is_removed_layer(self, layer):
        return layer.name in self._removed_layers


@contextlib.contextmanager
def net_guard(network):
    old = _common.net
    _common.set_network(network)
    yield
    _common.set_network(old)
