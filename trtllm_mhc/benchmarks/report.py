# SPDX-License-Identifier: Apache-2.0
"""Tables and a plot of recorded rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from trtllm_mhc.benchmarks.records import Row, newest, place_of, ratio
from trtllm_mhc.benchmarks.suite import OPS, OURS

BEGIN, END = "<!-- benchmark table: begin -->", "<!-- benchmark table: end -->"


def _places(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """By operation, then group size; where these are the same, as they come."""

    def order(place: tuple[Any, ...]) -> tuple[int, int]:
        op, tp = place[:2]
        return (OPS.index(op) if op in OPS else len(OPS)), tp

    return sorted(dict.fromkeys(place_of(row) for row in rows), key=order)


def _title(place: tuple[Any, ...]) -> str:
    op, tp, mode, cache, sublayers = place
    return f"{op}, tp {tp}, {mode}, {cache}{f', sublayers: {sublayers}' if sublayers else ''}"


def _grid(rows: Sequence[Row], place: tuple[Any, ...]) -> tuple[list[str], list[int], dict[tuple[str, int], Row]]:
    """Implementations, values of M, and the newest row of each."""
    cells = {key[-2:]: row for key, row in newest(rows).items() if key[:-2] == place}
    implementations = list(dict.fromkeys(row["implementation"] for row in rows if place_of(row) == place))
    return implementations, sorted({m for _, m in cells}), cells


def ratio_table(rows: Sequence[Row]) -> Table:
    """How many times as fast as each peer, both in one run."""
    columns = sorted({row["m"] for row in rows})
    table = Table(title="times as fast as the peer in the same run")
    table.add_column("what and where")
    table.add_column("peer")
    for m in columns:
        table.add_column(f"m={m}", justify="right")
    for place in _places(rows):
        for peer in _grid(rows, place)[0]:
            found = {m: ratio(rows, place, peer, m) for m in columns}
            if not peer.startswith(OURS) and any(found.values()):
                table.add_row(_title(place), peer, *(_number(found[m]) for m in columns))
    return table


def time_tables(rows: Sequence[Row]) -> list[Table]:
    """Microseconds, a table for each operation and place; +- is the noise."""
    tables = []
    for place in _places(rows):
        implementations, columns, cells = _grid(rows, place)
        table = Table(title=f"us: {_title(place)}")
        table.add_column("implementation")
        for m in columns:
            table.add_column(f"m={m}", justify="right")
        for name in implementations:
            found = (cells.get((name, m)) for m in columns)
            table.add_row(name, *("" if r is None else f"{r['us']:.2f} +-{r['us'] * r['noise']:.2f}" for r in found))
        tables.append(table)
    return tables


def markdown(rows: Sequence[Row]) -> str:
    """The README's table: times and ratios with a warm cache."""
    warm = [row for row in rows if row["cache"] == "warm"]
    columns = sorted({row["m"] for row in warm})
    lines = [
        "| us (times as fast as the peer) | " + " | ".join(f"m={m}" for m in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for place in _places(warm):
        implementations, _, cells = _grid(warm, place)
        for name in implementations:
            texts = []
            for m in columns:
                row = cells.get((name, m))
                times = None if name.startswith(OURS) else ratio(warm, place, name, m)
                texts.append("" if row is None else f"{row['us']:.2f}" + (f" ({times:.2f})" if times else ""))
            count = next((r["boundaries"] for r in cells.values() if "boundaries" in r), None)
            title = _title(place).replace(", warm", "") + (f", {count} boundaries" if count else "")
            lines.append(f"| {title}: `{name}` | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def with_table(text: str, rows: Sequence[Row]) -> str:
    """A document with the table between its marks renewed.

    Raises:
        ValueError: the document has no marks.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"expected the marks {BEGIN} and {END}")
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{markdown(rows)}\n{END}{rest.split(END, 1)[1]}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws the warm boundary's times over M, a panel for each place, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "trtllm-mhc"  # the same rows give the same file
    from matplotlib import pyplot

    places = [place for place in _places(rows) if place[0] in ("boundary", "local") and place[3] == "warm"]
    figure, axes = pyplot.subplots(
        1, len(places), figsize=(3.4 * len(places), 3.2), squeeze=False, layout="constrained"
    )
    for axis, place in zip(axes[0], places, strict=True):
        implementations, _, cells = _grid(rows, place)
        for name in implementations:
            points = sorted((m, row["us"]) for (which, m), row in cells.items() if which == name)
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({m for _, m in cells}), labels=[str(m) for m in sorted({m for _, m in cells})])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(f"{place[0]}, tp {place[1]}, {place[2]}", fontsize=9)
        axis.set_xlabel("tokens (M)")
        axis.legend(fontsize=6)
    axes[0][0].set_ylabel("us per call")
    device = next(iter(row.get("device", "") for row in rows), "")
    figure.suptitle(f"{device}, CUDA graph, warm L2", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
