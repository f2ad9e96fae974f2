# SPDX-License-Identifier: Apache-2.0
"""For TensorRT-LLM's TensorRT backend: fused boundaries in the engines that `trtllm-build` makes.

Importing this package imports tensorrt_llm and loads the plugins.

* `DeepseekV41ForCausalLM` is a model class for `trtllm-build`; `trtllm_mhc.integrations.deepseek_v41_model_cls` is the
  file for its ``--model_cls_file``.
* `fuse_on_build` makes any other model class fuse its boundaries.
* `fuse_network` is the pass itself, for builds that do not go through a model class.

Raises (on import):
    BackendError: there is no TensorRT-LLM with a TensorRT backend here.
"""

from trtllm_mhc import plugin
from trtllm_mhc.integrations.backend import BackendError, require_backend

require_backend()

from trtllm_mhc.integrations.tensorrt_llm.fuse import fuse_network  # noqa: E402
from trtllm_mhc.integrations.tensorrt_llm.hook import FusionError, fuse_on_build  # noqa: E402
from trtllm_mhc.integrations.tensorrt_llm.model import (  # noqa: E402
    DeepseekV41ForCausalLM,
    DeepseekV41PretrainedConfig,
)

plugin.load()

__all__ = [
    "BackendError",
    "DeepseekV41ForCausalLM",
    "DeepseekV41PretrainedConfig",
    "FusionError",
    "fuse_network",
    "fuse_on_build",
]
