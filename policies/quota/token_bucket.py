"""``token_bucket``: every limit of every account, in memory. The rules are those of its book (``_book.py``).

One gateway process; rates, holdings and budgets are lost at a restart. Where budgets must outlive one: ``ledger``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field

from policies.quota._account import Instant
from policies.quota._book import Book
from policies.spi import Json, PolicyConfig, PolicyContext, PolicySpec
from policies.types import Job, JobId, LimitState, LimitStatus, QuotaAccount, QuotaDecision, TenantId, Usage


class TokenBucketConfig(PolicyConfig):
    """Limits themselves belong to organisations, tenants, users and keys."""

    lease_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    """Longest time a reservation holds its slot without being settled; above ``timeouts.total_s``."""


class TokenBucketQuota:
    """Every call is O(accounts of the job + log open reservations) and runs in one event-loop turn."""

    never_waits: Literal[True] = True

    def __init__(self, lease_s: float = 900.0, *, wall: Callable[[], float] = time.time) -> None:
        """``wall`` is the calendar that budgets run by (Unix time)."""
        self._book = Book(lease_s)
        self._wall = wall

    async def reserve(self, job: Job, now: float) -> QuotaDecision:
        """Take the most that ``job`` may cost from every account, or nothing."""
        self._book.expire(now)
        return self._book.reserve(job, self._at(now))[0]

    async def settle(self, job_id: JobId, usage: Usage, now: float) -> Mapping[str, Any]:
        """Replace the reservation by what ran. ``refunded`` is negative when more ran than was reserved."""
        self._book.expire(now)
        settled = self._book.settle(job_id, usage, self._at(now))
        return {"refunded": 0} if settled is None else {"refunded": settled.tokens, "remaining": settled.remaining}

    def started(self, job_id: JobId) -> None:
        """The job left the queue."""
        self._book.started(job_id)

    def dump(self) -> Json:
        """Accounts and open reservations."""
        return self._book.dump()

    def load(self, state: Json) -> None:
        """Replace both. Raises ValueError when they do not have their shape."""
        self._book.load(state)

    def remaining(self, tenant: TenantId, now: float) -> Mapping[str, LimitState]:
        """What the tenant has left, for admin views: the very figures that decide. Empty when nothing is kept."""
        return self._book.remaining(tenant, self._at(now))

    def tightest(self, accounts: tuple[QuotaAccount, ...], now: float) -> Mapping[str, LimitState]:
        """What is left of the tightest limit of these accounts, for headers."""
        return self._book.tightest(accounts, self._at(now))

    def status(self, accounts: tuple[QuotaAccount, ...], now: float) -> list[LimitStatus]:
        """Every limit of these accounts, with what is left."""
        self._book.expire(now)
        return self._book.status(accounts, self._at(now))

    def concurrent(self, tenant: TenantId) -> int:
        """Slots taken."""
        return self._book.held(("tenant", tenant, tenant), "concurrent")

    def __len__(self) -> int:
        """Accounts kept in memory."""
        return len(self._book)

    def _at(self, now: float) -> Instant:
        return Instant.at(now, self._wall())


def _make(config: TokenBucketConfig, ctx: PolicyContext) -> TokenBucketQuota:
    return TokenBucketQuota(config.lease_s)


SPEC = PolicySpec(
    "quota", "token_bucket", TokenBucketConfig, _make, "Rates, concurrency and budgets at every level, in memory."
)
