# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc verify`: Polygraphy's comparison of the unfused with the fused network, and what it cannot see."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
    from trtllm_mhc.integrations.polygraphy.comparison import OutputComparison, Tolerance
    from trtllm_mhc.runtime.build import Plan
    from trtllm_mhc.verification.backends import Job, NetworkMaker, Runner
    from trtllm_mhc.verification.boundary_stack import StackJobs

Array = npt.NDArray[Any]

EXIT_HOLDS, EXIT_DIFFERS, EXIT_UNUSABLE = 0, 1, 2
# The interpreter takes seconds for what an engine does in milliseconds.
INPUTS_WITH_ENGINES, INPUTS_IN_NUMPY = 16, 4
# Two right forms may be on opposite sides of the exact value; a little more, because the largest error is itself noisy.
_ALLOWED_DISTANCES = 3.0


@dataclass(frozen=True)
class VerifyOptions:
    """The command's options; None for `inputs`, `coefficients`, `atol` and `rtol` leaves the choice to the command."""

    tp: int = 2
    layers: int = 40
    rows: int = 8
    inputs: int | None = None
    sublayers: str = "matmul"
    seed: int = 0
    all_reduce: str = "plugin"
    coefficients: str | None = None
    atol: float | None = None
    rtol: float | None = None
    stat: str = "elemwise"
    unfused: Path | None = None
    fused: Path | None = None
    hidden_size: int = 5120
    data: str | None = None
    save_engines: Path | None = None
    timing_cache: Path | None = None
    commit: str | None = None


def run(options: VerifyOptions, json_path: Path | None, console: Console) -> int:
    """Verifies; returns the exit code: 0 everything holds, 1 something differs, 2 it could not be found out."""
    # Ranks that share a GPU need hardware queues of their own; CUDA reads it when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if options.tp not in (1, 2, 4, 8):
        return _unusable(console, f"--tp: expected 1, 2, 4 or 8, got {options.tp}")
    if (options.unfused is None) != (options.fused is None):
        return _unusable(console, "--unfused and --fused belong together: give both, or neither to build the engines")
    try:
        import polygraphy  # noqa: F401
        import tensorrt
    except ImportError as error:
        return _unusable(
            console, f"{error}. verify needs TensorRT's Python package and Polygraphy (pip install polygraphy)"
        )

    findings = Findings(environment(tensorrt.__version__, options.commit))
    steps = Steps(console)
    try:
        if options.unfused is None:
            _verify_stack(options, findings, steps)
        else:
            from trtllm_mhc.cli.verify_engines import verify_engines

            verify_engines(options, findings, steps)
    except (RuntimeError, OSError, ValueError) as error:
        # EngineError, MailboxError, and what TensorRT lacks: each says what it is about.
        return _unusable(console, str(error))
    findings.record["seconds"] = steps.seconds
    if json_path is not None:
        findings.write(json_path, console)
    console.print(_table(findings.record))
    findings.print_verdict(console)
    return EXIT_DIFFERS if findings.failures else EXIT_HOLDS


def note_comparisons(comparisons: Sequence[OutputComparison], tolerance: Tolerance, findings: Findings) -> None:
    """Polygraphy's verdicts."""
    findings.record |= {
        "outputs": len(comparisons),
        "polygraphy_passed": sum(comparison.passed for comparison in comparisons),
        "polygraphy_tolerance": {"atol": tolerance.atol, "rtol": tolerance.rtol, "check_error_stat": tolerance.stat},
        "polygraphy_max_absdiff": max(comparison.max_absdiff for comparison in comparisons),
        "polygraphy_mean_absdiff": max(comparison.mean_absdiff for comparison in comparisons),
    }
    for comparison in comparisons:
        findings.require(comparison.passed, f"Polygraphy: {comparison}")


# ---- the boundary stack ---------------------------------------------------------------------------------------------


def _verify_stack(options: VerifyOptions, findings: Findings, steps: Steps) -> None:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config, ModelWeights
    from trtllm_mhc.verification.boundary_stack import StackJobs

    config = DeepseekV41Config(hidden_size=options.hidden_size, num_hidden_layers=options.layers)
    jobs = StackJobs(
        config,
        ModelWeights(config, options.seed),
        options.tp,
        options.sublayers,  # type: ignore[arg-type]
        options.all_reduce,  # type: ignore[arg-type]
    )
    verify_stack(jobs, options, findings, steps)


def verify_stack(jobs: StackJobs, options: VerifyOptions, findings: Findings, steps: Steps) -> None:
    """Every comparison of the forms of `jobs`; engines where they can be built, the numpy interpreter elsewhere."""
    from trtllm_mhc.runtime import build
    from trtllm_mhc.verification import stack_checks
    from trtllm_mhc.verification.backends import NetworkMaker

    no_engines: str | None = "this machine has no usable GPU"
    if cuda.device_count() > 0:
        with steps.step("test engine"):
            no_engines = build.why_no_engines()
    if no_engines is None and jobs.all_reduce != "plugin":
        raise build.EngineError(
            f"--all-reduce {jobs.all_reduce}: running it needs an NCCL communicator, which this version does not make; "
            "the network can be evaluated on a machine without a GPU"
        )
    jobs.coefficients = options.coefficients or ("plugin" if no_engines is None else "native")  # type: ignore[assignment]
    maker = NetworkMaker()
    with steps.step("define the network and fuse its boundaries"):
        maker.make(jobs.fused(), 0)
    steps.console.print(jobs.reports[0].table())
    note_report(jobs, jobs.config, findings)
    if findings.failures:
        return  # nothing to compare: the networks are not what they should be
    count = options.inputs or (INPUTS_WITH_ENGINES if no_engines is None else INPUTS_IN_NUMPY)
    findings.record |= {
        "layers": jobs.config.num_hidden_layers,
        "tp": jobs.tp_size,
        "m": options.rows,
        "inputs": count,
        "sublayers": jobs.sublayers,
        "seed": options.seed,
        "all_reduce": jobs.all_reduce,
        "coefficients": jobs.coefficients,
    }
    inputs = stack_checks.generate_inputs(count, options.rows, jobs.config.hidden_size, options.seed)
    if no_engines is not None:
        steps.console.print(
            f"[yellow]No engine was built:[/] {escape(no_engines)}. Both forms of the network are evaluated by the "
            "numpy interpreter instead."
        )
        findings.record |= {"mode": "numpy", "device": None}
        with steps.step(f"evaluate {count} inputs in float64"):
            exact = _Exact.evaluate(jobs, maker, inputs)
        _compare(jobs, _InNumpy(maker, jobs.tp_size), inputs, exact, options, findings, steps)
        return
    singles = stack_checks.single_boundary_jobs(jobs)
    built = [jobs.unfused(), jobs.fused(), jobs.probed(), jobs.probed_unfused()]
    built += [form for single in singles for form in (single.unfused(), single.fused())]
    rows = build.RowRange(1, options.rows, options.rows)
    with ThreadPoolExecutor(1) as background:
        # Needs the CPU only, and the builds mostly the GPU.
        future = background.submit(_Exact.evaluate, jobs, maker, inputs)
        with _engines(built, jobs, rows, options, findings, steps) as engines:
            with steps.step("finish the float64 evaluation"):
                exact = future.result()
            _compare(jobs, engines, inputs, exact, options, findings, steps)


@dataclass(frozen=True)
class _Exact:
    """The float64 evaluation.

    Attributes:
        outputs: the final output for each input.
        shown: for the first input each rank's tensors at every boundary, by name.
    """

    outputs: list[Array]
    shown: list[dict[str, Array]]

    @classmethod
    def evaluate(cls, jobs: StackJobs, maker: NetworkMaker, inputs: Sequence[Array]) -> _Exact:
        from trtllm_mhc.verification import stack_checks
        from trtllm_mhc.verification.boundary_stack import INPUT

        shown = maker.runner(jobs.probed_unfused(), jobs.tp_size, "float64").run([{INPUT: inputs[0]}] * jobs.tp_size)
        return cls(stack_checks.evaluate_exactly(jobs, maker, inputs), shown)


def _compare(
    jobs: StackJobs,
    runs: _Runs,
    inputs: Sequence[Array],
    exact: _Exact,
    options: VerifyOptions,
    findings: Findings,
    steps: Steps,
) -> None:
    from trtllm_mhc.integrations.polygraphy.comparison import compare, outputs_of, run_lockstep
    from trtllm_mhc.integrations.polygraphy.runners import GroupRunner, Input
    from trtllm_mhc.verification import stack_checks
    from trtllm_mhc.verification.boundary_stack import FUSED, INPUT, OUTPUT, UNFUSED
    from trtllm_mhc.verification.locate import Point, boundary_points, first_deviation

    shape = (-1, jobs.config.hidden_size)
    taken = {INPUT: Input(inputs[0].dtype, shape, shape)}
    with steps.step(f"run both forms on {len(inputs)} inputs, by Polygraphy's Comparator"):
        # The second is what Polygraphy's relative tolerance refers to.
        runners = [
            GroupRunner(job.name, functools.partial(runs.open, job), taken, jobs.tp_size)
            for job in (jobs.fused(), jobs.unfused())
        ]
        results = run_lockstep(runners, [{INPUT: x.astype(np.float32)} for x in inputs])
    outputs = {name: outputs_of(results, name, jobs.tp_size) for name in (FUSED, UNFUSED)}
    note_distances(outputs[FUSED], outputs[UNFUSED], exact.outputs, findings)
    tolerance = _tolerance(options, outputs[UNFUSED], exact.outputs)
    with steps.step("compare by Polygraphy's SimpleCompareFunc"):
        note_comparisons(compare(results, tolerance), tolerance, findings)

    feeds = [{INPUT: inputs[0]}] * jobs.tp_size
    with steps.step("run the forms that show every boundary"):
        with runs.open(jobs.probed()) as runner:
            shown = runner.run(feeds)
        with runs.open(jobs.probed_unfused()) as runner:
            shown_unfused = runner.run(feeds)
    same = reference.bits_equal(shown[0][OUTPUT].astype(np.float32), outputs[FUSED][0][0][OUTPUT])
    findings.record["checked_engine_equals_compared_engine"] = bool(same.all())
    with steps.step("find the first tensor that is off"):
        points = boundary_points(jobs.probes, jobs.unfused_probes)
        points.append(Point(OUTPUT, OUTPUT, OUTPUT))
        deviation = first_deviation(points, shown, shown_unfused, exact.shown)
        findings.record["first_deviation"] = None if deviation is None else str(deviation)
        findings.require(deviation is None, str(deviation))

    eps = stack_checks.expected_eps(jobs)
    boundaries = stack_checks.read_probes(jobs.probes, inputs[0], shown)
    with steps.step(f"check {len(boundaries)} boundaries against the reference"):
        for probe, wanted in zip(jobs.probes, eps, strict=True):
            text = f"{probe.layer}: the norm's epsilon is {probe.norm_eps}, expected {wanted}"
            findings.require(probe.norm_eps == wanted, text)
        note_bits(jobs.probes, stack_checks.check_bits(boundaries, eps), findings)
        if findings.record["mode"] == "numpy":
            # The interpreter computes a fused boundary by the reference itself: only its epsilon was put to the test.
            findings.record["boundaries_bit_equal_to_reference"] = None
    with steps.step("compare each boundary alone, fused and unfused, on the same inputs"):
        singles = stack_checks.single_boundary_jobs(jobs)
        with contextlib.ExitStack() as stack:
            forms = [form for single in singles for form in (single.unfused(), single.fused())]
            alone: dict[str, Runner] = {form.name: stack.enter_context(runs.open(form)) for form in forms}
            agreements = stack_checks.compare_singles(singles, alone, boundaries, eps)
        note_agreement(jobs.probes, agreements, findings)
    findings.record["max_ulp"] = findings.record["unfused_max_ulp"]


def _tolerance(
    options: VerifyOptions, unfused: Sequence[Sequence[Mapping[str, Array]]], exact: Sequence[Array]
) -> Tolerance:
    """The options', or else as far as the unfused form is from the exact result, in proportion."""
    from trtllm_mhc.integrations.polygraphy.comparison import Tolerance
    from trtllm_mhc.verification.boundary_stack import OUTPUT

    if options.atol is not None or options.rtol is not None:
        return Tolerance(options.atol or 0.0, options.rtol or 0.0, options.stat)
    largest = max(float(np.abs(ranks[0][OUTPUT] - truth).max()) for ranks, truth in zip(unfused, exact, strict=True))
    return Tolerance(_ALLOWED_DISTANCES * largest, 0.0, options.stat)


# ---- what runs the networks -----------------------------------------------------------------------------------------


class _Runs(Protocol):
    """Runs the networks of jobs."""

    def open(self, job: Job) -> contextlib.AbstractContextManager[Runner]:
        """A job's networks, ready to run."""
        ...


class _InNumpy:
    def __init__(self, maker: NetworkMaker, ranks: int) -> None:
        self._maker = maker
        self._ranks = ranks

    @contextlib.contextmanager
    def open(self, job: Job) -> Iterator[Runner]:
        yield self._maker.runner(job, self._ranks)


class _AsEngines:
    def __init__(self, plans: dict[str, list[Plan]], comms: Sequence[Any], group: Any) -> None:
        self._plans = plans
        self._comms = comms
        self._group = group

    @contextlib.contextmanager
    def open(self, job: Job) -> Iterator[Runner]:
        from trtllm_mhc.runtime.engine import EngineGroup

        # A lane each: several are open at once.
        lane = list(self._plans).index(job.name)
        with EngineGroup(self._plans[job.name], self._comms, self._group, lane=lane) as engines:
            yield engines


@contextlib.contextmanager
def _engines(
    built: Sequence[Job], jobs: StackJobs, rows: Any, options: VerifyOptions, findings: Findings, steps: Steps
) -> Iterator[_AsEngines]:
    from trtllm_mhc.cli.verify_engines import save
    from trtllm_mhc.runtime import build
    from trtllm_mhc.runtime.engine import communicators
    from trtllm_mhc.runtime.threads import ThreadGroup
    from trtllm_mhc.verification.backends import build_jobs

    group = ThreadGroup.on_devices(jobs.tp_size)
    shared = len(set(group.devices or ())) < jobs.tp_size
    findings.record["mode"] = "loopback" if shared else "one GPU per rank"
    findings.record["device"] = cuda.device_info(0).name
    with steps.step("build the engines"):
        cache = build.TimingCache(options.timing_cache)
        plans = build_jobs(built, jobs.tp_size, rows, cache, steps.say)
    if options.save_engines is not None:
        save(plans, options.save_engines, steps.console)
    hidden, capacity = jobs.config.hidden_size, max(options.rows, 64)
    with communicators(group, "verify", hidden_size=hidden, capacity=capacity, lanes=len(plans)) as comms:
        yield _AsEngines(plans, comms, group)


# ---- the result -----------------------------------------------------------------------------------------------------


def _unusable(console: Console, text: str) -> int:
    console.print(f"[red]{escape(text)}[/]")
    return EXIT_UNUSABLE


def _table(record: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    rows: dict[str, str] = {}
    if "polygraphy_passed" in record:
        tolerance = record["polygraphy_tolerance"]
        rows["Polygraphy"] = (
            f"{record['polygraphy_passed']} of {record['outputs']} outputs agree ({tolerance['check_error_stat']}, "
            f"atol {tolerance['atol']:.3g}, rtol {tolerance['rtol']:.3g}); largest difference "
            f"{record['polygraphy_max_absdiff']:.3g}"
        )
    if "ranks_equal" in record:
        rows["ranks equal, bit for bit"] = "yes" if record["ranks_equal"] else "no"
    if record.get("rms_error_fused") is not None:
        rows["rms distance to float64, fused / unfused"] = (
            f"{record['rms_error_fused']:.4e} / {record['rms_error_unfused']:.4e} = {record['rms_error_ratio']:.4f}"
        )
    if record.get("boundaries_bit_equal_to_reference") is not None:
        rows["boundaries with the reference's bits"] = (
            f"{record['boundaries_bit_equal_to_reference']} of {record['boundaries_fused']}"
        )
    if "unfused_boundaries_agreeing" in record:
        rows["boundaries alone, fused and unfused"] = (
            f"{record['unfused_boundaries_agreeing']} of {record['boundaries_fused']} agree, "
            f"at most {record['max_ulp']} ulp apart"
        )
    if "first_deviation" in record:
        rows["first tensor that is off"] = record["first_deviation"] or "none"
    if "output_max_ulp" in record:
        rows["largest difference in bf16 numbers"] = str(record["output_max_ulp"])
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table
