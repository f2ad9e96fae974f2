# SPDX-License-Identifier: Apache-2.0
"""What a build is to do with boundaries, handed to all its processes, and what each rank's build did.

`trtllm-build` starts worker processes of its own, so the settings travel in the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FUSE = "TRTLLM_MHC_FUSE"
_REQUIRE = "TRTLLM_MHC_REQUIRE"
_FOLDER = "TRTLLM_MHC_REPORT_FOLDER"
_RUN = "TRTLLM_MHC_RUN"


@dataclass(frozen=True)
class BuildSettings:
    """The settings.

    Attributes:
        fuse: whether to run the pass.
        require: boundaries that every rank must have fused for its engine to be built; None: any number.
        folder: where each rank's record goes; None: nowhere.
        run: tells the records of one command from older ones in the same folder.
    """

    fuse: bool = True
    require: int | None = None
    folder: Path | None = None
    run: str = ""

    def to_environment(self) -> dict[str, str]:
        """Variables for `from_environment`."""
        values = {_FUSE: str(int(self.fuse)), _RUN: self.run}
        if self.require is not None:
            values[_REQUIRE] = str(self.require)
        if self.folder is not None:
            values[_FOLDER] = str(self.folder)
        return values

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> BuildSettings:
        """The settings of this process; the defaults where nothing is set.

        Raises:
            ValueError: a variable has a value that means nothing.
        """
        fuse, require, folder = (environment.get(name, "") for name in (_FUSE, _REQUIRE, _FOLDER))
        if fuse not in ("", "0", "1"):
            raise ValueError(f"{_FUSE}: expected 0 or 1, got {fuse!r}")
        if require and not require.isdecimal():
            raise ValueError(f"{_REQUIRE}: expected a number of boundaries, got {require!r}")
        return cls(
            fuse=fuse != "0",
            require=int(require) if require else None,
            folder=Path(folder) if folder else None,
            run=environment.get(_RUN, ""),
        )


def record_file(folder: Path, rank: int) -> Path:
    """Where the record of one rank is."""
    return folder / f"mhc_fusion.rank{rank}.json"


def write_record(folder: Path, rank: int, record: Mapping[str, Any]) -> None:
    """Write the record of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    record_file(folder, rank).write_text(json.dumps(record, indent=2) + "\n")


def read_records(folder: Path, run: str) -> dict[int, dict[str, Any]]:
    """The records of one run by rank."""
    found = {}
    for path in folder.glob("mhc_fusion.rank*.json"):
        record = json.loads(path.read_text())
        if record.get("run") == run:
            found[int(record["rank"])] = record
    return dict(sorted(found.items()))
