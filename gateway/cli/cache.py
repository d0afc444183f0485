"""``forebay cache show|purge|receipt|share|unshare``: what a running gateway's workers keep, and for whom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.output import UserError, say

group = typer.Typer(help="Cached prefixes of a running gateway.", no_args_is_help=True)

Config = Annotated[Path | None, typer.Option("--config", help="Where the gateway's admin address stands.")]
Url = Annotated[str | None, typer.Option("--url", help="Admin URL, instead of the configuration's.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="cache")


def _client(config: Path | None, url: str | None) -> Any:
    from gateway.cli.admin import AdminClient

    return AdminClient.of(url, str(config) if config else None)


def _print(answer: Any) -> None:
    import json

    print(json.dumps(answer, indent=2))


@group.command()
def show(config: Config = None, url: Url = None) -> None:
    """Print epochs, retention times and public prefixes."""
    _print(_client(config, url).get("/admin/cache"))


@group.command()
def purge(
    tenant: Annotated[str, typer.Argument(help="The tenant.")],
    user: Annotated[list[str] | None, typer.Option("--user", help="Only this user's; may be repeated.")] = None,
    of_group: Annotated[list[str] | None, typer.Option("--group", help="Only this group's; may be repeated.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="Only of requests with this cache tag; may be repeated.")
    ] = None,
    config: Config = None,
    url: Url = None,
) -> None:
    """Zero a tenant's cached prefixes, or those of its users, groups or documents; print the signed receipt.

    Exit code 1 when something is left to zero: the receipt says what.
    """
    from urllib.parse import quote, urlencode

    named = [
        (kind, name) for kind, names in (("user", user), ("group", of_group), ("tag", tag)) for name in names or ()
    ]
    query = f"?{urlencode(named)}" if named else ""
    receipt = _client(config, url).delete(f"/admin/tenants/{quote(tenant, safe='')}/cache{query}")
    _tell(receipt)


@group.command()
def receipt(
    name: Annotated[str, typer.Argument(help="The receipt's number, as the purge printed it.")],
    config: Config = None,
    url: Url = None,
) -> None:
    """Print a receipt as it stands now."""
    from urllib.parse import quote

    _tell(_client(config, url).get(f"/admin/cache/receipts/{quote(name, safe='')}"))


@group.command()
def share(
    model: Annotated[str, typer.Argument(help="The model, as clients name it.")],
    file: Annotated[Path, typer.Argument(help="A text file: a system prompt, or with --raw the start of a prompt.")],
    raw: Annotated[bool, typer.Option("--raw", help="The text begins completions, not chats.")] = False,
    name: Annotated[str, typer.Option("--name", help="Your own word for it.")] = "",
    config: Config = None,
    url: Url = None,
) -> None:
    """Register a public prefix: with cache_scope public_prefix all tenants share its blocks."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read as UTF-8 text ({type(error).__name__}).") from None
    what: dict[str, Any] = {"text": text} if raw else {"messages": [{"role": "system", "content": text}]}
    _print(_client(config, url).post("/admin/public-prefixes", {"model": model, "name": name or file.name, **what}))


@group.command()
def unshare(
    prefix: Annotated[str, typer.Argument(help="Its id: see `forebay cache show`.")],
    config: Config = None,
    url: Url = None,
) -> None:
    """Unregister a public prefix and zero its blocks."""
    from urllib.parse import quote

    _tell(_client(config, url).delete(f"/admin/public-prefixes/{quote(prefix, safe='')}"))


def _tell(answer: Any) -> None:
    _print(answer)
    if answer["complete"]:
        say(f"{answer['zeroed_blocks']} blocks zeroed; nothing is left.")
        return
    say(f"{answer['zeroed_blocks']} blocks zeroed. Not complete: {'; '.join(answer['incomplete_because'])}.")
    raise typer.Exit(1)
