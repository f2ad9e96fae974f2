# SPDX-License-Identifier: Apache-2.0
"""Model repositories and launch lines for the three Triton backends that run TensorRT engines.

Nothing here needs a GPU, TensorRT or Triton.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_mhc.integrations.triton.settings import Settings
from trtllm_mhc.integrations.triton.tensors import TensorSpec, triton_name

Engine = bytes | bytearray | memoryview | Path

_MODEL_PY = '''\
# SPDX-License-Identifier: Apache-2.0
"""Written by trtllm_mhc.integrations.triton.repository; the work is done in trtllm_mhc.integrations.triton.model."""
{path}
from trtllm_mhc.integrations.triton.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def write_python_model(
    repository: Path,
    name: str,
    engines: Sequence[Engine],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    settings: Settings,
    *,
    python_path: Sequence[str | Path] = (),
    queue_size: int = 64,
) -> Path:
    """A model for the python backend: one process, in which every rank of the group is a thread.

    Args:
        repository: the model repository; made when it is not there.
        name: of the model; what is there under that name is replaced.
        engines: one for each rank, or none when `settings.group` opens something else than engines.
        inputs: of the engines. Every rank gets the same.
        outputs: of the engines. The first rank's are answered.
        settings: of the group.
        python_path: folders for `sys.path` of the model. The backend takes its Python and the packages of that from
            `python3` on PATH, and ignores PYTHONPATH.
        queue_size: requests that may wait; more are refused at once. One that has waited for `settings.deadline_s`, or
            for its own time-out if that is shorter, is refused as well.

    Returns:
        The model's version folder, in which `GroupRunner.record_canary` may put `canary.npz`.

    Raises:
        ValueError: a number of engines other than the ranks', or a dtype that Triton does not have.
    """
    if engines and len(engines) != settings.tp_size:
        raise ValueError(f"expected an engine for each of {settings.tp_size} ranks, got {len(engines)}")
    config = {
        **_header(name, "python", inputs, outputs),
        "instance_group": [{"kind": Word("KIND_MODEL"), "count": 1}],
        # For its queue; without a batch dimension it makes no batches.
        "dynamic_batching": {
            "default_queue_policy": {
                "timeout_action": Word("REJECT"),
                "default_timeout_microseconds": round(settings.deadline_s * 1e6),
                "allow_timeout_override": Word("true"),
                "max_queue_size": queue_size,
            }
        },
        "parameters": _parameters(settings.to_parameters()),
    }
    folder = _write(repository, name, config)
    for rank, engine in enumerate(engines):
        _write_engine(folder / f"rank{rank}.engine", engine)
    path = ""
    if python_path:
        path = f"\nimport sys\n\nsys.path[:0] = {json.dumps([os.fspath(entry) for entry in python_path])}\n"
    (folder / "model.py").write_text(_MODEL_PY.format(path=path))
    return folder


def write_tensorrt_model(
    repository: Path,
    name: str,
    engines: Sequence[Engine],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    gpus: Sequence[int] = (0,),
) -> Path:
    """A model for the C++ `tensorrt` backend, started with `tensorrt_backend_options`.

    One engine is an ordinary model. Several are the ranks of a group on as many GPUs, which takes a backend for
    TensorRT 11 that was built with multi-device support: it runs every rank on the same inputs and answers the first
    rank's outputs. Its ranks are threads of the server, which make no communicators of ours.

    Args:
        repository, name, inputs, outputs: as for `write_python_model`.
        engines: one for each rank.
        gpus: device of each rank.

    Returns:
        The model's version folder.

    Raises:
        ValueError: other numbers of engines than GPUs, or a dtype that Triton does not have.
    """
    if not engines or len(engines) != len(gpus):
        raise ValueError(f"expected an engine for each of the GPUs {list(gpus)}, got {len(engines)}")
    config = _header(name, "tensorrt", inputs, outputs)
    if len(engines) == 1:
        config["instance_group"] = [{"kind": Word("KIND_GPU"), "count": 1, "gpus": list(gpus)}]
    else:
        config["instance_group"] = [{"kind": Word("KIND_MODEL"), "count": 1}]
        config["parameters"] = _parameters(
            {
                "enable_multi_device": "true",
                "multi_device_gpus": ",".join(map(str, gpus)),
                "multi_device_per_rank_engines": "true",
            }
        )
    folder = _write(repository, name, config)
    if len(engines) == 1:
        _write_engine(folder / "model.plan", engines[0])
        return folder
    for rank, engine in enumerate(engines):
        _write_engine(folder / f"model.plan.rank{rank}", engine)
    (folder / "model.plan").symlink_to("model.plan.rank0")
    return folder


def server_command(
    repository: Path,
    *,
    tritonserver: str = "tritonserver",
    host: str = "127.0.0.1",
    http_port: int = 8000,
    grpc_port: int = 8001,
    options: Sequence[str] = (),
) -> list[str]:
    """Starts a server whose models are loaded and unloaded by name (a broken group is cured by doing both).

    Args:
        repository: the model repository. All its models are loaded at the start.
        tritonserver: the program.
        host: address to listen at, for HTTP and gRPC; metrics are off.
        http_port, grpc_port: where to listen.
        options: more options, such as `tensorrt_backend_options`.
    """
    return [
        tritonserver,
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--disable-auto-complete-config",
        f"--http-address={host}",
        f"--http-port={http_port}",
        f"--grpc-address={host}",
        f"--grpc-port={grpc_port}",
        "--allow-metrics=false",
        *options,
    ]


def tensorrt_backend_options(plugins: Sequence[str | Path]) -> list[str]:
    """Options of tritonserver that make the C++ `tensorrt` backend load plugin libraries.

    A path that cannot be loaded is only logged, and the models then fail with "Cannot find plugin".

    Raises:
        ValueError: a path with the separator in it.
    """
    paths = [os.fspath(path) for path in plugins]
    for path in paths:
        if ";" in path:
            raise ValueError(f"expected plugin paths without ';', which separates them, got {path!r}")
    return [f"--backend-config=tensorrt,plugins={';'.join(paths)}"]


def tensorrtllm_launch(
    repository: Path,
    plugin: Path,
    world_size: int,
    *,
    tritonserver: str = "tritonserver",
    host: str = "127.0.0.1",
    http_port: int = 8000,
    grpc_port: int = 8001,
    model: str = "tensorrt_llm",
) -> list[str]:
    """The `mpirun` line for the legacy `tensorrtllm` backend in leader mode, with our library in every rank.

    That backend has no option for plugin libraries, so each rank's server gets it by LD_PRELOAD.

    Args:
        repository: with a model of the `tensorrtllm` backend.
        plugin: `trtllm_mhc.plugin.library_path()`.
        world_size: ranks, each a server of its own on one GPU; the first one answers requests.
        tritonserver, host, http_port, grpc_port: as for `server_command`.
        model: the `tensorrtllm` model's name; ranks after the first load nothing else.

    Raises:
        ValueError: no rank.
    """
    if world_size < 1:
        raise ValueError(f"world_size: expected 1 or more, got {world_size}")
    command = ["mpirun", "--allow-run-as-root"]
    for rank in range(world_size):
        # Ranks after the first answer nothing, but each server wants addresses of its own.
        server = server_command(
            repository,
            tritonserver=tritonserver,
            host=host,
            http_port=http_port if rank == 0 else http_port + 10 * rank,
            grpc_port=grpc_port if rank == 0 else grpc_port + 10 * rank,
            options=[f"--backend-config=python,shm-region-prefix-name=prefix{rank}_"],
        )
        if rank > 0:
            server = [f"--load-model={model}" if option == "--load-model=*" else option for option in server]
        command += [*([":"] if rank else []), "-n", "1", "-x", f"LD_PRELOAD={plugin}", *server]
    return command


class Word(str):
    """A value that config.pbtxt has without quotes."""


def to_pbtxt(message: Mapping[str, Any], indent: int = 0) -> str:
    """Protobuf's text format of nested dictionaries and lists."""
    space = "  " * indent
    lines = []
    for key, value in message.items():
        if isinstance(value, Mapping):
            lines.append(f"{space}{key} {{\n{to_pbtxt(value, indent + 1)}{space}}}\n")
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            lines += [f"{space}{key} {{\n{to_pbtxt(entry, indent + 1)}{space}}}\n" for entry in value]
        elif isinstance(value, (list, tuple)):
            lines.append(f"{space}{key}: [{', '.join(map(_scalar, value))}]\n")
        else:
            lines.append(f"{space}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    return str(value)


def _header(name: str, backend: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, Any]:
    # No batching by Triton: M is an extent like others to it, so there is no batch dimension.
    return {
        "name": name,
        "backend": backend,
        "max_batch_size": 0,
        "input": [_tensor(spec) for spec in inputs],
        "output": [_tensor(spec) for spec in outputs],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": Word(f"TYPE_{triton_name(spec.dtype)}"), "dims": list(spec.shape)}


def _parameters(values: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": key, "value": {"string_value": value}} for key, value in values.items()]


def _write(repository: Path, name: str, config: Mapping[str, Any]) -> Path:
    model = repository / name
    if model.exists():
        shutil.rmtree(model)
    folder = model / "1"
    folder.mkdir(parents=True)
    (model / "config.pbtxt").write_text(to_pbtxt(config))
    return folder


def _write_engine(path: Path, engine: Engine) -> None:
    if isinstance(engine, Path):
        shutil.copyfile(engine, path)
    else:
        path.write_bytes(engine)
