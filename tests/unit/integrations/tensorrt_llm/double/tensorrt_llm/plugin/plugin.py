# SPDX-License-Identifier: Apache-2.0
import os
from collections import OrderedDict

import tensorrt as trt

TRT_LLM_PLUGIN_NAMESPACE = "tensorrt_llm"


def _load_plugin_lib():
    """The original's libnvinfer_plugin_tensorrt_llm.so; here a library that the tests compile."""
    library = os.environ.get("TRTLLM_DOUBLE_PLUGINS")
    registry = trt.get_plugin_registry()
    if library and not any(creator.plugin_namespace == TRT_LLM_PLUGIN_NAMESPACE for creator in registry.all_creators):
        registry.load_library(library)


_load_plugin_lib()


class PluginConfig:
    def __init__(self):
        self.nccl_plugin = None
        self.user_buffer = False

    def set_nccl_plugin(self, dtype):
        self.nccl_plugin = dtype


class CustomAllReduceHelper:
    POINTERS_PER_RANK = 7
    POINTERS_OF_COUNTER = 3

    def __init__(self):
        self.workspace = None

    def set_workspace_tensor(self, mapping, num_profiles=None):
        from ..functional import Tensor

        size = self.POINTERS_PER_RANK * mapping.tp_size + self.POINTERS_OF_COUNTER
        ranges = OrderedDict([("all_reduce_size", [size] * num_profiles)]) if num_profiles else None
        self.workspace = Tensor(name="all_reduce_workspace", dtype=trt.int64, shape=[size], dim_range=ranges)


_helper = None


def init_all_reduce_helper():
    global _helper
    _helper = CustomAllReduceHelper()


def current_all_reduce_helper():
    assert _helper is not None, "init_all_reduce_helper was not called"
    return _helper
