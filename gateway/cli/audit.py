"""``forebay audit verify|show``: is the audit log as it was written, and what is in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.output import UserError, say

group = typer.Typer(help="The audit log of tenants, keys, policies and purges.", no_args_is_help=True)

FileArgument = Annotated[Path | None, typer.Argument(help="The log; else that of the configuration's state.path.")]
ConfigOption = Annotated[str | None, typer.Option("--config", help="Configuration with state.path.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="audit")


@group.command()
def verify(
    file: FileArgument = None,
    config: ConfigOption = None,
    expect: Annotated[
        str | None, typer.Option("--expect", help="SEQ:MAC of a line that was noted elsewhere; it has to be there.")
    ] = None,
) -> None:
    """Find any edited, removed, moved, added or cut-off line; exit 1 if there is one.

    The key is FOREBAY_AUDIT_KEY, else the file audit.key beside the log.
    """
    from gateway.state.audit import find_key
    from gateway.state.audit import verify as check
    from gateway.state.folder import StateError

    path = _path(file, config)
    wanted = _expected(expect)
    try:
        verdict = check(path, find_key(path.parent, os.environ), expect=wanted)
    except StateError as error:
        raise UserError(f"{error}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    for problem in verdict.problems:
        print(problem)
    if not verdict.ok:
        raise UserError(f"{path} is not as it was written: {len(verdict.problems)} problems.")
    crashed = f", {verdict.unsealed} of them after the last seal (a crash)" if verdict.unsealed else ""
    say(f"{path}: {verdict.head.seq} entries, complete and unchanged{crashed}.")
    print(f"{verdict.head.seq}:{verdict.head.mac}")


@group.command()
def show(
    file: FileArgument = None,
    config: ConfigOption = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="So many of the newest.")] = 20,
) -> None:
    """The newest entries, oldest first, one JSON per line. Does not verify them."""
    path = _path(file, config)
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    for line in lines[-limit:]:
        print(line if line.isprintable() else json.dumps(line))  # whatever is in it, it must not steer a terminal


def _path(file: Path | None, config: str | None) -> Path:
    if file is not None:
        return file
    from gateway.cli.loading import load_config
    from gateway.state.audit import LOG_FILE

    loaded = load_config(config)
    state = loaded.settings.state.path
    if state is None:
        raise UserError(f"state.path: {loaded.path} keeps no state. Name the log, or --config.", code=2)
    return loaded.base_dir / Path(state).expanduser() / LOG_FILE


def _expected(text: str | None) -> tuple[int, str] | None:
    if text is None:
        return None
    seq, _, mac = text.partition(":")
    if not (seq.isascii() and seq.isdigit() and mac):
        raise UserError(f"--expect: {text!r} is not SEQ:MAC, as `forebay audit verify` prints it.", code=2)
    return int(seq), mac
