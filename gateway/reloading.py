"""What a reload brings into force at once, what waits for a restart, and which is which. Pure.

Rules
- A change is named by its path in the file; of a list, by the entry's id or name: ``tenants[search].weight``.
- Whatever is not in ``RESTART`` is live: a key that is added later is, or has to be put there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from gateway.settings import Settings

RESTART = (
    "listen",
    "admin",
    "state",
    "plugins",
    "models",
    "telemetry",
    "timeouts.step_stall_s",
    "log.level",
    "log.format",
)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a reload did."""

    changed: tuple[str, ...]
    """In force now."""
    needs_restart: tuple[str, ...]
    """As it was; the file says something else."""

    def as_json(self) -> dict[str, list[str]]:
        """For the admin API."""
        return {"changed": list(self.changed), "needs_restart": list(self.needs_restart)}


def in_force(live: Settings, wanted: Settings) -> Settings:
    """``wanted`` with everything that needs a restart as it is in ``live``."""
    kept: dict[str, Any] = {}
    for path in RESTART:
        section, _, key = path.partition(".")
        if key:
            taken = kept.get(section, getattr(wanted, section))
            kept[section] = taken.model_copy(update={key: getattr(getattr(live, section), key)})
        else:
            kept[section] = getattr(live, section)
    return wanted.model_copy(update=kept)


def compare(live: Settings, wanted: Settings) -> Reloaded:
    """Which keys differ, and what becomes of them."""
    taken = in_force(live, wanted)
    return Reloaded(tuple(differences(live, taken)), tuple(differences(taken, wanted)))


def differences(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Paths at which two values of one shape differ, in the order of the file."""
    if isinstance(old, BaseModel) and isinstance(new, BaseModel):
        for name, field in type(new).model_fields.items():
            key = field.alias or name
            yield from differences(getattr(old, name), getattr(new, name), f"{path}.{key}" if path else key)
    elif (before := _entries(old)) is not None and (after := _entries(new)) is not None and (before or after):
        for name in dict.fromkeys([*before, *after]):
            if name in before and name in after:
                yield from differences(before[name], after[name], f"{path}[{name}]")
            else:
                yield f"{path}[{name}]"
    elif old != new:
        yield path


def _entries(value: Any) -> Mapping[str, BaseModel] | None:
    """Sections by name, where ``value`` is a list or map of them."""
    if isinstance(value, Mapping) and all(isinstance(entry, BaseModel) for entry in value.values()):
        return value
    if isinstance(value, tuple) and all(isinstance(entry, BaseModel) for entry in value):
        return {str(getattr(entry, "id", getattr(entry, "name", index))): entry for index, entry in enumerate(value)}
    return None
