# SPDX-License-Identifier: Apache-2.0
"""A mailbox of more than 4 GiB: offsets do not wrap."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.loopback import BF16, Array, Loopback, make_inputs
from trtllm_mhc import reference
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import DeviceArray, Stream

ROWS, HIDDEN = 50_000, 7168  # 3 generations * 2 ranks * ROWS * HIDDEN * 2 bytes = 4.3 GB
TAIL = 3
NEEDED_BYTES = 30 << 30


def copy_tail(array: DeviceArray, rows: Array, stream: Stream, *, to_device: bool) -> None:
    """The last rows of an array of the device, to or from the host."""
    kinds = cuda.runtime().cudaMemcpyKind
    pointer = array.pointer + array.nbytes - rows.nbytes
    if to_device:
        cuda.call(
            "cudaMemcpyAsync", pointer, rows.ctypes.data, rows.nbytes, kinds.cudaMemcpyHostToDevice, stream.handle
        )
    else:
        cuda.call(
            "cudaMemcpyAsync", rows.ctypes.data, pointer, rows.nbytes, kinds.cudaMemcpyDeviceToHost, stream.handle
        )
    stream.synchronize()


def test_the_last_rows_of_a_large_call() -> None:
    """All rows but the last few are zero on all ranks; those few are compared, of calls in all three generations."""
    devices = cuda.device_count()
    if cuda.call("cudaMemGetInfo")[0] * min(devices, 2) < NEEDED_BYTES:
        pytest.skip(f"needs {NEEDED_BYTES >> 30} GiB of device memory")
    inputs = make_inputs(np.random.default_rng(0), 2, TAIL, HIDDEN)
    expected = inputs.expected()
    assert expected[1] is not None

    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        given = {
            "x": inputs.xs[rank],
            "residual": inputs.residual,
            "post": inputs.post,
            "comb": inputs.comb,
            "pre": inputs.pre,
        }
        arrays: dict[str, DeviceArray] = {}
        for name, tail in given.items():
            assert tail is not None
            arrays[name] = DeviceArray((ROWS, *tail.shape[1:]), tail.dtype)
            arrays[name].fill_bytes(0)
            copy_tail(arrays[name], np.ascontiguousarray(tail), stream, to_device=True)
        assert inputs.gamma is not None
        gamma = DeviceArray.from_numpy(inputs.gamma)
        out, layer_input = DeviceArray((ROWS, 4, HIDDEN), BF16), DeviceArray((ROWS, HIDDEN), BF16)
        group.barrier()
        for call in range(4):
            out.fill_bytes(0xFF, stream)
            layer_input.fill_bytes(0xFF, stream)
            communicator.boundary(
                **arrays, gamma=gamma, norm_eps=inputs.eps, residual_out=out, layer_input=layer_input, stream=stream
            )
            stream.synchronize()
            assert communicator.status() is None
            for array, want in ((out, expected[0]), (layer_input, expected[1])):
                found = np.empty(want.shape, want.dtype)
                copy_tail(array, found, stream, to_device=False)
                reference.assert_bits_equal(found, want, f"call {call}, rank {rank}")
        for array in (*arrays.values(), gamma, out, layer_input):
            array.close()

    with Loopback(2, HIDDEN, capacity=ROWS, timeout_s=20.0) as group:
        assert group.ranks[0][0].info.mailbox_bytes > 1 << 32
        group.run(work)
