# SPDX-License-Identifier: Apache-2.0
"""What the command line's scripts make, from environment variables: Polygraphy calls them without arguments."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "MHC_STACK_"
_CHOICES = {
    "sublayers": ("matmul", "none"),
    "all_reduce": ("plugin", "dist_collective"),
    "coefficients": ("plugin", "native"),
    "io": ("bfloat16", "float32"),
}


@dataclass(frozen=True)
class Settings:
    """Each attribute is read from the variable of its name in capitals after ``MHC_STACK_``, as MHC_STACK_LAYERS.

    Attributes:
        tp: ranks.
        rank: whose network is made.
        layers: decoder layers of the boundary stack.
        hidden: H.
        rows: tokens of a step (M).
        inputs: number of inputs that are generated.
        seed: of weights and inputs.
        sublayers: "matmul" or "none", what stands between the boundaries.
        all_reduce: "plugin" or "dist_collective", the layer of the unfused all-reduce.
        coefficients: "plugin" or "native" (slow to build), how the mixes are computed.
        io: "bfloat16": inputs and outputs as the model has them, for which Polygraphy needs torch's tensors;
            "float32": cast at the network's edge, which loses nothing. Default: bfloat16 where torch is installed.
    """

    tp: int = 1
    rank: int = 0
    layers: int = 40
    hidden: int = 5120
    rows: int = 8
    inputs: int = 16
    seed: int = 0
    sublayers: str = "matmul"
    all_reduce: str = "plugin"
    coefficients: str = "plugin"
    io: str = "float32"

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings of the process's environment, or of `environment`.

        Raises:
            ValueError: a variable has a value that is not possible, or nothing reads a variable of that name.
        """
        environment = os.environ if environment is None else environment
        fields = {field.name: field for field in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for variable, text in environment.items():
            name = variable.removeprefix(PREFIX).lower()
            if not variable.startswith(PREFIX):
                continue
            if name not in fields:
                known = [PREFIX + field.upper() for field in fields]
                raise ValueError(f"{variable}: nothing reads it; expected one of {known}")
            given[name] = _choice(variable, text, _CHOICES[name]) if name in _CHOICES else _number(variable, text)
        given.setdefault("io", "bfloat16" if importlib.util.find_spec("torch") is not None else "float32")
        settings = cls(**given)
        for name in ("layers", "rows", "inputs"):
            if getattr(settings, name) < 1:
                raise ValueError(f"{PREFIX}{name.upper()}: expected 1 or more, got {getattr(settings, name)}")
        if settings.tp not in (1, 2, 4, 8):
            raise ValueError(f"{PREFIX}TP: expected 1, 2, 4 or 8, got {settings.tp}")
        if not 0 <= settings.rank < settings.tp:
            raise ValueError(f"{PREFIX}RANK: expected 0 to {settings.tp - 1}, got {settings.rank}")
        return settings


def _number(variable: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{variable}: expected a whole number, got {text!r}") from None


def _choice(variable: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ValueError(f"{variable}: expected one of {list(choices)}, got {text!r}")
    return text
