# SPDX-License-Identifier: Apache-2.0
"""The model that Triton's python backend runs: all ranks of a tensor-parallel group in one stub process.

The `model.py` of a repository (`repository.write_python_model`) only imports `TritonPythonModel` from here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trtllm_mhc.integrations.triton import dlpack
from trtllm_mhc.integrations.triton.runner import (
    BadRequestError,
    DeadlineError,
    GroupBrokenError,
    GroupRunner,
    describe,
)
from trtllm_mhc.integrations.triton.settings import Settings
from trtllm_mhc.integrations.triton.tensors import TensorSpec, numpy_dtype

CANARY_FILE = "canary.npz"

# How long the process may take to end after `finalize`, with threads that hang in the driver.
_EXIT_S = 5.0


class TritonPythonModel:
    """Called by the python backend, from one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the group and runs its canary: a model that loads has computed something on all ranks.

        Raises:
            Exception: what is wrong; Triton reports it as the reason why the model is not ready.
        """
        self._triton: Any = importlib.import_module("triton_python_backend_utils")  # exists in the stub only
        config = json.loads(args["model_config"])
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        settings = Settings.from_parameters(parameters)
        inputs, outputs = ([_spec(tensor) for tensor in config[kind]] for kind in ("input", "output"))
        self._inputs = [spec.name for spec in inputs]
        self._outputs = [spec.name for spec in outputs]
        folder = Path(args["model_repository"], args["model_version"])
        self._runner = GroupRunner(settings.open(folder))
        self._runner.require_signature(inputs, outputs)
        self._runner.canary(folder / CANARY_FILE)
        _log(f"{args['model_name']}: {settings.tp_size} ranks ready")

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers each request, with outputs or an error. Never raises: that would fail the other requests as well."""
        begin = time.monotonic()
        return [self._answer(request, begin) for request in requests]

    def is_ready(self) -> bool:
        """Whether the group still answers. Servers from 2026 on ask; with older ones only a request tells."""
        return self._runner.broken is None

    def finalize(self) -> None:
        """Frees the group. Called when the model is unloaded, after the last request."""
        # A thread that hangs in the driver must not keep the process, and with it the unloading.
        exit_timer = threading.Timer(_EXIT_S, os._exit, [1])
        exit_timer.daemon = True
        exit_timer.start()
        if self._runner.broken is None:
            self._runner.close()

    def _answer(self, request: Any, begin: float) -> Any:
        error = self._triton.TritonError
        try:
            if request.is_cancelled():
                return self._failure("the client has cancelled the request", error.CANCELLED)
            timeout_us = request.timeout()
            deadline = begin + timeout_us / 1e6 if timeout_us else None
            outputs = self._runner.infer(self._read(request), deadline)
            wanted = [name for name in self._outputs if name in request.requested_output_names()]
            tensors = [self._triton.Tensor.from_dlpack(name, dlpack.from_numpy(outputs[name])) for name in wanted]
            return self._triton.InferenceResponse(tensors)
        except BadRequestError as failure:
            return self._failure(str(failure), error.INVALID_ARG)
        except DeadlineError as failure:
            return self._failure(str(failure), error.UNAVAILABLE)
        except GroupBrokenError as failure:
            # The process stays, so that later requests are told as well. Requests to a dead one would keep servers like
            # 2.51 from ever unloading the model.
            _log(str(failure))
            return self._failure(str(failure), error.UNAVAILABLE)
        except Exception as failure:
            _log(describe(failure))
            return self._failure(describe(failure), error.INTERNAL)

    def _read(self, request: Any) -> dict[str, Any]:
        found = {name: self._triton.get_input_tensor_by_name(request, name) for name in self._inputs}
        arrays = {}
        for name, tensor in found.items():
            if tensor is None:
                continue  # the runner names everything that is missing
            try:
                arrays[name] = dlpack.to_numpy(tensor.to_dlpack())
            except ValueError as error:
                raise BadRequestError(f"input {name!r}: {error}") from None
        return arrays

    def _failure(self, message: str, code: Any) -> Any:
        return self._triton.InferenceResponse(error=self._triton.TritonError(message, code))


def _spec(tensor: dict[str, Any]) -> TensorSpec:
    return TensorSpec(tensor["name"], numpy_dtype(tensor["data_type"]), tuple(int(size) for size in tensor["dims"]))


def _log(text: str) -> None:
    """Into the server's log: the stub's standard error."""
    print(f"trtllm_mhc: {text}", file=sys.stderr, flush=True)
