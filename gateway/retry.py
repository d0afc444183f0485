"""What becomes of the requests that a lost worker had: retried once, refused, or quarantined.

Rules
- A request may be retried only before its caller got a byte, at most once, and only while the retry budget lasts:
  a site where everything fails must not double its own load.
- Each loss that a request may have caused is a *strike* against everything that was in flight there, by fingerprint
  (tenant, model, tokens, parameters), so that sending it again does not start from zero. Two strikes: quarantined.
  Equal requests share it: one loss is one strike however many were there, and it counts for those that wait.
- A request with a strike is a *suspect*. A worker holds at most one suspect at a time until it got past the point where
  it was lost, so that a second loss has one culprit and the bystanders get one strike only.
- A loss whose culprit is found costs the bystanders no retry: only the culprit's own count is used up.
- A fingerprint that gets past that point is cleared. Strikes fade after ``ttl_s``; the memory is bounded.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

import msgspec

from gateway.errors import ApiError
from workers.protocol import Generate

MAX_STRIKES = 2
MAX_RETRIES = 1
"""How often an attempt that a worker's fault ended is repeated."""
MAX_REFUSALS = 3
"""How often a worker may hand a request back unstarted (draining, overloaded) before its caller gets 503."""


class QuarantinedError(ApiError):
    """500 from memory: this request was in flight each time a worker broke. Tells clients not to send it again."""

    def __init__(self) -> None:
        super().__init__(
            500,
            "This request is quarantined: workers broke each time they ran it. Change it, or ask the operator.",
            type="server_error",
            code="quarantined",
        )

    def headers(self) -> dict[str, str]:
        """``x-should-retry`` is what the OpenAI clients obey."""
        return {"x-should-retry": "false"}


def fingerprint(tenant: str, model: str, generate: Generate) -> bytes:
    """Same tenant, model, tokens and parameters, same digest. It cannot be read back."""
    digest = hashlib.sha256()
    for part in (
        tenant.encode(),
        model.encode(),
        msgspec.msgpack.encode(generate.params),
        f"{generate.n} {generate.max_tokens} {generate.adapter!r} {generate.beams!r}".encode(),
        generate.grammar.encode(),
        array("q", generate.tokens).tobytes(),
    ):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


class Strikes:
    """Remembers which requests were there when workers broke."""

    def __init__(self, capacity: int = 4096, ttl_s: float = 900.0) -> None:
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._strikes: OrderedDict[bytes, tuple[int, float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._strikes)

    def count(self, key: bytes, now: float) -> int:
        """Strikes against ``key``."""
        count, at, _ = self._strikes.get(key, (0, now, 0))
        if now - at > self._ttl_s:
            del self._strikes[key]
            return 0
        return count

    def produced(self, key: bytes) -> int:
        """Output tokens it had produced at its last strike."""
        return self._strikes.get(key, (0, 0.0, 0))[2]

    def strike(self, key: bytes, now: float, produced: int = 0) -> int:
        """One more; returns how many there are. The oldest of too many are forgotten."""
        count = self.count(key, now) + 1
        self._strikes[key] = (count, now, produced)
        self._strikes.move_to_end(key)
        while len(self._strikes) > self._capacity:
            self._strikes.popitem(last=False)
        return count

    def clear(self, key: bytes) -> None:
        """It ran well: forget what it was suspected of."""
        self._strikes.pop(key, None)


class RetryBudget:
    """A bucket of retries: a fifth of the dispatches, and at most ``capacity`` at once (one full worker, say)."""

    def __init__(self, capacity: int = 256, ratio: float = 0.2) -> None:
        self._capacity = float(capacity)
        self._ratio = ratio
        self._left = float(capacity)

    def earn(self) -> None:
        """A request was dispatched for the first time."""
        self._left = min(self._capacity, self._left + self._ratio)

    def spend(self) -> bool:
        """Take one retry; False when there is none left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
