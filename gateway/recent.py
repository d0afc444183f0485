"""Requests that ended lately: a bounded ring without content, and totals by outcome.

Rules
- Written once per request, at its end, in O(1). Holds what the log line holds, and no more: never content or keys.
- Bounded: the ring by ``keep``, the per-tenant totals by the labels that ``label`` lets through (unknown tenants are
  one, ``other``).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import Outcome
from gateway.log import RequestSummary

KEEP = 1024


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that is over."""

    at: float
    """Unix seconds."""
    summary: RequestSummary


class RecentRequests:
    """The last ``keep`` requests, and how many ended how since the start."""

    def __init__(
        self, label: Callable[[str | None], str], *, keep: int = KEEP, clock: Callable[[], float] = time.time
    ) -> None:
        """``label``: a tenant's name as in metrics. ``clock``: Unix seconds."""
        self._label = label
        self._clock = clock
        self._ring: deque[Ended] = deque(maxlen=keep)
        self._outcomes: Counter[Outcome] = Counter()
        self._refused: Counter[str] = Counter()

    def add(self, summary: RequestSummary) -> None:
        """A request ended."""
        self._ring.append(Ended(self._clock(), summary))
        self._outcomes[summary.outcome] += 1
        if summary.outcome in ("shed", "throttled"):
            self._refused[self._label(summary.tenant)] += 1

    def total(self, outcome: Outcome) -> int:
        """Requests that ended so since the start."""
        return self._outcomes[outcome]

    def refused(self, tenant: str) -> int:
        """Requests of ``tenant`` (a label) that were shed or throttled since the start."""
        return self._refused[tenant]

    def slowest(self, most: int, within_s: float) -> list[Ended]:
        """The ``most`` longest of the last ``within_s`` seconds that are still in the ring, longest first."""
        since = self._clock() - within_s
        young = (ended for ended in self._ring if ended.at >= since)
        return heapq.nlargest(most, young, key=lambda ended: ended.summary.duration_s)

    def __len__(self) -> int:
        return len(self._ring)
