# SPDX-License-Identifier: Apache-2.0
from .plugin import TRT_LLM_PLUGIN_NAMESPACE, PluginConfig, current_all_reduce_helper, init_all_reduce_helper

__all__ = ["TRT_LLM_PLUGIN_NAMESPACE", "PluginConfig", "current_all_reduce_helper", "init_all_reduce_helper"]
