"""The in-memory quota: each rule of its module, and the faults that others shipped."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from policies.quota._bucket import Bucket
from policies.quota.token_bucket import TokenBucketQuota
from policies.testing import make_job
from policies.types import Charge, JobId, Limits, QuotaDecision, TenantId

A = TenantId("a")


def kept(quota: TokenBucketQuota) -> list[str]:
    return [account["key"][2] for account in quota.dump()["accounts"]]


async def take(quota: TokenBucketQuota, job_id: str, now: float = 0.0, **fields: Any) -> QuotaDecision:
    tenant = fields.pop("tenant", "a")
    prompt, output = fields.pop("prompt", 10), fields.pop("output", 10)
    return await quota.reserve(make_job(job_id, tenant, prompt=prompt, output=output, limits=Limits(**fields)), now)


async def test_parallel_calls_cannot_pass_a_token_cap_together() -> None:
    """gateway A1: usage that is only added after completion lets a burst through."""
    quota = TokenBucketQuota()
    decisions = await asyncio.gather(
        *(take(quota, f"j{i}", prompt=20, output=40, tokens_per_minute=100) for i in range(20))
    )
    assert sum(decision.admitted for decision in decisions) == 1
    assert {decision.limit for decision in decisions if not decision.admitted} == {"tokens_per_minute"}


async def test_an_early_hang_up_pays_for_what_was_produced() -> None:
    """gateway A3: charged are the prompt and the tokens produced, the rest is returned, once."""
    quota = TokenBucketQuota()
    await take(quota, "x", prompt=100, output=500, tokens_per_minute=1000)
    assert quota.remaining(A, 0.0)["tokens"].remaining == 400
    figures = await quota.settle(JobId("x"), Charge(60, 40, 50), 0.0)
    assert figures["refunded"] == 450
    assert figures["remaining"]["tokens"].remaining == 850
    assert (await quota.settle(JobId("x"), Charge(60, 40, 50), 0.0))["refunded"] == 0
    assert quota.remaining(A, 0.0)["tokens"].remaining == 850


async def test_slots_of_stalled_calls_come_back() -> None:
    """gateway A5: a slot is freed by its settlement, or by its lease when the settlement never comes."""
    quota = TokenBucketQuota(lease_s=100.0)
    for i in range(4):
        assert (await take(quota, f"j{i}", concurrent=4)).admitted
    refused = await take(quota, "more", 50.0, concurrent=4)
    assert (refused.admitted, refused.limit, refused.retry_after_s) == (False, "concurrent", 1.0)
    await quota.settle(JobId("j0"), Charge(), 60.0)
    assert (await take(quota, "more", 60.0, concurrent=4)).admitted
    assert not (await take(quota, "no", 99.9, concurrent=4)).admitted
    assert (await take(quota, "yes", 100.0, concurrent=4)).admitted
    assert quota.concurrent(A) == 2


async def test_a_late_settlement_still_charges() -> None:
    quota = TokenBucketQuota(lease_s=10.0)
    await take(quota, "x", prompt=10, output=90, tokens_per_minute=600)
    await take(quota, "y", 11.0, concurrent=1)  # lets the lease of x run out
    assert (await quota.settle(JobId("x"), Charge(10, 0, 290), 11.0))["refunded"] == -200
    assert quota.concurrent(A) == 1, "its slot was freed before and is not freed twice"


async def test_a_reservation_nobody_settles_is_forgotten_in_the_end() -> None:
    quota = TokenBucketQuota(lease_s=10.0)
    await take(quota, "lost", tokens_per_minute=600)
    for now in (11.0, 41.0, 200.0, 300.0):
        await take(quota, f"other{now}", now, tenant="b", tokens_per_minute=600)
        await quota.settle(JobId(f"other{now}"), Charge(), now)
    assert quota.dump()["reservations"] == {}
    assert "a" not in kept(quota)


async def test_a_refusal_gives_back_every_earlier_gate() -> None:
    """gateway A7: refused by the concurrency cap must not eat a request-per-minute unit."""
    quota = TokenBucketQuota()
    limits = {"requests_per_minute": 2, "concurrent": 1}
    assert (await take(quota, "A", **limits)).admitted
    assert (await take(quota, "B", **limits)).limit == "concurrent"
    await quota.settle(JobId("A"), Charge(1, 0, 1), 0.0)
    assert (await take(quota, "C", **limits)).admitted


async def test_what_never_ran_costs_neither_tokens_nor_a_request() -> None:
    """gateway A7, later gates: shed from the queue or no worker, so nothing was served. security 67: zero is zero."""
    quota = TokenBucketQuota()
    limits = {"requests_per_minute": 1, "tokens_per_minute": 100}
    assert (await take(quota, "shed", **limits)).admitted
    assert (await quota.settle(JobId("shed"), Charge(), 0.0))["refunded"] == 20
    assert (await take(quota, "next", **limits)).admitted
    assert quota.remaining(A, 0.0)["requests"].remaining == 0


async def test_what_can_never_pass_says_so_and_how_to_pass() -> None:
    """gateway A9: an unpassable request is not told to come back later."""
    quota = TokenBucketQuota()
    refused = await take(quota, "x", prompt=50, output=1000, tokens_per_minute=200)
    assert (refused.admitted, refused.never, refused.retry_after_s) == (False, True, None)
    assert refused.limit == "tokens_per_minute"
    assert refused.message == (
        "It asks for up to 1050 tokens at once, but tokens_per_minute is 200; "
        "with its 50 prompt tokens, max_tokens can be at most 150."
    )
    assert (await take(quota, "y", prompt=50, output=150, tokens_per_minute=200)).admitted
    forbidden = await take(quota, "z", tenant="b", concurrent=0)
    assert (forbidden.never, forbidden.limit) == (True, "concurrent")
    forbidden = await take(quota, "z", tenant="b", requests_per_minute=0)
    assert (forbidden.never, forbidden.message) == (True, "requests_per_minute is 0.")


async def test_a_day_later_nothing_is_left() -> None:
    """gateway A11: counters do not add up day after day, and no state outlives its use."""
    quota = TokenBucketQuota()
    limits = {"requests_per_minute": 5, "tokens_per_minute": 1000}
    for day in range(3):
        now = day * 86_400.0
        for i in range(5):
            assert (await take(quota, f"{day}-{i}", now, **limits)).admitted
            await quota.settle(JobId(f"{day}-{i}"), Charge(10, 0, 10), now)
        assert not (await take(quota, f"{day}-no", now, **limits)).admitted
    for i in range(50):
        await take(quota, f"t{i}", 3 * 86_400.0, tenant=f"t{i}", **limits)
        await quota.settle(JobId(f"t{i}"), Charge(1, 0, 1), 3 * 86_400.0)
    for i in range(30):
        await take(quota, f"z{i}", 4 * 86_400.0, tenant="z", **limits)
    assert kept(quota) == ["z"]


async def test_one_figure_decides_and_is_shown() -> None:
    """gateway A13: what an admin sees and what is enforced is the same number."""
    quota = TokenBucketQuota()
    for i in range(3):
        decision = await take(quota, f"j{i}", requests_per_minute=3)
        assert decision.remaining == quota.remaining(A, 0.0)
    assert (await take(quota, "no", requests_per_minute=3)).remaining["requests"].remaining == 0
    assert quota.remaining(TenantId("nobody"), 0.0) == {}


async def test_the_limit_holds_for_every_call() -> None:
    """gateway A15: not only for the first one."""
    quota = TokenBucketQuota()
    assert [(await take(quota, f"j{i}", requests_per_minute=5)).admitted for i in range(20)] == [True] * 5 + [
        False
    ] * 15


async def test_overshoot_is_charged_and_repaid_by_time() -> None:
    """gateway A17: more ran than was reserved: taken too, into debt; the remaining header falls to 0."""
    quota = TokenBucketQuota()
    limits = {"tokens_per_minute": 600}
    await take(quota, "x", prompt=100, output=100, **limits)
    figures = await quota.settle(JobId("x"), Charge(100, 0, 800), 0.0)
    assert figures["refunded"] == -700
    assert figures["remaining"]["tokens"].remaining == 0
    refused = await take(quota, "y", **limits)
    assert refused.retry_after_s == pytest.approx((300 + 20) / 10, abs=0.01)
    assert (await take(quota, "y", refused.retry_after_s, **limits)).admitted


async def test_limits_count_tokens_not_calls() -> None:
    """gateway A19: at equal request rates the tenant with huge prompts runs out, the one with tiny ones does not."""
    quota = TokenBucketQuota()
    limits = {"requests_per_minute": 100, "tokens_per_minute": 1000}
    tiny = [await take(quota, f"t{i}", tenant="tiny", prompt=2, output=3, **limits) for i in range(20)]
    huge = [await take(quota, f"h{i}", tenant="huge", prompt=300, output=100, **limits) for i in range(20)]
    assert sum(decision.admitted for decision in tiny) == 20
    assert sum(decision.admitted for decision in huge) == 2


async def test_a_changed_limit_is_adopted_without_a_refill() -> None:
    quota = TokenBucketQuota()
    for i in range(4):
        assert (await take(quota, f"j{i}", requests_per_minute=4)).admitted
    assert not (await take(quota, "raised", requests_per_minute=60)).admitted
    assert (await take(quota, "raised", 1.01, requests_per_minute=60)).admitted
    for now in (61.0, 61.0):
        await take(quota, f"full{now}", now, requests_per_minute=60)
    assert quota.remaining(A, 61.0)["requests"].remaining > 50
    await take(quota, "lowered", 61.0, requests_per_minute=2)
    assert quota.remaining(A, 61.0)["requests"].remaining == 1


async def test_a_limit_set_while_a_request_runs_is_not_credited_by_it() -> None:
    quota = TokenBucketQuota()
    await take(quota, "before", prompt=10, output=500)
    await take(quota, "after", prompt=10, output=90, tokens_per_minute=100)
    await quota.settle(JobId("before"), Charge(10, 0, 0), 0.0)
    assert quota.remaining(A, 0.0)["tokens"].remaining == 0


async def test_reset_tells_when_the_quota_is_full() -> None:
    """gateway F1: limit, remaining and reset reflect the reservation."""
    quota = TokenBucketQuota()
    state = (await take(quota, "x", prompt=20, output=10, tokens_per_minute=60)).remaining["tokens"]
    assert (state.limit, state.remaining, state.reset_s) == (60, 30, 30.0)


@pytest.mark.parametrize("wrong_s", [90 * 86_400.0, 7 * 86_400.0, -90 * 86_400.0], ids=["quarter", "week", "back"])
async def test_a_clock_that_is_set_right_finds_what_the_month_has_spent(wrong_s: float) -> None:
    """A clock that was wrong for a moment neither refills a budget nor keeps the next months from refilling it."""
    wall = [datetime(2026, 11, 28, tzinfo=UTC).timestamp()]
    quota = TokenBucketQuota(wall=lambda: wall[0])

    async def left() -> int:
        return quota.remaining(A, 0.0)["tokens"].remaining

    async def spend(name: str, tokens: int) -> None:
        assert (await take(quota, name, prompt=tokens, output=0, tokens_per_month=1000)).admitted
        await quota.settle(JobId(name), Charge(tokens, 0, 0), 0.0)

    await spend("before", 600)
    assert (await take(quota, "open", prompt=300, output=0, tokens_per_month=1000)).admitted
    wall[0] += wrong_s
    await spend("meanwhile", 50)
    wall[0] -= wrong_s
    assert await left() == 100
    await quota.settle(JobId("open"), Charge(200, 0, 0), 0.0)
    assert await left() == 200
    wall[0] += 4 * 86_400.0  # December
    assert await left() == (950 if wrong_s == 7 * 86_400.0 else 1000)
    wall[0] += 31 * 86_400.0
    assert await left() == 1000


async def test_dump_and_load_keep_debt_slots_and_leases() -> None:
    """DESIGN §4: a swap must not refill a bucket."""
    old = TokenBucketQuota(lease_s=50.0)
    limits = {"tokens_per_minute": 60, "concurrent": 2}
    await take(old, "x", prompt=20, output=10, **limits)
    await take(old, "y", prompt=10, output=10, **limits)
    await old.settle(JobId("y"), Charge(10, 0, 70), 0.0)
    new = TokenBucketQuota(lease_s=50.0)
    new.load(json.loads(json.dumps(old.dump())))
    assert new.dump() == old.dump()
    assert new.concurrent(A) == 1
    refused = await take(new, "z", **limits)
    assert refused.retry_after_s == pytest.approx(20 + 50, abs=0.01)
    await take(new, "later", 51.0, tenant="b")
    assert new.concurrent(A) == 0, "the lease goes on running"
    for bad in ({"accounts": [3]}, {"accounts": [{"key": ["a"]}]}, {"accounts": 1}, {"reservations": {"x": {"y": 1}}}):
        with pytest.raises(ValueError, match="not the dump"):
            new.load(bad)


def test_bucket_never_exceeds_its_capacity_and_time_never_runs_back() -> None:
    bucket = Bucket.full(60, 10.0)
    bucket.take(5.0)
    bucket.refill(5.0)
    assert (bucket.level, bucket.at) == (55.0, 10.0)
    bucket.refill(1000.0)
    assert bucket.level == 60.0
    bucket.take(-10.0)
    assert bucket.level == 60.0
