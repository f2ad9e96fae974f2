# SPDX-License-Identifier: Apache-2.0
"""DLPack capsules, against numpy's own where numpy has the type."""

from __future__ import annotations

import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trtllm_mhc.integrations.triton import dlpack, tensors


class Exporter:
    """What numpy takes a capsule from."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def values(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 2, shape).astype(dtype) if dtype == np.bool_ else rng.integers(0, 99, shape).astype(dtype)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0, 4)])
@pytest.mark.parametrize("name", list(tensors.DTYPES))
def test_round_trip(name: str, shape: tuple[int, ...]) -> None:
    array = values(tensors.DTYPES[name], shape)
    back = dlpack.to_numpy(dlpack.from_numpy(array))
    assert back.dtype == array.dtype
    assert back.shape == shape
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", [name for name in tensors.DTYPES if name != "BF16"])
def test_numpy_reads_our_capsules_and_we_its(name: str) -> None:
    array = values(tensors.DTYPES[name], (3, 5))
    np.testing.assert_array_equal(np.from_dlpack(Exporter(dlpack.from_numpy(array))), array)
    np.testing.assert_array_equal(dlpack.to_numpy(array.__dlpack__()), array)


def test_array_lives_as_long_as_its_consumer_and_no_longer() -> None:
    before = len(dlpack._exported)
    array = np.arange(1000, dtype=np.float32)
    consumer = np.from_dlpack(Exporter(dlpack.from_numpy(array)))
    expected = array.copy()
    del array
    gc.collect()
    assert len(dlpack._exported) == before + 1
    np.testing.assert_array_equal(consumer, expected)
    del consumer
    gc.collect()
    assert len(dlpack._exported) == before


def test_capsule_that_nobody_takes_frees_its_array() -> None:
    before = len(dlpack._exported)
    capsule = dlpack.from_numpy(np.zeros(4))
    assert len(dlpack._exported) == before + 1
    del capsule
    assert len(dlpack._exported) == before


def test_bf16_bits_survive() -> None:
    patterns = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)
    assert dlpack.to_numpy(dlpack.from_numpy(patterns)).tobytes() == patterns.tobytes()


def test_view_is_copied_in_its_own_order() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    np.testing.assert_array_equal(dlpack.to_numpy(dlpack.from_numpy(array)), array)


def test_strided_capsule_is_refused() -> None:
    strided = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        dlpack.to_numpy(strided.__dlpack__())


def test_used_capsule_is_refused() -> None:
    capsule = dlpack.from_numpy(np.zeros(4))
    taken = np.from_dlpack(Exporter(capsule))
    with pytest.raises(ValueError, match="unused DLPack capsule"):
        dlpack.to_numpy(capsule)
    assert taken.shape == (4,)


def test_dtype_that_triton_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        dlpack.from_numpy(np.zeros(4, ml_dtypes.float8_e4m3fn))
