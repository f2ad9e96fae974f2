# SPDX-License-Identifier: Apache-2.0
"""One rank that plays its whole group: runs under compute-sanitizer, where ranks cannot run side by side.

compute-sanitizer --tool memcheck|racecheck --error-exitcode 1 python3 -m pytest tests/gpu/test_self_loop.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.gpu.loopback import DeviceInputs, bf16, make_inputs
from trtllm_mhc import reference
from trtllm_mhc.runtime.communicator import Communicator, Finalize, WaitMode
from trtllm_mhc.runtime.cuda import DeviceArray, Stream


@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("wait_mode", ["spin", "split", "gate"])
def test_every_kernel(tp: int, hidden: int, wait_mode: WaitMode) -> None:
    """Full, residual-only, MXFP8, finalize, published and all-reduce, with M around a capacity of 4."""
    rng = np.random.default_rng(tp)
    with (
        Communicator.self_loop(
            tp_size=tp, device=0, hidden_size=hidden, capacity=4, wait_mode=wait_mode, timeout_s=10
        ) as communicator,
        Stream() as stream,
    ):
        assert communicator.info.waits_at_gate == (wait_mode == "gate")
        assert (communicator.info.exchange_rows > 0) == (wait_mode == "spin")
        for rows in (1, 3, 9, 2):
            x = bf16(rng, rows, hidden)
            inputs = replace(make_inputs(rng, tp, rows, hidden), xs=[x] * tp)
            expected = inputs.expected()
            call = DeviceInputs(inputs, 0)
            call.boundary(communicator, stream)
            call.check(expected, stream, " of the full boundary")

            alone = DeviceInputs(inputs.residual_only(), 0)
            alone.boundary(communicator, stream)
            alone.check(expected, stream, " of the residual-only boundary")

            assert expected[1] is not None
            data, swizzled = reference.quantize(expected[1])
            outputs = DeviceArray(data.shape, data.dtype), DeviceArray(swizzled.shape, np.uint8)
            call.poison()
            call.boundary(communicator, stream, mxfp8=outputs)
            call.check(expected, stream, " of the boundary with MXFP8")
            np.testing.assert_array_equal(outputs[0].to_numpy(stream).view(np.uint8), data.view(np.uint8))
            np.testing.assert_array_equal(outputs[1].to_numpy(stream), swizzled)

            identity = np.arange(rows, dtype=np.int32)[:, None]
            parts = (np.zeros_like(x), np.ones((rows, 1), np.float32), identity, x)
            call.poison()
            call.boundary(communicator, stream, x=Finalize(*(DeviceArray.from_numpy(part) for part in parts)))
            call.check(expected, stream, " of the finalize")

            total = communicator.all_reduce(call.x, stream=stream)
            reference.assert_bits_equal(total.to_numpy(stream), reference.all_reduce(inputs.xs), "sum")

            if rows <= 4:
                call.poison()
                communicator.publish(call.x, stream=stream)
                call.boundary(communicator, stream, x=None, published=True)
                call.check(expected, stream, " of the published boundary")
        assert communicator.status() is None
