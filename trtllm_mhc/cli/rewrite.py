# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc rewrite`: fuse the boundaries of an ONNX model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from trtllm_mhc.rewrite import FuseOptions, Report


class MissingPackageError(Exception):
    """A package that a command needs is not installed."""


def require_packages(*names: str) -> None:
    """Checks that packages can be imported.

    Raises:
        MissingPackageError: says what to install.
    """
    how = {"tensorrt": "pip install tensorrt"}
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingPackageError(f"needs the package {name}: {how.get(name, 'pip install trtllm-mhc[onnx]')}")


#: The arguments of `make_options`.
FuseArguments = tuple[int | None, int, str, str, bool, bool]


def make_options(
    tp_size: int | None,
    rank: int,
    group: str,
    separate_collapse: str,
    finalize: bool,
    coefficients: bool,
) -> FuseOptions:
    """The pass's options from the command line's.

    Raises:
        ValueError: they are not as `FuseOptions` says.
    """
    from trtllm_mhc.rewrite import FuseOptions

    try:
        ranks = tuple(int(part) for part in group.split(",")) if group else ()
    except ValueError:
        raise ValueError(f"--group: expected ranks separated by commas, got {group!r}") from None
    return FuseOptions(
        tp_size=tp_size,
        rank=rank,
        group=ranks,
        separate_collapse=separate_collapse,  # type: ignore[arg-type]
        finalize=finalize,
        coefficients=coefficients,
    )


def run(
    source: Path,
    target: Path,
    options: FuseArguments,
    require: int | None,
    json_path: Path | None,
    console: Console,
) -> int:
    """Runs the command with the arguments of `make_options`; returns the exit code."""
    try:
        require_packages("tensorrt", "onnx", "onnx_ir")
        from trtllm_mhc.rewrite.onnx import rewrite_file

        report = rewrite_file(source, target, make_options(*options))
    except (MissingPackageError, OSError, ValueError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 2
    show(report, json_path, console)
    return report.exit_code(require)


def show(report: Report, json_path: Path | None, console: Console) -> None:
    """Prints the report's table; writes its JSON to a file, or instead of the table to the output (``-``)."""
    if json_path != Path("-"):
        console.print(report.table())
    write_json(report.to_json(), json_path)


def write_json(text: str, path: Path | None) -> None:
    """Writes to a file; ``-`` is the output."""
    if path == Path("-"):
        sys.stdout.write(text + "\n")
    elif path is not None:
        path.write_text(text + "\n")
