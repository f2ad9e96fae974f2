# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc trtllm-build`: TensorRT-LLM's `trtllm-build` with the plugins loaded and the boundaries fused."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_mhc.integrations.backend import BackendError, require_backend
from trtllm_mhc.integrations.build_settings import BuildSettings, read_records, record_file
from trtllm_mhc.models.architectures import DEEPSEEK_V41

MODEL_FILE = "trtllm_mhc.integrations.deepseek_v41_model_cls"


@dataclass(frozen=True)
class TrtllmBuildOptions:
    """The command's own options, and what goes to `trtllm-build`."""

    arguments: tuple[str, ...]
    fuse: bool = True
    require: int | None = None
    report: Path | None = None


class UsageError(ValueError):
    """The arguments do not fit together; the message says what to change."""


def run(options: TrtllmBuildOptions, console: Console) -> int:
    """Runs the command; returns the exit code."""
    try:
        require_backend()
        arguments = complete_arguments(options.arguments)
    except (BackendError, UsageError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    folder = Path(_value(arguments, "--output_dir") or "engine_outputs")
    settings = BuildSettings(options.fuse, options.require, folder, uuid.uuid4().hex)
    os.environ.update(settings.to_environment())

    from tensorrt_llm.commands import build

    sys.argv = ["trtllm-build", *arguments]
    failure: BaseException | None = None
    try:
        build.main()
    except (Exception, SystemExit) as error:
        failure = error
        if isinstance(error, SystemExit) and not error.code:
            return 0  # --help
    records = read_records(folder, settings.run)
    if records:
        console.print(_table(records))
        console.print(f"reports: {escape(str(record_file(folder, min(records))))} and so on for each rank")
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(json.dumps({"ranks": list(records.values())}, indent=2) + "\n")
    return _conclude(options, records, failure, console)


def complete_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments for `trtllm-build`, with what is missing: the model file, one timing cache, engine details.

    Raises:
        UsageError: the model needs a file that only the user can name, or there is no model.
    """
    found = list(arguments)
    if _wants_help(found):
        return found
    if _value(found, "--model_cls_file") is None:
        config = _config_path(found)
        architecture = _architecture(config)
        if architecture != DEEPSEEK_V41:
            raise UsageError(
                f"{config}: architecture: expected {DEEPSEEK_V41!r}, got {architecture!r}. For another model, pass "
                "--model_cls_file with a file whose class is decorated with "
                "trtllm_mhc.integrations.tensorrt_llm.fuse_on_build, and --model_cls_name."
            )
        found += ["--model_cls_file", _model_file(), "--model_cls_name", DEEPSEEK_V41]
    # The ranks' engines must not differ in tactics: each takes what the ones before it measured.
    cache = str(Path(_value(found, "--output_dir") or "engine_outputs") / "timing.cache")
    defaults = {
        "--input_timing_cache": cache,
        "--output_timing_cache": cache,
        "--profiling_verbosity": "detailed",  # the runner compares the ranks' engines layer by layer
    }
    for name, value in defaults.items():
        if _value(found, name) is None:
            found += [name, value]
    return found


def _value(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option, the last one as argparse takes it."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value


def _wants_help(arguments: Sequence[str]) -> bool:
    return "-h" in arguments or "--help" in arguments


def _config_path(arguments: Sequence[str]) -> Path:
    source = _value(arguments, "--checkpoint_dir") or _value(arguments, "--model_config")
    if source is None:
        raise UsageError("expected --checkpoint_dir or --model_config among trtllm-build's arguments, got neither")
    return Path(source) if source.lower().endswith(".json") else Path(source, "config.json")


def _architecture(path: Path) -> Any:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: expected the config of a TensorRT-LLM checkpoint: {error}") from None
    return content.get("architecture") if isinstance(content, dict) else None


def _model_file() -> str:
    found = importlib.util.find_spec(MODEL_FILE)
    assert found is not None
    assert found.origin is not None
    return found.origin


def _table(records: dict[int, dict[str, Any]]) -> Table:
    table = Table(title="boundaries")
    for heading in ("rank", "found", "fused", "full", "residual-only", "refused"):
        table.add_column(heading, justify="right")
    for rank, record in records.items():
        report = record["report"]
        counts = ("found", "fused", "full", "residual_only", "refused")
        cells = ["-"] * 5 if report is None else [str(report[f"boundaries_{name}"]) for name in counts]
        table.add_row(str(rank), *cells)
    return table


def _conclude(
    options: TrtllmBuildOptions,
    records: dict[int, dict[str, Any]],
    failure: BaseException | None,
    console: Console,
) -> int:
    if failure is not None:
        name = "" if type(failure).__name__ == "FusionError" else f"{type(failure).__name__}: "
        console.print(f"[red]trtllm-build failed: {escape(name + str(failure))}[/]")
        return 1
    if not records:
        console.print(
            "[red]No rank's network went through the pass:[/] the model class is not decorated with "
            "trtllm_mhc.integrations.tensorrt_llm.fuse_on_build. The engines are unfused."
        )
        return 1
    if not options.fuse:
        console.print("The engines are unfused, as asked.")
    elif all(record["report"]["boundaries_fused"] == 0 for record in records.values()):
        console.print("[yellow]Nothing was fused.[/] With one rank there is no all-reduce to fuse.")
    return 0
