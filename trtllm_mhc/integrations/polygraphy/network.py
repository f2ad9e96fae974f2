# SPDX-License-Identifier: Apache-2.0
"""Networks whose edge Polygraphy can handle without torch: numpy, which it works with, has no bf16."""

from __future__ import annotations

from typing import Any

import tensorrt as trt

from trtllm_mhc.network import layers, ops

_INNER = "{}/bf16"


def float32_io(network: Any) -> None:
    """Turn the bf16 inputs and outputs of `network` into fp32 ones of the same names, with casts behind them.

    Nothing is lost: every bf16 number is an fp32 number. An input that is not a bf16 number is rounded, to nearest
    even. The tensors inside are renamed: "x" becomes "x/bf16".

    Args:
        network: an ``INetworkDefinition``; optimization profiles are made after it and need no change.
    """
    for tensor in [network.get_input(index) for index in range(network.num_inputs)]:
        if tensor.dtype == trt.bfloat16:
            _widen_input(network, tensor)
    for tensor in [network.get_output(index) for index in range(network.num_outputs)]:
        if tensor.dtype == trt.bfloat16:
            _widen_output(network, tensor)


def _widen_input(network: Any, old: Any) -> None:
    name, shape = old.name, layers.tensor_shape(old)
    users = [
        (layer, slot)
        for layer in (network.get_layer(index) for index in range(network.num_layers))
        for slot in range(layer.num_inputs)
        if layer.get_input(slot) is not None and layer.get_input(slot).name == name
    ]
    # TensorRT 10 can change the input itself, and 10.6 builds no network that an input was removed from; 11 cannot.
    in_place = type(old).dtype.fset is not None
    if in_place:
        old.dtype = trt.float32
        narrow = ops.cast(network, old, trt.bfloat16)
        narrow.name = _INNER.format(name)
    else:
        old.name = _INNER.format(name)
        narrow = ops.cast(network, network.add_input(name, trt.float32, shape), trt.bfloat16)
    for layer, slot in users:
        layer.set_input(slot, narrow)
    if not in_place:
        network.remove_tensor(old)


def _widen_output(network: Any, old: Any) -> None:
    name = old.name
    network.unmark_output(old)
    old.name = _INNER.format(name)
    wide = ops.cast(network, old, trt.float32)
    wide.name = name
    network.mark_output(wide)
