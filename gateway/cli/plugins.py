"""``forebay plugins``: which policies, launchers and models are registered, and by whom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.output import UserError, say


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(plugins)


def plugins(
    config: Annotated[
        Path | None, typer.Option("--config", help="Load the plugins this configuration names; else built-ins only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what is registered, and from where.

    Plugins that are installed but not named in the configuration are listed as such.
    """
    import json

    from policies.manager import PluginError, installed_plugins, make_manager
    from policies.registry import RegistrationError, Registry

    names: tuple[str, ...] = ()
    if config is not None:
        from gateway.cli.loading import load_config

        names = load_config(str(config)).settings.plugins
    try:
        manager = make_manager(names)
        registry = Registry.from_manager(manager)
    except (PluginError, RegistrationError) as error:
        raise UserError(str(error)) from None
    sources = {name: _source(plugin) for name, plugin in manager.list_name_plugin() if plugin is not None}
    rows = [
        *(_row(item.spec.kind, item.spec.name, item.origin, item.spec.summary) for item in registry.policies()),
        *(_row("launcher", item.spec.name, item.origin, item.spec.summary) for item in registry.launchers()),
        *(_row("model", item.spec.architecture, item.origin, item.spec.summary) for item in registry.models()),
    ]
    for row in rows:
        row["source"] = sources.get(row["plugin"], "")
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        widths = {key: max(len(row[key]) for row in rows) for key in ("kind", "name", "plugin")}
        for row in rows:
            cells = (f"{row[key]:<{width}}" for key, width in widths.items())
            print("  ".join([*cells, row["summary"]]))
        print()
        for name, source in sorted(sources.items()):
            print(f"{name}: {source}")
    for point in installed_plugins():
        if point.name not in names:
            owner = f" (of {point.dist.name})" if point.dist else ""
            say(f"Installed but not named in `plugins:`, so not loaded: {point.name}{owner}")


def _row(kind: str, name: str, plugin: str, summary: str) -> dict[str, str]:
    return {"kind": kind, "name": name, "plugin": plugin, "summary": summary}


def _source(plugin: Any) -> str:
    """The file a plugin's code lies in."""
    import inspect

    try:
        return inspect.getfile(plugin if inspect.ismodule(plugin) else type(plugin))
    except TypeError:
        return repr(plugin)
