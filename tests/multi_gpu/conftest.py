# SPDX-License-Identifier: Apache-2.0
"""Everything here needs a GPU for each of at least two ranks; test_nccl*.py make do with one where NCCL does: 2.30 or
newer, NCCL_MULTI_RANK_GPU_ENABLE=1."""

from __future__ import annotations

import os

import pytest

# NVLink SHARP would make multicast objects; children inherit it.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


@pytest.fixture(scope="session")
def gpus() -> int:
    """The number of GPUs."""
    from trtllm_mhc.runtime import cuda

    return cuda.device_count()


def ranks_may_share_a_gpu() -> bool:
    """Whether NCCL is told to let them."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


@pytest.fixture(autouse=True)
def _enough_gpus(request: pytest.FixtureRequest, gpus: int) -> None:
    makes_do = request.path.name.startswith("test_nccl") and ranks_may_share_a_gpu()
    if gpus < 2 and not makes_do:
        pytest.skip(f"needs 2 GPUs, this machine has {gpus}")
