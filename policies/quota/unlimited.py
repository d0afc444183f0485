"""``unlimited``: admits everything and counts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from policies.quota._account import Instant
from policies.quota._book import Book
from policies.spi import Json, NoConfig, PolicyContext, PolicySpec
from policies.types import Job, JobId, QuotaDecision, Usage

_LEASE_S = 900.0


class UnlimitedQuota:
    """Ignores every limit, ``concurrent`` included.

    It keeps the books of the policy before it, settles what was open in them and hands them on: a swap to it and back
    resets no budget.
    """

    never_waits: Literal[True] = True

    def __init__(self, *, wall: Callable[[], float] = time.time) -> None:
        self._inherited = Book(_LEASE_S)
        self._wall = wall

    async def reserve(self, job: Job, now: float) -> QuotaDecision:
        """Admit."""
        return QuotaDecision(admitted=True, cost=job.total_tokens)

    async def settle(self, job_id: JobId, usage: Usage, now: float) -> Mapping[str, Any]:
        """Of its own jobs nothing was reserved, and nothing is given back."""
        self._inherited.expire(now)
        settled = self._inherited.settle(job_id, usage, Instant.at(now, self._wall()))
        return {"refunded": settled.tokens if settled is not None else 0}

    def dump(self) -> Json:
        """What it took over."""
        return self._inherited.dump()

    def load(self, state: Json) -> None:
        """Keep it for whoever comes next. Raises ValueError when it does not have its shape."""
        self._inherited.load(state)


def _make(config: NoConfig, ctx: PolicyContext) -> UnlimitedQuota:
    return UnlimitedQuota()


SPEC = PolicySpec("quota", "unlimited", NoConfig, _make, "No limits at all, for development and trusted networks.")
