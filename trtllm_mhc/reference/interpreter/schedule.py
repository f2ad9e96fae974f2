# SPDX-License-Identifier: Apache-2.0
"""The order in which a network's layers are evaluated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtllm_mhc.network.layers import downcast, layer_type


@dataclass(frozen=True)
class Step:
    """One layer.

    Attributes:
        layer: downcast to its own class.
        kind: the name of its layer type.
        inputs: names of the input tensors; None for an optional input that is not connected.
        outputs: the output tensors.
    """

    layer: Any
    kind: str
    inputs: tuple[str | None, ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class Schedule:
    """The layers that the wanted tensors depend on, in an order of data dependence.

    The order follows from the outputs and the inputs of each layer alone, not from the order in which layers were
    added, so that ranks whose networks have the same structure meet their collectives in the same order.

    Attributes:
        steps: the layers, producers first.
        inputs: the network inputs that are read, by name.
        uses: how often each tensor is read, wanted tensors once more.
    """

    steps: tuple[Step, ...]
    inputs: dict[str, Any]
    uses: Counter[str]


def make_schedule(network: Any, wanted: Sequence[str]) -> Schedule:
    """The schedule that computes the tensors named ``wanted``.

    Raises:
        ValueError: the network has no such tensor, or a layer depends on itself.
    """
    available = {tensor.name: tensor for tensor in map(network.get_input, range(network.num_inputs))}
    producers: dict[str, Step] = {}
    for index in range(network.num_layers):
        layer = downcast(network.get_layer(index))
        inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
        step = Step(
            layer,
            layer_type(layer).name,
            tuple(None if tensor is None else tensor.name for tensor in inputs),
            tuple(layer.get_output(i) for i in range(layer.num_outputs)),
        )
        producers.update((tensor.name, step) for tensor in step.outputs)
    for name in wanted:
        if name not in producers and name not in available:
            raise ValueError(f"the network has no tensor named {name!r}")

    steps: list[Step] = []
    entered: set[int] = set()
    done: set[int] = set()
    read: dict[str, Any] = {}
    # A step is on the stack once to enter it, above its producers, and once to leave it, below them.
    stack = [(producers[name], False) for name in reversed(wanted) if name in producers]
    while stack:
        step, leaving = stack.pop()
        key = id(step)
        if leaving:
            steps.append(step)
            done.add(key)
            continue
        if key in done:
            continue
        if key in entered:
            raise ValueError(f"layer {step.layer.name!r} depends on its own output")
        entered.add(key)
        stack.append((step, True))
        names = [name for name in step.inputs if name is not None]
        read.update((name, available[name]) for name in names if name in available)
        before = [producers[name] for name in names if name in producers]
        # Constants last, that is right before their reader: a network's weights need not be alive all at once.
        before.sort(key=lambda producer: producer.kind == "CONSTANT")
        stack.extend((producer, False) for producer in reversed(before) if id(producer) not in done)
    read.update((name, available[name]) for name in wanted if name in available)
    uses = Counter(name for step in steps for name in step.inputs if name is not None)
    uses.update(wanted)
    return Schedule(tuple(steps), read, uses)
