"""Prefixes that the operator registered as public: tenants share their cached blocks (``cache_scope: public_prefix``).

Rules
- Only what is registered here is shared, and of it only whole blocks; a prompt that leaves the prefix, even inside it,
  is private from that block on.
- A prefix is kept as tokens of its model. Bounded: ``MAX_PER_MODEL``, since every prompt is compared with each.
- Readers (tokenizing threads) see a whole, unchanging table; only the event loop changes it, by putting another in its
  place. The file, where there is one, is replaced whole before a change is answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gateway.epochs import write_whole

FILE = "public-prefixes.json"
MAX_PER_MODEL = 64
MAX_NAME_CHARS = 128


class TooManyPrefixesError(ValueError):
    """A model has as many as it may have."""


@dataclass(frozen=True, slots=True)
class PublicPrefix:
    """One registered prefix."""

    id: str
    """Of model and tokens: the same prefix registered again is the same."""
    model: str
    name: str
    """The operator's own word for it."""
    created: float
    tokens: tuple[int, ...] = field(repr=False)

    @classmethod
    def of(cls, model: str, name: str, tokens: Sequence[int]) -> PublicPrefix:
        """A new one."""
        digest = hashlib.sha256(model.encode() + b"\0" + array("q", tokens).tobytes()).hexdigest()
        return cls(digest[:16], model, name, time.time(), tuple(tokens))


class PublicPrefixes:
    """All of them."""

    def __init__(self, path: Path | None = None) -> None:
        """``path``: the file that they outlive the process in. Raises ValueError for one that cannot be read."""
        self._path = path
        self._saving = asyncio.Lock()
        self._table: Mapping[str, tuple[PublicPrefix, ...]] = _by_model(_read(path) if path is not None else [])

    def match(self, model: str, tokens: Sequence[int]) -> int:
        """How many leading tokens of ``tokens`` lie inside a public prefix of ``model``. From any thread."""
        return max((_common(prefix.tokens, tokens) for prefix in self._table.get(model, ())), default=0)

    def listed(self) -> list[PublicPrefix]:
        """Every prefix, oldest first."""
        return sorted((prefix for found in self._table.values() for prefix in found), key=lambda prefix: prefix.created)

    async def add(self, prefix: PublicPrefix) -> PublicPrefix:
        """Register it; in force at once. Returns the one that counts: the old one, where it was registered before.

        Raises TooManyPrefixesError, OSError (nothing has changed then).
        """
        async with self._saving:
            present = self._table.get(prefix.model, ())
            for other in present:
                if other.id == prefix.id:
                    return other
            if len(present) >= MAX_PER_MODEL:
                raise TooManyPrefixesError(f"a model has at most {MAX_PER_MODEL} public prefixes; remove one first")
            await self._become([*self.listed(), prefix])
        return prefix

    async def remove(self, prefix_id: str) -> PublicPrefix | None:
        """Unregister it; None where there is none. Raises OSError (nothing has changed then)."""
        async with self._saving:
            rest = [prefix for prefix in self.listed() if prefix.id != prefix_id]
            gone = next((prefix for prefix in self.listed() if prefix.id == prefix_id), None)
            if gone is not None:
                await self._become(rest)
        return gone

    async def _become(self, prefixes: list[PublicPrefix]) -> None:
        if self._path is not None:
            text = json.dumps([asdict(prefix) for prefix in prefixes])
            await asyncio.to_thread(write_whole, self._path, text)
        self._table = _by_model(prefixes)


def _by_model(prefixes: Sequence[PublicPrefix]) -> Mapping[str, tuple[PublicPrefix, ...]]:
    table: dict[str, tuple[PublicPrefix, ...]] = {}
    for prefix in prefixes:
        table[prefix.model] = (*table.get(prefix.model, ()), prefix)
    return table


def _common(prefix: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common beginning."""
    if not prefix or not tokens or prefix[0] != tokens[0]:
        return 0
    for index, (one, other) in enumerate(zip(prefix, tokens, strict=False)):
        if one != other:
            return index
    return min(len(prefix), len(tokens))


def _read(path: Path) -> list[PublicPrefix]:
    try:
        data: list[dict[str, Any]] = json.loads(path.read_bytes())
        return [PublicPrefix(**{**entry, "tokens": tuple(map(int, entry["tokens"]))}) for entry in data]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"state.path: {path} cannot be read ({type(error).__name__}); restore or remove it") from error
