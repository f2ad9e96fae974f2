# SPDX-License-Identifier: Apache-2.0
"""The pass that replaces unfused boundaries in a TensorRT network by plugin layers."""

from trtllm_mhc.rewrite.dot import neighbourhood_dot
from trtllm_mhc.rewrite.fuse import fuse_boundaries
from trtllm_mhc.rewrite.plan import FuseOptions
from trtllm_mhc.rewrite.report import BoundaryEntry, CoefficientsEntry, Reason, Report

__all__ = [
    "BoundaryEntry",
    "CoefficientsEntry",
    "FuseOptions",
    "Reason",
    "Report",
    "fuse_boundaries",
    "neighbourhood_dot",
]
