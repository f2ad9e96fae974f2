# SPDX-License-Identifier: Apache-2.0
"""`trtllm-mhc verify` with engines that are files: a folder with rank0.engine, rank1.engine, ..., or one for all."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape

from trtllm_mhc import reference
from trtllm_mhc.cli.findings import Findings
from trtllm_mhc.cli.steps import Steps
from trtllm_mhc.runtime import cuda

if TYPE_CHECKING:
    from trtllm_mhc.cli.verify import VerifyOptions
    from trtllm_mhc.integrations.polygraphy.runners import Input
    from trtllm_mhc.runtime.build import Plan

Array = npt.NDArray[Any]

# Of engines that are files nothing exact is known. An element must be outside of both to count.
_ATOL, _RTOL = 0.1, 0.1
_DEFAULT_INPUTS = 16


def save(plans: Mapping[str, Sequence[Plan]], folder: Path, console: Console) -> None:
    """Writes the engines of both forms to `folder`/unfused and `folder`/fused."""
    for form in ("unfused", "fused"):
        (folder / form).mkdir(parents=True, exist_ok=True)
        for rank, plan in enumerate(plans[form]):
            (folder / form / f"rank{rank}.engine").write_bytes(plan.data)
        console.print(f"engines: {escape(str(folder / form))}")


def read_plans(path: Path, ranks: int) -> list[Plan]:
    """One plan for each rank: of a folder with rank0.engine and so on, or one file for all.

    Raises:
        FileNotFoundError: a file is missing.
    """
    from trtllm_mhc.runtime.build import Plan

    if path.is_file():
        return [Plan(path.read_bytes(), 0.0)] * ranks
    files = [path / f"rank{rank}.engine" for rank in range(ranks)]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"expected an engine for each of {ranks} ranks; missing: {', '.join(missing)}")
    return [Plan(file.read_bytes(), 0.0) for file in files]


def verify_engines(options: VerifyOptions, findings: Findings, steps: Steps) -> None:
    """Runs both engines of every rank and compares them, by Polygraphy and by bits."""
    from trtllm_mhc.cli.verify import note_comparisons
    from trtllm_mhc.integrations.polygraphy.comparison import Tolerance, compare, outputs_of, run_lockstep
    from trtllm_mhc.integrations.polygraphy.runners import GroupRunner, plan_inputs
    from trtllm_mhc.runtime.build import require_device
    from trtllm_mhc.runtime.engine import EngineGroup, communicators
    from trtllm_mhc.runtime.threads import ThreadGroup
    from trtllm_mhc.verification.checks import ranks_equal

    assert options.unfused is not None
    assert options.fused is not None
    plans = {"fused": read_plans(options.fused, options.tp), "unfused": read_plans(options.unfused, options.tp)}
    require_device()
    inputs = {name: plan_inputs(found[0]) for name, found in plans.items()}
    if inputs["fused"] != inputs["unfused"]:
        raise ValueError(f"the engines take different inputs: {inputs['fused']} and {inputs['unfused']}")
    feeds = list(_feeds(options, inputs["fused"]))
    group = ThreadGroup.on_devices(options.tp)
    findings.record |= {
        "device": cuda.device_info(0).name,
        "mode": "loopback" if len(set(group.devices or ())) < options.tp else "one GPU per rank",
        "tp": options.tp,
        "inputs": len(feeds),
    }
    with communicators(group, "verify", hidden_size=options.hidden_size, lanes=2) as comms:
        runners = [
            GroupRunner(
                name,
                functools.partial(EngineGroup, plans[name], comms, group, lane=lane),
                inputs[name],
                options.tp,
            )
            for lane, name in enumerate(plans)
        ]
        with steps.step(f"run both engines on {len(feeds)} inputs, by Polygraphy's Comparator"):
            results = run_lockstep(runners, feeds)
    given = options.atol is not None or options.rtol is not None
    tolerance = Tolerance(
        options.atol or 0.0 if given else _ATOL, options.rtol or 0.0 if given else _RTOL, options.stat
    )
    with steps.step("compare by Polygraphy's SimpleCompareFunc"):
        note_comparisons(compare(results, tolerance), tolerance, findings)
    outputs = {name: outputs_of(results, name, options.tp) for name in plans}
    equal = {name: all(ranks_equal(ranks) for ranks in found) for name, found in outputs.items()}
    findings.record |= {"ranks_equal": all(equal.values()), "rms_error_fused": None, "rms_error_unfused": None}
    for name, value in equal.items():
        findings.require(value, f"the ranks' outputs of the {name} engines differ: {_unequal(outputs[name])}")
    findings.record["output_max_ulp"] = _max_ulp(outputs["fused"], outputs["unfused"])


def _feeds(options: VerifyOptions, inputs: Mapping[str, Input]) -> Iterator[dict[str, Array]]:
    if options.data is not None:
        from polygraphy import mod

        path, _, name = options.data.partition(":")
        yield from mod.import_from_script(path, name or "load_data")()
        return
    rng = np.random.default_rng(options.seed)
    bf16 = np.dtype(ml_dtypes.bfloat16)
    for name, spec in inputs.items():
        if spec.dtype not in (bf16, np.float32, np.float16) or -1 in spec.shape[1:]:
            raise ValueError(
                f"input {name!r} is {spec.dtype} {list(spec.shape)}: only floating-point inputs [M, ...] are "
                "generated; give a script with --data"
            )
    for _ in range(options.inputs or _DEFAULT_INPUTS):
        feed = {}
        for name, spec in inputs.items():
            rows = options.rows if -1 in spec.shape else spec.shape[0]
            values = rng.standard_normal((rows, *spec.shape[1:]), np.float32)
            # bf16 as fp32 of the same value: numpy has no bf16.
            feed[name] = values.astype(bf16).astype(np.float32) if spec.dtype == bf16 else values.astype(spec.dtype)
        yield feed


def _unequal(outputs: Sequence[Sequence[Mapping[str, Array]]]) -> str:
    """The first output, rank and row whose bits are not rank 0's."""
    for index, ranks in enumerate(outputs):
        for rank, found in enumerate(ranks):
            for name, array in found.items():
                equal = reference.bits_equal(array, ranks[0][name]).reshape(len(array), -1).all(axis=1)
                if not equal.all():
                    return f"{name} of rank {rank}, input {index}, from row {int(np.argmin(equal))} on"
    return "not at all"


def _max_ulp(
    fused: Sequence[Sequence[Mapping[str, Array]]], unfused: Sequence[Sequence[Mapping[str, Array]]]
) -> int | None:
    """The largest distance in bf16 numbers; None where no output holds bf16 numbers only."""
    largest = None
    for ours, theirs in zip(fused, unfused, strict=True):
        for rank, other in zip(ours, theirs, strict=True):
            for name, array in rank.items():
                pair = [values.astype(ml_dtypes.bfloat16) for values in (array, other[name])]
                if all(
                    bool(reference.bits_equal(narrow.astype(np.float32), wide.astype(np.float32)).all())
                    for narrow, wide in zip(pair, (array, other[name]), strict=True)
                ):
                    distance = int(np.max(reference.ulp_distance(pair[0], pair[1]), initial=0))
                    largest = max(distance, largest or 0)
    return largest
