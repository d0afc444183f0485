"""Reports as tables for the terminal (or Markdown) and, with matplotlib installed, as PNG plots."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.bench.report import BenchError
from workers.plain import escaped

PIPE_WIDTH = 140
Cell = str | int | float | bool | None


@dataclass(slots=True)
class Table:
    """A table with a title and remarks below it."""

    title: str
    columns: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Add a row."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.title}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(list(cells))

    def markdown(self) -> str:
        """As Markdown, for a file."""
        head = "| " + " | ".join(self.columns) + " |"
        rule = "|---|" + "---:|" * (len(self.columns) - 1)
        body = ["| " + " | ".join(map(text, row)) + " |" for row in self.rows]
        return "\n".join([f"### {self.title}", "", head, rule, *body, "", *self.notes]).rstrip() + "\n"

    def to_json(self) -> dict[str, Any]:
        """Title, columns, rows and notes."""
        return {"title": self.title, "columns": list(self.columns), "rows": self.rows, "notes": self.notes}


def text(cell: Cell) -> str:
    """A cell as people read it: four digits, thousands parted, ``-`` for nothing."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        size = abs(cell)
        return f"{cell:,.0f}" if size >= 1000 else f"{cell:.1f}" if size >= 100 else f"{cell:.4g}"
    return escaped(cell)


def show(tables: Iterable[Table], width: int | None = None) -> None:
    """Print tables on standard output; into a pipe or file they are ``PIPE_WIDTH`` wide."""
    import sys

    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(width=width or (None if sys.stdout.isatty() else PIPE_WIDTH), highlight=False, markup=False)
    for table in tables:
        made = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
        for index, column in enumerate(table.columns):
            made.add_column(column, justify="right" if index else "left", overflow="fold")
        for row in table.rows:
            made.add_row(*map(text, row))
        console.print(made)
        for note in table.notes:
            console.print(note, style="dim")


def write_markdown(path: Path, tables: Iterable[Table]) -> None:
    """Write tables as Markdown. Raises BenchError when that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: cannot be written: {error.strerror}") from None


RUN_COLUMNS = (
    ("running", "concurrency"),
    ("out tok/s", "output_tokens_s"),
    ("all tok/s", "total_tokens_s"),
    ("TTFT p50", "ttft_p50_ms"),
    ("p95", "ttft_p95_ms"),
    ("ITL p50", "itl_p50_ms"),
    ("p99", "itl_p99_ms"),
    ("max", "itl_max_ms"),
    ("failed", "failed"),
)


def runs_table(title: str, runs: Sequence[dict[str, Any]], first: str = "running") -> Table:
    """One line per run; with bookkeeping, and the floor and the share of it, where they were measured. Times in ms."""
    floors = any("floor" in run for run in runs)
    books = any("bookkeeping_share" in run for run in runs)
    columns = [first, *(name for name, _ in RUN_COLUMNS[1:])]
    columns += [*(("books", "of step") if books else ()), *(("floor", "of it") if floors else ())]
    table = Table(title, columns, notes=["TTFT and ITL in ms."])
    if books:
        table.notes = ["TTFT, ITL and books in ms. Books: planning and bookkeeping, all of a step outside the model."]
    for run in runs:
        cells: list[Cell] = [run.get("name", run.get("concurrency")), *(run.get(key) for _, key in RUN_COLUMNS[1:])]
        if books:
            share = run.get("bookkeeping_share")
            cells += [run.get("bookkeeping_ms_per_step"), None if share is None else f"{share:.2%}"]
        if floors:
            limit = run.get("floor", {}).get("output_tokens_s")
            reached = run.get("output_tokens_s")
            cells += [limit, f"{reached / limit:.0%}" if limit and reached else None]
        table.add(*cells)
    return table


def tenants_table(runs: Sequence[dict[str, Any]]) -> list[Table]:
    """One line per run and tenant; no table where nobody has several."""
    columns = ("load", "tenant", "requests", "failed", "out tok/s", "TTFT p50", "p95", "ITL p50", "p99")
    keys = ("requests", "failed", "output_tokens_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p99_ms")
    table = Table("tenants", columns)
    for run in runs:
        for name, figures in run.get("tenants", {}).items():
            table.add(run.get("name", run.get("concurrency")), name, *(figures.get(key) for key in keys))
    return [table] if table.rows else []


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_lines(
    path: Path,
    title: str,
    series: dict[str, Sequence[tuple[float, float]]],
    *,
    x: str,
    y: str,
    log_x: bool = False,
) -> Path:
    """Lines with markers, one per series, as PNG. Raises BenchError without matplotlib."""
    if not can_plot():
        raise BenchError("plots need matplotlib: pip install 'forebay[plot]'")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for name, points in series.items():
        xs, ys = [point[0] for point in points], [point[1] for point in points]
        axes.plot(xs, ys, marker="o", label=name)
    if log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({point[0] for points in series.values() for point in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def plot_runs(folder: Path, named: Mapping[str, Sequence[dict[str, Any]]]) -> list[Path]:
    """Throughput, TTFT and ITL over concurrency, one line per name (and the floor); the files made."""
    made = []
    wanted = (
        ("output_tokens_s", "Output tokens per second", "tokens/s"),
        ("ttft_p50_ms", "Time to first token, median", "ms"),
        ("itl_p99_ms", "Gap between tokens, p99", "ms"),
    )
    for key, title, unit in wanted:
        series: dict[str, Sequence[tuple[float, float]]] = {}
        for name, runs in named.items():
            points = [(run["concurrency"], run[key]) for run in runs if run.get("concurrency") and run.get(key)]
            if points:
                series[name] = points
            floors = [(run["concurrency"], run["floor"][key]) for run in runs if run.get("floor", {}).get(key)]
            if floors:
                series.setdefault("floor", floors)
        if series:
            made.append(plot_lines(folder / f"{key}.png", title, series, x="running", y=unit, log_x=True))
    return made
