"""Which plugins take part: built-ins first, then the entry points that the config lists, all through the same hooks.

Rules
- Nothing is loaded that ``plugins:`` does not name: an installed distribution alone changes nothing.
- A plugin that cannot be loaded, misspells a hook or forgets the marker stops the start with its name in the message.
- Observers run one by one; one that raises is reported and skipped, the others and the request go on.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import pluggy

from policies import builtin, hookspecs
from policies.spi import ENTRY_POINT_GROUP, PROJECT
from policies.types import JobEvent

BUILTIN = "builtin"
_PREFIX = f"{PROJECT}_"


class PluginError(ValueError):
    """A plugin is unknown, does not load or does not follow the hooks. ``plugin`` is its entry-point name."""

    def __init__(self, plugin: str, message: str) -> None:
        super().__init__(f"plugin {plugin!r}: {message}")
        self.plugin = plugin


def installed_plugins() -> tuple[metadata.EntryPoint, ...]:
    """The entry points of group ``forebay.plugins`` in this environment, without loading them."""
    return tuple(metadata.entry_points(group=ENTRY_POINT_GROUP))


def make_manager(
    plugins: Sequence[str] = (), *, entry_points: Iterable[metadata.EntryPoint] | None = None
) -> pluggy.PluginManager:
    """A manager with the hook specifications, the built-ins and the named plugins.

    ``entry_points`` replaces the installed ones (tests). Raises PluginError.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    register(manager, builtin, BUILTIN)
    found = installed_plugins() if entry_points is None else tuple(entry_points)
    for name in plugins:
        register(manager, _load(name, found), name)
    return manager


def register(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """Register one plugin object (a module, an instance, or a class made without arguments). Raises PluginError."""
    if manager.has_plugin(name):
        raise PluginError(name, "is listed twice; remove one of the two entries from 'plugins:'")
    if inspect.isclass(plugin):
        try:
            plugin = plugin()
        except Exception as error:
            raise PluginError(name, f"its class could not be made without arguments: {error}") from error
    known = set(vars(manager.hook))
    hooks = 0
    for attribute in dir(plugin):
        if not attribute.startswith(_PREFIX) or not inspect.isroutine(getattr(plugin, attribute)):
            continue
        if attribute not in known:
            raise PluginError(name, f"unknown hook {attribute!r}{_suggest(attribute, known)}")
        if manager.parse_hookimpl_opts(plugin, attribute) is None:
            raise PluginError(name, f"{attribute!r} lacks the marker; put '@hookimpl' (policies.spi) above it")
        hooks += 1
    if not hooks:
        raise PluginError(name, f"implements no hook; known hooks: {', '.join(sorted(known))}")
    try:
        manager.register(plugin, name=name)
        # Catches marked hooks that the scan above cannot see, e.g. specname= under another function name.
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(name, str(error)) from error


def notify(
    manager: pluggy.PluginManager,
    event: JobEvent,
    on_error: Callable[[str, Exception], None],
    *,
    skip: Container[str] = (),
    on_done: Callable[[str], None] | None = None,
) -> None:
    """Tell every observer but those in ``skip``; ``on_error(plugin, exception)`` hears of each that raised.

    ``on_done(plugin)`` is called after each one, so that a caller can time them.
    """
    for implementation in reversed(manager.hook.forebay_job_event.get_hookimpls()):
        name = implementation.plugin_name
        if name in skip:
            continue
        try:
            if implementation.argnames:
                implementation.function(event)
            else:
                implementation.function()
        except Exception as error:
            on_error(name, error)
        if on_done is not None:
            on_done(name)


def tenant_from_claims(manager: pluggy.PluginManager) -> Callable[[Mapping[str, Any]], str | None] | None:
    """The ``forebay_tenant_from_claims`` hook as a function, or None when no plugin implements it."""
    hook = manager.hook.forebay_tenant_from_claims
    if not hook.get_hookimpls():
        return None

    def call(claims: Mapping[str, Any]) -> str | None:
        answer = hook(claims=claims)
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"forebay_tenant_from_claims answered {type(answer).__name__}, expected str or None")
        return answer

    return call


def _load(name: str, found: Sequence[metadata.EntryPoint]) -> object:
    matches = [point for point in found if point.name == name]
    names = sorted({point.name for point in found})
    if not matches:
        listing = ", ".join(names) if names else "none"
        raise PluginError(
            name, f"not installed{_suggest(name, names)} (installed in group {ENTRY_POINT_GROUP}: {listing})"
        )
    values = {point.value for point in matches}
    if len(values) > 1:
        raise PluginError(name, f"several distributions offer it ({', '.join(sorted(values))}); uninstall all but one")
    try:
        return matches[0].load()
    except Exception as error:  # whatever a foreign module raises at import
        raise PluginError(name, f"loading {matches[0].value} failed: {type(error).__name__}: {error}") from error


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
