# SPDX-License-Identifier: Apache-2.0
"""The all-reduce of a torch module that is to be exported to ONNX.

torch's functional collectives have no ONNX form. A module that calls `all_reduce` of this module instead is exported
with a node that TensorRT takes for this project's plugin and that `trtllm-mhc rewrite` knows:

    torch.onnx.export(module, inputs, "model.onnx", dynamo=True, custom_translation_table=translation_table())

Needs torch 2.6 or newer with onnxscript.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DOMAIN = "trtllm_mhc"


def _sum(x: torch.Tensor, tp_size: int, rank: int, group: list[int]) -> torch.Tensor:
    result = x.clone()
    if tp_size > 1:
        if not torch.distributed.is_initialized():
            raise RuntimeError(
                f"trtllm_mhc::all_reduce: expected torch.distributed with {tp_size} ranks, got a process without it"
            )
        members = torch.distributed.new_group(group) if group else None
        if torch.distributed.get_world_size(members) != tp_size:
            got = torch.distributed.get_world_size(members)
            raise RuntimeError(f"trtllm_mhc::all_reduce: expected a group of {tp_size} ranks, got {got}")
        torch.distributed.all_reduce(result, group=members)
    return result


def _like(x: torch.Tensor, tp_size: int, rank: int, group: list[int]) -> torch.Tensor:
    return torch.empty_like(x)


_all_reduce = torch.library.custom_op(f"{DOMAIN}::all_reduce", _sum, mutates_args=())
_all_reduce.register_fake(_like)


def all_reduce(x: torch.Tensor, tp_size: int, *, rank: int = -1, group: tuple[int, ...] = ()) -> torch.Tensor:
    """The sum of ``x`` over the ranks of a group.

    Args:
        x: [..., H] bfloat16, this rank's summand.
        tp_size: ranks in the group.
        rank: this rank's index in it; -1 leaves it to the communicator at run time.
        group: world ranks in order; empty means 0 .. tp_size - 1.

    Raises:
        RuntimeError: run, and not exported, where torch.distributed has no such group.
    """
    result: torch.Tensor = _all_reduce(x, tp_size, rank, list(group))
    return result


def translation_table() -> dict[Any, Callable[..., Any]]:
    """What `torch.onnx.export` needs as ``custom_translation_table``."""
    from onnxscript import ir, opset18, values

    node = values.Op(values.Opset(DOMAIN, 1), "MhcAllReduce", _schema())

    def translate(x: Any, tp_size: int, rank: int, group: Any) -> Any:
        fields: dict[str, Any] = {"tp_size": tp_size, "plugin_version": "1", "plugin_namespace": DOMAIN}
        if rank >= 0:
            fields["rank"] = rank
        if group:
            fields["group"] = list(group)
        if len(x.shape) == 2:
            return node(x, **fields)
        # The plugin takes [M, H].
        flat_shape = opset18.Constant(value=ir.tensor([-1, int(x.shape[-1])], dtype=ir.DataType.INT64))
        reduced = node(opset18.Reshape(x, flat_shape), **fields)
        return opset18.Reshape(reduced, opset18.Shape(x))

    return {torch.ops.trtllm_mhc.all_reduce.default: translate}


def _schema() -> Any:
    """The plugin as an ONNX operator."""
    from onnx.defs import OpSchema

    parameter, attribute = OpSchema.FormalParameter, OpSchema.Attribute
    kinds = OpSchema.AttrType
    return OpSchema(
        "MhcAllReduce",
        DOMAIN,
        1,
        inputs=[parameter("x", "T")],
        outputs=[parameter("sum", "T")],
        type_constraints=[("T", ["tensor(bfloat16)"], "bfloat16 alone")],
        attributes=[
            attribute("tp_size", kinds.INT, required=True),
            attribute("rank", kinds.INT, required=False),
            attribute("group", kinds.INTS, required=False),
            attribute("plugin_version", kinds.STRING, required=False),
            attribute("plugin_namespace", kinds.STRING, required=False),
        ],
    )
