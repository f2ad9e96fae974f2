# SPDX-License-Identifier: Apache-2.0
"""Requests to a Triton server over HTTP or gRPC, every one of them with a time-out.

Needs tritonclient (`pip install trtllm-mhc[triton]`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from trtllm_mhc.integrations.triton.tensors import Array, triton_name

Protocol = Literal["http", "grpc"]


class RequestFailedError(RuntimeError):
    """The server answered with an error.

    Attributes:
        status: the server's code: an HTTP status ("400"), or a gRPC status ("StatusCode.INVALID_ARGUMENT").
    """

    def __init__(self, message: str, status: str | None) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """One connection. Threads need a client each."""

    def __init__(self, url: str, protocol: Protocol = "http", timeout_s: float = 30.0) -> None:
        """Connects with the first request.

        Args:
            url: "address:port".
            protocol: which one listens there.
            timeout_s: seconds that any request may take, loading a model included, unless the call says otherwise.
        """
        self.protocol = protocol
        self._timeout_s = timeout_s
        self._module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
        options = {"connection_timeout": timeout_s, "network_timeout": timeout_s} if protocol == "http" else {}
        self._client: Any = self._module.InferenceServerClient(url, **options)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] = (),
        *,
        server_timeout_s: float | None = None,
    ) -> dict[str, Array]:
        """One request.

        Args:
            model: its name.
            inputs: by name; bf16 as ml_dtypes.bfloat16.
            outputs: names; empty: all.
            server_timeout_s: how long after its start the model may still begin with it; later it is refused.

        Raises:
            RequestFailedError: the server's error.
            TimeoutError: no answer within the client's time-out.
        """
        tensors = []
        for name, array in inputs.items():
            tensor = self._module.InferInput(name, list(array.shape), triton_name(array.dtype))
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        options: dict[str, Any] = {"timeout": round(server_timeout_s * 1e6)} if server_timeout_s is not None else {}
        if outputs:
            options["outputs"] = [self._module.InferRequestedOutput(name) for name in outputs]
        if self.protocol == "grpc":
            options["client_timeout"] = self._timeout_s
        answer = self._call(lambda: self._client.infer(model, tensors, **options))
        described = answer.get_response()["outputs"] if self.protocol == "http" else answer.get_response().outputs
        names = [each["name"] if self.protocol == "http" else each.name for each in described]
        return {name: answer.as_numpy(name) for name in names}

    def server_version(self) -> str:
        """The server's name and version."""
        answer = self._call(self._client.get_server_metadata)
        name, version = (
            (answer["name"], answer["version"]) if self.protocol == "http" else (answer.name, answer.version)
        )
        return f"{name} {version}"

    def is_ready(self, model: str) -> bool:
        """Whether the server calls the model ready. Older servers do so when its process is dead; `canary` tells."""
        return bool(self._call(lambda: self._client.is_model_ready(model)))

    def canary(self, model: str, inputs: Mapping[str, Array]) -> str | None:
        """Asks the model itself: None when it answers a small request, else why not."""
        try:
            self.infer(model, inputs)
        except (RequestFailedError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def unload(self, model: str) -> None:
        """Asks the server to unload; it lets requests in flight end first. Servers need --model-control-mode=explicit.

        Raises: as `infer`.
        """
        self._call(lambda: self._client.unload_model(model))

    def load(self, model: str) -> None:
        """Loads a model (again, if it is loaded) and waits for it.

        Raises: as `infer`.
        """
        self._call(lambda: self._client.load_model(model))

    def reload(self, model: str) -> None:
        """What brings back a model whose process is dead or whose group is broken: a new process.

        Raises: as `infer`; TimeoutError also when the old process does not go.
        """
        self.unload(model)
        deadline = time.monotonic() + self._timeout_s
        while self.is_ready(model):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the model {model!r} was still there {self._timeout_s:g} s after unloading")
            time.sleep(0.02)
        self.load(model)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _call(self, request: Any) -> Any:
        try:
            return request()
        except InferenceServerException as error:
            if error.status() == "StatusCode.DEADLINE_EXCEEDED" or "Deadline Exceeded" in str(error.message()):
                raise TimeoutError(f"no answer within {self._timeout_s:g} s") from error
            raise RequestFailedError(str(error.message()), error.status()) from error
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from error
