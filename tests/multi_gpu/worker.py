# SPDX-License-Identifier: Apache-2.0
"""One rank that a launcher has started: `torchrun ... -m tests.multi_gpu.worker --meet torch`.

Meets the others, checks boundaries on both sides of the threshold of NCCL against the reference, eager and replayed,
resets, and prints "rank R of N: ok".
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.gpu.loopback import DeviceInputs, make_inputs
from trtllm_mhc.runtime import cuda, nccl
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import Stream

THRESHOLD = 128
ROWS = (1, 8, 3, 80, 128, 300)


def _torch(device: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device))
    return dist.get_rank(), dist.get_world_size()


def _join(meet: str, device: int) -> Communicator:
    common: dict[str, Any] = {"hidden_size": 5120, "timeout_s": 30.0, "nccl_rows": THRESHOLD}
    if meet == "environment":
        size = int(os.environ.get("WORLD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
        return Communicator.from_environment(tp_size=size, device=device, **common)
    if meet == "mpi":
        from mpi4py import MPI

        from trtllm_mhc.runtime.adapters import mpi

        world = MPI.COMM_WORLD
        return Communicator.all_gather(
            mpi.all_gather(world), tp_size=world.size, rank=world.rank, device=device, **common
        )
    rank, size = _torch(device)
    if meet == "torch-nccl":
        return Communicator.from_nccl(nccl.torch_communicator(), tp_size=size, rank=rank, device=device, **common)
    from trtllm_mhc.runtime.adapters import torch_distributed

    return Communicator.all_gather(torch_distributed.all_gather(), tp_size=size, rank=rank, device=device, **common)


def _local_rank() -> int:
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"):
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit("the launcher has set none of LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK and MPI_LOCALRANKID")


def check(communicator: Communicator, rank: int, tp: int) -> None:
    """With up to two ranks both ways have the reference's bits; with more only the mailbox has."""
    rng = np.random.default_rng(0)
    rows = ROWS if tp <= 2 else ROWS[:4]
    sets = [[make_inputs(rng, tp, m, 5120) for m in rows] for _ in range(2)]
    expected = [[inputs.expected() for inputs in calls] for calls in sets]
    calls = [DeviceInputs(inputs, rank) for inputs in sets[0]]
    with Stream() as stream:
        for call in calls:
            call.boundary(communicator, stream)
        for call, outputs in zip(calls, expected[0], strict=True):
            call.check(outputs, stream)
        with stream.capture() as graph:
            for call in calls:
                call.boundary(communicator, stream)
        for replay in range(20):
            for call, inputs in zip(calls, sets[replay % 2], strict=True):
                call.load(inputs, rank, stream)
                call.poison()
            graph.launch(stream)
            for call, outputs in zip(calls, expected[replay % 2], strict=True):
                call.check(outputs, stream, f" of replay {replay}")
        graph.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--meet", choices=("torch", "torch-nccl", "mpi", "environment"), required=True)
    parser.add_argument("--reversed", action="store_true", help="odd ranks see the GPUs in reversed order")
    options = parser.parse_args(arguments)
    local = _local_rank()
    device = local
    if options.reversed:
        # Before CUDA starts. The last GPU is the first one of the odd ranks, so ordinals say nothing about devices.
        count = int(os.environ["MHC_TEST_GPUS"])
        order = range(count) if local % 2 == 0 else range(count - 1, -1, -1)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))
        device = local if local % 2 == 0 else count - 1 - local
    cuda.set_device(device)
    communicator = _join(options.meet, device)
    info = communicator.info
    assert info.nccl_rows == THRESHOLD, info.transport_reason
    check(communicator, info.rank, info.tp_size)
    communicator.reset()
    check(communicator, info.rank, info.tp_size)
    communicator.close()
    if options.meet.startswith("torch"):
        import torch.distributed as dist

        dist.destroy_process_group()
    print(f"rank {info.rank} of {info.tp_size}: ok", flush=True)


if __name__ == "__main__":
    main()
