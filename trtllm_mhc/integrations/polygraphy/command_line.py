# SPDX-License-Identifier: Apache-2.0
"""What `scripts/mhc.py` offers to Polygraphy's command line."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import tensorrt as trt
from polygraphy.backend.trt import create_network

from trtllm_mhc import plugin
from trtllm_mhc.integrations.polygraphy.cuda_runtime import expose_cuda_runtime
from trtllm_mhc.integrations.polygraphy.network import float32_io
from trtllm_mhc.integrations.polygraphy.settings import Settings
from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights, build_boundary_stack
from trtllm_mhc.network import CommunicatorSpec
from trtllm_mhc.rewrite import fuse_boundaries
from trtllm_mhc.runtime import cuda
from trtllm_mhc.runtime.communicator import Communicator

Array = npt.NDArray[Any]

_lock = threading.Lock()
_communicators: list[Communicator] = []  # one; it lives as long as the process


def load_stack() -> tuple[trt.Builder, trt.INetworkDefinition]:
    """DeepSeek V4.1's boundary stack, unfused, as `Settings` describe it.

    Input ``embeddings`` [M, H], output ``hidden_states`` [M, H], M dynamic.
    """
    settings = Settings.read()
    join_group(settings)
    builder, network = create_network(strongly_typed=hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"))
    config = DeepseekV41Config(hidden_size=settings.hidden, num_hidden_layers=settings.layers)
    build_boundary_stack(
        network,
        config,
        ModelWeights(config, settings.seed),
        CommunicatorSpec(settings.tp, all_reduce=settings.all_reduce),  # type: ignore[arg-type]
        rank=settings.rank,
        sublayers=settings.sublayers,  # type: ignore[arg-type]
        coefficients=settings.coefficients,  # type: ignore[arg-type]
    )
    if settings.io == "float32":
        float32_io(network)
    return builder, network


def fuse(network: Any) -> None:
    """Runs the rewrite pass on `network` and prints its report.

    Raises:
        RuntimeError: no boundary was fused, so that what follows would compare a network with itself.
    """
    join_group(Settings.read())
    report = fuse_boundaries(network)
    print(report.to_text(), end="")
    if not report.fused and not report.already_fused:
        raise RuntimeError(f"the pass fused no boundary: {report.summary()}")


def load_data() -> Iterator[dict[str, Any]]:
    """Inputs of `load_stack`: the same for every rank, and for the same seed the same each time."""
    settings = Settings.read()
    join_group(settings)
    return _generate(settings)


load_network, postprocess = load_stack, fuse  # Polygraphy's own names for them


def stack_input(settings: Settings, index: int) -> Array:
    """Input number `index` of the stack: [M, H] bf16."""
    rng = np.random.default_rng((settings.seed, index))
    return rng.standard_normal((settings.rows, settings.hidden), np.float32).astype(ml_dtypes.bfloat16)


def join_group(settings: Settings) -> None:
    """Makes the communicator that this process's engines need, once.

    Polygraphy runs one rank: only a group of one can be joined here. With more ranks networks can still be made and
    engines built; running them needs the ranks side by side, as threads (`runners.GroupRunner`). Does nothing where
    there is no GPU. An error in a kernel ends the process's CUDA work: Polygraphy would not ask for it.
    """
    plugin.load()
    expose_cuda_runtime()
    with _lock:
        if settings.tp == 1 and not _communicators and cuda.device_count() > 0:
            _communicators.append(
                Communicator.threads(
                    "polygraphy", tp_size=1, rank=0, device=0, hidden_size=settings.hidden, on_error="trap"
                )
            )


def _generate(settings: Settings) -> Iterator[dict[str, Any]]:
    torch = importlib.import_module("torch") if settings.io == "bfloat16" else None
    for index in range(settings.inputs):
        x = stack_input(settings, index).astype(np.float32)
        yield {"embeddings": x if torch is None else torch.from_numpy(x).to(torch.bfloat16)}
