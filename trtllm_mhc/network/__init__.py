# SPDX-License-Identifier: Apache-2.0
"""Building the boundaries of a model in a TensorRT network: functional layers, and the layer loop on top of them."""

from trtllm_mhc.network.boundaries import (
    Boundaries,
    BoundaryState,
    CommunicatorSpec,
    LayerWeights,
    QuantizedActivation,
    Step,
)
from trtllm_mhc.network.single_boundary import SingleBoundary, build_single_boundary

__all__ = [
    "Boundaries",
    "BoundaryState",
    "CommunicatorSpec",
    "LayerWeights",
    "QuantizedActivation",
    "SingleBoundary",
    "Step",
    "build_single_boundary",
]
