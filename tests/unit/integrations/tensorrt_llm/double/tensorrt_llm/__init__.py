# SPDX-License-Identifier: Apache-2.0
"""A contract double of TensorRT-LLM's TensorRT backend: what this project touches of it, on real TensorRT networks.

It behaves as TensorRT-LLM 1.2 does where that matters to us, traps included, and as nothing else. test_contract.py
compares its signatures with those of a real TensorRT-LLM wherever one can be imported.
"""

from ._common import default_net, default_trtnet
from .mapping import Mapping
from .module import Module
from .network import Network, net_guard
from .parameter import Parameter

__version__ = "0+double"
__all__ = ["Mapping", "Module", "Network", "Parameter", "default_net", "default_trtnet", "net_guard"]
