# SPDX-License-Identifier: Apache-2.0
"""A TensorRT-LLM to run against: the real one where it can be imported, else the contract double."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOUBLE = Path(__file__).parent / "double"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and "trtllm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.tensorrt_llm)


def real_is_installed() -> bool:
    found = importlib.util.find_spec("tensorrt_llm")
    return found is not None and found.origin is not None and not found.origin.startswith(str(DOUBLE))


@pytest.fixture(scope="session")
def trtllm_environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """What other processes need in their environment to import the same TensorRT-LLM as this one."""
    environment = dict(os.environ)
    if not real_is_installed():
        environment["PYTHONPATH"] = os.pathsep.join([str(DOUBLE), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment["TRTLLM_DOUBLE_PLUGINS"] = str(request.getfixturevalue("all_reduce_library"))
    return environment


@pytest.fixture(scope="session")
def trtllm(trt: ModuleType, builder: Any, request: pytest.FixtureRequest) -> ModuleType:
    """The package `tensorrt_llm`, with an AllReduce plugin that networks can hold."""
    if not real_is_installed():
        request.getfixturevalue("all_reduce_v2")
        sys.path.insert(0, str(DOUBLE))
    import tensorrt_llm

    return tensorrt_llm


@pytest.fixture(scope="session")
def integration(trtllm: ModuleType) -> ModuleType:
    """Our side of it."""
    from trtllm_mhc.integrations import tensorrt_llm

    return tensorrt_llm


@pytest.fixture
def config() -> Any:
    """Small matrices, the real structure: an Engram layer, four streams, 20 iterations."""
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config

    return DeepseekV41Config(hidden_size=4096, num_hidden_layers=3, o_lora_rank=32, mlp_size=64)


@pytest.fixture
def checkpoint(tmp_path: Path, config: Any) -> Path:
    """A checkpoint folder of two ranks."""
    from trtllm_mhc.models.deepseek_v41 import ModelWeights
    from trtllm_mhc.models.deepseek_v41.checkpoint import write_checkpoint

    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, config, ModelWeights(config, seed=5), 2)
    return folder
