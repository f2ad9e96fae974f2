# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc inspect`: the boundaries of an ONNX model, of a network that a script makes, or of an engine."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from trtllm_mhc.cli.rewrite import FuseArguments, MissingPackageError, make_options, require_packages, write_json

if TYPE_CHECKING:
    from trtllm_mhc.rewrite.graph import Graph
    from trtllm_mhc.runtime.inspection import EngineLayer, Leftover

_ENGINE_SUFFIXES = (".engine", ".plan", ".trt")


@dataclass(frozen=True)
class InspectOptions:
    """The command's options; ``fuse`` are the arguments of `make_options`."""

    file: str
    fuse: FuseArguments = (None, -1, "", "keep", True, False)
    require: int | None = None
    json_path: Path | None = None
    dot: str | None = None


def run(options: InspectOptions, console: Console) -> int:
    """Runs the command; returns the exit code."""
    try:
        require_packages("tensorrt")
        path, function = _split(options.file)
        if not path.is_file():
            raise FileNotFoundError(f"expected an ONNX model, a script or an engine, got {path}, which does not exist")
        if path.suffix in _ENGINE_SUFFIXES:
            return _engine(path, options, console)
        if path.suffix == ".onnx":
            require_packages("onnx", "onnx_ir")
            return _graph("onnx", _onnx_graph(path), options, console)
        if path.suffix == ".py":
            # What the script returns keeps the network alive.
            network, owners = _network(path, function)
            code = _graph("network", _network_graph(network), options, console)
            del network, owners
            return code
        raise ValueError(f"expected a file *.onnx, *.py or one of *{', *'.join(_ENGINE_SUFFIXES)}, got {path.name!r}")
    except (MissingPackageError, OSError, ValueError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 2


def _split(file: str) -> tuple[Path, str]:
    """File and function of ``FILE[:FUNCTION]``."""
    head, colon, function = file.rpartition(":")
    return (Path(head), function) if colon and head.endswith(".py") else (Path(file), "load_network")


def _onnx_graph(path: Path) -> Graph:
    from trtllm_mhc.rewrite.onnx.file import load
    from trtllm_mhc.rewrite.onnx.rewire import view

    return view(load(path))


def _network(path: Path, function: str) -> tuple[Any, Any]:
    """The network that a script's function returns, alone or as in Polygraphy in a tuple with its builder."""
    import tensorrt as trt

    from trtllm_mhc import plugin

    plugin.load()
    names = runpy.run_path(str(path))
    if not callable(names.get(function)):
        raise ValueError(
            f"{path}: expected a function {function} that returns a network; name another as FILE:FUNCTION"
        )
    made = names[function]()
    parts = made if isinstance(made, tuple) else (made,)
    network = next((part for part in parts if isinstance(part, trt.INetworkDefinition)), None)
    if network is None:
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(
            f"{path}: expected {function} to return an INetworkDefinition, alone or in a tuple, got {kinds}"
        )
    return network, (made, names)


def _network_graph(network: Any) -> Graph:
    from trtllm_mhc.rewrite.tensorrt_graph import TensorRTGraph

    return TensorRTGraph(network)


def _graph(kind: str, graph: Graph, options: InspectOptions, console: Console) -> int:
    from trtllm_mhc.rewrite import neighbourhood_dot
    from trtllm_mhc.rewrite.analysis import analyse

    report = analyse(graph, make_options(*options.fuse)).report()
    if options.dot is not None:
        layers = {entry.name: entry.all_reduce for entry in report.found}
        sys.stdout.write(neighbourhood_dot(graph, layers.get(options.dot, options.dot)))
        return 0
    if options.json_path != Path("-"):
        console.print(f"What the rewrite pass would do with {escape(options.file)}, which stays as it is:")
        console.print(report.table())
    write_json(json.dumps({"kind": kind, **report.to_dict()}, indent=2), options.json_path)
    return report.exit_code(options.require)


def _engine(path: Path, options: InspectOptions, console: Console) -> int:
    from trtllm_mhc.runtime.inspection import count_plugins, find_leftovers

    if options.dot is not None:
        raise ValueError("--dot: expected an ONNX model or a script, got an engine, whose layers are not the network's")
    layers, kept = _engine_layers(path)
    boundaries = count_plugins(layers).get("MhcBoundary", 0)
    all_reduces = [layer.name for layer in layers if layer.is_all_reduce]
    leftovers = find_leftovers(layers, kept)
    if options.json_path != Path("-"):
        console.print(
            f"{len(layers)} layers, {boundaries} fused boundaries, {len(all_reduces)} all-reduces beside them"
        )
        for leftover in leftovers:
            console.print(escape(describe(leftover)))
    record = {
        "kind": "engine",
        "layers": len(layers),
        "boundaries": boundaries,
        "all_reduces": all_reduces,
        "leftovers": [asdict(leftover) for leftover in leftovers],
    }
    write_json(json.dumps(record, indent=2), options.json_path)
    return int(options.require is not None and (boundaries < options.require or bool(leftovers)))


def describe(leftover: Leftover) -> str:
    """Why an all-reduce is still there, and what to do, in a sentence or two."""
    kept_by = ", ".join(repr(name) for name in leftover.kept_by)
    why = f"kept alive by {kept_by}, marked after the pass" if kept_by else "kept alive by another reader"
    return (
        f"{leftover.name!r} sums the same tensor as {leftover.boundary!r}: {why}. Every step does both. "
        "Mark such tensors before the pass, which then refuses the boundary and says so; or do not mark them."
    )


def _engine_layers(path: Path) -> tuple[list[EngineLayer], set[str]]:
    """The layers of an engine, and the names of its outputs and debug tensors."""
    import tensorrt as trt

    from trtllm_mhc import plugin
    from trtllm_mhc.runtime.build import EngineError, ErrorRecorder, explain, logger, require_device
    from trtllm_mhc.runtime.inspection import inspect

    try:
        require_device()
        plugin.load()
        recorder = ErrorRecorder()
        runtime = trt.Runtime(logger())
        runtime.error_recorder = recorder
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise EngineError(explain(f"{path} cannot be deserialised", recorder))
    except EngineError as error:
        raise ValueError(str(error)) from error
    layers = inspect(engine)
    names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
    kept = {name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT}
    kept |= {name for layer in layers for name in layer.outputs if engine.is_debug_tensor(name)}
    return layers, kept
