# SPDX-License-Identifier: Apache-2.0
"""A process of its own for test_engines.py: loads the plans of all ranks and runs them on given inputs.

run_plan.py FOLDER: `rank{r}.engine` and `inputs{r}.npz` in, `outputs{r}.npz` out. bf16 arrays travel as uint16.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trtllm_mhc.runtime.build import Plan
from trtllm_mhc.runtime.engine import EngineGroup, communicators
from trtllm_mhc.runtime.threads import ThreadGroup

Array = npt.NDArray[Any]


def pack(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: a.view(np.uint16) if a.dtype == ml_dtypes.bfloat16 else a for name, a in arrays.items()}


def unpack(arrays: Any) -> dict[str, Array]:
    return {
        name: arrays[name].view(ml_dtypes.bfloat16) if arrays[name].dtype == np.uint16 else arrays[name]
        for name in arrays
    }


def main(folder: Path) -> None:
    paths = sorted(folder.glob("rank*.engine"))
    plans = [Plan(path.read_bytes(), 0.0) for path in paths]
    feeds = [unpack(np.load(folder / f"inputs{rank}.npz")) for rank in range(len(plans))]
    group = ThreadGroup.on_devices(len(plans))
    with (
        communicators(group, "fresh process", hidden_size=feeds[0]["x"].shape[1], timeout_s=20) as comms,
        EngineGroup(plans, comms, group) as engines,
    ):
        for rank, outputs in enumerate(engines.run(feeds)):
            np.savez(folder / f"outputs{rank}.npz", **pack(outputs))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
