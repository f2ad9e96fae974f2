# SPDX-License-Identifier: Apache-2.0
"""The file for `trtllm-build --model_cls_file FILE --model_cls_name DeepseekV41ForCausalLM`.

It only re-exports: a class defined here could not be found by the processes that ``--workers`` starts.
"""

from trtllm_mhc.integrations.tensorrt_llm import DeepseekV41ForCausalLM

__all__ = ["DeepseekV41ForCausalLM"]
