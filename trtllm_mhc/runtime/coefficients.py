# SPDX-License-Identifier: Apache-2.0
"""The mHC coefficients of one sublayer on arrays of the device; no communication."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import ml_dtypes
import numpy as np

from trtllm_mhc.runtime import library as c_api
from trtllm_mhc.runtime.cuda import DeviceArray, Stream
from trtllm_mhc.runtime.library import library

COUNT = (2 + c_api.STREAMS) * c_api.STREAMS
"""Coefficients of a token: pre, post and comb."""

_BF16 = np.dtype(ml_dtypes.bfloat16)
_F32 = np.dtype(np.float32)


class Coefficients(NamedTuple):
    """post [M, 4], comb [M, 4, 4] ([source, target]) and pre [M, 4], all f32."""

    post: DeviceArray
    comb: DeviceArray
    pre: DeviceArray


def workspace_bytes(rows: int, hidden: int, *, broadcast: bool = False) -> int:
    """Bytes of the workspace for ``rows`` rows; one for more rows serves fewer."""
    return int(library().mhcCoefficientsWorkspaceBytes(rows, hidden, int(broadcast)))


def coefficients(
    streams: DeviceArray,
    fn: DeviceArray,
    scale: DeviceArray,
    base: DeviceArray,
    *,
    rms_norm_eps: float,
    hc_eps: float,
    post_alpha: float,
    sinkhorn_iters: int,
    stream: Stream,
    out: Coefficients | None = None,
    workspace: DeviceArray | None = None,
) -> Coefficients:
    """Enqueues the coefficients of ``streams``; all arithmetic is float32, and a row's result depends on that row only.

    Args:
        streams: [M, 4, H] bf16; or [M, H] where all streams are equal, with ``fn`` summed over the streams.
        fn: [24, 4 * H] f32 (or [24, H]), rows in the order pre, post, comb.
        scale: [3] f32, for pre, post and comb.
        base: [24] f32.
        rms_norm_eps: added to the mean square of the streams.
        hc_eps: added to ``pre`` and to every divisor of the Sinkhorn normalisation.
        post_alpha: factor of ``post``.
        sinkhorn_iters: column normalisations of ``comb``, 1 or more; one less of its rows.
        stream: where the work is enqueued. The arrays must live until it is done.
        out: the results; new arrays if None.
        workspace: uint8, at least `workspace_bytes`; a new array if None.

    Raises:
        ValueError: a dtype or shape is not as above, or a number is out of range.
        MhcError: the launch failed.
    """
    shape = streams.shape
    if streams.dtype != _BF16 or len(shape) not in (2, 3) or (len(shape) == 3 and shape[1] != c_api.STREAMS):
        raise ValueError(
            f"streams: expected bfloat16 [M, {c_api.STREAMS}, H] or [M, H], got {streams.dtype} {list(shape)}"
        )
    rows, hidden, broadcast = shape[0], shape[-1], len(shape) == 2
    mixes, matrix = (rows, c_api.STREAMS), (rows, c_api.STREAMS, c_api.STREAMS)
    if out is None:
        out = Coefficients(DeviceArray(mixes, _F32), DeviceArray(matrix, _F32), DeviceArray(mixes, _F32))
    if workspace is None:
        workspace = DeviceArray((workspace_bytes(rows, hidden, broadcast=broadcast),), np.uint8)
    features = hidden if broadcast else c_api.STREAMS * hidden
    for name, array, expected in (
        ("fn", fn, (COUNT, features)),
        ("scale", scale, (3,)),
        ("base", base, (COUNT,)),
        ("post", out.post, mixes),
        ("comb", out.comb, matrix),
        ("pre", out.pre, mixes),
    ):
        if array.dtype != _F32 or array.shape != expected:
            raise ValueError(f"{name}: expected float32 {list(expected)}, got {array.dtype} {list(array.shape)}")
    args = c_api.CCoefficientsArgs(
        struct_size=ctypes.sizeof(c_api.CCoefficientsArgs),
        rows=rows,
        hidden_size=hidden,
        broadcast=int(broadcast),
        sinkhorn_iters=sinkhorn_iters,
        rms_norm_eps=rms_norm_eps,
        hc_eps=hc_eps,
        post_alpha=post_alpha,
        streams=streams.pointer,
        fn=fn.pointer,
        scale=scale.pointer,
        base=base.pointer,
        post=out.post.pointer,
        comb=out.comb.pointer,
        pre=out.pre.pointer,
        workspace=workspace.pointer,
        workspace_bytes=workspace.nbytes,
    )
    library().check(library().mhcCoefficients(ctypes.byref(args), stream.handle), "mhcCoefficients")
    return out
