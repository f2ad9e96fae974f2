# SPDX-License-Identifier: Apache-2.0
"""NCCL as found in Python environments: its PyPI package, and the communicators of torch.distributed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def wheel_library() -> Path | None:
    """libnccl.so.2 of the PyPI package nvidia-nccl-cu13 or nvidia-nccl-cu12; None where neither is installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        library = Path(folder, "lib", "libnccl.so.2")
        if library.is_file():
            return library
    return None


def torch_communicator(group: Any = None) -> int:
    """The `ncclComm_t` of a torch.distributed process group on the current CUDA device, as an integer.

    torch makes it with the group's first collective, or at once with `init_process_group(device_id=...)`; it stays
    torch's and ends with the process group.

    Args:
        group: a process group with the NCCL backend; None: the default group.

    Raises:
        ValueError: the group has no NCCL communicator yet, or torch does not show it.
    """
    import torch
    import torch.distributed

    chosen = group if group is not None else torch.distributed.distributed_c10d._get_default_group()
    backend = chosen._get_backend(torch.device("cuda", torch.cuda.current_device()))
    if not hasattr(backend, "_comm_ptr"):
        raise ValueError(f"{type(backend).__name__} of torch {torch.__version__} does not show its NCCL communicator")
    handle = int(backend._comm_ptr())
    if handle == 0:
        raise ValueError(
            "the process group has no NCCL communicator yet: run a collective, or give init_process_group a device_id"
        )
    return handle


def version_text(version: int) -> str:
    """NCCL's way of counting, as text: 22809 is "2.28.9"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
