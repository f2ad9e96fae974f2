# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trtllm_mhc.benchmarks import gates, records, report
from trtllm_mhc.benchmarks.gates import Gate

PLACE = ("boundary", 2, "self_loop", "warm", None)


def row(implementation: str, m: int, us: float, run: str = "2026-12-01T02:00:00+00:00", **other: Any) -> records.Row:
    return {
        "op": "boundary",
        "implementation": implementation,
        "tp": 2,
        "mode": "self_loop",
        "m": m,
        "us": us,
        "noise": 0.01,
        "cache": "warm",
        "run": run,
        "device": "NVIDIA H200",
        **other,
    }


ROWS = [row("trtllm_mhc", 1, 2.0), row("sglang_fused", 1, 3.0), row("trtllm_mhc", 8, 4.0), row("sglang_fused", 8, 4.2)]


def gate(**fields: Any) -> Gate:
    return Gate(**{"op": "boundary", "tp": 2, "mode": "self_loop", "peer": "sglang_fused", "m": (1, 8), **fields})


def test_ratio_is_the_peer_s_time_to_ours() -> None:
    assert records.ratio(ROWS, PLACE, "sglang_fused", 1) == pytest.approx(1.5)


def test_rows_of_different_runs_are_never_compared() -> None:
    later = "2026-12-02T02:00:00+00:00"
    # Ours alone was measured again, much faster: nothing may be concluded from that.
    assert records.ratio([*ROWS, row("trtllm_mhc", 1, 0.5, later)], PLACE, "sglang_fused", 1) == pytest.approx(1.5)
    both = [row("trtllm_mhc", 1, 2.5, later), row("sglang_fused", 1, 3.0, later)]
    assert records.ratio([*both, *ROWS], PLACE, "sglang_fused", 1) == pytest.approx(1.2)
    assert records.ratio(both[:1] + ROWS[1:2], PLACE, "sglang_fused", 1) is None


def test_other_places_do_not_count() -> None:
    rows = [row("trtllm_mhc", 1, 2.0, cache="cold"), row("sglang_fused", 1, 3.0)]
    assert records.ratio(rows, PLACE, "sglang_fused", 1) is None


def test_read_gives_back_what_append_wrote(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "rows.jsonl"
    records.append(path, ROWS[:2])
    records.append(path, ROWS[2:])
    assert records.read(path) == ROWS


@pytest.mark.parametrize("line", ["{", "[]", '{"op": "boundary"}', "7"])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: expected a row"):
        records.read(path)


def test_gate_holds_at_its_ratio_and_fails_below() -> None:
    verdicts = gates.judge([gate(at_least=1.05)], ROWS)
    assert [verdict.holds for verdict in verdicts] == [True, True]
    verdicts = gates.judge([gate(at_least=1.1)], ROWS)
    assert [verdict.holds for verdict in verdicts] == [True, False]
    assert str(verdicts[1]) == (
        "boundary, tp 2, self_loop, warm: trtllm_mhc against sglang_fused, M = 8: 1.050, must be at least 1.1"
    )


def test_gate_without_rows_is_not_judged() -> None:
    (verdict,) = gates.judge([gate(at_least=1.1, m=(2,))], ROWS)
    assert verdict.holds is None
    assert "not measured" in str(verdict)


@pytest.mark.parametrize(
    "line",
    [
        '{"op": "boundary"}',
        '{"op": "boundary", "tp": 2, "mode": "self_loop", "peer": "p", "m": [], "at_least": 1}',
        '{"op": "boundary", "tp": 2, "mode": "self_loop", "peer": "p", "m": [1], "at_least": 0}',
        '{"op": "boundary", "tp": 2, "mode": "self_loop", "peer": "p", "m": [1], "at_least": 1, "us": 3}',
        "nothing",
    ],
)
def test_a_line_that_is_no_gate_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "gates.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"gates\.jsonl:1: expected a gate"):
        gates.read(path)


def test_tables_show_ratios_noise_and_gaps() -> None:
    console = Console(record=True, width=200)
    console.print(report.ratio_table(ROWS))
    for table in report.time_tables(ROWS):
        console.print(table)
    text = console.export_text()
    assert "1.50" in text
    assert "1.05" in text
    assert "3.00 +-0.03" in text


def test_markdown_has_times_and_ratios() -> None:
    assert report.markdown(ROWS).splitlines() == [
        "| us (times as fast as the peer) | m=1 | m=8 |",
        "|---|---|---|",
        "| boundary, tp 2, self_loop: `trtllm_mhc` | 2.00 | 4.00 |",
        "| boundary, tp 2, self_loop: `sglang_fused` | 3.00 (1.50) | 4.20 (1.05) |",
    ]


def test_table_of_a_document_is_renewed() -> None:
    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    renewed = report.with_table(text, ROWS)
    assert renewed == f"before\n{report.BEGIN}\n{report.markdown(ROWS)}\n{report.END}\nafter\n"
    assert report.with_table(renewed, ROWS) == renewed
    with pytest.raises(ValueError, match="marks"):
        report.with_table("no marks", ROWS)


def test_plot_is_svg_and_the_same_for_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        report.plot(ROWS, tmp_path / name)
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()
    assert "<svg" in (tmp_path / "a.svg").read_text()
