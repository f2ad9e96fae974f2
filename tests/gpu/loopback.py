# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads, spread over the GPUs there are (one GPU: all on it), and boundary inputs for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_mhc import reference
from trtllm_mhc.runtime.communicator import BoundaryOutputs, Communicator
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.threads import ThreadGroup

BF16 = ml_dtypes.bfloat16
Array = npt.NDArray[Any]
Result = TypeVar("Result")
_names = itertools.count()


@dataclass(frozen=True)
class Inputs:
    """One boundary: `xs` has one [M, H] contribution per rank; everything else is the same on all ranks."""

    xs: list[Array]
    residual: Array
    post: Array
    comb: Array
    pre: Array | None
    gamma: Array | None
    eps: float = 1e-20

    def residual_only(self) -> Inputs:
        return replace(self, pre=None, gamma=None)

    def expected(self) -> tuple[Array, Array | None]:
        eps = None if self.pre is None else self.eps
        return reference.boundary(self.xs, self.residual, self.post, self.comb, self.pre, self.gamma, eps)


def bf16(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32).astype(BF16)


def make_inputs(rng: np.random.Generator, tp: int, rows: int, hidden: int) -> Inputs:
    """Values of the size that V4.1 has, with zeros of both signs among the contributions."""
    xs = [bf16(rng, rows, hidden) for _ in range(tp)]
    for rank, x in enumerate(xs):
        x[:, 16 * rank : 16 * rank + 8] = 0.0
        x[:, 8 * rank :: 97] = -0.0
    comb = rng.random((rows, 4, 4), np.float32)
    return Inputs(
        xs=xs,
        residual=bf16(rng, rows, 4, hidden),
        post=2 * rng.random((rows, 4), np.float32),
        comb=comb / comb.sum(axis=1, keepdims=True),
        pre=rng.random((rows, 4), np.float32) + np.float32(1e-6),
        gamma=(1 + 0.1 * rng.standard_normal(hidden, np.float32)).astype(BF16),
    )


def all_bf16_patterns(tp: int, hidden: int) -> list[Array]:
    """Contributions [rows, H] in which every 16-bit pattern occurs on every rank, against another one on the others."""
    rows = -(-65536 // hidden)
    patterns = np.resize(np.arange(65536, dtype=np.uint16), rows * hidden)
    return [np.roll(patterns, 977 * rank).reshape(rows, hidden).view(BF16) for rank in range(tp)]


class DeviceInputs:
    """One rank's copy on its device, and poisoned outputs."""

    def __init__(self, inputs: Inputs, rank: int) -> None:
        self.x = DeviceArray.from_numpy(inputs.xs[rank])
        self.residual = DeviceArray.from_numpy(inputs.residual)
        self.post = DeviceArray.from_numpy(inputs.post)
        self.comb = DeviceArray.from_numpy(inputs.comb)
        self.pre = None if inputs.pre is None else DeviceArray.from_numpy(inputs.pre)
        self.gamma = None if inputs.gamma is None else DeviceArray.from_numpy(inputs.gamma)
        self.eps = inputs.eps
        self.residual_out = DeviceArray(inputs.residual.shape, BF16)
        self.layer_input = None if inputs.pre is None else DeviceArray(inputs.xs[rank].shape, BF16)
        self.poison()

    def poison(self) -> None:
        for array in (self.residual_out, self.layer_input):
            if array is not None:
                array.fill_bytes(0xFF)

    def load(self, inputs: Inputs, rank: int, stream: Stream) -> None:
        """Other values of the same shapes."""
        self.x.copy_from(inputs.xs[rank], stream)
        self.residual.copy_from(inputs.residual, stream)
        self.post.copy_from(inputs.post, stream)
        self.comb.copy_from(inputs.comb, stream)
        if self.pre is not None and self.gamma is not None and inputs.pre is not None and inputs.gamma is not None:
            self.pre.copy_from(inputs.pre, stream)
            self.gamma.copy_from(inputs.gamma, stream)

    def boundary(self, communicator: Communicator, stream: Stream, **options: Any) -> BoundaryOutputs:
        """Enqueues; `options` replace arguments of `Communicator.boundary`."""
        arguments: dict[str, Any] = {
            "x": self.x,
            "residual": self.residual,
            "post": self.post,
            "comb": self.comb,
            "pre": self.pre,
            "gamma": self.gamma,
            "norm_eps": self.eps,
            "residual_out": self.residual_out,
            "layer_input": self.layer_input,
            "stream": stream,
        }
        return communicator.boundary(**(arguments | options))

    def check(self, expected: tuple[Array, Array | None], stream: Stream, what: str = "") -> None:
        reference.assert_bits_equal(self.residual_out.to_numpy(stream), expected[0], f"residual_out{what}")
        if self.layer_input is not None and expected[1] is not None:
            reference.assert_bits_equal(self.layer_input.to_numpy(stream), expected[1], f"layer_input{what}")


class Loopback:
    """A group of rank threads, each with a communicator and a stream, on as many GPUs as there are."""

    def __init__(self, tp: int, hidden: int = 5120, timeout_s: float = 5.0, **options: Any) -> None:
        self.tp = tp
        self.threads = ThreadGroup.on_devices(tp)
        name = f"loopback {next(_names)}"
        assert self.threads.devices is not None
        devices = self.threads.devices

        def join(rank: int) -> tuple[Communicator, Stream]:
            communicator = Communicator.threads(
                name,
                tp_size=tp,
                rank=rank,
                device=devices[rank],
                hidden_size=hidden,
                timeout_s=timeout_s,
                **options,
            )
            return communicator, Stream()

        self.ranks = self.threads.run(join, timeout_s=60)

    def barrier(self) -> None:
        """Called by every rank between allocating and enqueueing: where ranks share a GPU, an allocation can wait for
        a kernel that is itself waiting for the allocating rank."""
        self.threads.barrier()

    def run(self, work: Callable[[int, Communicator, Stream], Result], timeout_s: float = 120.0) -> list[Result]:
        """Runs `work(rank, communicator, stream)` on every rank."""
        return self.threads.run(lambda rank: work(rank, *self.ranks[rank]), timeout_s=timeout_s)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *error: object) -> None:
        def leave(rank: int, communicator: Communicator, stream: Stream) -> None:
            communicator.close()
            stream.close()

        self.run(leave, timeout_s=60)
