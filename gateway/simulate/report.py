"""A run's figures for people: a table on the terminal. Names may come from recorded traffic: they are only text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.simulate.figures import Figures
from workers.plain import escaped

_COLUMNS = ("tenant", "weight", "share", "service", "requests", "finished", "shed", "TTFT p50", "TTFT p95", "wait p95")
WIDTH = 110


def print_figures(figures: Figures, file: TextIO, *, title: str = "") -> None:
    """One row per tenant, then what concerns all."""
    data = figures.as_json()
    table = Table(title=title or None, title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "tenant" else "right")
    for tenant, row in data["tenants"].items():
        table.add_row(
            Text(escaped(tenant)),
            f"{row['weight']:g}",
            f"{row['share']:.3f}",
            f"{row['service']:,.0f}",
            f"{row['requests']:,}",
            f"{row['finished']:,}",
            f"{row['shed']:,}",
            seconds(row["ttft_p50_s"]),
            seconds(row["ttft_p95_s"]),
            seconds(row["queue_wait_p95_s"]),
        )
    console = _console(file)
    console.print(table)
    lines = [
        f"{data['throughput_tokens_s']:,.0f} tokens/s over {data['elapsed_s']:,.1f} s; {data['requests']:,} requests, "
        f"{data['unfinished']:,} unfinished, {data['preemptions']:,} preemptions, {data['shed']:,} shed",
        f"Jain's index {data['jain']:.4f}; largest service difference {data['max_service_difference']:,.0f} "
        f"(all backlogged for {data['backlogged_s']:,.1f} s)",
        f"policy {data['policy']}, seed {data['seed']}; simulated in {figures.run.wall_s:.2f} s",
    ]
    for line in lines:
        console.print(line, highlight=False)


def print_rows(header: Sequence[str], rows: Sequence[Sequence[str]], file: TextIO, *, title: str = "") -> None:
    """Any table whose first column is a name."""
    table = Table(title=title or None, title_justify="left")
    for position, name in enumerate(header):
        table.add_column(name, justify="right" if position else "left")
    for row in rows:
        table.add_row(*(Text(escaped(cell)) for cell in row))
    _console(file).print(table)


def seconds(value: float | None) -> str:
    """``1.234 s``; a dash where nothing was measured."""
    return "–" if value is None else f"{value:.3f} s" if value < 100 else f"{value:.1f} s"


def _console(file: TextIO) -> Console:
    """A terminal as wide as it is; into a file or a pipe, wide enough that no cell is cut."""
    return Console(file=file) if file.isatty() else Console(file=file, width=WIDTH)
