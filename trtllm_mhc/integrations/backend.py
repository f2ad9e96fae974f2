# SPDX-License-Identifier: Apache-2.0
"""Whether the TensorRT-LLM of this environment still has its TensorRT backend, found out without importing it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from importlib.machinery import PathFinder

#: Modules of the TensorRT backend, which were removed together.
_BACKEND_MODULES = ("builder", "graph_rewriting", "network")
_INSTEAD = (
    "`trtllm-mhc build` builds the same engines with TensorRT alone; this project's runner and Triton's `tensorrt` "
    "backend run them"
)


class BackendError(ImportError):
    """There is no TensorRT-LLM with a TensorRT backend here. The message says what to use."""


def require_backend() -> str:
    """The version of a TensorRT-LLM whose TensorRT backend can be imported.

    Raises:
        BackendError: TensorRT-LLM is not installed, or is one of those without the backend.
    """
    found = importlib.util.find_spec("tensorrt_llm")
    if found is None or found.submodule_search_locations is None:
        raise BackendError(
            f"expected TensorRT-LLM 0.17 to 1.2 in this environment, got no tensorrt_llm. Without it: {_INSTEAD}."
        )
    folders = list(found.submodule_search_locations)
    missing = [name for name in _BACKEND_MODULES if PathFinder.find_spec(f"tensorrt_llm.{name}", folders) is None]
    if missing:
        raise BackendError(
            f"TensorRT-LLM {installed_version()} has no TensorRT backend (tensorrt_llm.{missing[0]} is gone): it was "
            "removed in July 2026, with trtllm-build. Use TensorRT-LLM 0.17 to 1.2, or do without: "
            f"{_INSTEAD}."
        )
    return installed_version()


def installed_version() -> str:
    """The version of the installed TensorRT-LLM, as its metadata says; without metadata ``"(version unknown)"``."""
    for name in ("tensorrt_llm", "tensorrt-llm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(version unknown)"
