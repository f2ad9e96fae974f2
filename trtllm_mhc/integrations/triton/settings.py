# SPDX-License-Identifier: Apache-2.0
"""What a python-backend model is told by the `parameters` of its config.pbtxt."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

ENGINE_GROUP = "trtllm_mhc.integrations.triton.groups:open_engines"


@dataclass(frozen=True)
class Settings:
    """The group that a model runs.

    Attributes:
        tp_size: number of ranks; the engines are `rank0.engine`, ... in the model's version folder.
        hidden_size: H of the communicator.
        capacity: rows of one mailbox slot; larger M goes through in chunks.
        deadline_s: seconds that either phase of a request may take. Ranks wait for each other half as long, so that
            the error can say which one was missing.
        devices: CUDA device of each rank; empty: rank r on device r modulo their number.
        group: "module:function" that opens the group, called with these settings and the version folder.
    """

    tp_size: int
    hidden_size: int
    capacity: int = 64
    deadline_s: float = 30.0
    devices: tuple[int, ...] = ()
    group: str = ENGINE_GROUP

    def __post_init__(self) -> None:
        if self.tp_size < 1:
            raise ValueError(f"tp_size: expected 1 or more, got {self.tp_size}")
        if not self.deadline_s > 0:
            raise ValueError(f"deadline_s: expected more than 0, got {self.deadline_s}")
        if self.devices and len(self.devices) != self.tp_size:
            raise ValueError(f"devices: expected one for each of {self.tp_size} ranks, got {list(self.devices)}")

    def to_parameters(self) -> dict[str, str]:
        """As config.pbtxt holds them."""
        return {
            "tp_size": str(self.tp_size),
            "hidden_size": str(self.hidden_size),
            "capacity": str(self.capacity),
            "deadline_s": f"{self.deadline_s:g}",
            "devices": ",".join(map(str, self.devices)),
            "group": self.group,
        }

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Settings:
        """Reads them back. Parameters of other names are left to Triton and the backend.

        Raises:
            ValueError: one is missing or cannot be read; the message names it.
        """
        read: dict[str, Callable[[str], Any]] = {
            "tp_size": int,
            "hidden_size": int,
            "capacity": int,
            "deadline_s": float,
            "devices": lambda text: tuple(int(part) for part in text.split(",") if part.strip()),
            "group": str,
        }
        values: dict[str, Any] = {}
        for name in (field.name for field in fields(cls)):
            if name not in parameters:
                continue
            try:
                values[name] = read[name](parameters[name])
            except ValueError as error:
                raise ValueError(f"parameter {name!r} of config.pbtxt: {error}") from None
        missing = [name for name in ("tp_size", "hidden_size") if name not in values]
        if missing:
            raise ValueError(f"config.pbtxt: expected the parameters {missing}")
        return cls(**values)

    def open(self, folder: Path) -> Any:
        """The group (`groups.RankGroup`), opened.

        Raises:
            ValueError: `group` names no function.
            Exception: whatever opening raises.
        """
        module, separator, name = self.group.partition(":")
        if not separator:
            raise ValueError(f"group: expected 'module:function', got {self.group!r}")
        function = getattr(importlib.import_module(module), name, None)
        if function is None:
            raise ValueError(f"group: the module {module} has no {name!r}")
        return cast(Callable[[Settings, Path], Any], function)(self, folder)
