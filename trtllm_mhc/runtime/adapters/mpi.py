# SPDX-License-Identifier: Apache-2.0
"""Ranks that mpi4py has joined already.

    Communicator.all_gather(mpi.all_gather(MPI.COMM_WORLD), tp_size=2, rank=MPI.COMM_WORLD.rank, ...)

MPI knows no time-out: a rank that does not come is waited for without an end.
"""

from __future__ import annotations

from typing import Any

from trtllm_mhc.runtime.communicator import AllGather


def all_gather(comm: Any) -> AllGather:
    """The all-gather of an mpi4py communicator."""

    def gather(mine: bytes) -> list[bytes]:
        size = len(mine)
        received = bytearray(size * comm.Get_size())
        comm.Allgather(mine, received)
        return [bytes(received[at : at + size]) for at in range(0, len(received), size)]

    return gather
