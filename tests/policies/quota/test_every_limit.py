"""Every limit at every level under two hundred requests at once: what passes is what fits, and refunds are exact."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from policies.quota.ledger import LedgerConfig, LedgerQuota
from policies.quota.limits import RATES
from policies.quota.token_bucket import TokenBucketQuota
from policies.testing import make_job
from policies.types import Charge, Job, JobId, Limits, LimitStatus, QuotaAccount, TenantId, TokenPrice

PROMPT, OUTPUT, ROOM, CROWD = 25, 15, 20, 200
PRICE = TokenPrice(2, 1, 10)
MOST = PRICE.most(PROMPT, OUTPUT)
NOTHING, HALF, ALL = Charge(), Charge(20, 5, 3), Charge(PROMPT, 0, OUTPUT)
COSTS = {"requests": 1, "tokens": PROMPT + OUTPUT, "input_tokens": PROMPT, "output_tokens": OUTPUT, "currency": MOST}
UNITS = {
    **{name: rate.unit for name, rate in RATES.items()},
    "tokens_per_month": "tokens",
    "currency_per_month": "currency",
    "concurrent": "requests",
    "queued": "requests",
    "kv_tokens": "tokens",
}
HELD = {"concurrent", "queued", "kv_tokens"}
LEVELS = ("organisation", "tenant", "user", "key")
Quota = LedgerQuota | TokenBucketQuota


def accounts(level: str, limit: str) -> tuple[QuotaAccount, ...]:
    """All four of a caller; one of them has the limit, which is enough for ``ROOM`` requests."""
    own = Limits(**{limit: ROOM * COSTS[UNITS[limit]]})
    name = f"{level}-{limit}"
    return tuple(
        QuotaAccount(each, TenantId("" if each == "organisation" else name), name, own if each == level else Limits())
        for each in LEVELS
    )


def job(name: str, wanted: tuple[QuotaAccount, ...]) -> Job:
    return make_job(name, wanted[1].tenant, prompt=PROMPT, output=OUTPUT, accounts=wanted, price=PRICE)


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Quota]:
    if kind == "token_bucket":
        yield TokenBucketQuota()
        return
    quota = LedgerQuota(folder / "ledger.db", LedgerConfig())
    await quota.start()
    try:
        yield quota
    finally:
        await quota.close()


def left(quota: Quota, wanted: tuple[QuotaAccount, ...]) -> LimitStatus:
    (status,) = quota.status(wanted, 0.0)
    return status


def test_the_table_has_every_limit() -> None:
    mine = {"max_output_tokens", "max_context_tokens"}  # of one request: no account counts them
    assert {item.name for item in fields(Limits)} - mine == set(UNITS)


@pytest.mark.parametrize("kind", ["token_bucket", "ledger"])
@pytest.mark.parametrize("level", LEVELS)
async def test_two_hundred_at_once_pass_what_fits_and_get_back_what_did_not_run(
    kind: str, level: str, tmp_path: Path
) -> None:
    """gateway A1, A5, A7, security 65: no token over, no refusal takes anything, and refunds are to the token."""
    async with opened(kind, tmp_path) as quota:
        for limit, unit in UNITS.items():
            wanted, cost = accounts(level, limit), COSTS[unit]
            ids = [f"{level}-{limit}-{place}" for place in range(CROWD)]
            asked: list[Any] = await asyncio.gather(*(quota.reserve(job(name, wanted), 0.0) for name in ids))
            passed = [name for name, decision in zip(ids, asked, strict=True) if decision.admitted]
            refused = {(d.limit, d.level, d.never) for d in asked if not d.admitted}
            assert (len(passed), refused) == (ROOM, {(limit, level, False)}), limit
            assert left(quota, wanted).remaining == 0

            ended = list(zip(passed, [NOTHING] * 10 + [HALF] * 6 + [ALL] * 4, strict=True))
            await asyncio.gather(*(quota.settle(JobId(name), usage, 0.0) for name, usage in ended))
            ran = {
                "requests": 10,
                "tokens": 6 * 28 + 4 * 40,
                "input_tokens": 10 * PROMPT,
                "output_tokens": 6 * 3 + 4 * OUTPUT,
                "currency": 6 * PRICE.cost(HALF) + 4 * PRICE.cost(ALL),
            }[unit]
            rest = ROOM * cost - (0 if limit in HELD else ran)
            assert left(quota, wanted).remaining == rest, limit

            again = [quota.reserve(job(f"{name}-again", wanted), 0.0) for name in ids]
            assert sum(decision.admitted for decision in await asyncio.gather(*again)) == rest // cost, limit
