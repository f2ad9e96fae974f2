# SPDX-License-Identifier: Apache-2.0
"""Evaluation of one network per rank, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtllm_mhc.network.layers import tensor_shape
from trtllm_mhc.reference._arrays import AnyArray

from . import collectives, contraction, local_plugins, movement, pointwise  # noqa: F401  (the rules register themselves)
from .arithmetic import Arithmetic, Precision, is_float
from .rules import RULES, Operation
from .schedule import Step, make_schedule


class LockstepError(ValueError):
    """The ranks' networks do not meet at the same collectives; the message names ranks and layers."""


@dataclass
class _Waiting:
    """A rank that has come to a collective."""

    step: Step
    operation: Operation
    collective: collectives.Collective


class _Rank:
    """One rank's network, evaluated from collective to collective."""

    def __init__(
        self, index: int, ranks: int, network: Any, feed: Mapping[str, Any], wanted: Sequence[str], how: Arithmetic
    ) -> None:
        self.index = index
        self._ranks = ranks
        self._how = how
        self._wanted = wanted
        schedule = make_schedule(network, wanted)
        self._left = schedule.uses
        known = {network.get_input(i).name for i in range(network.num_inputs)}
        unknown = sorted(set(feed) - known)
        if unknown:
            raise ValueError(
                f"feed of rank {index}: expected only inputs of the network, {sorted(known)}, got {unknown}"
            )
        self._values = {name: self._fed(tensor, feed) for name, tensor in schedule.inputs.items()}
        self._steps: Iterator[Step] = iter(schedule.steps)
        self.waiting: _Waiting | None = None

    def advance(self) -> None:
        """Evaluate layers up to the next collective, or to the end."""
        for step in self._steps:
            operation = Operation(step.layer, [self._take(name) for name in step.inputs], self._how)
            if collectives.is_collective(operation):
                self.waiting = _Waiting(step, operation, collectives.read(operation, self.index, self._ranks))
                return
            if step.kind not in RULES:
                raise NotImplementedError(
                    f"layer {step.layer.name!r}: the interpreter has no rule for type {step.kind}"
                )
            result = RULES[step.kind](operation)
            self._keep(step, result if isinstance(result, tuple) else (result,))

    def resume(self, outputs: Sequence[AnyArray]) -> None:
        """Give the collective that the rank waits at its outputs."""
        assert self.waiting is not None
        self._keep(self.waiting.step, outputs)
        self.waiting = None

    def result(self) -> dict[str, AnyArray]:
        """Copies of the wanted tensors: a value may be a view of a feed or of the network's weights."""
        return {name: np.array(self._how.load(self._values[name])) for name in self._wanted}

    def _fed(self, tensor: Any, feed: Mapping[str, Any]) -> AnyArray:
        what = f"feed of rank {self.index}, input {tensor.name!r}"
        if tensor.name not in feed:
            raise ValueError(f"{what}: expected an array, got none")
        array = feed[tensor.name]
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{what}: expected a numpy array, got {type(array).__name__}")
        expected = Arithmetic("network").stored_dtype(tensor.dtype)
        if array.dtype != expected and not (self._how.exact and is_float(expected) and is_float(array.dtype)):
            raise TypeError(f"{what}: expected dtype {expected}, got {array.dtype}")
        shape = tuple(tensor.shape)
        if len(shape) != array.ndim or any(want not in (-1, got) for want, got in zip(shape, array.shape, strict=True)):
            raise ValueError(f"{what}: expected shape {list(shape)}, got {list(array.shape)}")
        return self._how.store(array, tensor.dtype)

    def _take(self, name: str | None) -> AnyArray | None:
        if name is None:
            return None
        self._left[name] -= 1
        return self._values[name] if self._left[name] else self._values.pop(name)

    def _keep(self, step: Step, results: Sequence[AnyArray]) -> None:
        for tensor, value in zip(step.outputs, results, strict=True):
            name, shape = tensor.name, tensor_shape(tensor)
            if (
                shape is None
                or len(shape) != value.ndim
                or any(want not in (-1, got) for want, got in zip(shape, value.shape, strict=True))
            ):
                raise RuntimeError(
                    f"layer {step.layer.name!r} of rank {self.index}: TensorRT gives its output the shape {shape}, the "
                    f"interpreter {value.shape}"
                )
            if self._left[name]:
                # Weights stay as they are until they are read: in float64 they would be four times as large.
                self._values[name] = value if step.kind == "CONSTANT" else self._how.store(value, tensor.dtype)


def evaluate(
    networks: Sequence[Any],
    feeds: Sequence[Mapping[str, AnyArray]],
    *,
    precision: Precision = "network",
    extra_outputs: Sequence[str] = (),
) -> list[dict[str, AnyArray]]:
    """Evaluate one ``INetworkDefinition`` per rank with numpy, the ranks in lockstep.

    Only layers that an output depends on are evaluated, in an order of data dependence. At ``MhcAllReduce`` and
    ``MhcBoundary`` plugin layers and at all-reducing ``IDistCollectiveLayer``s the ranks of the layer's group meet and
    their inputs are combined.

    Args:
        networks: one network for each rank; world rank r is ``networks[r]``.
        feeds: for each rank its network inputs by name, of the inputs' dtypes (ml_dtypes for bf16 and FP8; with
            ``"float64"`` any floating-point dtype for a floating-point input). Dynamic extents take the arrays'.
        precision: ``"network"`` gives every tensor its dtype in the network, each layer computed in fp32 and rounded
            once; ``"float64"`` computes and keeps all floating-point tensors in float64, without any rounding below
            that.
        extra_outputs: names of further tensors to give back, in every network.

    Returns:
        For each rank its outputs by name (and ``extra_outputs``), as new arrays.

    Raises:
        LockstepError: the networks do not meet at the same collectives.
        NotImplementedError: a layer that the interpreter does not know, by name and type.
        TypeError, ValueError: a feed of another dtype or shape, a missing or an unknown one.
    """
    if len(networks) != len(feeds) or not networks:
        raise ValueError(f"expected as many feeds as networks, and at least one, got {len(feeds)} and {len(networks)}")
    how = Arithmetic(precision)
    ranks = []
    for index, (network, feed) in enumerate(zip(networks, feeds, strict=True)):
        outputs = [network.get_output(i).name for i in range(network.num_outputs)]
        wanted = list(dict.fromkeys([*outputs, *extra_outputs]))
        ranks.append(_Rank(index, len(networks), network, feed, wanted, how))
    # Infinities and NaN are values like others here.
    with np.errstate(all="ignore"):
        running = list(ranks)
        while running:
            for rank in running:
                rank.advance()
            running = _meet(ranks)
    return [rank.result() for rank in ranks]


def _meet(ranks: Sequence[_Rank]) -> list[_Rank]:
    """Complete every collective at which a whole group has come together; the ranks that may go on."""
    waiting = {rank.index: rank.waiting for rank in ranks if rank.waiting is not None}
    met: list[_Rank] = []
    for index, at in waiting.items():
        group = at.collective.group
        others = [waiting.get(member) for member in group]
        if index != min(group) or any(other is None or other.collective != at.collective for other in others):
            continue
        results = collectives.combine(at.collective, [other.operation for other in others if other is not None])
        for member, outputs in zip(group, results, strict=True):
            ranks[member].resume(outputs)
            met.append(ranks[member])
    if waiting and not met:
        states = "".join(
            f"\n  rank {rank.index}: "
            + (
                f"layer {rank.waiting.step.layer.name!r}, {rank.waiting.collective}"
                if rank.waiting
                else "no collective left"
            )
            for rank in ranks
        )
        raise LockstepError(f"the ranks do not meet at the same collective:{states}")
    return sorted(met, key=lambda rank: rank.index)
