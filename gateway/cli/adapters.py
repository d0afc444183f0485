"""``forebay adapter list|load|drop``: LoRA adapters of a running gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.output import say

group = typer.Typer(help="LoRA adapters of a running gateway.", no_args_is_help=True)

Config = Annotated[Path | None, typer.Option("--config", help="Where the gateway's admin address stands.")]
Url = Annotated[str | None, typer.Option("--url", help="Admin URL, instead of the configuration's.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="adapter")


def _client(config: Path | None, url: str | None) -> Any:
    from gateway.cli.admin import AdminClient

    return AdminClient.of(url, str(config) if config else None)


def _print(answer: Any) -> None:
    import json

    print(json.dumps(answer, indent=2))


@group.command("list")
def show(config: Config = None, url: Url = None) -> None:
    """Print every adapter with its content, its requests and its workers."""
    _print(_client(config, url).get("/admin/adapters"))


@group.command()
def load(
    model: Annotated[str, typer.Argument(help="The model, as clients name it.")],
    name: Annotated[str, typer.Argument(help="What clients will ask for.")],
    source: Annotated[str, typer.Argument(help="The directory, as the workers see it.")],
    config: Config = None,
    url: Url = None,
) -> None:
    """Load an adapter on every worker of a model, or give a name other content; requests under way are left alone."""
    _print(_client(config, url).post("/admin/adapters", {"model": model, "name": name, "source": source}))


@group.command()
def drop(
    name: Annotated[str, typer.Argument(help="The adapter.")],
    config: Config = None,
    url: Url = None,
) -> None:
    """Drop an adapter: no new request finds it, and it goes with its last one."""
    from urllib.parse import quote

    answer = _client(config, url).delete(f"/admin/adapters/{quote(name, safe='')}")
    _print(answer)
    if not answer["freed"]:
        say(f"{answer['requests']} requests still use it; its memory is freed after the last.")
