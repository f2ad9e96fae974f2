# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc doctor`: what this machine has of what is needed.

Everything is looked up on its own, so that one missing piece hides no other.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import trtllm_mhc
from trtllm_mhc import plugin
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime import library as c_api

EXIT_READY, EXIT_BROKEN, EXIT_MISSING = 0, 1, 3

PLUGINS = ("MhcBoundary", "MhcAllReduce", "MhcCoefficients", "MhcPublishLinear")
MINIMUM_CAPABILITY = (9, 0)
# From this number of streams on, work of different ranks would share hardware queues and wait for each other.
MANY_RANKS = 8
CONNECTIONS = 32


class State(Enum):
    """How a finding is shown, and what it means for the exit code."""

    OK = "[green]ok[/]"
    HINT = "[cyan]hint[/]"
    MISSING = "[yellow]missing[/]"
    BROKEN = "[red]broken[/]"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    state: State
    text: str


def run(console: Console) -> int:
    """Prints the report; returns the exit code."""
    table = Table(title="trtllm-mhc doctor", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    findings = list(examine(os.environ))
    for finding in findings:
        table.add_row(finding.subject, finding.state.value, escape(finding.text))
    console.print(table)
    code = exit_code(findings)
    console.print(
        {
            EXIT_READY: "[green]Engines can be built and run here.[/]",
            EXIT_MISSING: "[yellow]Engines cannot be built and run here:[/] see what is missing above. Networks can be "
            "made and rewritten with TensorRT alone; the numpy reference needs neither TensorRT nor a GPU.",
            EXIT_BROKEN: "[red]Something is broken:[/] see above.",
        }[code]
    )
    return code


def exit_code(findings: list[Finding]) -> int:
    """The worst of the findings."""
    states = {finding.state for finding in findings}
    if State.BROKEN in states:
        return EXIT_BROKEN
    return EXIT_MISSING if State.MISSING in states else EXIT_READY


def examine(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Looks at everything. Never raises for something that is missing or broken."""
    yield Finding("trtllm-mhc", State.OK, f"{trtllm_mhc.__version__}, Python {platform.python_version()}")
    library = _library()
    yield library
    yield from _tensorrt(library.state is State.OK)
    devices = 0
    for finding, count in _devices():
        devices = max(devices, count)
        yield finding
    if devices:
        yield from _environment(environment)
        if library.state is State.OK:
            yield _nccl()
            yield from _build()


def _library() -> Finding:
    try:
        version = c_api.library().version()
    except FileNotFoundError as error:
        return Finding("plugin library", State.MISSING, str(error))
    except (OSError, ImportError, RuntimeError) as error:
        return Finding("plugin library", State.BROKEN, str(error))
    return Finding("plugin library", State.OK, f"{version}, {plugin.library_path()}")


def _tensorrt(library_loads: bool) -> Iterator[Finding]:
    try:
        import tensorrt
    except ImportError as error:
        yield Finding(
            "TensorRT", State.MISSING, f"{error}; install it (pip install tensorrt) or use scripts/with_tensorrt.sh"
        )
        return
    yield Finding("TensorRT", State.OK, f"{tensorrt.__version__}, {os.path.dirname(tensorrt.__file__)}")
    if not library_loads:
        return
    for name in PLUGINS:
        try:
            creator = plugin.creator(name)
        except Exception as error:
            yield Finding(f"plugin {name}", State.BROKEN, str(error))
        else:
            identity = f"version {creator.plugin_version}, namespace {creator.plugin_namespace}"
            yield Finding(f"plugin {name}", State.OK, identity)


def _devices() -> Iterator[tuple[Finding, int]]:
    """Findings on the GPUs, each with the number of usable devices."""
    try:
        count = cuda.device_count()
        version = importlib.metadata.version("cuda-bindings")
    except cuda.CudaError as error:
        yield Finding("CUDA", State.BROKEN if error.name else State.MISSING, str(error)), 0
        return
    driver = cuda.driver_version()
    if count == 0:
        why = (
            "no NVIDIA driver" if driver == (0, 0) else f"no usable device (the driver supports CUDA {_dotted(driver)})"
        )
        yield Finding("GPU", State.MISSING, f"{why}; cuda-bindings {version}"), 0
        return
    text = f"driver supports {_dotted(driver)}, cuda-bindings {version}"
    yield Finding("CUDA", State.OK, text), count
    for ordinal in range(count):
        info = cuda.device_info(ordinal)
        state = State.OK if info.compute_capability >= MINIMUM_CAPABILITY else State.MISSING
        multicast = {True: "supported", False: "not supported", None: "unknown"}[info.multicast]
        text = (
            f"{info.name}, compute capability {_dotted(info.compute_capability)}, "
            f"{info.total_memory / 2**30:.0f} GiB, NVLink multicast {multicast}"
        )
        if state is State.MISSING:
            text += f"; the kernels need {_dotted(MINIMUM_CAPABILITY)} or newer"
        yield Finding(f"GPU {ordinal}", state, text), count
    if count > 1:
        yield _peer_access(count), count


def _peer_access(count: int) -> Finding:
    without = [
        f"{device} to {peer}"
        for device in range(count)
        for peer in range(count)
        if device != peer and not cuda.can_access_peer(device, peer)
    ]
    if without:
        return Finding("peer access", State.HINT, f"not between GPUs {', '.join(without)}: groups across them use NCCL")
    return Finding("peer access", State.OK, f"between all {count} GPUs")


def _nccl() -> Finding:
    try:
        return Finding("NCCL", State.OK, c_api.library().nccl_version())
    except c_api.UnsupportedError as error:
        return Finding("NCCL", State.HINT, f"only needed without peer access, or for nccl_rows: {error}")


def _build() -> Iterator[Finding]:
    try:
        from trtllm_mhc.runtime import build
    except ImportError:  # no TensorRT, which is reported already
        return
    reason = build.why_no_engines()
    if reason is None:
        yield Finding("test engine", State.OK, "built and deserialised")
    else:
        yield Finding("test engine", State.BROKEN, reason)


def _environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    enough = connections is not None and connections.isdigit() and int(connections) >= CONNECTIONS
    yield Finding(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        State.OK if enough else State.HINT,
        f"{connections or 'not set'}"
        + ("" if enough else f"; set it to {CONNECTIONS} where {MANY_RANKS} or more ranks or streams share a GPU"),
    )
    loading = environment.get("CUDA_MODULE_LOADING")
    eager = loading == "EAGER"
    yield Finding(
        "CUDA_MODULE_LOADING",
        State.OK if eager else State.HINT,
        f"{loading or 'not set'}"
        + (
            ""
            if eager
            else "; kernels load lazily: where ranks share a GPU warm each engine up with its gate closed "
            "(EngineGroup does), or set EAGER"
        ),
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
