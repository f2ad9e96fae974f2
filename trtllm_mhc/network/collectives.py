# SPDX-License-Identifier: Apache-2.0
"""What an ``IDistCollectiveLayer`` does, written on the layer.

TensorRT takes the operation, the reduction and the group of a ``DIST_COLLECTIVE`` layer when it is added and gives none
of them back, in no binding. Whoever adds such a layer and wants it understood later, by the interpreter or by the
rewrite pass, writes it into the layer's metadata, which TensorRT carries into the engine's inspector as well.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_KEY = "trtllm_mhc.collective"


@dataclass(frozen=True)
class Collective:
    """The arguments of ``INetworkDefinition.add_dist_collective``.

    Attributes:
        operation: the name of a ``CollectiveOperation``, such as ``"ALL_REDUCE"``.
        reduction: the name of a ``ReduceOperation``, such as ``"SUM"``; ``"NONE"`` where nothing is reduced.
        group: the world ranks that take part, in order.
    """

    operation: str
    reduction: str
    group: tuple[int, ...]

    @property
    def is_all_reduce_sum(self) -> bool:
        """Whether this is the collective that ends a tensor-parallel linear."""
        return self.operation == "ALL_REDUCE" and self.reduction == "SUM"


def label_all_reduce_sum(layer: Any, group: Sequence[int]) -> None:
    """Write on ``layer`` that it sums over the world ranks of ``group``."""
    layer.metadata = json.dumps({_KEY: {"operation": "ALL_REDUCE", "reduction": "SUM", "group": list(map(int, group))}})


def read_collective(layer: Any) -> Collective | None:
    """What is written on a ``DIST_COLLECTIVE`` layer; None when nothing is."""
    try:
        found = json.loads(layer.metadata)[_KEY]
        return Collective(str(found["operation"]), str(found["reduction"]), tuple(int(r) for r in found["group"]))
    except (KeyError, TypeError, ValueError):
        return None
