# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc demo`: DeepSeek V4.1's boundary network, rewritten, built, run and compared."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import trtllm_mhc
from trtllm_mhc import reference
from trtllm_mhc.cli.steps import Steps
from trtllm_mhc.runtime import cuda

if TYPE_CHECKING:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config
    from trtllm_mhc.runtime.engine import EngineGroup
    from trtllm_mhc.verification.backends import NetworkMaker, Runner
    from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs, StackJobs
    from trtllm_mhc.verification.checks import Agreement, BoundaryCheck
    from trtllm_mhc.verification.probes import BoundaryProbe

Array = npt.NDArray[Any]

# The fused engine may not be farther from the exact result than the unfused one, up to the noise of the estimate.
LARGEST_ERROR_RATIO = 1.05
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
    commit: str | None = None
    timing_cache: Path | None = None


@dataclass
class Findings:
    """What the demo measured; becomes the record.

    Attributes:
        record: keys and values of the record.
        failures: the conditions that do not hold.
    """

    record: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def require(self, condition: bool, otherwise: str) -> None:
        """Notes a failure unless `condition` holds."""
        if not condition:
            self.failures.append(otherwise)


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
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(findings.record, indent=2) + "\n")
        console.print(f"record: {escape(str(json_path))}")
    _summarise(findings, console)
    return 1 if findings.failures else 0


def _run(options: DemoOptions, findings: Findings, steps: Steps, tensorrt_version: str) -> None:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
    from trtllm_mhc.runtime import build
    from trtllm_mhc.verification.backends import NetworkMaker
    from trtllm_mhc.verification.boundary_stack import StackJobs

    config = DeepseekV41Config(num_hidden_layers=options.layers)
    no_engines: str | None = "this machine has no usable GPU"
    if cuda.device_count() > 0:
        with steps.step("test engine"):
            no_engines = build.why_no_engines()
    findings.record |= _environment(options, tensorrt_version)

    jobs = StackJobs(config, ModelWeights(config, options.seed), options.tp, options.sublayers)  # type: ignore[arg-type]
    maker = NetworkMaker()
    with steps.step("define the network and fuse its boundaries"):
        maker.make(jobs.fused(), 0)
    steps.console.print(jobs.reports[0].table())
    _note_report(jobs, config, findings)
    if findings.failures:
        return  # nothing to compare: the networks are not what they should be

    count = options.inputs or (INPUTS_WITH_ENGINES if no_engines is None else INPUTS_IN_NUMPY)
    findings.record["inputs"] = count
    inputs = _generate_inputs(count, options, config)
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
    from trtllm_mhc.verification.backends import build_jobs, open_engines
    from trtllm_mhc.verification.boundary_stack import FUSED, OUTPUT, PROBED, UNFUSED

    group = ThreadGroup.on_devices(options.tp)
    shared = len(set(group.devices or ())) < options.tp
    findings.record["mode"] = "loopback" if shared else "one GPU per rank"
    findings.record["device"] = cuda.device_info(0).name
    singles = _single_jobs(jobs)
    rows = build.RowRange(1, options.rows, options.rows)
    stack_jobs = [jobs.unfused(), jobs.fused(), jobs.probed()]
    single_jobs = [form for single in singles for form in (single.unfused(), single.fused())]
    with ThreadPoolExecutor(1) as background:
        # Needs the CPU only, and the builds mostly the GPU.
        exact = background.submit(_evaluate_exactly, jobs, maker, inputs, options.tp)
        with steps.step("build the engines"):
            cache = build.TimingCache(options.timing_cache)
            plans = build_jobs([*stack_jobs, *single_jobs], options.tp, rows, cache, steps.say)
        with steps.step("finish the float64 evaluation"):
            truth = exact.result()

    lanes = max(2, len(single_jobs))
    hidden = jobs.config.hidden_size
    with communicators(group, "demo", hidden_size=hidden, capacity=max(options.rows, 64), lanes=lanes) as comms:
        with open_engines(plans, [UNFUSED, FUSED], comms, group) as (unfused, fused):
            _note_layers(unfused, fused, jobs.config.boundaries, findings)
            with steps.step(f"run both engines on {len(inputs)} inputs"):
                outputs = {
                    name: [engines.run([{_input_name(): x}] * options.tp) for x in inputs]
                    for name, engines in ((UNFUSED, unfused), (FUSED, fused))
                }
            _note_distances(outputs[FUSED], outputs[UNFUSED], truth, findings)
            with steps.step("time both engines in CUDA graphs"):
                _time(unfused, fused, outputs, findings)
        del plans[UNFUSED], plans[FUSED]
        with (
            open_engines(plans, [PROBED], comms, group) as (probed,),
            steps.step("run the engine that shows every boundary"),
        ):
            shown = probed.run([{_input_name(): inputs[0]}] * options.tp)
        with steps.step(f"check {len(jobs.probes)} boundaries against the reference"):
            # Outputs in between may lead TensorRT to other kernels around the boundaries; if not, the bits say so.
            same = reference.bits_equal(shown[0][OUTPUT], outputs[FUSED][0][0][OUTPUT])
            findings.record["checked_engine_equals_timed_engine"] = bool(same.all())
            boundaries = _read_probes(jobs.probes, inputs[0], shown)
            _note_bits(jobs.probes, _check_bits(jobs.probes, boundaries), findings)
        names = [job.name for job in single_jobs]
        with (
            open_engines(plans, names, comms, group) as engines,
            steps.step("compare single-boundary engines on the same inputs"),
        ):
            runners: dict[str, Runner] = dict(zip(names, engines, strict=True))
            _note_agreement(jobs.probes, _compare_singles(singles, runners, jobs.probes, boundaries), findings)


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


def _note_layers(unfused: EngineGroup, fused: EngineGroup, boundaries: int, findings: Findings) -> None:
    from trtllm_mhc.runtime.inspection import count_plugins

    inside = {"unfused": count_plugins(unfused.layers), "fused": count_plugins(fused.layers)}
    findings.record["engine_plugins"] = inside
    findings.record["engine_layers"] = {"unfused": len(unfused.layers), "fused": len(fused.layers)}
    findings.require(
        inside["fused"] == {"MhcBoundary": boundaries},
        f"expected {boundaries} MhcBoundary layers and no all-reduce in the fused engine, got {inside['fused']}",
    )
    findings.require(
        inside["unfused"] == {"MhcAllReduce": boundaries},
        f"expected {boundaries} MhcAllReduce layers in the unfused engine, got {inside['unfused']}",
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
    from trtllm_mhc.verification.backends import split_rows
    from trtllm_mhc.verification.boundary_stack import OUTPUT

    findings.record |= {"mode": "numpy", "device": None, "unfused_us": None, "fused_us": None}
    # Rows are independent: all inputs go through at once.
    feeds = [{_input_name(): np.concatenate(inputs)}] * options.tp
    with steps.step("evaluate the unfused network"):
        unfused = maker.runner(jobs.unfused(), options.tp).run(feeds)
    with steps.step("evaluate the fused network and what goes into its boundaries"):
        fused = maker.runner(jobs.probed(), options.tp).run(feeds)
    with steps.step("evaluate the unfused network in float64"):
        truth = _evaluate_exactly(jobs, maker, inputs, options.tp)
    by_input = {
        name: [
            [{OUTPUT: piece} for piece in ranks]
            for ranks in zip(*(split_rows(rank[OUTPUT], options.rows) for rank in outputs), strict=True)
        ]
        for name, outputs in (("fused", fused), ("unfused", unfused))
    }
    _note_distances(by_input["fused"], by_input["unfused"], truth, findings)

    # One input's rows are enough for the boundaries; norm weights have no rows.
    shown = [{name: array[: options.rows] for name, array in rank.items()} for rank in fused]
    boundaries = _read_probes(jobs.probes, inputs[0], shown)
    # The interpreter computes a fused boundary by the reference itself, so comparing their bits would prove nothing.
    findings.record["boundaries_bit_equal_to_reference"] = None
    with steps.step("compare each boundary alone, fused and unfused"):
        singles = _single_jobs(jobs)
        forms = [form for single in singles for form in (single.unfused(), single.fused())]
        runners: dict[str, Runner] = {form.name: maker.runner(form, options.tp) for form in forms}
        _note_agreement(jobs.probes, _compare_singles(singles, runners, jobs.probes, boundaries), findings)


# ---- parts of both --------------------------------------------------------------------------------------------------


def _input_name() -> str:
    from trtllm_mhc.verification.boundary_stack import INPUT

    return INPUT


def _generate_inputs(count: int, options: DemoOptions, config: DeepseekV41Config) -> list[Array]:
    rng = np.random.default_rng(options.seed)
    shape = (options.rows, config.hidden_size)
    return [rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for _ in range(count)]


def _evaluate_exactly(jobs: StackJobs, maker: NetworkMaker, inputs: list[Array], tp: int) -> list[Array]:
    from trtllm_mhc.verification.backends import split_rows
    from trtllm_mhc.verification.boundary_stack import OUTPUT

    exact = maker.runner(jobs.unfused(), tp, "float64").run([{_input_name(): np.concatenate(inputs)}] * tp)
    return split_rows(exact[0][OUTPUT], inputs[0].shape[0])


def _single_jobs(jobs: StackJobs) -> list[SingleBoundaryJobs]:
    from trtllm_mhc.verification.boundary_stack import SingleBoundaryJobs

    config = jobs.config
    kinds = [config.rms_norm_eps, None]
    # As the boundaries hold it: rounded to fp32.
    eps = [None if kind is None else float(np.float32(kind)) for kind in kinds]
    return [SingleBoundaryJobs(config.hidden_size, jobs.tp_size, each) for each in eps]


def _read_probes(
    probes: Sequence[BoundaryProbe], x: Array, shown: Sequence[Mapping[str, Array]]
) -> list[list[dict[str, Array]]]:
    """For each boundary each rank's tensors by role."""
    return [[probe.read({_input_name(): x, **rank}) for rank in shown] for probe in probes]


def _check_bits(
    probes: Sequence[BoundaryProbe], boundaries: Sequence[Sequence[Mapping[str, Array]]]
) -> list[BoundaryCheck]:
    from trtllm_mhc.verification.checks import check_boundary, in_parallel

    pairs = list(zip(boundaries, probes, strict=True))
    return in_parallel(lambda pair: check_boundary(pair[0], pair[1].norm_eps), pairs)


def _compare_singles(
    singles: Sequence[SingleBoundaryJobs],
    runners: Mapping[str, Runner],
    probes: Sequence[BoundaryProbe],
    boundaries: Sequence[Sequence[Mapping[str, Array]]],
) -> list[tuple[Agreement, BoundaryCheck]]:
    by_eps: dict[float | None, Callable[[Sequence[Mapping[str, Array]]], tuple[Agreement, BoundaryCheck]]] = {}
    for single in singles:
        fused, unfused = runners[single.fused().name], runners[single.unfused().name]
        by_eps[single.norm_eps] = lambda ranks, s=single, f=fused, u=unfused: s.compare(f, u, ranks)  # type: ignore[misc]
    return [by_eps[probe.norm_eps](ranks) for probe, ranks in zip(probes, boundaries, strict=True)]


# ---- the record -----------------------------------------------------------------------------------------------------


def _environment(options: DemoOptions, tensorrt_version: str) -> dict[str, Any]:
    return {
        "layers": options.layers,
        "tp": options.tp,
        "m": options.rows,
        "sublayers": options.sublayers,
        "seed": options.seed,
        "driver": _driver(),
        "tensorrt": tensorrt_version,
        "version": trtllm_mhc.__version__,
        "commit": options.commit or _commit(),
    }


def _note_report(jobs: StackJobs, config: DeepseekV41Config, findings: Findings) -> None:
    report = jobs.reports[0]
    findings.record |= {
        "boundaries_found": len(report.found),
        "boundaries_fused": len(report.fused),
        "boundaries_full": report.full,
        "boundaries_residual_only": report.residual_only,
    }
    expected = (config.boundaries, config.boundaries_full, config.boundaries_residual_only)
    got = (len(report.fused), report.full, report.residual_only)
    findings.require(got == expected, f"expected {expected} boundaries fused (all, full, residual-only), got {got}")


def _note_distances(
    fused: Sequence[Sequence[Mapping[str, Array]]],
    unfused: Sequence[Sequence[Mapping[str, Array]]],
    truth: Sequence[Array],
    findings: Findings,
) -> None:
    from trtllm_mhc.verification.boundary_stack import OUTPUT
    from trtllm_mhc.verification.checks import compare_distances, ranks_equal

    equal = {
        name: all(ranks_equal(ranks) for ranks in outputs) for name, outputs in (("fused", fused), ("unfused", unfused))
    }
    findings.record["ranks_equal"] = all(equal.values())
    for name, value in equal.items():
        findings.require(value, f"the ranks' outputs of the {name} network differ")
    ratio = compare_distances([ranks[0][OUTPUT] for ranks in fused], [ranks[0][OUTPUT] for ranks in unfused], truth)
    findings.record |= {
        "rms_error_fused": ratio.rms_error,
        "rms_error_unfused": ratio.rms_error_baseline,
        "rms_output": float(np.sqrt(np.mean(np.square(np.stack(truth))))),
        "rms_error_ratio": ratio.ratio,
        "rms_error_ratio_interval": [ratio.low, ratio.high],
        "rms_error_ratio_confidence": ratio.confidence,
    }
    findings.require(
        ratio.not_above(LARGEST_ERROR_RATIO),
        f"the fused network is farther from the exact result: ratio {ratio.ratio:.4f}, up to {ratio.high:.4f}",
    )


def _note_bits(probes: Sequence[BoundaryProbe], results: Sequence[BoundaryCheck], findings: Findings) -> None:
    findings.record["boundaries_bit_equal_to_reference"] = sum(check.bit_equal for check in results)
    for probe, check in zip(probes, results, strict=True):
        findings.require(check.bit_equal, f"{probe.layer} differs from the reference: {check.detail}")
        findings.require(check.ranks_equal, f"{probe.layer}: the ranks differ")
    findings.record["ranks_equal"] &= all(check.ranks_equal for check in results)


def _note_agreement(
    probes: Sequence[BoundaryProbe], results: Sequence[tuple[Agreement, BoundaryCheck]], findings: Findings
) -> None:
    agreements = [agreement for agreement, _ in results]
    findings.record |= {
        "unfused_agreement": sum(agreement.agrees for agreement in agreements) / len(agreements),
        "unfused_boundaries_agreeing": sum(agreement.agrees for agreement in agreements),
        "unfused_elements_differing": sum(agreement.different for agreement in agreements)
        / sum(agreement.elements for agreement in agreements),
        "unfused_max_ulp": max(agreement.max_ulp for agreement in agreements),
    }
    for probe, (agreement, check) in zip(probes, results, strict=True):
        findings.require(agreement.agrees, f"{probe.layer}: the unfused boundary alone does not agree: {agreement}")
        findings.require(
            check.bit_equal, f"{probe.layer}: fused and alone it differs from the reference: {check.detail}"
        )


def _summarise(findings: Findings, console: Console) -> None:
    if "unfused_agreement" in findings.record:
        console.print(_table(findings.record))
    for failure in findings.failures[:20]:
        console.print(f"[red]failed:[/] {escape(failure)}")
    if len(findings.failures) > 20:
        console.print(f"[red]... and {len(findings.failures) - 20} more[/]")
    if not findings.failures:
        console.print("[green]Every comparison holds.[/]")


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


def _driver() -> str | None:
    """The NVIDIA driver's version."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line(command)


def _commit() -> str | None:
    return _first_line(["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"])


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
