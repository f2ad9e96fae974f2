# SPDX-License-Identifier: Apache-2.0
"""What a command that checks something finds: the record of its run, and the conditions that do not hold."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape

import trtllm_mhc

if TYPE_CHECKING:
    from trtllm_mhc.models.deepseek_v41 import DeepseekV41Config
    from trtllm_mhc.verification.boundary_stack import StackJobs
    from trtllm_mhc.verification.checks import Agreement, BoundaryCheck
    from trtllm_mhc.verification.probes import BoundaryProbe

Array = npt.NDArray[Any]

# The fused engine may not be farther from the exact result than the unfused one, up to the noise of the estimate.
LARGEST_ERROR_RATIO = 1.05
_FAILURES_SHOWN = 20


@dataclass
class Findings:
    """What a command measured.

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

    def write(self, path: Path, console: Console) -> None:
        """Writes the record as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.record, indent=2) + "\n")
        console.print(f"record: {escape(str(path))}")

    def print_verdict(self, console: Console) -> None:
        """Says what does not hold, or that everything does."""
        for failure in self.failures[:_FAILURES_SHOWN]:
            console.print(f"[red]failed:[/] {escape(failure)}")
        if len(self.failures) > _FAILURES_SHOWN:
            console.print(f"[red]... and {len(self.failures) - _FAILURES_SHOWN} more[/]")
        if not self.failures:
            console.print("[green]Every comparison holds.[/]")


def environment(tensorrt_version: str | None, commit: str | None = None) -> dict[str, Any]:
    """Versions, for the record; `commit` wins over git's. No TensorRT: None."""
    return {
        "driver": _driver(),
        "tensorrt": tensorrt_version,
        "version": trtllm_mhc.__version__,
        "commit": commit or _commit(),
    }


def note_report(jobs: StackJobs, config: DeepseekV41Config, findings: Findings) -> None:
    """Whether the pass fused every boundary that the model has."""
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


def note_distances(
    fused: Sequence[Sequence[Mapping[str, Array]]],
    unfused: Sequence[Sequence[Mapping[str, Array]]],
    truth: Sequence[Array],
    findings: Findings,
) -> None:
    """Compares the stack's final outputs: the ranks with each other, and both forms with the exact result.

    Args:
        fused: for each input each rank's outputs by name.
        unfused: the same of the unfused form.
        truth: for each input the exact output.
        findings: takes the results.
    """
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


def note_bits(probes: Sequence[BoundaryProbe], results: Sequence[BoundaryCheck], findings: Findings) -> None:
    """Whether every boundary of the network has the reference's bits, and the same on every rank."""
    findings.record["boundaries_bit_equal_to_reference"] = sum(check.bit_equal for check in results)
    for probe, check in zip(probes, results, strict=True):
        findings.require(check.bit_equal, f"{probe.layer} differs from the reference: {check.detail}")
        findings.require(check.ranks_equal, f"{probe.layer}: the ranks differ")
    findings.record["ranks_equal"] &= all(check.ranks_equal for check in results)


def note_agreement(
    probes: Sequence[BoundaryProbe], results: Sequence[tuple[Agreement, BoundaryCheck]], findings: Findings
) -> None:
    """How far each unfused boundary alone is from the fused one, as `stack_checks.compare_singles` found."""
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
