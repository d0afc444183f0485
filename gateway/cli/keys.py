"""``forebay keys create|list|rotate|revoke``: API keys of a running gateway, over its admin API."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

import typer

from gateway.cli.output import UserError, say

if TYPE_CHECKING:
    from gateway.cli.admin import AdminClient

group = typer.Typer(help="API keys, made and ended while the gateway runs.", no_args_is_help=True)

ConfigOption = Annotated[str | None, typer.Option("--config", help="Where the gateway's admin address stands.")]
UrlOption = Annotated[str | None, typer.Option("--url", help="Admin URL, instead of the configuration's.")]
KeyArgument = Annotated[str, typer.Argument(help="The key's id (`forebay keys list`).")]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="keys")


@group.command()
def create(
    tenant: Annotated[str, typer.Option("--tenant", help="Whose key it is.")],
    user: Annotated[str | None, typer.Option("--user", help="The tenant's user who holds it.")] = None,
    groups: Annotated[list[str] | None, typer.Option("--group", help="A group; several times for several.")] = None,
    roles: Annotated[list[str] | None, typer.Option("--role", help="A role; several times for several.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="What people call it.")] = None,
    expires: Annotated[str | None, typer.Option("--expires", help="How long it lives: 90d, 12h, 30m.")] = None,
    config: ConfigOption = None,
    url: UrlOption = None,
) -> None:
    """Make a key and print it: the only time that it is shown."""
    body: dict[str, Any] = {"tenant": tenant, "user": user, "name": name}
    if groups:
        body["groups"] = groups
    if roles:
        body["roles"] = roles
    if expires is not None:
        body["expires_in_s"] = seconds(expires, "--expires")
    answer = _client(config, url).post("/admin/keys", {key: value for key, value in body.items() if value is not None})
    _show(answer, f"Key {answer['id']} of {tenant}. It is shown only now:")


@group.command("list")
def list_(
    tenant: Annotated[str | None, typer.Option("--tenant", help="This tenant's keys only.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    config: ConfigOption = None,
    url: UrlOption = None,
) -> None:
    """All keys, revoked ones too: id, first characters, tenant, user, state, end, name."""
    query = f"?{urlencode({'tenant': tenant})}" if tenant else ""
    keys = _client(config, url).get(f"/admin/keys{query}")["keys"]
    if as_json:
        print(json.dumps(keys, indent=2))
        return
    if not keys:
        say("No keys.")
    for key in keys:
        prefixes = ",".join(secret["prefix"] for secret in key["secrets"]) or "-"
        cells = [key["id"], prefixes, key["tenant"], key["user"] or "-", key["state"], key["expires_at"] or "-"]
        print("  ".join([*cells, key["name"] or ""]).rstrip())


@group.command()
def rotate(
    key: KeyArgument,
    overlap: Annotated[str, typer.Option("--overlap", help="How long the old secret passes too: 1h, 0s.")] = "1h",
    config: ConfigOption = None,
    url: UrlOption = None,
) -> None:
    """Give a key another secret and print it. Id, tenant and user stay, and so do quotas and budgets."""
    body = {"overlap_s": seconds(overlap, "--overlap")}
    answer = _client(config, url).post(f"/admin/keys/{quote(key, safe='')}/rotate", body)
    _show(answer, f"Another secret of key {key}; the one before passes for {overlap}. It is shown only now:")


@group.command()
def revoke(key: KeyArgument, config: ConfigOption = None, url: UrlOption = None) -> None:
    """End a key at once: the next request with it gets 401. A stream that runs is finished."""
    answer = _client(config, url).delete(f"/admin/keys/{quote(key, safe='')}")
    say(f"Key {answer['id']} of {answer['tenant']} is revoked.")


def seconds(text: str, option: str) -> float:
    """``90d``, ``12h``, ``30m``, ``45s`` in seconds. Raises UserError."""
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", text.strip())
    if found is None:
        raise UserError(f"{option}: {text!r} is no time; write e.g. 90d, 12h, 30m or 45s.", code=2)
    return float(int(found[1]) * _UNITS[found[2]])


def _show(answer: Any, line: str) -> None:
    say(line)
    print(answer["secret"])
    if "warning" in answer:
        say(f"Note: {answer['warning']}")


def _client(config: str | None, url: str | None) -> AdminClient:
    from gateway.cli.admin import AdminClient

    return AdminClient.of(url, config)
