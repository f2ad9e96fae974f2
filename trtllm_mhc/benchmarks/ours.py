# SPDX-License-Identifier: Apache-2.0
"""The library's operations as subjects of measurements."""

from __future__ import annotations

from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from trtllm_mhc import reference
from trtllm_mhc.benchmarks.harness import HIDDEN, NORM_EPS, CheckError, Rank
from trtllm_mhc.reference import mxfp8
from trtllm_mhc.runtime import coefficients
from trtllm_mhc.runtime.communicator import WaitMode
from trtllm_mhc.runtime.cuda import DeviceArray, Stream


class Boundary:
    """A boundary; with tp 1 its local form.

    Args:
        rank: where it runs.
        rows: M.
        wait_mode: of the communicator.
        mxfp8: writes the layer input as MXFP8 as well.
        published: a publish of its own comes before the consumer, as from a producer.
    """

    def __init__(
        self, rank: Rank, rows: int, *, wait_mode: WaitMode = "auto", mxfp8: bool = False, published: bool = False
    ) -> None:
        self._communicator = rank.communicator(wait_mode)
        self._tensors = rank.tensors(rows)
        self._published = published
        self._outputs = self._tensors.new_outputs()
        self._mxfp8 = _mxfp8_outputs(rows) if mxfp8 else None

    def enqueue(self, stream: Stream) -> None:
        """See `Subject`."""
        t = self._tensors
        if self._published:
            self._communicator.publish(t.x, stream=stream)
        self._communicator.boundary(
            None if self._published else t.x,
            t.residual,
            t.post,
            t.comb,
            t.pre,
            t.gamma,
            norm_eps=NORM_EPS,
            residual_out=self._outputs[0],
            layer_input=self._outputs[1],
            mxfp8=self._mxfp8,
            published=self._published,
            stream=stream,
        )

    def check(self) -> None:
        """See `Subject`; the reference's bits."""
        if (record := self._communicator.status()) is not None:
            raise CheckError(f"the mailbox reports {record}")
        self._tensors.check_bits(*self._outputs)
        if self._mxfp8 is not None:
            check_mxfp8(self._outputs[1], *self._mxfp8)


class Coefficients:
    """The mixes of one sublayer, with the constants of DeepSeek V4.1."""

    _CONSTANTS: ClassVar[dict[str, Any]] = {
        "rms_norm_eps": 1e-20,
        "hc_eps": 1e-6,
        "post_alpha": 2.0,
        "sinkhorn_iters": 20,
    }

    def __init__(self, rank: Rank, rows: int) -> None:
        rng = np.random.default_rng(rows)
        self._host = (
            rng.standard_normal((rows, 4, HIDDEN), np.float32).astype(ml_dtypes.bfloat16),
            rng.standard_normal((coefficients.COUNT, 4 * HIDDEN), np.float32) / np.float32(143),
            rng.random(3, np.float32),
            rng.random(coefficients.COUNT, np.float32),
        )
        self._inputs = [DeviceArray.from_numpy(array) for array in self._host]
        self._workspace = DeviceArray((coefficients.workspace_bytes(rows, HIDDEN),), np.uint8)
        f32 = np.float32
        self._out = coefficients.Coefficients(
            DeviceArray((rows, 4), f32), DeviceArray((rows, 4, 4), f32), DeviceArray((rows, 4), f32)
        )

    def enqueue(self, stream: Stream) -> None:
        """See `Subject`."""
        coefficients.coefficients(
            *self._inputs, **self._CONSTANTS, stream=stream, out=self._out, workspace=self._workspace
        )

    def check(self) -> None:
        """See `Subject`; fp32 results of 20 normalisations, whose errors do not grow."""
        want = reference.coefficients_float64(*self._host, **self._CONSTANTS)
        for name, got, expected in zip(self._out._fields, self._out, want, strict=True):
            worst = float(np.abs(got.to_numpy() - expected).max())
            if not worst <= 1e-4:
                raise CheckError(f"{name}: off by {worst:g}, expected at most 1e-4")


def _mxfp8_outputs(rows: int) -> tuple[DeviceArray, DeviceArray]:
    data = DeviceArray((rows, HIDDEN), ml_dtypes.float8_e4m3fn)
    scales = DeviceArray((mxfp8.scale_bytes(rows, HIDDEN),), np.uint8)
    for array in (data, scales):
        array.fill_bytes(0xFF)
    return data, scales


def check_mxfp8(layer_input: DeviceArray, data: DeviceArray, scales: DeviceArray) -> None:
    """Raises CheckError unless `data` and `scales` are what the reference makes of `layer_input`."""
    want_data, want_scales = mxfp8.quantize(layer_input.to_numpy())
    if not (data.to_numpy().view(np.uint8) == want_data.view(np.uint8)).all():
        raise CheckError("the MXFP8 data are not those of the layer input")
    if not (scales.to_numpy() == want_scales).all():
        raise CheckError("the MXFP8 scales are not those of the layer input")
