# SPDX-License-Identifier: Apache-2.0
"""Helping Polygraphy find the CUDA runtime, which it opens by itself."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path


def expose_cuda_runtime() -> None:
    """Puts the folder of pip's CUDA runtime at the end of LD_LIBRARY_PATH, where Polygraphy looks before it gives up.

    Polygraphy 0.53 knows CUDA toolkits and the folder of pip's CUDA 12 packages; those of CUDA 13 have another one.
    Does nothing where there are no such packages. Only this process and its children are concerned: the dynamic loader
    has read the variable already.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []
    found = sorted({str(path.parent) for folder in folders for path in folder.glob("cu*/lib/libcudart.so*")})
    known = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(dict.fromkeys([*known, *found]))
