"""Which of the gateways that share a ledger answers to an idempotency key: the keeper's list.

Rules
- A name belongs to whoever claimed it first, until it lets go. Others are told that it is somebody else's, and whether
  that is for the same body.
- What runs at a gateway that is gone is free again: nothing of it is charged. What was answered there stays refused for
  as long as its answer would have been kept: it was charged.
- At most ``MAX_NAMES``: beyond, those that nobody is there for any more go first, then the oldest answers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from policies.quota_spi import KeyClaim

MAX_NAMES = 100_000
OWN = ""
"""The keeper itself, among owners."""


@dataclass(slots=True)
class _Claim:
    owner: str
    body: str
    until: float | None = None
    """With an answer: how long it is kept (monotonic)."""


class KeyClaims:
    """Of one ledger. Belongs to the event loop."""

    def __init__(self) -> None:
        self._claims: OrderedDict[str, _Claim] = OrderedDict()

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, owner: str, name: str, body: str, now: float) -> KeyClaim:
        """Take ``name`` for ``owner``, or say why not."""
        found = self._claims.get(name)
        if found is not None and found.until is not None and found.until <= now:
            del self._claims[name]
            found = None
        if found is None:
            self._make_room(now)
            self._claims[name] = _Claim(owner, body)
            return "ours"
        if found.body != body:
            return "other_body"
        return "ours" if found.owner == owner and found.until is None else "elsewhere"

    def keep(self, owner: str, name: str, until: float) -> None:
        """It was answered; the answer is kept there until then."""
        found = self._claims.get(name)
        if found is not None and found.owner == owner:
            found.until = until

    def release(self, owner: str, name: str) -> None:
        """Let go of it."""
        found = self._claims.get(name)
        if found is not None and found.owner == owner:
            del self._claims[name]

    def gone(self, owner: str) -> None:
        """Free what runs there."""
        for name in [name for name, claim in self._claims.items() if claim.owner == owner and claim.until is None]:
            del self._claims[name]

    def _make_room(self, now: float) -> None:
        if len(self._claims) < MAX_NAMES:
            return
        answered = [(name, claim.until) for name, claim in self._claims.items() if claim.until is not None]
        past = [name for name, until in answered if until <= now]
        for name in past or [name for name, _ in answered[:1]] or [next(iter(self._claims))]:
            del self._claims[name]
