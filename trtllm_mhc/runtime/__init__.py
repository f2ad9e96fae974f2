# SPDX-License-Identifier: Apache-2.0
"""Running engines: communicators, device memory, graphs and groups of ranks; and the boundary on torch tensors."""

from trtllm_mhc.runtime.boundary_all_reduce import (
    BoundaryAllReduce,
    QuantizedLayerInput,
    empty_quantized_layer_input,
)

__all__ = ["BoundaryAllReduce", "QuantizedLayerInput", "empty_quantized_layer_input"]
