# SPDX-License-Identifier: Apache-2.0
"""A network of one boundary alone, for comparing engines boundary by boundary on the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

import tensorrt as trt

from trtllm_mhc.network import functional
from trtllm_mhc.network.boundaries import CommunicatorSpec
from trtllm_mhc.network.functional import Array


@dataclass(frozen=True)
class SingleBoundary:
    """The tensors of `build_single_boundary`, by their names in the network."""

    inputs: dict[str, trt.ITensor]
    outputs: dict[str, trt.ITensor]


def build_single_boundary(
    network: trt.INetworkDefinition,
    spec: CommunicatorSpec,
    *,
    hidden: int,
    norm_eps: float,
    gamma: Array | None = None,
    hc_mult: int = 4,
    collapse: bool = True,
    rows: int = -1,
) -> SingleBoundary:
    """Makes ``network`` (empty) one unfused boundary.

    Inputs: ``x`` [M, H] bf16, ``residual`` [M, hc, H] bf16, ``post`` [M, hc] f32, ``comb`` [M, hc, hc] f32, and with
    ``collapse`` ``pre`` [M, hc] f32 and, unless given as an array, ``gamma`` [H] bf16.
    Outputs: ``residual_out`` [M, hc, H] bf16, and with ``collapse`` ``layer_input`` [M, H] bf16.

    Args:
        network: a strongly typed network.
        spec: the ranks to sum over.
        hidden: H.
        norm_eps: epsilon of the norm; unused without ``collapse``.
        gamma: [H] bf16, the norm's weight as a constant; None makes it an input.
        hc_mult: residual streams.
        collapse: False makes the residual-only boundary.
        rows: M; -1 leaves it dynamic.
    """
    shapes: dict[str, tuple[trt.DataType, tuple[int, ...]]] = {
        "x": (trt.bfloat16, (rows, hidden)),
        "residual": (trt.bfloat16, (rows, hc_mult, hidden)),
        "post": (trt.float32, (rows, hc_mult)),
        "comb": (trt.float32, (rows, hc_mult, hc_mult)),
    }
    if collapse:
        shapes["pre"] = (trt.float32, (rows, hc_mult))
        if gamma is None:
            shapes["gamma"] = (trt.bfloat16, (hidden,))
    inputs = {name: network.add_input(name, dtype, shape) for name, (dtype, shape) in shapes.items()}

    reduced = functional.all_reduce(network, inputs["x"], spec)
    streams = functional.mhc_post(network, reduced, inputs["residual"], inputs["post"], inputs["comb"])
    outputs = {"residual_out": streams}
    if collapse:
        weight = inputs["gamma"] if gamma is None else gamma
        outputs["layer_input"] = functional.mhc_pre_delayed(network, streams, inputs["pre"], weight, norm_eps)
    for name, tensor in outputs.items():
        tensor.name = name
        network.mark_output(tensor)
    return SingleBoundary(inputs, outputs)
