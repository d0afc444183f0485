"""Tenants of the configuration file and of the admin API as one list. Pure.

Rules
- The file is the truth for every key that it sets of a tenant; what it leaves out may be set through the admin API, and
  so may whole tenants that it does not name.
- What is stored is kept as it was set, in the shape of ``tenants[]``. Where it does not fit the file any more (a class
  is gone) that tenant is left out and named: its requests get 403 rather than somebody else's rights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from gateway.errors import ApiError, bad_request
from gateway.settings import Settings, Tenant
from gateway.settings_base import Section
from policies.wording import complaint

Raw = Mapping[str, Any]
Path = tuple[str, ...]


class Combiner:
    """Makes the list, and makes again only what has changed: with thousands of tenants one change stays a small one."""

    def __init__(self) -> None:
        self._settings: Settings | None = None
        self._made: dict[str, tuple[Raw, Tenant | str]] = {}
        """By name: what was stored, and the tenant or what is wrong with it."""

    def combined(self, settings: Settings, stored: Mapping[str, Raw]) -> tuple[Settings, list[str]]:
        """``settings`` with the stored tenants in it, and what is wrong with those that were left out."""
        named = {tenant.id: tenant for tenant in settings.tenants}
        known = self._made if settings is self._settings else {}
        self._settings, self._made = settings, {}
        for name in [*named, *sorted(set(stored) - set(named))]:
            raw = stored.get(name)
            if raw is None:
                self._made[name] = ({}, named[name])
            elif name in known and known[name][0] == raw:
                self._made[name] = known[name]
            else:
                self._made[name] = (raw, _tried(name, named.get(name), raw, settings))
        tenants = [made for _, made in self._made.values() if isinstance(made, Tenant)]
        problems = [made for _, made in self._made.values() if isinstance(made, str)]
        return settings.model_copy(update={"tenants": tuple(tenants)}), problems


def _tried(name: str, named: Tenant | None, raw: Raw, settings: Settings) -> Tenant | str:
    try:
        return effective(name, named, raw, settings)
    except ApiError as error:
        return f"tenant {name}: {error.message}"


def effective(name: str, named: Tenant | None, stored: Raw, settings: Settings) -> Tenant:
    """One tenant: what is stored, under what the file says. Raises ApiError 400 with ``param``."""
    raw = _copied(stored)
    for path, value in leaves(named) if named is not None else ():
        _set(raw, path, value)
    try:
        tenant = Tenant.model_validate({**raw, "id": name})
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(map(str, detail["loc"]))
        raise bad_request(f"{where}: {complaint(detail, Tenant)}.", param=where) from None
    for place, message in alone(tenant, settings).inconsistencies():
        if place[:2] == ("tenants", 0):
            where = ".".join(map(str, place[2:]))
            raise bad_request(f"{where}: {message}.", param=where)
    return tenant


def alone(tenant: Tenant, settings: Settings) -> Settings:
    """``settings`` with this tenant only, for the checks that look at several sections."""
    return settings.model_copy(update={"tenants": (tenant,), "tenant_defaults": None})


def patched(stored: Raw, patch: Raw) -> dict[str, Any]:
    """A JSON merge patch (RFC 7396): mappings are merged, null removes, everything else replaces."""
    result = _copied(stored)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            before = result.get(key)
            result[key] = patched(before if isinstance(before, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def fixed(named: Tenant | None, patch: Raw) -> list[str]:
    """Keys of ``patch`` that the file sets, dotted."""
    if named is None:
        return []
    set_there = [path for path, _ in leaves(named)]
    return [
        ".".join(path) for path in _paths(patch) if any(path[: len(there)] == there[: len(path)] for there in set_there)
    ]


def leaves(section: Section, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The keys that the file sets, but for ``id``, with their values as JSON."""
    dumped = section.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for name, field in type(section).model_fields.items():
        key = field.alias or name
        if name not in section.model_fields_set or (not prefix and key == "id"):
            continue
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), dumped[key]


def _paths(patch: Raw, prefix: Path = ()) -> Iterator[Path]:
    for key, value in patch.items():
        if isinstance(value, Mapping) and value:
            yield from _paths(value, (*prefix, key))
        else:
            yield (*prefix, key)


def _set(raw: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        inner = raw.get(key)
        raw[key] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        raw = inner
    raw[path[-1]] = value


def _copied(raw: Raw) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in raw.items()}
