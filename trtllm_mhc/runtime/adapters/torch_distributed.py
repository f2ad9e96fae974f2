# SPDX-License-Identifier: Apache-2.0
"""Ranks that torch.distributed has joined already.

    Communicator.all_gather(torch_distributed.all_gather(), tp_size=2, rank=dist.get_rank(), ...)

torch's own time-out bounds each call.
"""

from __future__ import annotations

from typing import Any

from trtllm_mhc.runtime.communicator import AllGather


def all_gather(group: Any = None) -> AllGather:
    """The all-gather of `group` (None: the world). Works with gloo and with NCCL, on the device that is current.

    Raises:
        ImportError: torch is not installed.
        RuntimeError: torch.distributed is not initialised.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call init_process_group first")
    size = dist.get_world_size(group)

    def gather(mine: bytes) -> list[bytes]:
        device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
        send = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        parts = [torch.empty_like(send) for _ in range(size)]
        dist.all_gather(parts, send, group=group)
        return [bytes(part.cpu().numpy()) for part in parts]

    return gather
