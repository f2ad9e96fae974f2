# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc demo --variant`: one boundary of each kind, unfused and fused, compared and timed."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trtllm_mhc.cli.findings import Findings, environment
from trtllm_mhc.cli.steps import Steps
from trtllm_mhc.runtime import cuda

if TYPE_CHECKING:
    from trtllm_mhc.runtime.engine import EngineGroup
    from trtllm_mhc.verification.variants import Outcome, Variant

# A boundary takes microseconds: many in one graph, so that its launch does not count.
_PASSES_PER_GRAPH = 20
_REPLAYS = 30
_INPUTS = 3


@dataclass(frozen=True)
class Options:
    """The command's options.

    Attributes:
        variants: names separated by commas, or "all".
        tp: ranks.
        rows: tokens of a step.
        seed: of the inputs.
        commit: for the record; None: git's.
        timing_cache: TensorRT's, kept in this file.
    """

    variants: str
    tp: int
    rows: int
    seed: int = 0
    commit: str | None = None
    timing_cache: Path | None = None


def run(options: Options, json_path: Path | None, console: Console) -> int:
    """Runs the comparison; returns the exit code: 0 if everything holds."""
    # Ranks that share a GPU need hardware queues of their own; CUDA reads it when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    try:
        import tensorrt
    except ImportError:
        console.print(
            "[red]The demo needs TensorRT's Python package.[/] Install it (pip install tensorrt), or run `make demo`, "
            "which fetches one."
        )
        return 1
    from trtllm_mhc.runtime import build
    from trtllm_mhc.verification.variants import VARIANTS, Size

    names = list(VARIANTS) if options.variants == "all" else options.variants.split(",")
    unknown = [name for name in names if name not in VARIANTS]
    if unknown or options.tp not in (1, 2, 4, 8):
        if unknown:
            known = ", ".join(VARIANTS)
            console.print(f"[red]--variant: expected all or some of {known}; got {escape(options.variants)}[/]")
        else:
            console.print(f"[red]--tp: expected 1, 2, 4 or 8, got {options.tp}[/]")
        return 1
    findings, steps = Findings(), Steps(console)
    variants = [VARIANTS[name](Size(options.tp, options.rows)) for name in names]
    no_engines: str | None = "this machine has no usable GPU"
    if cuda.device_count() > 0:
        with steps.step("test engine"):
            no_engines = build.why_no_engines()
    common = {"tp": options.tp, "m": options.rows, **environment(tensorrt.__version__, options.commit)}
    if no_engines is None:
        made = _run_engines(options, variants, findings, steps)
    else:
        console.print(
            f"[yellow]No engine was built:[/] {escape(no_engines)}. Both forms are evaluated by the numpy "
            "interpreter instead, which computes fused boundaries by the reference itself."
        )
        made = _run_numpy(options, variants, findings, steps)
    records: list[dict[str, Any]] = []
    try:
        for record in made:
            records.append(record | common)
            if json_path is not None:  # after each, for all are many engines to build
                json_path.parent.mkdir(parents=True, exist_ok=True)
                json_path.write_text(json.dumps(records, indent=2) + "\n")
    except build.EngineError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return 1
    if json_path is not None:
        console.print(f"record: {escape(str(json_path))}")
    console.print(_table(records, options))
    findings.print_verdict(console)
    return 1 if findings.failures else 0


def _run_engines(
    options: Options, variants: Sequence[Variant], findings: Findings, steps: Steps
) -> Iterator[dict[str, Any]]:
    from trtllm_mhc.runtime import build
    from trtllm_mhc.runtime.engine import communicators
    from trtllm_mhc.runtime.threads import ThreadGroup
    from trtllm_mhc.verification.backends import build_jobs, open_engines
    from trtllm_mhc.verification.variants import Outcome

    group = ThreadGroup.on_devices(options.tp)
    shared = len(set(group.devices or ())) < options.tp
    where = {"mode": "loopback" if shared else "one GPU per rank", "device": cuda.device_info(0).name}
    rows = build.RowRange(1, options.rows, options.rows)
    cache = build.TimingCache(options.timing_cache)
    hidden = variants[0].size.hidden
    with communicators(group, "variants", hidden_size=hidden, capacity=max(options.rows, 64), lanes=2) as comms:
        for variant in variants:
            jobs = [variant.fused(), *([variant.unfused()] if variant.unfused_builds else [])]
            try:
                with steps.step(f"{variant.name}: build"):
                    plans = build_jobs(jobs, options.tp, rows, cache, steps.say)
            except RuntimeError as error:  # of this variant; the others may do
                findings.require(False, f"{variant.name}: {error}")
                nothing = {"equal": None, "agrees": None, "error": str(error).splitlines()[0]}
                yield _record(variant, Outcome(), None, None) | nothing | where
                continue
            with (
                steps.step(f"{variant.name}: run, compare and time"),
                open_engines(plans, [job.name for job in jobs], comms, group) as engines,
            ):
                outcome = _compare(variant, engines, options.seed)
                times = _time(engines)
            _note(variant, outcome, findings)
            record = _record(variant, outcome, times[1] if len(times) > 1 else None, times[0])
            yield record | where | ({} if variant.unfused_builds else {"agrees": None})


def _compare(variant: Variant, engines: Sequence[EngineGroup], seed: int) -> Outcome:
    """Eager and in a graph, over a few inputs, the outputs' memory poisoned before each pass.

    Args:
        variant: whose engines.
        engines: the fused form, and the unfused one if there is one.
        seed: of the inputs.
    """
    sets = [variant.feeds(seed + number) for number in range(_INPUTS)]
    outputs = []
    for number, feeds in enumerate(sets):
        forms = []
        for form in engines:
            form.prepare(feeds)
            form.poison_outputs()
            forms.append(form.run_prepared())
            if number == 0:
                form.capture(_PASSES_PER_GRAPH)
        outputs.append((feeds, forms[0], forms[-1]))
    forms = []
    for form in engines:
        form.poison_outputs()
        forms.append(form.replay(sets[0]))
    outputs.append((sets[0], forms[0], forms[-1]))
    # The comparisons are numpy's, which lets other threads run.
    with ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(lambda each: variant.compare(*each), outputs))
    whole = outcomes[0]
    for other in outcomes[1:]:
        whole.join(other)
    return whole


def _time(engines: Sequence[EngineGroup]) -> list[float]:
    """Medians in the order A B B A, so that a drift of the clocks counts for both."""
    samples: list[list[float]] = [[] for _ in engines]
    order = list(range(len(engines)))
    for number in order + order[::-1]:
        samples[number] += engines[number].time_replays(_REPLAYS, passes=_PASSES_PER_GRAPH).samples_us
    return [statistics.median(each) for each in samples]


def _run_numpy(
    options: Options, variants: Sequence[Variant], findings: Findings, steps: Steps
) -> Iterator[dict[str, Any]]:
    from trtllm_mhc.verification.backends import NetworkMaker

    maker = NetworkMaker()
    for variant in variants:
        with steps.step(f"{variant.name}: evaluate both forms"):
            feeds = variant.feeds(options.seed)
            fused, unfused = (maker.runner(job, options.tp).run(feeds) for job in (variant.fused(), variant.unfused()))
            outcome = variant.compare(feeds, fused, unfused)
        _note(variant, outcome, findings)
        record = _record(variant, outcome, None, None)
        # Comparing the reference with itself would prove nothing.
        yield record | {"equal": None if outcome.equal else False, "mode": "numpy", "device": None}


def _note(variant: Variant, outcome: Outcome, findings: Findings) -> None:
    holds = outcome.equal and outcome.agrees
    findings.require(holds, f"{variant.name}: " + "; ".join(outcome.details[:3]))


def _record(variant: Variant, outcome: Outcome, unfused_us: float | None, fused_us: float | None) -> dict[str, Any]:
    return {
        "variant": variant.name,
        "equal": outcome.equal,
        "agrees": outcome.agrees,
        "max_ulp": outcome.max_ulp,
        "unfused_us": None if unfused_us is None else round(unfused_us, 2),
        "fused_us": None if fused_us is None else round(fused_us, 2),
        **({"note": variant.note} if variant.note else {}),
    }


def _table(records: Sequence[dict[str, Any]], options: Options) -> Table:
    mode = records[0]["mode"]
    table = Table(title=f"one boundary, tp {options.tp}, M = {options.rows}, {mode}", title_justify="left")
    for heading in (
        "variant",
        "equal to the reference",
        "unfused agrees",
        "max ulp",
        "unfused us",
        "fused us",
        "saves",
    ):
        table.add_column(heading, overflow="fold", justify="left" if heading == "variant" else "right")
    for record in records:
        before, after = record["unfused_us"], record["fused_us"]
        times = ["not measured" if each is None else f"{each:.2f}" for each in (before, after)]
        times.append("" if before is None or after is None else f"{before - after:.2f}")
        equal = {True: "yes", False: "NO", None: "no engine"}[record["equal"]]
        agrees = {True: "yes", False: "NO", None: "no engine"}[record["agrees"]]
        name = record["variant"] + (f" ({record['note']})" if "note" in record else "")
        table.add_row(name, equal, agrees, str(record["max_ulp"]), *times)
    return table
