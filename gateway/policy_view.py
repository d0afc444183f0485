"""The live policies as an operator may see them, and what an operator sends back.

Rules
- Whatever is named like a secret is shown as ``MASK`` and never otherwise; a mask that comes back means "as it is now",
  so that a form can be sent without typing the secret again. Where there is nothing to keep, it is a mistake.
- Nothing here changes a policy: ``Runtime.swap`` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from gateway.runtime import PolicySet
from gateway.settings import PolicyUse
from policies.registry import Registry
from policies.spi import KINDS, Kind, PolicyConfig, PolicyConfigError

MASK = "***"
_SECRET = re.compile(r"key|secret|hash|token|password", re.IGNORECASE)
_NOT_SECRET = ("_env", "_file", "_claim", "_cost", "_url")


@dataclass(frozen=True, slots=True)
class SettingView:
    """One key of a policy's ``with:`` block."""

    name: str
    default: str | None
    """As JSON-like text; None where it must be given."""
    meaning: str


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A registered policy."""

    name: str
    summary: str
    origin: str
    """``builtin``, or the plugin it came from."""
    settings: tuple[SettingView, ...]


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One kind's live policy."""

    kind: Kind
    use: str
    summary: str
    settings: Mapping[str, Any]
    """Its ``with:`` block, secrets masked."""


def live(policies: PolicySet, registry: Registry) -> list[PolicyRow]:
    """What is in force, by kind."""
    return [
        PolicyRow(kind, use.use, registry.policy(kind, use.use).summary, without_secrets(use.with_))
        for kind, use in ((kind, policies.uses[kind]) for kind in KINDS)
    ]


def choices(registry: Registry, kind: Kind) -> list[PolicyChoice]:
    """What could be in force."""
    return [
        PolicyChoice(item.spec.name, item.spec.summary, item.origin, tuple(_settings(item.spec.config)))
        for item in registry.policies(kind)
    ]


def _settings(config: type[PolicyConfig]) -> Iterator[SettingView]:
    for name, field in config.model_fields.items():
        default = None
        if not field.is_required():
            value = field.get_default(call_default_factory=True, validated_data={})
            default = "" if value is PydanticUndefined else _shown(value)[:80]
        yield SettingView(field.alias or name, default, (field.description or "").strip())


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def without_secrets(value: Any, name: str = "") -> Any:
    """A policy's settings as they may be shown: whatever is named like a secret is masked."""
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if _SECRET.search(name) and not name.endswith(_NOT_SECRET) and value is not None:
        return MASK
    return [without_secrets(inner, name) for inner in value] if isinstance(value, list | tuple) else value


def restored(kind: Kind, use: PolicyUse, policies: PolicySet) -> PolicyUse:
    """``use`` with every mask replaced by the live policy's value. Raises PolicyConfigError where there is none."""
    before = policies.uses[kind]
    kept = before.with_ if before.use == use.use else {}
    missing: list[tuple[str, str]] = []
    with_ = _restored(use.with_, kept, "with", missing)
    if missing:
        raise PolicyConfigError("; ".join(f"{path}: {message}" for path, message in missing), mistakes=missing)
    return use.model_copy(update={"with_": with_})


def _restored(value: Any, kept: Any, path: str, missing: list[tuple[str, str]]) -> Any:
    if value == MASK:
        if kept is None:
            missing.append((path, f"{MASK} stands for a value that is not in force here; give the value"))
        return kept
    if isinstance(value, Mapping):
        old = kept if isinstance(kept, Mapping) else {}
        return {key: _restored(inner, old.get(key), f"{path}.{key}", missing) for key, inner in value.items()}
    if isinstance(value, list):
        old_list = list(kept) if isinstance(kept, list | tuple) else []
        return [
            _restored(inner, _counterpart(inner, i, old_list, len(value)), f"{path}[{i}]", missing)
            for i, inner in enumerate(value)
        ]
    return value


def _counterpart(item: Any, index: int, old: list[Any], length: int) -> Any:
    """The live list's item that looked like ``item`` when it was masked: a secret must not move to another entry.

    By its place only while the list is as long as it was; else it has to be the only one that looks so.
    """
    alike = [other for other in old if item in (MASK, without_secrets(other))]
    if len(alike) == 1:
        return alike[0]
    return old[index] if len(old) == length and any(other is old[index] for other in alike) else None
