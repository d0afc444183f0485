"""The key that signs tokens here: from the environment, or this machine's development key.

Rules
- The development key lies outside any repository, readable by its owner only, and is made by ``serve --dev`` alone.
- A key that the environment holds always wins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.cli.output import UserError

if TYPE_CHECKING:
    from gateway.settings import Settings


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """What a token for this configuration must hold."""

    audience: str
    issuer: str
    tenant_claim: str
    algorithms: tuple[str, ...]
    key_env: str | None


@dataclass(frozen=True, slots=True)
class Key:
    """A key and where it was found."""

    value: str
    origin: str


def jwt_settings(settings: Settings) -> JwtSettings | None:
    """The ``jwt`` policy of the configuration, also inside a ``chain``; None where there is none."""
    use = settings.policies.auth
    for name, with_ in _policies({"use": use.use, "with": use.with_}):
        if name == "jwt":
            return JwtSettings(
                audience=_first(with_.get("audience", "")),
                issuer=_first(with_.get("issuer", "")),
                tenant_claim=with_.get("tenant_claim", "tenant"),
                algorithms=tuple(with_.get("algorithms", ())),
                key_env=with_.get("key_env"),
            )
    return None


def _policies(value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every ``{use:, with:}`` at or below ``value``."""
    if isinstance(value, Mapping):
        if "use" in value:
            yield value["use"], value.get("with") or {}
        for inner in value.values():
            yield from _policies(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _policies(inner)


def _first(value: Any) -> str:
    return str(value[0]) if isinstance(value, list | tuple) and value else str(value)


def find_key(variable: str) -> Key | None:
    """The key, if there is one; none is made. Raises UserError for a key file that cannot be trusted."""
    from gateway.paths import dev_key_path

    if value := os.environ.get(variable):
        return Key(value, f"{variable} (environment)")
    return Key(make_dev_key(), str(dev_key_path())) if dev_key_path().exists() else None


def make_dev_key() -> str:
    """The development key, made when it is missing. Raises UserError for a key file that cannot be trusted."""
    from gateway.paths import PathError, dev_key

    try:
        return dev_key()
    except PathError as error:
        raise UserError(str(error)) from None
