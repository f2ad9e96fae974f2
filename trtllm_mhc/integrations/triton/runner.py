# SPDX-License-Identifier: Apache-2.0
"""Requests on a tensor-parallel group: what fails one request, and what ends the group.

A request goes through two phases on all ranks. In `prepare` no rank waits for another, so a failure there costs this
request only. In `run` the ranks wait for each other inside their kernels: after a failure there nobody knows where each
of them is, and the group answers nothing more.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_mhc.integrations.triton.groups import Array, Outputs, RankGroup
from trtllm_mhc.integrations.triton.tensors import TensorSpec
from trtllm_mhc.runtime.threads import RankTimeoutError


class BadRequestError(ValueError):
    """The request's tensors do not fit the model; the message names what was expected and what came."""


class DeadlineError(TimeoutError):
    """The request's own time-out passed before the ranks began; the group is as it was."""


class PrepareError(RuntimeError):
    """The request could not be prepared, for another reason than its tensors; the group has passed its canary since."""


class GroupBrokenError(RuntimeError):
    """The ranks failed together, now or before. Only loading the model again helps."""


class CanaryError(RuntimeError):
    """The group computes something else than the recorded outputs."""


class GroupRunner:
    """Runs requests one after another. Not for concurrent use.

    Attributes:
        broken: why the group answers nothing more; None while it does.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.broken: str | None = None

    def infer(self, inputs: Mapping[str, Array], deadline: float | None = None) -> Outputs:
        """Runs all ranks on the same inputs; returns the first rank's outputs.

        Args:
            inputs: every input by name.
            deadline: by the monotonic clock; None: only the group's own bounds.

        Raises:
            BadRequestError, DeadlineError, PrepareError: this request fails, the next one may work.
            GroupBrokenError: see there.
        """
        return self._infer_ranks(inputs, deadline)[0]

    def canary(self, recorded: Path | None = None) -> None:
        """Runs the group on recorded inputs and compares every rank's outputs, bit for bit.

        Args:
            recorded: what `record_canary` wrote; without it, or while it is not there, zeros of the smallest shapes
                are run and nothing is compared.

        Raises:
            CanaryError: other bits, or a record that does not fit.
            Exception: as `infer`.
        """
        if recorded is None or not recorded.exists():
            self._infer_ranks(self._zeros(), None)
            return
        with np.load(recorded) as arrays:
            names = {name for name in arrays.files if name.startswith("input.")}
            expected = {f"input.{name}" for name in self._group.inputs}
            if names != expected:
                raise CanaryError(f"{recorded.name}: expected {sorted(expected)}, got {sorted(names)}")
            inputs = {name: arrays[f"input.{name}"].view(r.dtype) for name, r in self._group.inputs.items()}
            for rank, outputs in enumerate(self._infer_ranks(inputs, None)):
                for name, array in outputs.items():
                    _compare(arrays[_output_key(rank, name)], array, f"output {name!r} of rank {rank}")

    def record_canary(self, path: Path, inputs: Mapping[str, Array]) -> None:
        """Writes inputs, and what every rank makes of them, for `canary`."""
        record = {f"input.{name}": _as_bits(array) for name, array in inputs.items()}
        for rank, outputs in enumerate(self._infer_ranks(inputs, None)):
            record |= {_output_key(rank, name): _as_bits(array) for name, array in outputs.items()}
        np.savez(path, **record)  # type: ignore[arg-type]

    def require_signature(self, inputs: list[TensorSpec], outputs: list[TensorSpec]) -> None:
        """Raises ValueError unless a model configuration declares what the group has."""
        declared = {spec.name: spec for spec in inputs}
        if set(declared) != set(self._group.inputs):
            raise ValueError(f"config.pbtxt: expected the inputs {list(self._group.inputs)}, got {list(declared)}")
        for name, range_ in self._group.inputs.items():
            spec = declared[name]
            if spec.dtype != range_.dtype or not spec.accepts(range_.smallest) or not spec.accepts(range_.largest):
                raise ValueError(
                    f"config.pbtxt, input {name!r}: expected {range_.dtype} of shapes {list(range_.smallest)} to "
                    f"{list(range_.largest)}, got {spec.dtype} {list(spec.shape)}"
                )
        unknown = [spec.name for spec in outputs if spec.name not in self._group.outputs]
        if unknown:
            raise ValueError(f"config.pbtxt: expected outputs among {list(self._group.outputs)}, got {unknown}")

    def close(self) -> None:
        """Frees the group."""
        self._group.close()

    def _infer_ranks(self, inputs: Mapping[str, Array], deadline: float | None) -> list[Outputs]:
        self._require_whole()
        self._check(inputs)
        _require_time(deadline)
        try:
            self._group.prepare([inputs] * self._group.tp_size)
        except ValueError as error:
            raise BadRequestError(str(error)) from error
        except RankTimeoutError as error:
            raise self._break("preparing a request", error) from error
        except Exception as error:
            # Nobody waited for anybody, so the ranks should be as before. Make sure.
            self._run_zeros_or_break()
            raise PrepareError(f"preparing the request failed: {describe(error)}") from error
        _require_time(deadline)
        try:
            return self._group.run()
        except Exception as error:
            raise self._break("running a request", error) from error

    def _zeros(self) -> dict[str, Array]:
        return {name: np.zeros(known.smallest, known.dtype) for name, known in self._group.inputs.items()}

    def _run_zeros_or_break(self) -> None:
        try:
            self._group.prepare([self._zeros()] * self._group.tp_size)
            self._group.run()
        except Exception as error:
            raise self._break("running the canary after a request that could not be prepared", error) from error

    def _check(self, inputs: Mapping[str, Array]) -> None:
        known = self._group.inputs
        if set(inputs) != set(known):
            missing, unknown = sorted(set(known) - set(inputs)), sorted(set(inputs) - set(known))
            raise BadRequestError(f"expected the inputs {list(known)}; missing {missing}, unknown {unknown}")
        for name, array in inputs.items():
            wrong = known[name].explain(array)
            if wrong is not None:
                raise BadRequestError(f"input {name!r}: {wrong}")
        # A profile bounds each input by itself; that the rows M of all of them agree is the engine's to say.

    def _require_whole(self) -> None:
        if self.broken is not None:
            raise GroupBrokenError(f"the group of ranks has failed before, load the model again; then: {self.broken}")

    def _break(self, doing: str, error: BaseException) -> GroupBrokenError:
        self.broken = f"{doing} failed: {describe(error)}"
        return GroupBrokenError(self.broken)


def describe(error: BaseException) -> str:
    """An exception in one piece of text, with its notes."""
    return "".join(traceback.format_exception_only(error)).strip()


def _require_time(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise DeadlineError("the request's time-out passed before the ranks began")


def _output_key(rank: int, name: str) -> str:
    return f"output.{rank}.{name}"


def _as_bits(array: Array) -> Array:
    """npz files hold no bf16."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _compare(expected: Array, array: Array, what: str) -> None:
    bits: Array = _as_bits(array)
    if bits.shape != expected.shape or bits.dtype != expected.dtype:
        raise CanaryError(f"{what}: expected {expected.dtype} {list(expected.shape)}, got {bits.dtype} {bits.shape}")
    different: Any = np.argwhere(bits != expected)
    if len(different):
        raise CanaryError(
            f"{what}: {len(different)} of {bits.size} elements have other bits than recorded, the first at "
            f"{different[0].tolist()}: expected {expected[tuple(different[0])]:#x}, got {bits[tuple(different[0])]:#x}"
        )
