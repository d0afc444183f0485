"""The configuration file as commands read it: a name or path in, a checked file out, every mistake as one message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.cli.output import UserError

if TYPE_CHECKING:
    from gateway.config_file import Loaded
    from policies.registry import Registry

DEFAULT = "demo"


def load_config(name: str | None = None) -> Loaded:
    """The file, checked by itself and against what is registered; without a name the demo's.

    Raises UserError with every mistake.
    """
    from gateway.config_file import ConfigErrors, load
    from gateway.paths import PathError, resolve_config

    try:
        path = resolve_config(name or DEFAULT)
    except PathError as error:
        raise UserError(str(error), code=2) from None
    try:
        loaded = load(path)
        loaded.verify(load_registry(loaded.settings.plugins))
    except ConfigErrors as error:
        raise UserError(_listing(error)) from None
    return loaded


def load_registry(plugins: tuple[str, ...] = ()) -> Registry:
    """What the built-ins and ``plugins`` register. Raises UserError for a plugin that cannot take part."""
    from policies.manager import PluginError, make_manager
    from policies.registry import RegistrationError, Registry

    try:
        return Registry.from_manager(make_manager(plugins))
    except (PluginError, RegistrationError) as error:
        raise UserError(f"plugins: {error}") from None


def _listing(error: object) -> str:
    lines = str(error).splitlines()
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} mistakes in the configuration:", *lines])
