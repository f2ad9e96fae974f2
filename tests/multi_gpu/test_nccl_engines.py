# SPDX-License-Identifier: Apache-2.0
"""Engines whose communicators send large M through NCCL, and the all-reduce layer with strategy "nccl"."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.gpu.loopback import BF16, bf16, make_inputs
from tests.gpu.test_engines import EPS, HIDDEN, check, feeds_of
from trtllm_mhc import reference
from trtllm_mhc.runtime.library import Transport
from trtllm_mhc.runtime.threads import ThreadGroup

THRESHOLD = 32
MAXIMUM_ROWS = 128


def test_an_engine_s_boundary_on_both_sides_of_the_threshold(trt: Any) -> None:
    from trtllm_mhc.runtime.build import RowRange, build_engine
    from trtllm_mhc.runtime.engine import EngineGroup, communicators
    from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs

    job = SingleBoundaryJobs(HIDDEN, 2, EPS).fused()
    plan = build_engine(lambda network: job.populate(network, 0), rows=RowRange(1, 8, MAXIMUM_ROWS))
    rng = np.random.default_rng(0)
    group = ThreadGroup.on_devices(2)
    with (
        communicators(group, "nccl engine", hidden_size=HIDDEN, timeout_s=20.0, nccl_rows=THRESHOLD) as comms,
        EngineGroup([plan] * 2, comms, group) as engines,
    ):
        assert comms[0].info.transport is Transport.MAILBOX_NCCL, comms[0].info.transport_reason
        for rows in (8, 32, 128, 31):
            inputs = make_inputs(rng, 2, rows, HIDDEN)
            check(engines.run(feeds_of(inputs)), inputs, f"M = {rows}")
        engines.capture(passes=2)
        for replay in range(20):
            inputs = make_inputs(rng, 2, 31, HIDDEN)
            check(engines.replay(feeds_of(inputs)), inputs, f"replay {replay}")


def test_an_all_reduce_layer_by_nccl(trt: Any) -> None:
    from trtllm_mhc.network.plugins import add_all_reduce
    from trtllm_mhc.runtime.build import RowRange, build_engine
    from trtllm_mhc.runtime.engine import EngineGroup, communicators

    def populate(network: Any) -> None:
        x = network.add_input("x", trt.bfloat16, (-1, HIDDEN))
        total = add_all_reduce(network, x, tp_size=2, strategy="nccl")
        total.name = "sum"
        network.mark_output(total)

    plan = build_engine(populate, rows=RowRange(1, 8, MAXIMUM_ROWS))
    rng = np.random.default_rng(1)
    group = ThreadGroup.on_devices(2)
    # Layers that ask for NCCL get it whatever M is.
    with (
        communicators(group, "nccl layer", hidden_size=HIDDEN, timeout_s=20.0, nccl_rows=1 << 20) as comms,
        EngineGroup([plan] * 2, comms, group) as engines,
    ):
        for rows in (1, 8, 128):
            xs = [bf16(rng, rows, HIDDEN) for _ in range(2)]
            for out in engines.run([{"x": x} for x in xs]):
                # -0 where both have -0: NCCL's sum is not touched.
                reference.assert_bits_equal(out["sum"] + BF16(0), reference.all_reduce(xs), f"M = {rows}")
