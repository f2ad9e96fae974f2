# SPDX-License-Identifier: Apache-2.0
"""A real tritonserver that serves a boundary, evaluated by the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from trtllm_mhc import reference
from trtllm_mhc.integrations.triton import server as servers

Array = npt.NDArray[Any]
ROOT = Path(__file__).resolve().parents[4]
MODEL = "boundary"
TP = 2


@pytest.fixture(scope="session")
def installation() -> servers.Installation:
    os.environ.setdefault(servers.ENVIRONMENT, str(ROOT / ".triton"))
    try:
        return servers.Installation.find()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Holds one model."""
    # Asked for here and not as arguments, which would mark the tests `tensorrt`, to be repeated under each version:
    # they are about the server. A TensorRT that makes no Builder makes no networks in the server's process either.
    request.getfixturevalue("builder")
    tensorrt = Path(request.getfixturevalue("trt").__file__)
    # What the model imports from; the backend does not take it from PYTHONPATH.
    python_path = [ROOT, Path(__file__).parent, tensorrt.resolve().parents[1]]
    from served_boundary import DEADLINE_S, QUEUE, ranges

    from trtllm_mhc.integrations.triton.repository import write_python_model
    from trtllm_mhc.integrations.triton.settings import Settings
    from trtllm_mhc.integrations.triton.tensors import TensorSpec

    folder = tmp_path_factory.mktemp("repository")
    known = ranges()
    inputs = [
        TensorSpec(name, r.dtype, tuple(a if a == b else -1 for a, b in zip(r.smallest, r.largest, strict=True)))
        for name, r in known.items()
    ]
    outputs = [
        TensorSpec("residual_out", known["residual"].dtype, (-1, *known["residual"].largest[1:])),
        TensorSpec("layer_input", known["x"].dtype, (-1, *known["x"].largest[1:])),
    ]
    settings = Settings(TP, known["x"].largest[1], deadline_s=DEADLINE_S, group="served_boundary:open_group")
    write_python_model(folder, MODEL, [], inputs, outputs, settings, python_path=python_path, queue_size=QUEUE)
    return folder


@pytest.fixture(scope="module")
def server(installation: servers.Installation, repository: Path) -> Iterator[servers.TritonServer]:
    with servers.TritonServer(installation, repository) as running:
        yield running


@pytest.fixture
def make_inputs() -> Callable[..., dict[str, Array]]:
    """Inputs of the boundary, drawn from a seed; `fault` is put where the model looks for it."""
    from served_boundary import HIDDEN

    def make(rows: int = 1, seed: int = 0, fault: float | None = None) -> dict[str, Array]:
        rng = np.random.default_rng([seed, rows])
        x = rng.standard_normal((rows, HIDDEN), np.float32)
        if fault is not None:
            x[0, 0] = fault
        return {
            "x": x.astype(ml_dtypes.bfloat16),
            "residual": rng.standard_normal((rows, 4, HIDDEN), np.float32).astype(ml_dtypes.bfloat16),
            "post": rng.random((rows, 4), np.float32),
            "comb": rng.random((rows, 4, 4), np.float32),
            "pre": rng.random((rows, 4), np.float32),
            "gamma": rng.standard_normal(HIDDEN, np.float32).astype(ml_dtypes.bfloat16),
        }

    return make


@pytest.fixture
def expect() -> Callable[[dict[str, Array]], dict[str, Array]]:
    """What the boundary makes of inputs: every rank contributes the same `x`."""
    from served_boundary import EPS

    def outputs(inputs: dict[str, Array]) -> dict[str, Array]:
        rest = (inputs[name] for name in ("residual", "post", "comb", "pre", "gamma"))
        residual_out, layer_input = reference.boundary([inputs["x"]] * TP, *rest, EPS)
        assert layer_input is not None
        return {"residual_out": residual_out, "layer_input": layer_input}

    return outputs
