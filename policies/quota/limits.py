"""Which limits there are, and what a job costs under each. Pure tables and arithmetic.

Three kinds: *rates* (a bucket that refills), *holdings* (freed when a request ends) and *budgets* (a calendar month).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Literal

from policies.types import Charge, Job, Limits, QuotaAccount, TokenPrice

Unit = Literal["requests", "tokens", "input_tokens", "output_tokens", "currency"]
Units = Mapping[str, int]
"""Amount by unit."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit that is a bucket."""

    limit: str
    unit: Unit
    window_s: float
    header: str
    """Under which name the ``x-ratelimit-*`` headers count it."""


_WINDOWS = {"minute": 60.0, "hour": 3600.0, "day": 86_400.0}
_UNITS: tuple[Unit, ...] = ("requests", "tokens", "input_tokens", "output_tokens")
RATES: Mapping[str, Rate] = {
    f"{unit}_per_{window}": Rate(f"{unit}_per_{window}", unit, seconds, "requests" if unit == "requests" else "tokens")
    for unit in _UNITS
    for window, seconds in _WINDOWS.items()
}
BUDGETS: Mapping[str, Unit] = {"tokens_per_month": "tokens", "currency_per_month": "currency"}
HOLDINGS = ("concurrent", "queued", "kv_tokens")
PER_UNIT = 10**9
"""Money is counted in billionths of the currency: whole numbers, so that sums are exact."""


def reserved(job: Job) -> dict[str, int]:
    """The most that a job can cost, by unit."""
    return {
        "requests": 1,
        "tokens": job.total_tokens,
        "input_tokens": job.prompt_tokens,
        "output_tokens": job.max_tokens,
        "currency": job.price.most(job.prompt_tokens, job.max_tokens) if job.price is not None else 0,
    }


def ran(usage: Charge, price: TokenPrice | None) -> dict[str, int]:
    """What a job did cost, by unit. Where nothing ran, not even the request counts."""
    return {
        "requests": 1 if usage.total else 0,
        "tokens": usage.total,
        "input_tokens": usage.prompt + usage.cached,
        "output_tokens": usage.output,
        "currency": price.cost(usage) if price is not None else 0,
    }


def accounts_of(job: Job) -> tuple[QuotaAccount, ...]:
    """Every account that ``job`` counts against."""
    return job.accounts or (QuotaAccount("tenant", job.tenant, job.tenant, job.limits),)


def money(amount: int) -> str:
    """Billionths of the currency as people write it."""
    return f"{Decimal(amount) / PER_UNIT:f}"


def capacity(limits: Limits, name: str) -> int | None:
    """The value of one limit; None where it is not set."""
    value: int | None = getattr(limits, name)
    return value


def most_output(
    accounts: tuple[QuotaAccount, ...], prompt_tokens: int, price: TokenPrice | None
) -> tuple[int, str] | None:
    """The most output that full limits would let pass beside this prompt, and the limit that says so; None: no bound.

    Zero or less where not even the prompt would pass.
    """
    rooms: list[tuple[int, str]] = []
    for account in accounts:
        limits = account.limits
        for name in ("kv_tokens", "tokens_per_month", *(r.limit for r in RATES.values() if r.unit == "tokens")):
            limit = capacity(limits, name)
            if limit is not None:
                rooms.append((limit - prompt_tokens, name))
        for rate in RATES.values():
            limit = capacity(limits, rate.limit) if rate.unit == "output_tokens" else None
            if limit is not None:
                rooms.append((limit, rate.limit))
        if limits.currency_per_month is not None and price is not None and price.output:
            left = limits.currency_per_month - price.most(prompt_tokens, 0)
            rooms.append((left // price.output, "currency_per_month"))
    return min(rooms, default=None)


def month_of(wall: float) -> int:
    """The calendar month (UTC) of a Unix time, as a number that rises by one each month."""
    return _month_of_hour(int(wall // 3600.0))


@lru_cache(16)
def _month_of_hour(hour: int) -> int:
    at = datetime.fromtimestamp(hour * 3600, UTC)
    return at.year * 12 + at.month - 1


def month_start(month: int) -> float:
    """The Unix time at which it begins."""
    return datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp()
