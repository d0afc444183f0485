"""A JWKS that is refreshed: the last good set is kept, and nobody can make it be fetched often.

Rules
- One fetch at a time, whoever needs it; at most one attempt per ``cooldown_s`` (per ``RETRY_S`` while there is no set
  that may be trusted: then nobody can get in anyway).
- A known key id is answered at once, also while a fetch runs: a flood of unknown ids slows nobody down.
- A set is fetched anew from half of ``refresh_s`` on, beside the work. One that is older than ``refresh_s`` all the
  same (nobody came for a while) is looked at only after a fetch, or once that has failed: a key that was removed is
  not accepted for longer because nobody else asked.
- An unknown key id waits for one fetch (key rotation), unless the last attempt is younger than the cooldown.
- Keys are made of a document in a thread: it may hold thousands.
- A failed fetch, or one without usable keys, changes nothing; a set older than ``max_stale_s`` is no longer trusted and
  every token is answered "unavailable" (503) rather than "invalid" (401).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from policies.auth._keys import VerifyKey
from policies.spi import AuthError, PolicyUnavailableError

RETRY_S = 2.0

Keys = dict[str | None, VerifyKey]


@dataclass(frozen=True, slots=True)
class Freshness:
    """Times in seconds."""

    refresh_s: float = 300.0
    cooldown_s: float = 30.0
    max_stale_s: float = 3600.0
    fetch_timeout_s: float = 4.0


class KeySet:
    """``fetch`` gets the document, ``parse`` makes keys of it; ``clock`` is monotonic seconds."""

    def __init__(
        self,
        fetch: Callable[[], Awaitable[Any]],
        parse: Callable[[Any], Keys],
        freshness: Freshness,
        clock: Callable[[], float],
    ) -> None:
        self._fetch = fetch
        self._parse = parse
        self._freshness = freshness
        self._clock = clock
        self._keys: Keys = {}
        self._good_at: float | None = None
        self._tried_at: float | None = None
        self._down = False
        """The last attempt failed."""
        self._task: asyncio.Task[None] | None = None
        self.fetches = 0
        """Attempts so far."""

    async def find(self, kid: str | None) -> VerifyKey:
        """The key for a token's ``kid``. Raises AuthError or PolicyUnavailableError."""
        age = self._age()
        if age > self._freshness.refresh_s / 2:
            self._start()
            if age > self._freshness.refresh_s and not self._down:
                await self._fetched()
        if self._age() <= self._freshness.max_stale_s:
            key = self._lookup(kid)
            if key is not None:
                return key
            if kid is None:
                raise AuthError("the token names no key and the set has several")
            self._start()
        await self._fetched()
        if self._age() > self._freshness.max_stale_s:
            raise PolicyUnavailableError("the key set cannot be fetched", self._pause())
        key = self._lookup(kid)
        if key is None:
            raise AuthError("unknown key id")
        return key

    async def _fetched(self) -> None:
        """Wait for the fetch that runs, if one does."""
        if self._task is not None:
            # Shielded: a caller that gives up must not cancel the fetch that others wait for.
            await asyncio.shield(self._task)

    def _age(self) -> float:
        return float("inf") if self._good_at is None else self._clock() - self._good_at

    def _pause(self) -> float:
        trusted = self._age() <= self._freshness.max_stale_s
        return self._freshness.cooldown_s if trusted else min(RETRY_S, self._freshness.cooldown_s)

    def _lookup(self, kid: str | None) -> VerifyKey | None:
        if kid is not None:
            return self._keys.get(kid)
        return next(iter(self._keys.values())) if len(self._keys) == 1 else None

    def _start(self) -> None:
        """Begin a fetch, unless one runs or the last attempt is too young."""
        now = self._clock()
        if self._task is not None or (self._tried_at is not None and now - self._tried_at < self._pause()):
            return
        self._tried_at = now
        self.fetches += 1
        self._task = asyncio.get_running_loop().create_task(self._refresh())

    async def _refresh(self) -> None:
        try:
            asked = self._clock()
            document = await asyncio.wait_for(self._fetch(), self._freshness.fetch_timeout_s)
            self._keys = await asyncio.to_thread(self._parse, document)
            self._good_at, self._down = asked, False
        except Exception:  # whatever went wrong, the last good set stays; its age tells in the end
            self._down = True
        finally:
            self._task = None
