"""``forebay config check|schema|reload``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.output import UserError, say

group = typer.Typer(help="The configuration file.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="config")


@group.command()
def check(config: Annotated[str, typer.Argument(help="The file, or the name of a shipped one.")]) -> None:
    """Name every mistake of a configuration, with its path; exit 1 if there is one."""
    from gateway.cli.loading import load_config
    from gateway.config_checks import on_disk

    loaded = load_config(config)
    if found := [mistake.at(loaded.source) for mistake in on_disk(loaded.settings, loaded.base_dir)]:
        raise UserError("\n".join(f"{loaded.path}: {mistake}" for mistake in found))
    say(f"{loaded.path}: no mistakes.")


@group.command()
def schema() -> None:
    """Print the JSON schema of the configuration file."""
    import json

    from gateway.config_file import json_schema

    print(json.dumps(json_schema(), indent=2))


@group.command()
def reload(
    config: Annotated[Path | None, typer.Option("--config", help="Where the gateway's admin address stands.")] = None,
    url: Annotated[str | None, typer.Option("--url", help="Admin URL, instead of the configuration's.")] = None,
) -> None:
    """Tell a running gateway to read its configuration file again: what changed, and what waits for a restart."""
    import json

    from gateway.cli.admin import AdminClient

    answer = AdminClient.of(url, str(config) if config else None).post("/admin/policies", {"reload": True})
    print(json.dumps(answer, indent=2))
    done = answer["reload"]
    say(f"In force now: {', '.join(done['changed'])}." if done["changed"] else "Nothing that can change live is new.")
    if done["needs_restart"]:
        say(f"Needs a restart: {', '.join(done['needs_restart'])}.")
