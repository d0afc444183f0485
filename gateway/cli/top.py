"""``forebay top``: the console's overview in a terminal.

Rules
- Reads ``/admin/overview`` and nothing else; changes nothing.
- Names come from tokens and configuration: they are shown as text, never as markup, and without control characters.
- While the gateway cannot be reached the last figures stay, marked as old.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.output import UserError
from workers.plain import escaped

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

    from gateway.cli.admin import AdminClient

BAR = 24
WIDE = 100


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


def top(
    config: Annotated[
        str | None, typer.Option("--config", help="The YAML file, or a shipped one's name, with the admin address.")
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="Admin URL, instead of the configuration's.")] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
) -> None:
    """Shares, latencies and workers of a running gateway, live. Ctrl-C ends it."""
    from rich.console import Console

    from gateway.cli.admin import AdminClient

    client = AdminClient.of(url, config)
    console = Console()
    first = client.get("/admin/overview")
    if once:
        console.print(screen(first, width=console.width))
        return
    with contextlib.suppress(KeyboardInterrupt):  # that is how one ends it
        _watch(console, client, first, interval)


def _watch(console: Console, client: AdminClient, overview: dict[str, Any], interval: float) -> None:
    from rich.live import Live

    with Live(
        screen(overview, width=console.width), console=console, screen=console.is_terminal, auto_refresh=False
    ) as live:
        while True:
            time.sleep(interval)
            try:
                overview, problem = client.get("/admin/overview"), ""
            except UserError as error:
                problem = str(error)
            live.update(screen(overview, problem, console.width), refresh=True)


def screen(overview: dict[str, Any], problem: str = "", width: int = 120) -> RenderableType:
    """Everything, as rich shows it. Below ``WIDE`` columns the lesser figures are left out."""
    from rich.console import Group

    wide = width >= WIDE
    parts: list[RenderableType] = [_head(overview["status"], problem), *_figures(overview["now"], wide)]
    parts.append(_tenants(overview, wide))
    if overview["workers"]:
        parts.append(_workers(overview["workers"], wide))
        parts += _special(overview["workers"])
    return Group(*parts)


def _head(status: dict[str, Any], problem: str) -> Text:
    from rich.text import Text

    line = Text("Forebay  ", style="bold")
    if problem:
        return line.append(f"figures are old: {escaped(problem)}", "bold red")
    if status["stalled"]:
        line.append(f"stalled: {escaped(', '.join(status['stalled']))}  ", "bold red")
    if status["ready"]:
        line.append("ready", "green")
    else:
        line.append(f"not ready: {escaped('; '.join(status['missing']))}", "yellow")
    return line.append(f"  {status['workers_ready']} of {status['workers']} workers", "dim")


def _figures(now: dict[str, Any], wide: bool) -> list[RenderableType]:
    from rich.table import Table

    counts = [
        _figure("fairness", "–" if now["fairness"] is None else f"{now['fairness']:.3f}"),
        _figure("tok/s", f"{now['tokens_per_s']:,.0f}"),
        _figure("running", str(now["running"])),
        _figure("queued", str(now["queued"])),
        _figure("shed", str(now["shed"])),
        _figure("throttled", str(now["throttled"])),
    ]
    times = [
        _figure("first token p50 p95 p99", quantiles(now["first_token"])),
        _figure("between tokens", quantiles(now["between_tokens"])),
    ]
    grids = []
    for cells in [[*counts, *times]] if wide else [counts, times]:
        grid = Table.grid(padding=(0, 3))
        grid.add_row(*cells)
        grids.append(grid)
    return [*grids, ""]


def _figure(name: str, value: str) -> Text:
    from rich.text import Text

    return Text(f"{name}\n", "dim").append(value, "bold")


def _tenants(overview: dict[str, Any], wide: bool) -> RenderableType:
    from rich.text import Text

    length = BAR if wide else BAR // 2
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "share": lambda row: f"{row['share']:.1%}" if row["active"] else "–",
        "entitled": lambda row: f"{row['entitled']:.1%}" if row["active"] else "–",
        "running": lambda row: str(row["running"]),
        "queued": lambda row: str(row["queued"]),
        "refused": lambda row: f"{row['refused']:,}",
    }
    if wide:
        columns |= {"backlog": lambda row: f"{row['queued_tokens']:,}", "weight": lambda row: f"{row['weight']:g}"}
    table = _table("tenant", columns, wide)
    for row in overview["tenants"]:
        drawn = bar(row["share"], row["entitled"], length) if row["active"] else Text("")
        style = "" if row["active"] else "dim"
        table.add_row(Text(escaped(row["id"])), drawn, *(show(row) for show in columns.values()), style=style)
    if overview["more_tenants"]:
        table.add_row(Text(f"and {overview['more_tenants']} more", "dim"))
    table.add_row()
    return table


def _workers(workers: list[dict[str, Any]], wide: bool) -> RenderableType:
    from rich.text import Text

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "running": lambda row: f"{row['running']}/{row['max_running']}",
        "KV used": lambda row: f"{row['used_blocks']:,}",
        "hits": lambda row: "–" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}",
        "preempted": lambda row: f"{row['preemptions']:,}",
        "step": lambda row: f"{row['step_ms']:.1f} ms",
    }
    if wide:
        columns |= {
            "waiting": lambda row: str(row["waiting"]),
            "cached": lambda row: f"{row['cached_blocks']:,}",
            "free": lambda row: f"{row['free_blocks']:,}",
        }
    table = _table("worker", columns, wide)
    for row in workers:
        state = row["state"] + (", set aside" if row["set_aside"] else "") + (", stale" if row["stale"] else "")
        shown = Text(state, "green" if state == "ready" else "yellow")
        table.add_row(Text(escaped(row["name"])), shown, *(show(row) for show in columns.values()))
    return table


def _below(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{tier['name']} {tier['bytes'] / 2**20:,.0f} MiB" + ("" if tier["up"] else " (not written to)")
        for tier in row.get("tiers") or ()
    )


def _came(row: dict[str, Any]) -> str:
    moved = row.get("transfers")
    return "" if not moved else f"{moved['ok']:,}" + (f", {moved['failed']:,} failed" if moved["failed"] else "")


def _right(row: dict[str, Any]) -> str:
    return "" if row.get("acceptance") is None else f"{row['acceptance']:.1%}"


_SPECIAL: dict[str, Callable[[dict[str, Any]], str]] = {
    "guesses right": _right,
    "below the device": _below,
    "prompts from elsewhere": _came,
    "adapters": lambda row: ", ".join(map(escaped, row.get("adapters") or ())),
}
"""What only some workers have."""


def _special(workers: list[dict[str, Any]]) -> list[RenderableType]:
    """A line for each worker that has any of it, wrapped where it is long."""
    from rich.text import Text

    lines: list[RenderableType] = []
    for row in workers:
        told = {name: text for name, show in _SPECIAL.items() if (text := show(row))}
        if told:
            line = Text(escaped(row["name"]), overflow="fold")
            for name, text in told.items():
                line.append(f"  {name} ", "dim").append(text)
            lines.append(line)
    return ["", *lines] if lines else []


def _table(subject: str, columns: Iterable[str], wide: bool) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(subject, no_wrap=True, max_width=28 if wide else 18)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def bar(share: float, entitled: float, length: int = BAR) -> Text:
    """``share`` of the length filled, with a mark at ``entitled``."""
    from rich.text import Text

    filled, mark = (min(length, max(0, round(part * length))) for part in (share, entitled))
    text = Text("█" * filled, "cyan").append("·" * (length - filled), "dim")
    at = min(mark, length - 1)
    return text[:at] + Text("│", "bold") + text[at + 1 :]


def quantiles(value: dict[str, float] | None) -> str:
    """``p50 p95 p99`` in ms or s."""
    return "–" if value is None else "  ".join(_time(value[name]) for name in ("p50", "p95", "p99"))


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
