# SPDX-License-Identifier: Apache-2.0
import weakref
from enum import IntEnum

import numpy as np
import tensorrt as trt

from ._common import default_net, default_trtnet
from ._utils import np_dtype_to_trt, str_dtype_to_trt
from .network import PluginInfo, set_plugin_info
from .plugin import TRT_LLM_PLUGIN_NAMESPACE, current_all_reduce_helper


class Tensor:
    def __init__(
        self,
        name=None,
        dtype=None,
        shape=None,
        dim_range=None,
        is_network_input=True,
        location=trt.TensorLocation.DEVICE,
        network=None,
        trt_tensor=None,
    ):
        self.profiles = []
        if trt_tensor is not None:
            assert network is not None
            assert not is_network_input
            self.trt_tensor = trt_tensor
            self._network = weakref.ref(network)
            return
        self._network = weakref.ref(default_net())
        if not is_network_input:
            return
        dtype = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
        ranges = list((dim_range or {}).values())
        for profile in range(len(ranges[0]) if ranges else 0):
            sizes = [each[profile] for each in ranges]
            triples = [size if isinstance(size, list | tuple) else (size, size, size) for size in sizes]
            self.profiles.append(tuple(zip(*triples, strict=True)))
        default_net()._add_input(self, name, dtype, shape, dim_range)

    @property
    def network(self):
        return self._network()

    @property
    def name(self):
        return self.trt_tensor.name

    @property
    def dtype(self):
        return self.trt_tensor.dtype

    @property
    def shape(self):
        return self.trt_tensor.shape

    def cast(self, dtype):
        return cast(self, dtype)

    def mark_output(self, name=None, dtype=None):
        default_net()._mark_output(self, name, str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype)

    def get_users(self):
        return self.network.get_tensor_users(self)

    def __add__(self, b):
        layer = default_trtnet().add_elementwise(self.trt_tensor, b.trt_tensor, trt.ElementWiseOperation.SUM)
        return _create_tensor(layer.get_output(0), layer)

    def __hash__(self):
        return id(self.trt_tensor)

    def __eq__(self, b):
        return isinstance(b, Tensor) and self.trt_tensor is b.trt_tensor


def _create_tensor(trt_tensor, producer):
    tensor = Tensor(network=default_net(), is_network_input=False)
    tensor.trt_tensor = trt_tensor
    default_net()._set_layer_name(producer)
    return tensor


def _add_plugin_info(layer, plugin_creator, plugin_name, pfc):
    set_plugin_info(default_trtnet(), layer.name, PluginInfo(plugin_creator, plugin_name, pfc))


def constant(ndarray):
    weights = trt.Weights(np_dtype_to_trt(ndarray.dtype), ndarray.ctypes.data, ndarray.size)
    default_net().register_ndarray(ndarray)
    layer = default_trtnet().add_constant(ndarray.shape, weights)
    return _create_tensor(layer.get_output(0), layer)


def cast(input, dtype):
    dtype = str_dtype_to_trt(dtype) if isinstance(dtype, str) else dtype
    if input.dtype == dtype:
        return input
    layer = default_trtnet().add_cast(input.trt_tensor, dtype)
    return _create_tensor(layer.get_output(0), layer)


def matmul(input, mat2, transa=False, transb=False):
    kinds = [trt.MatrixOperation.TRANSPOSE if each else trt.MatrixOperation.NONE for each in (transa, transb)]
    layer = default_trtnet().add_matrix_multiply(input.trt_tensor, kinds[0], mat2.trt_tensor, kinds[1])
    return _create_tensor(layer.get_output(0), layer)


class AllReduceStrategy(IntEnum):
    NCCL = 0
    UB = 2
    AUTO = 3
    NCCL_SYMMETRIC = 8


class AllReduceFusionOp(IntEnum):
    NONE = 0


class AllReduceParams:
    def __init__(self, strategy=AllReduceStrategy.AUTO, fusion_op=AllReduceFusionOp.NONE):
        self.strategy = strategy
        self.fusion_op = fusion_op

    def update_strategy(self):
        if self.strategy == AllReduceStrategy.AUTO and default_net().plugin_config.user_buffer:
            self.strategy = AllReduceStrategy.UB


allreduce_ub_counter = 0


def allreduce(tensor, group, all_reduce_params=None):
    global allreduce_ub_counter
    allreduce_ub_counter += 1
    params = all_reduce_params or AllReduceParams()
    params.update_strategy()
    inputs = []
    if params.strategy not in (AllReduceStrategy.NCCL, AllReduceStrategy.UB):
        workspace = current_all_reduce_helper().workspace
        if workspace is None:
            params.strategy = AllReduceStrategy.NCCL_SYMMETRIC
        else:
            inputs.append(workspace.trt_tensor)
    if params.strategy == AllReduceStrategy.UB:
        tensor.mark_output(f"allreduce_ub_0_{allreduce_ub_counter}")
    dtype = default_net().plugin_config.nccl_plugin
    inputs.insert(0, tensor.cast(dtype).trt_tensor)
    creator = trt.get_plugin_registry().get_plugin_creator("AllReduce", "1", TRT_LLM_PLUGIN_NAMESPACE)
    assert creator is not None
    field = trt.PluginField("group", np.array(group, np.int32), trt.PluginFieldType.INT32)
    pfc = trt.PluginFieldCollection([field])
    layer = default_trtnet().add_plugin_v2(inputs, creator.create_plugin("allreduce", pfc))
    _add_plugin_info(layer, creator, "allreduce", pfc)
    return _create_tensor(layer.get_output(0), layer).cast(tensor.dtype)
