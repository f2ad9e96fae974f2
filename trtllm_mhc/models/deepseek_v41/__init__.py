# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V4.1: its dimensions, generated weights, and the stack of its boundaries as a network."""

from trtllm_mhc.models.deepseek_v41.config import DeepseekV41Config
from trtllm_mhc.models.deepseek_v41.stack import BoundaryStack, build_boundary_stack
from trtllm_mhc.models.deepseek_v41.weights import ModelWeights

__all__ = ["BoundaryStack", "DeepseekV41Config", "ModelWeights", "build_boundary_stack"]
