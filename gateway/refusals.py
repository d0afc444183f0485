"""How many requests of one caller are refused for what they say, and when no more of them are read.

Quota is taken when a request is known to be sound, so a mistake costs none of it. Yet each was read, parsed, perhaps
tokenised, its grammar compiled: a caller that sends nothing else would have all that for nothing. LiteLLM and Envoy
count attempts instead; then a typo eats into the limits that work has.

Rules
- A caller is a tenant's user, else its credential: a broken script does not stop its colleagues.
- What counts is the request's own fault (``FAULTS``): neither a missing credential (nobody to count it for) nor a 429
  (it may pass later, and a limit that refuses takes nothing), nor an end that the operator made.
- Over the limit the next request is 429 before its body is read, sound or not, until there is room again.
- Belongs to the event loop. Remembers callers for a minute, in this process only: it is this process that is spared.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.errors import Outcome, throttled
from policies.types import Principal

WINDOW_S = 60.0
PAD_S = 0.001
"""What rounding may make of a moment."""
FAULTS = frozenset({400, 403, 404, 413, 422})
REMEMBERED = 4096
"""Above so many callers, those are forgotten that have nothing against them."""

_Caller = tuple[str, str]


class Refusals:
    """Counts. One per gateway."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """At most so many per caller, all at once or spread over the minute; None: no limit."""
        self._clock = clock
        self._per_minute = per_minute
        self._each_s = WINDOW_S / per_minute if per_minute is not None else 0.0
        self._clear_at: dict[_Caller, float] = {}
        """When what a caller was refused will be forgotten (GCRA's theoretical arrival time)."""
        self._most = REMEMBERED

    def __len__(self) -> int:
        """Callers that are remembered."""
        return len(self._clear_at)

    def check(self, principal: Principal) -> None:
        """Raises ApiError 429 for a caller that was refused too often."""
        if not self._clear_at or (clear_at := self._clear_at.get(_caller(principal))) is None:
            return
        left = clear_at - self._clock() - (WINDOW_S - self._each_s)
        if left > PAD_S:
            raise throttled(
                f"More than {self._per_minute} of your requests in a minute were refused for what they say. "
                "Mend them first; none is read for now.",
                "refused_too_often",
                left,
            )

    def count(self, principal: Principal, outcome: Outcome, status: int | None) -> None:
        """A request of this caller ended so; ``status`` is what it was answered with."""
        if self._per_minute is None or outcome != "error" or status not in FAULTS:
            return
        now = self._clock()
        caller = _caller(principal)
        self._clear_at[caller] = max(self._clear_at.get(caller, now), now) + self._each_s
        if len(self._clear_at) > self._most:
            self._clear_at = {caller: at for caller, at in self._clear_at.items() if at > now}
            self._most = REMEMBERED + 2 * len(self._clear_at)


def _caller(principal: Principal) -> _Caller:
    return principal.tenant, principal.user or principal.key_id or ""
