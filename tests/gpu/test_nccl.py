# SPDX-License-Identifier: Apache-2.0
"""NCCL as far as one GPU shows it: loading it, a group of one rank, a communicator of torch's handed in, refusals.

NCCL's all-reduce over one rank is a copy, so everything around it is under test here, and NCCL's kernels are not:
tests/multi_gpu has those.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.loopback import BF16, DeviceInputs, Loopback, all_bf16_patterns, bf16, make_inputs
from trtllm_mhc import reference
from trtllm_mhc.runtime.communicator import Communicator, Finalize
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.library import (
    ErrorKind,
    InvalidArgumentError,
    MailboxError,
    Transport,
    UnsupportedError,
    library,
)

# NVLink SHARP would make multicast objects.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

ROOT = Path(__file__).parents[2]
THRESHOLD = 8


@pytest.fixture(scope="module", autouse=True)
def nccl_version() -> str:
    try:
        return library().nccl_version()
    except UnsupportedError as error:
        pytest.skip(str(error))


def one_rank(**options: int) -> Communicator:
    return Communicator.threads(
        "nccl alone", tp_size=1, rank=0, device=0, hidden_size=5120, timeout_s=60, nccl_rows=THRESHOLD, **options
    )


def test_info_says_what_was_decided(nccl_version: str) -> None:
    with one_rank() as communicator:
        info = communicator.info
        assert info.transport is Transport.MAILBOX_NCCL
        assert (info.nccl_rows, info.nccl_workspace_rows) == (THRESHOLD, 2048)
        assert info.transport_reason == "nccl_rows is 8"
        assert info.nccl_version == nccl_version
    with Communicator.threads("nccl not", tp_size=1, rank=0, device=0, hidden_size=5120) as communicator:
        assert communicator.info.transport is Transport.LOCAL
        assert communicator.info.nccl_version is None


@pytest.mark.parametrize("hidden", [4096, 5120, 7168])
@pytest.mark.parametrize("rows", [1, 7, 8, 64, 65, 300])
def test_every_operation_around_the_threshold(rows: int, hidden: int) -> None:
    """In chunks of 64 rows, so that 300 rows are five all-reduces."""
    rng = np.random.default_rng(rows)
    inputs = make_inputs(rng, 1, rows, hidden)
    expected = inputs.expected()
    assert expected[1] is not None
    data, swizzled = reference.quantize(expected[1])
    with (
        Communicator.threads(
            "nccl operations",
            tp_size=1,
            rank=0,
            device=0,
            hidden_size=hidden,
            timeout_s=60,
            nccl_rows=THRESHOLD,
            nccl_workspace_rows=64,
        ) as communicator,
        Stream() as stream,
    ):
        call = DeviceInputs(inputs, 0)
        outputs = DeviceArray(data.shape, data.dtype), DeviceArray(swizzled.shape, np.uint8)
        for output in outputs:
            output.fill_bytes(0xFF)
        call.boundary(communicator, stream, mxfp8=outputs)
        call.check(expected, stream)
        np.testing.assert_array_equal(outputs[0].to_numpy(stream).view(np.uint8), data.view(np.uint8))
        np.testing.assert_array_equal(outputs[1].to_numpy(stream), swizzled)

        call = DeviceInputs(inputs.residual_only(), 0)
        call.boundary(communicator, stream)
        call.check(expected, stream, " of the residual-only boundary")

        top_k = 3
        index = rng.permutation(rows * top_k).reshape(rows, top_k).astype(np.int32)
        index[rng.random(index.shape) < 0.3] = -1
        parts = bf16(rng, rows * top_k, hidden), rng.random((rows, top_k), np.float32), index, bf16(rng, rows, hidden)
        finalized = replace(inputs, xs=[reference.finalize(*parts)])
        call = DeviceInputs(finalized, 0)
        call.boundary(communicator, stream, x=Finalize(*(DeviceArray.from_numpy(part) for part in parts)))
        call.check(finalized.expected(), stream, " of the finalize")

        total = communicator.all_reduce(call.x, stream=stream)
        reference.assert_bits_equal(total.to_numpy(stream), reference.all_reduce(finalized.xs), "sum")
        assert communicator.status() is None


def test_an_all_reduce_by_nccl_of_every_bf16_pattern() -> None:
    x = all_bf16_patterns(1, 5120)[0]
    with one_rank() as communicator, Stream() as stream:
        total = communicator.all_reduce_nccl(DeviceArray.from_numpy(x), stream=stream)
        np.testing.assert_array_equal(total.to_numpy(stream).view(np.uint16), x.view(np.uint16))
        small = DeviceArray.from_numpy(x[:2])
        np.testing.assert_array_equal(
            communicator.all_reduce_nccl(small, stream=stream).to_numpy(stream).view(np.uint16), x[:2].view(np.uint16)
        )


def test_captured_beside_calls_below_the_threshold() -> None:
    rng = np.random.default_rng(3)
    rows = [2, 20, 130, 4]
    sets = [[make_inputs(rng, 1, m, 5120) for m in rows] for _ in range(4)]
    expected = [[inputs.expected() for inputs in calls] for calls in sets]
    with one_rank(nccl_workspace_rows=64) as communicator, Stream() as stream:
        calls = [DeviceInputs(inputs, 0) for inputs in sets[0]]
        with stream.capture() as graph:
            for call in calls:
                call.boundary(communicator, stream)
        for replay in range(100):
            which = replay % len(sets)
            for call, inputs in zip(calls, sets[which], strict=True):
                call.load(inputs, 0, stream)
                call.poison()
            graph.launch(stream)
            for i, call in enumerate(calls):
                call.check(expected[which][i], stream, f" of call {i}, replay {replay}")
        graph.close()


@pytest.mark.parametrize("bad", [99, -2])
def test_a_finalize_index_outside_the_tensor_stops_the_lane(bad: int) -> None:
    rng = np.random.default_rng(5)
    rows = 70
    inputs = make_inputs(rng, 1, rows, 5120)
    index = np.full((rows, 2), -1, np.int32)
    index[66, 1] = bad
    parts = bf16(rng, 99, 5120), rng.random((rows, 2), np.float32), index, inputs.xs[0]
    with one_rank(nccl_workspace_rows=64) as communicator, Stream() as stream:
        call = DeviceInputs(inputs, 0)
        moe_output = Finalize(*(DeviceArray.from_numpy(part) for part in parts))
        call.boundary(communicator, stream, x=moe_output)
        streams = call.residual_out.to_numpy(stream).astype(np.float32)
        assert np.isnan(streams[66]).all()
        record = communicator.status()
        assert record is not None
        assert (record.kind, record.token, record.expected) == (ErrorKind.INDEX, 66, 99)
        with pytest.raises(MailboxError):
            call.boundary(communicator, stream)
        communicator.reset()
        call.poison()
        call.boundary(communicator, stream)
        call.check(inputs.expected(), stream, " after the reset")


def test_a_self_loop_has_no_nccl() -> None:
    with Communicator.self_loop(tp_size=2, device=0, hidden_size=5120) as communicator, Stream() as stream:
        x = DeviceArray((4, 5120), BF16)
        with pytest.raises(UnsupportedError, match="made without NCCL"):
            communicator.all_reduce_nccl(x, stream=stream)


def test_ranks_on_one_gpu_do_without_and_say_why() -> None:
    def work(rank: int, communicator: Communicator, stream: Stream) -> None:
        info = communicator.info
        assert info.transport is Transport.MAILBOX
        assert info.nccl_rows == 0
        assert info.transport_reason == (
            f"nccl_rows is 8, but up to {info.ranks_per_device} ranks share a device, which NCCL does not allow"
        )
        with pytest.raises(UnsupportedError, match="share a device"):
            communicator.all_reduce_nccl(DeviceArray((4, 5120), BF16), stream=stream)

    from trtllm_mhc.runtime import cuda

    tp = 8 if cuda.device_count() > 1 else 2
    if cuda.device_count() >= tp:
        pytest.skip(f"{tp} ranks do not share any of {cuda.device_count()} GPUs")
    with Loopback(tp, nccl_rows=8) as group:
        group.run(work)


HANDED_IN = """
import numpy as np
import torch
import torch.distributed as dist
from tests.gpu.loopback import DeviceInputs, make_inputs
from trtllm_mhc.runtime import nccl
from trtllm_mhc.runtime.communicator import Communicator
from trtllm_mhc.runtime.cuda import Stream
from trtllm_mhc.runtime.library import InvalidArgumentError

torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
handle = nccl.torch_communicator()
for rows, expected in ((0, 0), (8, 8)):
    with Communicator.from_nccl(
        handle, tp_size=1, rank=0, device=0, hidden_size=5120, timeout_s=10, nccl_rows=rows
    ) as communicator, Stream() as stream:
        assert communicator.info.nccl_rows == expected
        inputs = make_inputs(np.random.default_rng(0), 1, 20, 5120)
        call = DeviceInputs(inputs, 0)
        call.boundary(communicator, stream)
        call.check(inputs.expected(), stream)
        communicator.reset()
        call.poison()
        call.boundary(communicator, stream)
        call.check(inputs.expected(), stream)
        loaded = communicator.info.nccl_version
try:
    Communicator.from_nccl(handle, tp_size=2, rank=0, device=0, hidden_size=5120, timeout_s=10)
except InvalidArgumentError as error:
    assert "the NCCL communicator has ranks 1, the configuration has tp_size = 2" in str(error), error
else:
    raise AssertionError("expected a refusal")
assert loaded == ".".join(map(str, torch.cuda.nccl.version())), (loaded, torch.cuda.nccl.version())
one = torch.ones(4, device="cuda")
dist.all_reduce(one)
assert one.sum().item() == 4
dist.destroy_process_group()
print("handed in", loaded)
"""


def test_a_communicator_of_torch_is_handed_in() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch with NCCL")
    done = subprocess.run(
        [sys.executable, "-c", HANDED_IN], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "handed in" in done.stdout


def test_a_threshold_that_is_no_number_of_rows() -> None:
    with pytest.raises(InvalidArgumentError, match=r"nccl_rows must be -1 \(never\), 0 .* got -2"):
        Communicator.threads("bad", tp_size=1, rank=0, device=0, hidden_size=5120, nccl_rows=-2)
    with pytest.raises(InvalidArgumentError, match=r"nccl_workspace_rows must be in 0 \.\. 65535, got 70000"):
        one_rank(nccl_workspace_rows=70000)
