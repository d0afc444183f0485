"""Addresses that send nothing but bad credentials: slowed down, never locked out.

A look at a credential, and what is told of a 401, costs what a good request costs before its body is read. A count per
address would stop a flood, and everybody behind the same proxy with it. So:

Rules
- An address from which a good credential has come lately is nobody's business here: whoever is behind a shared proxy
  passes, whatever others send through it.
- One that has sent ``per_minute`` bad ones and no good one has its requests wait ``PAUSE_S`` before they are looked at,
  ``MOST_WAITING`` at a time; more than that are 429 at once, unread. A good one among those that waited ends it all.
- Only what is asked with a credential counts: health checks and the API's description never wait.
- An IPv6 address is its /64, which is what one customer of a provider gets.
- Belongs to the event loop; remembered is little, and not for long, in this process only: it is this process that is
  spared.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Callable

from gateway import log
from gateway.errors import throttled

WINDOW_S = 60.0
PAUSE_S = 1.0
MOST_WAITING = 64
"""Per address."""
ALL_WAITING = 1024
GOOD_S = 3600.0
"""How long one good credential speaks for its address."""
REMEMBERED = 4096
"""Above so many addresses, those are forgotten that have nothing for or against them."""
_log = log.get("strangers")


class Strangers:
    """Counts. One per gateway."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """None: nobody is slowed down."""
        self._clock = clock
        self._per_minute = per_minute
        self._each_s = WINDOW_S / per_minute if per_minute is not None else 0.0
        self._clear_at: dict[str, float] = {}
        """When an address's bad credentials will be forgotten (GCRA's theoretical arrival time)."""
        self._good_until: dict[str, float] = {}
        self._most_good = REMEMBERED
        self._most_bad = REMEMBERED
        self._waiting: Counter[str] = Counter()

    def __bool__(self) -> bool:
        """Whether anybody has sent a bad credential lately."""
        return bool(self._clear_at)

    def __len__(self) -> int:
        """Addresses with something against them."""
        return len(self._clear_at)

    async def let_in(self, host: str | None) -> None:
        """Return when a request from there may go on. Raises ApiError 429."""
        where = address(host)
        clear_at = self._clear_at.get(where)
        if clear_at is None or not self._over(clear_at, self._clock()):
            return
        if self._waiting[where] >= MOST_WAITING or self._waiting.total() >= ALL_WAITING:
            raise throttled(
                "Too many requests from your address had no valid credential, and none had one. Retry later.",
                "too_many_bad_credentials",
                PAUSE_S,
            )
        self._waiting[where] += 1
        try:
            await asyncio.sleep(PAUSE_S)
        finally:
            self._waiting[where] -= 1
            if not self._waiting[where]:
                del self._waiting[where]

    def good(self, host: str | None) -> None:
        """A credential from there was verified."""
        if self._per_minute is None or host is None:
            return
        where, now = address(host), self._clock()
        if self._good_until.get(where, 0.0) - now < GOOD_S / 2:
            self._good_until[where] = now + GOOD_S
            self._clear_at.pop(where, None)
            if len(self._good_until) > self._most_good:
                self._good_until = {each: until for each, until in self._good_until.items() if until > now}
                self._most_good = REMEMBERED + 2 * len(self._good_until)

    def bad(self, host: str | None) -> None:
        """A request from there had no valid credential."""
        if self._per_minute is None or host is None:
            return
        where, now = address(host), self._clock()
        if self._good_until.get(where, 0.0) > now:
            return
        before = self._clear_at.get(where, now)
        self._clear_at[where] = after = max(before, now) + self._each_s
        if self._over(after, now) and not self._over(before, now):
            _log.warning("bad_credentials_slowed", peer=where, per_minute=self._per_minute)
        if len(self._clear_at) > self._most_bad:
            self._clear_at = {each: at for each, at in self._clear_at.items() if at > now}
            self._most_bad = REMEMBERED + 2 * len(self._clear_at)

    def _over(self, clear_at: float, now: float) -> bool:
        return clear_at - now > WINDOW_S - self._each_s / 2


def address(host: str | None) -> str:
    """What counts as one address."""
    if host is None or ":" not in host:
        return host or ""
    try:
        found = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return f"{ipaddress.IPv6Network((found, 64), strict=False).network_address}/64"
