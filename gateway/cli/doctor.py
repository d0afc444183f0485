"""``forebay doctor``: what this installation is made of, and what would keep it from starting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MARKS = {"ok": ("ok", "32"), "note": ("note", "33"), "fail": ("FAIL", "31")}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    path: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="Configuration; the demo by default."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="The same, as other commands have it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look for what would keep Forebay from starting.

    Shows versions, devices, compiler, model files, ports, and who owns the import names; exit 1 if something fails.
    """
    import json
    import sys
    from dataclasses import asdict

    from gateway.cli.checks import everything

    findings = everything(path or (str(config) if config else None))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        colour = sys.stdout.isatty()
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            word, code = _MARKS[finding.status]
            mark = f"\x1b[{code}m{word:<4}\x1b[0m" if colour else f"{word:<4}"
            print(f"{mark}  {finding.what:<{width}}  {finding.detail}")
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)
