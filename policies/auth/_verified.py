"""Tokens that were verified before: a client sends the same one with every request, and a signature costs the most.

Rules
- Remembered is only what was verified in full, under the digest of the whole token; the token itself is not kept.
- It is good for exactly the key object that verified it: a key that was removed or replaced, or a key set that was
  fetched anew, means verifying again. So a key is looked up for every request, as without this.
- It is good until the token's own ``exp`` and the leeway. What else a token is checked for (``nbf``, ``iat``) only
  becomes truer with time, and the rest is the configuration, which lives as long as this does.
- Bounded: the oldest goes first. A refused token is never remembered: nobody can fill this without a valid signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from policies.auth._keys import VerifyKey
from policies.types import Principal

LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Verified:
    """A token's ``kid``, the key that verified it, when it ends (UNIX time), and whose it is."""

    kid: str | None
    key: VerifyKey
    until: float
    principal: Principal


class VerifiedTokens:
    """Of one policy. The event loop is the only user."""

    def __init__(self, clock: Callable[[], float], limit: int = LIMIT) -> None:
        self._clock = clock
        self._limit = limit
        self._known: dict[bytes, Verified] = {}

    def __len__(self) -> int:
        return len(self._known)

    def look_up(self, token: str) -> Verified | None:
        """What is known of it while it has not expired; whether its key still stands is the caller's to compare."""
        digest = _digest(token)
        found = self._known.get(digest)
        if found is not None and self._clock() >= found.until:
            del self._known[digest]
            return None
        return found

    def remember(self, token: str, verified: Verified) -> None:
        """A token that was just verified."""
        known = self._known
        digest = _digest(token)
        known.pop(digest, None)
        while len(known) >= self._limit:
            del known[next(iter(known))]
        known[digest] = verified


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
