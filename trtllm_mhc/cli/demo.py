# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc demo`: DeepSeek V4.1's boundary network, rewritten, built, run and compared."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_mhc import reference
from trtllm_mhc.cli.findings import Findings, environment, note_agreement, note_bits, note_distances, note_report
from trtllm_mhc.cli.steps import Steps
from trtllm_mhc.runtime import cuda

if TYPE_CHECKING:
    from trtllm_mhc.runtime.engine import EngineGroup
    from trtllm_mhc.verification.backends import NetworkMaker, Runner
    from trtllm_mhc.verification.boundary_stack import StackJobs

Array = npt.NDArray[Any]

# Long enough a graph that the launch and the skew between ranks do not count.
PASSES_PER_GRAPH = 4
REPLAYS = 50
# The interpreter takes seconds for what an engine does in milliseconds.
INPUTS_WITH_ENGINES, INPUTS_IN_NUMPY = 16, 4


@dataclass(frozen=True)
class DemoOptions:
    """The command's options."""

    tp: int
    layers: int
    rows: int
    inputs: int | None
    sublayers: str
    seed: int
    coefficients: str | None = None  # None: "plugin" with engines, "native" in the interpreter
    commit: str | None = None
    timing_cache: Path | None = None


def run(options: DemoOptions, json_path: Path | None, console: Console) -> int:
    """Runs the demo; returns the exit code."""
    # Ranks that share a GPU need hardware queues of their own; CUDA reads it when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if options.tp not in (1, 2, 4, 8):
        console.print(f"[red]--tp: expected 1, 2, 4 or 8, got {options.tp}[/]")
        return 1
    try:
        import tensorrt
    except ImportError:
        console.print(
            "[red]The demo needs TensorRT's Python package.[/] Install it (pip install tensorrt), or run `make demo`, "
            "which fetches one. `trtllm-mhc doctor` says what else is missing."
        )
        return 1
    from trtllm_mhc.runtime.build import EngineError

    findings = Findings()
    try:
        _run(options, findings, Steps(console), tensorrt.__version__)
    except EngineError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    if json_path is not None:
        findings.write(json_path, console)
    if "unfused_agreement" in findings.record:
        console.print(_table(findings.record))
    findings.print_verdict(console)
    return 1 if findings.failures else 0


def _run(options: DemoOptions, findings: Findings, steps: Steps, tensorrt_version: str) -> None:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
    from trtllm_mhc.runtime import build
    from trtllm_mhc.verification import stack_checks
    from trtllm_mhc.verification.backends import NetworkMaker
    from trtllm_mhc.verification.boundary_stack import StackJobs

    config = DeepseekV41Config(num_hidden_layers=options.layers)
    no_engines: str | None = "this machine has no usable GPU"
    if cuda.device_count() > 0:
        with steps.step("test engine"):
            no_engines = build.why_no_engines()
    findings.record |= _environment(options, tensorrt_version)

    # Native coefficients are a hundred layers for every sublayer, whose engine TensorRT takes too long to build.
    coefficients = options.coefficients or ("plugin" if no_engines is None else "native")
    findings.record["coefficients"] = coefficients
    jobs = StackJobs(
        config,
        ModelWeights(config, options.seed),
        options.tp,
        options.sublayers,  # type: ignore[arg-type]
        coefficients=coefficients,  # type: ignore[arg-type]
    )
    maker = NetworkMaker()
    with steps.step("define the network and fuse its boundaries"):
        maker.make(jobs.fused(), 0)
    steps.console.print(jobs.reports[0].table())
    note_report(jobs, config, findings)
    if findings.failures:
        return  # nothing to compare: the networks are not what they should be

    count = options.inputs or (INPUTS_WITH_ENGINES if no_engines is None else INPUTS_IN_NUMPY)
    findings.record["inputs"] = count
    inputs = stack_checks.generate_inputs(count, options.rows, config.hidden_size, options.seed)
    if no_engines is None:
        _run_engines(options, jobs, maker, inputs, findings, steps)
    else:
        steps.console.print(
            f"[yellow]No engine was built:[/] {escape(no_engines)}. Both forms of the network are evaluated by the "
            "numpy interpreter instead."
        )
        _run_numpy(options, jobs, maker, inputs, findings, steps)
    findings.record["seconds"] = steps.seconds


# ---- with engines ---------------------------------------------------------------------------------------------------


def _run_engines(
    options: DemoOptions,
    jobs: StackJobs,
    maker: NetworkMaker,
    inputs: list[Array],
    findings: Findings,
    steps: Steps,
) -> None:
    from trtllm_mhc.runtime import build
    from trtllm_mhc.runtime.engine import communicators
    from trtllm_mhc.runtime.threads import ThreadGroup
    from trtllm_mhc.verification import stack_checks
    from trtllm_mhc.verification.backends import build_jobs, open_engines
    from trtllm_mhc.verification.boundary_stack import FUSED, INPUT, OUTPUT, PROBED, UNFUSED

    group = ThreadGroup.on_devices(options.tp)
    shared = len(set(group.devices or ())) < options.tp
    findings.record["mode"] = "loopback" if shared else "one GPU per rank"
    findings.record["device"] = cuda.device_info(0).name
    singles = stack_checks.single_boundary_jobs(jobs)
    rows = build.RowRange(1, options.rows, options.rows)
    stack_jobs = [jobs.unfused(), jobs.fused(), jobs.probed()]
    single_jobs = [form for single in singles for form in (single.unfused(), single.fused())]
    with ThreadPoolExecutor(1) as background:
        # Needs the CPU only, and the builds mostly the GPU.
        exact = background.submit(stack_checks.evaluate_exactly, jobs, maker, inputs)
        with steps.step("build the engines"):
            cache = build.TimingCache(options.timing_cache)
            plans = build_jobs([*stack_jobs, *single_jobs], options.tp, rows, cache, steps.say)
        with steps.step("finish the float64 evaluation"):
            truth = exact.result()

    lanes = max(2, len(single_jobs))
    hidden = jobs.config.hidden_size
    with communicators(group, "demo", hidden_size=hidden, capacity=max(options.rows, 64), lanes=lanes) as comms:
        with open_engines(plans, [UNFUSED, FUSED], comms, group) as (unfused, fused):
            _note_layers(unfused, fused, jobs, findings)
            with steps.step(f"run both engines on {len(inputs)} inputs"):
                outputs = {
                    name: [engines.run([{INPUT: x}] * options.tp) for x in inputs]
                    for name, engines in ((UNFUSED, unfused), (FUSED, fused))
                }
            note_distances(outputs[FUSED], outputs[UNFUSED], truth, findings)
            with steps.step("time both engines in CUDA graphs"):
                _time(unfused, fused, outputs, findings)
        del plans[UNFUSED], plans[FUSED]
        with (
            open_engines(plans, [PROBED], comms, group) as (probed,),
            steps.step("run the engine that shows every boundary"),
        ):
            shown = probed.run([{INPUT: inputs[0]}] * options.tp)
        with steps.step(f"check {len(jobs.probes)} boundaries against the reference"):
            # Outputs in between may lead TensorRT to other kernels around the boundaries; if not, the bits say so.
            same = reference.bits_equal(shown[0][OUTPUT], outputs[FUSED][0][0][OUTPUT])
            findings.record["checked_engine_equals_timed_engine"] = bool(same.all())
            boundaries = stack_checks.read_probes(jobs.probes, inputs[0], shown)
            note_bits(jobs.probes, stack_checks.check_bits(boundaries, stack_checks.expected_eps(jobs)), findings)
        names = [job.name for job in single_jobs]
        with (
            open_engines(plans, names, comms, group) as engines,
            steps.step("compare single-boundary engines on the same inputs"),
        ):
            runners: dict[str, Runner] = dict(zip(names, engines, strict=True))
            note_agreement(
                jobs.probes,
                stack_checks.compare_singles(singles, runners, boundaries, stack_checks.expected_eps(jobs)),
                findings,
            )


def _time(unfused: EngineGroup, fused: EngineGroup, outputs: Mapping[str, list[Any]], findings: Findings) -> None:
    """Times in the order A B B A, so that a drift of the clocks counts for both."""
    from trtllm_mhc.verification.boundary_stack import FUSED, OUTPUT, UNFUSED

    samples: dict[str, list[float]] = {UNFUSED: [], FUSED: []}
    for name, engines in ((UNFUSED, unfused), (FUSED, fused)):
        engines.capture(PASSES_PER_GRAPH)
        replayed = engines.replay()
        # The last input's buffers are still there, so a replay must repeat its outputs.
        same = all(
            bool(reference.bits_equal(after[OUTPUT], before[OUTPUT]).all())
            for after, before in zip(replayed, outputs[name][-1], strict=True)
        )
        findings.require(same, f"the {name} engine gives other bits in a CUDA graph than outside")
    for name, engines in ((UNFUSED, unfused), (FUSED, fused), (FUSED, fused), (UNFUSED, unfused)):
        samples[name] += engines.time_replays(REPLAYS, passes=PASSES_PER_GRAPH).samples_us
    for name in (UNFUSED, FUSED):
        findings.record[f"{name}_us"] = round(statistics.median(samples[name]), 2)
        quantiles = statistics.quantiles(samples[name], n=10)
        findings.record[f"{name}_us_p10_p90"] = [round(quantiles[0], 2), round(quantiles[-1], 2)]


def _note_layers(unfused: EngineGroup, fused: EngineGroup, jobs: StackJobs, findings: Findings) -> None:
    from trtllm_mhc.runtime.inspection import count_plugins

    inside = {"unfused": count_plugins(unfused.layers), "fused": count_plugins(fused.layers)}
    findings.record["engine_plugins"] = inside
    findings.record["engine_layers"] = {"unfused": len(unfused.layers), "fused": len(fused.layers)}
    both = {"MhcCoefficients": 2 * jobs.config.num_hidden_layers} if jobs.coefficients == "plugin" else {}
    for form, plugin in (("fused", "MhcBoundary"), ("unfused", "MhcAllReduce")):
        expected = {plugin: jobs.config.boundaries} | both
        findings.require(
            inside[form] == expected, f"expected plugins {expected} in the {form} engine, got {inside[form]}"
        )


# ---- without a GPU --------------------------------------------------------------------------------------------------


def _run_numpy(
    options: DemoOptions,
    jobs: StackJobs,
    maker: NetworkMaker,
    inputs: list[Array],
    findings: Findings,
    steps: Steps,
) -> None:
    from trtllm_mhc.verification import stack_checks
    from trtllm_mhc.verification.backends import split_rows
    from trtllm_mhc.verification.boundary_stack import INPUT, OUTPUT

    findings.record |= {"mode": "numpy", "device": None, "unfused_us": None, "fused_us": None}
    # Rows are independent: all inputs go through at once.
    feeds = [{INPUT: np.concatenate(inputs)}] * options.tp
    with steps.step("evaluate the unfused network"):
        unfused = maker.runner(jobs.unfused(), options.tp).run(feeds)
    with steps.step("evaluate the fused network and what goes into its boundaries"):
        fused = maker.runner(jobs.probed(), options.tp).run(feeds)
    with steps.step("evaluate the unfused network in float64"):
        truth = stack_checks.evaluate_exactly(jobs, maker, inputs)
    by_input = {
        name: [
            [{OUTPUT: piece} for piece in ranks]
            for ranks in zip(*(split_rows(rank[OUTPUT], options.rows) for rank in outputs), strict=True)
        ]
        for name, outputs in (("fused", fused), ("unfused", unfused))
    }
    note_distances(by_input["fused"], by_input["unfused"], truth, findings)

    # One input's rows are enough for the boundaries; norm weights have no rows.
    shown = [{name: array[: options.rows] for name, array in rank.items()} for rank in fused]
    boundaries = stack_checks.read_probes(jobs.probes, inputs[0], shown)
    # The interpreter computes a fused boundary by the reference itself, so comparing their bits would prove nothing.
    findings.record["boundaries_bit_equal_to_reference"] = None
    with steps.step("compare each boundary alone, fused and unfused"):
        singles = stack_checks.single_boundary_jobs(jobs)
        forms = [form for single in singles for form in (single.unfused(), single.fused())]
        runners: dict[str, Runner] = {form.name: maker.runner(form, options.tp) for form in forms}
        note_agreement(
            jobs.probes,
            stack_checks.compare_singles(singles, runners, boundaries, stack_checks.expected_eps(jobs)),
            findings,
        )


# ---- parts of both --------------------------------------------------------------------------------------------------


# ---- the record -----------------------------------------------------------------------------------------------------


def _environment(options: DemoOptions, tensorrt_version: str) -> dict[str, Any]:
    return {
        "layers": options.layers,
        "tp": options.tp,
        "m": options.rows,
        "sublayers": options.sublayers,
        "seed": options.seed,
        **environment(tensorrt_version, options.commit),
    }


def _table(record: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    bits = record.get("boundaries_bit_equal_to_reference")
    kinds = f"{record['boundaries_full']} full, {record['boundaries_residual_only']} residual-only"
    rows = {
        "boundaries fused": f"{record['boundaries_fused']} of {record['boundaries_found']} ({kinds})",
        "equal to the reference, bit for bit": "not measured: no engine" if bits is None else f"{bits} boundaries",
        "unfused boundaries that agree": f"{record['unfused_boundaries_agreeing']} of {record['boundaries_fused']}; "
        f"{record['unfused_elements_differing']:.2e} of the elements have other bits",
        "rms error, fused / unfused": f"{record['rms_error_fused']:.4e} / {record['rms_error_unfused']:.4e} = "
        f"{record['rms_error_ratio']:.4f}, {record['rms_error_ratio_confidence']:.0%} interval "
        f"{record['rms_error_ratio_interval'][0]:.4f} to {record['rms_error_ratio_interval'][1]:.4f}",
        "ranks equal, bit for bit": "yes" if record["ranks_equal"] else "no",
    }
    if record["fused_us"] is not None:
        rows["unfused / fused, per pass"] = (
            f"{record['unfused_us']:.1f} us / {record['fused_us']:.1f} us = "
            f"{record['unfused_us'] / record['fused_us']:.3f} ({record['mode']}, M = {record['m']})"
        )
    for name, text in rows.items():
        table.add_row(name, text)
    return table
