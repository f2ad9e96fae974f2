# SPDX-License-Identifier: Apache-2.0
"""The stress test's data: rows that boundaries take their inputs from, with what the reference makes of them.

Every output row depends on the input rows of the same token alone, so one pool serves every M: a call takes M
neighbouring rows, beginning anywhere.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from tests.gpu.loopback import Array, bf16, make_inputs
from trtllm_mhc import reference
from trtllm_mhc.runtime.cuda import DeviceArray

TOP_K = 6
EPS = 1e-20


class CPool(ctypes.Structure):
    """`Pool` of kernels.cu."""

    ARRAYS = ("x", "shared", "residual", "streams", "normed", "sum", "quantised", "scales")
    MIXES = ("post", "comb", "pre", "weights", "index")
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ARRAYS + MIXES),
        ("rows", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class Pool:
    """Of all ranks, on the host.

    Attributes:
        xs: for each rank its contribution [R, H]: what `finalize` gives on `permuted`, `weights`, `index`, `shared`.
        permuted: for each rank [P, H]; its last row, which no index names, is NaN.
        weights: for each rank [R, K]; NaN where the index is -1.
        index: for each rank [R, K], -1 for the experts of other ranks.
        shared: for each rank [R, H].
        common: what all ranks have alike: the other inputs and every expected output, by name.
        gamma: [H].
    """

    xs: list[Array]
    permuted: list[Array]
    weights: list[Array]
    index: list[Array]
    shared: list[Array]
    common: dict[str, Array]
    gamma: Array

    @property
    def rows(self) -> int:
        return int(self.xs[0].shape[0])

    @property
    def hidden(self) -> int:
        return int(self.xs[0].shape[1])


def make_pool(rng: np.random.Generator, tp: int, rows: int, hidden: int, permuted_rows: int = 61) -> Pool:
    """A pool of `rows` rows for `tp` ranks."""
    permuted, weights, index, shared, xs = [], [], [], [], []
    owner = rng.integers(0, tp, (rows, TOP_K))
    for rank in range(tp):
        mine = np.where(owner == rank, rng.integers(0, permuted_rows - 1, (rows, TOP_K)), -1).astype(np.int32)
        experts = bf16(rng, permuted_rows, hidden)
        experts[-1] = np.nan
        weight = rng.random((rows, TOP_K), np.float32)
        weight[mine == -1] = np.nan
        always = bf16(rng, rows, hidden)
        always[:, 16 * rank : 16 * rank + 8] = 0.0
        permuted.append(experts)
        weights.append(weight)
        index.append(mine)
        shared.append(always)
        xs.append(reference.finalize(experts, weight, mine, always))
    inputs = make_inputs(rng, tp, rows, hidden)
    assert inputs.pre is not None
    assert inputs.gamma is not None
    streams, normed = reference.boundary(xs, inputs.residual, inputs.post, inputs.comb, inputs.pre, inputs.gamma, EPS)
    assert normed is not None
    quantised, swizzled = reference.quantize(normed)
    scales, _ = reference.unswizzle_scales(swizzled, rows, hidden)
    common = {
        "residual": inputs.residual,
        "post": inputs.post,
        "comb": inputs.comb,
        "pre": inputs.pre,
        "streams": streams,
        "normed": normed,
        "sum": reference.all_reduce(xs),
        "quantised": quantised,
        "scales": scales,
    }
    return Pool(xs, permuted, weights, index, shared, common, inputs.gamma)


class DevicePool:
    """One rank's pool on its device.

    Attributes:
        arguments: as kernels take it.
        permuted: [P, H] bf16.
        gamma: [H] bf16.
    """

    def __init__(self, pool: Pool, rank: int) -> None:
        mine = {"x": pool.xs[rank], "shared": pool.shared[rank]}
        mine |= {"weights": pool.weights[rank], "index": pool.index[rank]}
        self._arrays = {name: DeviceArray.from_numpy(array) for name, array in (pool.common | mine).items()}
        self.arguments = CPool(
            **{name: array.pointer for name, array in self._arrays.items()},
            rows=pool.rows,
            hidden=pool.hidden,
            top_k=TOP_K,
        )
        self.permuted = DeviceArray.from_numpy(pool.permuted[rank])
        self.gamma = DeviceArray.from_numpy(pool.gamma)
