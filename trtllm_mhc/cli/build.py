# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc build`: every rank's engine of the boundary stack, with TensorRT alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

import trtllm_mhc
from trtllm_mhc.cli.steps import Steps

if TYPE_CHECKING:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config
    from trtllm_mhc.models.deepseek_v41.stack import StackWeights
    from trtllm_mhc.rewrite import Report


@dataclass(frozen=True)
class BuildOptions:
    """The command's options. ``tp``, ``layers``, ``seed`` and ``sublayers`` are for a model without a checkpoint."""

    output: Path
    checkpoint: Path | None = None
    tp: int = 2
    layers: int = 40
    seed: int = 0
    sublayers: str = "matmul"
    coefficients: str = "plugin"
    max_rows: int = 64
    opt_rows: int = 8
    fuse: bool = True
    require: int | None = None
    timing_cache: Path | None = None
    dry_run: bool = False


def run(options: BuildOptions, console: Console) -> int:
    """Runs the command; returns the exit code."""
    try:
        import tensorrt  # noqa: F401
    except ImportError:
        console.print("[red]Building needs TensorRT's Python package:[/] pip install tensorrt")
        return 1
    from trtllm_mhc.models.deepseek_v41.checkpoint import CheckpointError
    from trtllm_mhc.runtime.build import EngineError

    try:
        return _run(options, Steps(console))
    except (EngineError, CheckpointError, FileNotFoundError, ValueError) as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1


def _run(options: BuildOptions, steps: Steps) -> int:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights, checkpoint
    from trtllm_mhc.runtime.build import RowRange
    from trtllm_mhc.verification.backends import Job, NetworkMaker

    weights: list[StackWeights]
    if options.checkpoint is not None:
        config, tp_size = checkpoint.read_config(options.checkpoint)
        weights = [
            checkpoint.RankWeights(
                config, checkpoint.read_tensors(options.checkpoint, config, rank, tp_size), rank, tp_size
            )
            for rank in range(tp_size)
        ]
    else:
        config, tp_size = DeepseekV41Config(num_hidden_layers=options.layers), options.tp
        weights = [ModelWeights(config, options.seed)] * tp_size
    rows = RowRange(1, options.opt_rows, options.max_rows)
    stack = _Stack(config, weights, tp_size, options)
    job = Job("fused" if options.fuse else "unfused", stack.populate, timed=True)

    if options.dry_run:
        maker = NetworkMaker()
        for rank in range(tp_size):
            with steps.step(f"define the network of rank {rank}"):
                maker.make(job, rank)
        plans = None
    else:
        from trtllm_mhc.runtime.build import TimingCache, require_device
        from trtllm_mhc.verification.backends import build_jobs

        require_device()
        cache = TimingCache(options.timing_cache or options.output / "timing.cache")
        with steps.step("build the engines"):
            plans = build_jobs([job], tp_size, rows, cache, steps.say)[job.name]
    # One engine at a time into its place, the description last: a folder with config.json is complete.
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "config.json").unlink(missing_ok=True)
    for rank, plan in enumerate(plans or []):
        (options.output / f"rank{rank}.engine").write_bytes(plan.data)
    if options.fuse:
        steps.console.print(stack.reports[0].table())
    (options.output / "report.json").write_text(json.dumps(_report(stack, options), indent=2) + "\n")
    description = _description(options, config, tp_size, engines=plans is not None)
    (options.output / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    steps.console.print(f"{tp_size} ranks in {escape(str(options.output))}")
    return 0


class _Stack:
    """Fills the networks of all ranks and keeps what the pass says."""

    def __init__(
        self, config: DeepseekV41Config, weights: list[StackWeights], tp_size: int, options: BuildOptions
    ) -> None:
        self.config = config
        self.reports: dict[int, Report] = {}
        self._weights = weights
        self._tp_size = tp_size
        self._options = options

    def populate(self, network: Any, rank: int) -> None:
        from trtllm_mhc.models.deepseek_v41 import build_boundary_stack
        from trtllm_mhc.network import CommunicatorSpec
        from trtllm_mhc.rewrite import fuse_boundaries
        from trtllm_mhc.runtime.build import EngineError

        build_boundary_stack(
            network,
            self.config,
            self._weights[rank],
            CommunicatorSpec(self._tp_size),
            rank=rank,
            sublayers=self._options.sublayers,  # type: ignore[arg-type]
            coefficients=self._options.coefficients,  # type: ignore[arg-type]
        )
        if not self._options.fuse:
            return
        report = self.reports[rank] = fuse_boundaries(network)
        if report.exit_code(self._options.require):
            wanted = "all" if self._options.require is None else self._options.require
            raise EngineError(
                f"rank {rank}: expected {wanted} boundaries fused, got {report.summary()}\n{report.to_text()}"
            )


def _report(stack: _Stack, options: BuildOptions) -> dict[str, Any]:
    ranks = {rank: report.to_dict() for rank, report in sorted(stack.reports.items())}
    return {"fuse": options.fuse, "ranks": ranks}


def _description(options: BuildOptions, config: DeepseekV41Config, tp_size: int, *, engines: bool) -> dict[str, Any]:
    import tensorrt

    from trtllm_mhc.models.deepseek_v41 import checkpoint

    return {
        "trtllm_mhc": trtllm_mhc.__version__,
        "tensorrt": tensorrt.__version__,
        "engines": [f"rank{rank}.engine" for rank in range(tp_size)] if engines else [],
        "fuse": options.fuse,
        "rows": {"minimum": 1, "optimum": options.opt_rows, "maximum": options.max_rows},
        "checkpoint": None if options.checkpoint is None else str(options.checkpoint),
        "seed": options.seed if options.checkpoint is None else None,
        "sublayers": options.sublayers,
        "coefficients": options.coefficients,
        "pretrained_config": checkpoint.pretrained_config(config, tp_size),
    }
