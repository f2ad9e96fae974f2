# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one GPU: waiting must not keep the peers' own kernels off it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.loopback import DeviceInputs, Loopback, make_inputs
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import Stream


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("rows", [26, 64])
def test_a_matmul_before_every_publish(tp: int, rows: int) -> None:
    """Each rank's cuBLAS GEMM finds room while all the others wait for it."""
    torch = pytest.importorskip("torch")
    inputs = make_inputs(np.random.default_rng(rows), tp, rows, 5120)
    expected = inputs.expected()

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        call = DeviceInputs(inputs, rank)
        activation = torch.randn(64, 4096, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(4096, 5120, dtype=torch.bfloat16, device="cuda")
        product = torch.empty(64, 5120, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
            torch.matmul(activation, weight, out=product)  # loads cuBLAS's kernel and makes its workspace
        stream.synchronize()
        group.barrier()
        for _ in range(100):
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
                for _ in range(1 + rank % 3):  # ranks arrive at different times
                    torch.matmul(activation, weight, out=product)
            call.boundary(communicator, stream)
        call.check(expected, stream, f" on rank {rank}")

    with Loopback(tp, timeout_s=10.0) as group:
        group.run(work)
