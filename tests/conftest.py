# SPDX-License-Identifier: Apache-2.0
"""Fixtures for every test: a TensorRT with our plugins loaded, and networks to put layers into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parent
GPU_FOLDERS = ("gpu", "multi_gpu", "stress")
HAS_GPU = os.path.exists("/dev/nvidiactl")

if not HAS_GPU:
    # TensorRT reads it when the first Builder of the process is made.
    os.environ.setdefault("TRT_INTERNAL_OPTIONS", "--cpu_only=1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tensorrt", metavar="VERSION", help="fail, rather than skip, unless this TensorRT is found")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "trt" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.tensorrt)
        if item.path.is_relative_to(TESTS) and item.path.relative_to(TESTS).parts[0] in GPU_FOLDERS:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def trt(request: pytest.FixtureRequest) -> ModuleType:
    """The TensorRT on the path, with our plugin library loaded."""
    expected = request.config.getoption("--tensorrt")
    try:
        import tensorrt
    except ImportError as error:
        if expected:
            pytest.fail(f"expected TensorRT {expected}, got ImportError: {error}")
        pytest.skip("no TensorRT on the path (scripts/with_tensorrt.sh VERSION pytest ...)")
    if expected and not tensorrt.__version__.startswith(f"{expected}."):
        pytest.fail(f"expected TensorRT {expected}, got {tensorrt.__version__} from {tensorrt.__file__}")

    from trtllm_mhc import plugin

    plugin.load()
    return tensorrt


@pytest.fixture(scope="session")
def trt_messages(trt: ModuleType) -> list[tuple[Any, str]]:
    """What TensorRT's process-wide logger has said so far, as (severity, text)."""
    return _logger(trt).messages


@pytest.fixture(scope="session")
def builder(trt: ModuleType) -> Any:
    """The process's Builder; skips where this TensorRT cannot make one without a GPU."""
    version = tuple(int(part) for part in trt.__version__.split(".")[:2])
    if not HAS_GPU and version < (10, 15):
        pytest.skip(f"TensorRT {trt.__version__} makes no Builder without a GPU")
    return trt.Builder(_logger(trt))


@pytest.fixture
def network(trt: ModuleType, builder: Any) -> Any:
    """A fresh, strongly typed network definition."""
    flags = 0  # TensorRT 11 knows no other networks
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return builder.create_network(flags)


@pytest.fixture(scope="session")
def all_reduce_library(trt: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TensorRT-LLM's AllReduce as far as networks go, compiled: a V2 plugin of that name, in two namespaces."""
    if not trt.__version__.startswith("10."):
        pytest.skip(f"TensorRT-LLM's TensorRT backend, and its plugins, are for TensorRT 10, not {trt.__version__}")
    compiler = shutil.which("g++")
    headers = Path(trt.__file__).parents[2] / "include"
    cuda = [Path(sysconfig.get_path("purelib"), "nvidia/cu13/include"), Path("/usr/local/cuda/include")]
    cuda = [folder for folder in cuda if (folder / "cuda_runtime_api.h").is_file()]
    if compiler is None or not (headers / "NvInfer.h").is_file() or not cuda:
        pytest.skip(f"needs g++, {headers}/NvInfer.h and the CUDA headers to compile a plugin of the old interface")
    library = tmp_path_factory.mktemp("all_reduce_v2") / "liball_reduce_v2.so"
    includes = [f"-isystem{folder}" for folder in (headers, *cuda[:1])]
    source = TESTS / "unit/rewrite/all_reduce_v2.cpp"
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", "-Wno-deprecated-declarations", *includes, source, "-o", library],
        check=True,
        timeout=110,
    )
    return library


@pytest.fixture(scope="session")
def all_reduce_v2(trt: ModuleType, all_reduce_library: Path) -> Any:
    """The plugin registry, with that library loaded."""
    registry = trt.get_plugin_registry()
    assert registry.load_library(str(all_reduce_library)) is not None
    return registry


_loggers: dict[str, Any] = {}


def _logger(trt: ModuleType) -> Any:
    """One logger per process, as TensorRT wants it."""
    if not _loggers:

        class CollectingLogger(trt.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.messages: list[tuple[Any, str]] = []

            def log(self, severity: Any, text: str) -> None:
                self.messages.append((severity, text))

        _loggers["it"] = CollectingLogger()
    return _loggers["it"]
