# SPDX-License-Identifier: Apache-2.0
"""Times of the linear layer that publishes, beside cuBLAS, which needs a publish kernel after it.

One rank plays its group. A graph calls each of many weight tensors once, in turn, more of them than five times the L2
cache holds: weights come from memory, as they do in a model; activations and the boundary's tensors stay in the cache.
A sample is a replay's time divided by the calls; a result is the median. All variants of a case are sampled in turn.
cuBLAS is called through torch.
"""

from __future__ import annotations

import ctypes
import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from trtllm_mhc.runtime.communicator import Communicator, publish_linear_arguments
from trtllm_mhc.runtime.cuda import DeviceArray, Event, Graph, Stream
from trtllm_mhc.runtime.library import library

Weights = Literal["bf16", "e4m3"]

HIDDEN = 5120
FEATURES = (1024, 2048, 4096)
ROTATED_BYTES = 320_000_000  # of weights, more than five times the 60 MB of an H200's L2 cache
PEAK_BYTES_PER_US = 4.3e6  # what an H200's memory gives a copy
WARM_UP = 3
REPLAYS = 15
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Result:
    """Microseconds per call.

    Attributes:
        rows: M.
        features: K of a rank.
        weights: of our layer; cuBLAS has bf16 in any case.
        publish_gemm_us: publishing layer, then the boundary that consumes.
        cublas_us: cuBLAS, then a publish kernel, then the boundary.
        linear_us: our layer alone, publishing nothing.
        cublas_gemm_us: cuBLAS alone.
        bandwidth_fraction: bytes of the weights over `linear_us`, as a part of 4.3 TB/s.
    """

    rows: int
    features: int
    weights: Weights
    publish_gemm_us: float
    cublas_us: float
    linear_us: float
    cublas_gemm_us: float
    bandwidth_fraction: float


class _Boundary:
    """Inputs and outputs of the boundary that consumes."""

    def __init__(self, rows: int) -> None:
        rng = np.random.default_rng(rows)
        self.residual = DeviceArray.from_numpy(_bf16(rng, rows, 4, HIDDEN))
        self.post, self.comb, self.pre = (
            DeviceArray.from_numpy(rng.random(shape, np.float32)) for shape in ((rows, 4), (rows, 4, 4), (rows, 4))
        )
        self.gamma = DeviceArray.from_numpy(_bf16(rng, HIDDEN))
        self.residual_out = DeviceArray((rows, 4, HIDDEN), ml_dtypes.bfloat16)
        self.layer_input = DeviceArray((rows, HIDDEN), ml_dtypes.bfloat16)

    def consume(self, communicator: Communicator, stream: Stream) -> None:
        communicator.boundary(
            None,
            self.residual,
            self.post,
            self.comb,
            self.pre,
            self.gamma,
            norm_eps=1e-20,
            residual_out=self.residual_out,
            layer_input=self.layer_input,
            published=True,
            stream=stream,
        )


def measure(rows: Sequence[int], features: Sequence[int] = FEATURES, tp_size: int = 2) -> Iterator[Result]:
    """Measures both kinds of weights for every M and K, and gives each result as it comes.

    Args:
        rows: values of M, at most 64.
        features: values of K of a rank.
        tp_size: ranks that the one rank plays.

    Raises:
        RuntimeError: torch is missing, or a measurement failed.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise RuntimeError("this benchmark compares with cuBLAS through torch, which is not installed") from None
    torch.cuda.init()
    with (
        Communicator.self_loop(
            tp_size=tp_size, device=0, hidden_size=HIDDEN, wait_mode="split", timeout_s=TIMEOUT_S
        ) as communicator,
        Stream() as stream,
    ):
        for k in features:
            cublas_weights = _torch_weights(torch, k)
            for kind in ("bf16", "e4m3"):
                weights = _device_weights(kind, k)
                for m in rows:
                    yield _case(torch, communicator, stream, m, k, kind, weights, cublas_weights)
                    if (record := communicator.status()) is not None:
                        raise RuntimeError(f"a measurement failed: {record}")
                weights.clear()
            cublas_weights.clear()


def _case(
    torch: Any,
    communicator: Communicator,
    stream: Stream,
    rows: int,
    features: int,
    kind: Weights,
    weights: list[tuple[DeviceArray, DeviceArray | None]],
    cublas_weights: list[Any],
) -> Result:
    boundary = _Boundary(rows)
    activation = DeviceArray.from_numpy(_bf16(np.random.default_rng(1), rows, features))
    out = DeviceArray((rows, HIDDEN), ml_dtypes.bfloat16)
    x = DeviceArray.from_numpy(_bf16(np.random.default_rng(2), rows, HIDDEN))
    theirs = torch.randn(rows, features, device="cuda").to(torch.bfloat16)
    theirs_out = torch.empty(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def linear(i: int) -> None:
        args, _ = publish_linear_arguments(activation, *weights[i % len(weights)], out, HIDDEN)
        lib = library()
        lib.check(lib.mhcPublishLinearLocal(HIDDEN, ctypes.byref(args), stream.handle), "linear")

    def publish_linear(i: int) -> None:
        communicator.publish_linear(activation, *weights[i % len(weights)], out=out, stream=stream)
        boundary.consume(communicator, stream)

    def cublas(i: int) -> None:
        torch.mm(theirs, cublas_weights[i % len(cublas_weights)], out=theirs_out)

    def cublas_and_publish(i: int) -> None:
        cublas(i)
        communicator.publish(x, stream=stream)
        boundary.consume(communicator, stream)

    with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
        ours, reference = len(weights), len(cublas_weights)
        graphs = [
            _capture(stream, call, calls)
            for call, calls in (
                (linear, ours),
                (publish_linear, ours),
                (cublas, reference),
                (cublas_and_publish, reference),
            )
        ]
    alone, published, cublas_alone, cublas_published = _sample(graphs, stream)
    for graph, _ in graphs:
        graph.close()
    size = HIDDEN * features * (2 if kind == "bf16" else 1)
    return Result(
        rows,
        features,
        kind,
        publish_gemm_us=published,
        cublas_us=cublas_published,
        linear_us=alone,
        cublas_gemm_us=cublas_alone,
        bandwidth_fraction=size / alone / PEAK_BYTES_PER_US,
    )


def _capture(stream: Stream, call: Callable[[int], None], calls: int) -> tuple[Graph, int]:
    call(0)
    stream.synchronize(TIMEOUT_S)
    with stream.capture() as graph:
        for i in range(calls):
            call(i)
    return graph, calls


def _sample(graphs: Sequence[tuple[Graph, int]], stream: Stream) -> list[float]:
    begin, end = Event(), Event()
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(WARM_UP + REPLAYS):
        for (graph, calls), taken in zip(graphs, samples, strict=True):
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize(TIMEOUT_S)
            taken.append(1000 * end.elapsed_ms(begin) / calls)
    begin.close()
    end.close()
    return [statistics.median(taken[WARM_UP:]) for taken in samples]


def _bf16(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def _device_weights(kind: Weights, features: int) -> list[tuple[DeviceArray, DeviceArray | None]]:
    rng = np.random.default_rng(features)
    repeats = 8
    values = np.tile(rng.standard_normal((HIDDEN // repeats, features), np.float32), (repeats, 1))
    scaled = kind == "e4m3"
    weight = values.astype(ml_dtypes.float8_e4m3fn if scaled else ml_dtypes.bfloat16)
    scales = rng.integers(118, 124, (HIDDEN // 32, features // 32), np.uint8) if scaled else None
    return [
        (DeviceArray.from_numpy(weight), None if scales is None else DeviceArray.from_numpy(scales))
        for _ in range(-(-ROTATED_BYTES // weight.nbytes))
    ]


def _torch_weights(torch: Any, features: int) -> list[Any]:
    count = -(-ROTATED_BYTES // (2 * HIDDEN * features))
    return [torch.randn(HIDDEN, features, device="cuda").to(torch.bfloat16).T for _ in range(count)]
