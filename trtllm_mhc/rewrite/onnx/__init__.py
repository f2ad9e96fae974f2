# SPDX-License-Identifier: Apache-2.0
"""The rewrite pass on ONNX models. Needs the packages onnx and onnx-ir, but neither a GPU nor a TensorRT builder."""

from trtllm_mhc.rewrite.onnx.file import rewrite_file
from trtllm_mhc.rewrite.onnx.graph import OnnxGraph
from trtllm_mhc.rewrite.onnx.rewire import fuse_model

__all__ = ["OnnxGraph", "fuse_model", "rewrite_file"]
