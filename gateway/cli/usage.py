"""``forebay usage``: who used how much, and what it cost, as a table, CSV or JSON."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from gateway.cli.output import UserError, say

FORMATS = ("table", "csv", "json")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="usage")(usage)


def usage(
    group_by: Annotated[
        str, typer.Option("--group-by", help="organisation, tenant, user, model, class, cost_centre, day; with commas.")
    ] = "tenant",
    first: Annotated[str | None, typer.Option("--from", help="First day (UTC). None: the first of the month.")] = None,
    last: Annotated[str | None, typer.Option("--to", help="Last day (UTC). None: today.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this part, e.g. tenant=search; may be repeated.")
    ] = None,
    form: Annotated[str, typer.Option("--format", help="table, csv or json.")] = "table",
    url: Annotated[str | None, typer.Option("--url", help="The gateway's admin URL. None: as the config says.")] = None,
    config: Annotated[str | None, typer.Option("--config", help="Configuration of the gateway.")] = None,
) -> None:
    """Usage and cost of a period, from the ledger of a running gateway."""
    from gateway.cli.admin import AdminClient
    from gateway.usage import as_csv

    if form not in FORMATS:
        raise UserError(f"--format: {form!r} is none of {', '.join(FORMATS)}.", code=2)
    parameters = {"group_by": group_by, "from": first, "to": last}
    for part in only or []:
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"--only: {part!r} has no '='; write tenant=search, for example.", code=2)
        parameters[name] = value
    wanted = urlencode({name: value for name, value in parameters.items() if value is not None})
    report = AdminClient.of(url, config).get(f"/admin/usage?{wanted}")
    if form == "json":
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    elif form == "csv":
        sys.stdout.write(as_csv(report))
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    say(f"{report['from']} to {report['to']} (UTC), money in {report['currency']}")
    if not report["rows"]:
        say("nothing was used")
        return
    groups = report["group_by"]
    total = {**dict.fromkeys(groups, ""), **report["total"]}
    if groups:
        total[groups[0]] = "total"
    columns = list(report["rows"][0])
    lines = [columns, *([_cell(row[name]) for name in columns] for row in [*report["rows"], total])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = [
            cell.ljust(width) if name in groups else cell.rjust(width)
            for name, cell, width in zip(columns, line, widths, strict=True)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    devices = report["devices"]
    if devices["seconds"]:
        parts = ", ".join(f"{kind} {seconds:g} s" for kind, seconds in devices["seconds"].items())
        say(f"devices: {devices['total_seconds']:g} s in all: {parts}")


def _cell(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)
