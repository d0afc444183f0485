"""Hypothesis drives the books: no level is ever over-admitted, everything comes back, and a Retry-After works."""

from __future__ import annotations

import asyncio
import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.quota.token_bucket import TokenBucketQuota
from policies.testing import make_job
from policies.types import Charge, Job, JobId, Limits, QuotaAccount, QuotaDecision, TokenPrice

LEASE_S = 40.0
PRICE = TokenPrice(input=3, cached=1, output=5)
LIMITS = {
    "organisation": Limits(
        requests_per_hour=40, tokens_per_hour=9000, kv_tokens=900, tokens_per_month=20_000, currency_per_month=60_000
    ),
    "tenant": Limits(requests_per_minute=7, tokens_per_minute=300, concurrent=3),
    "user": Limits(input_tokens_per_minute=200, output_tokens_per_day=2000, queued=2, requests_per_day=30),
}
RATES = {
    ("organisation", "requests_per_hour"): ("requests", 40, 3600.0),
    ("organisation", "tokens_per_hour"): ("tokens", 9000, 3600.0),
    ("tenant", "requests_per_minute"): ("requests", 7, 60.0),
    ("tenant", "tokens_per_minute"): ("tokens", 300, 60.0),
    ("user", "input_tokens_per_minute"): ("input", 200, 60.0),
    ("user", "output_tokens_per_day"): ("output", 2000, 86_400.0),
    ("user", "requests_per_day"): ("requests", 30, 86_400.0),
}
MONTH_END = 1_796_083_200.0  # 2026-12-01T00:00:00Z


def accounts(tenant: str, user: str) -> tuple[QuotaAccount, ...]:
    return (
        QuotaAccount("organisation", "", "o", LIMITS["organisation"]),
        QuotaAccount("tenant", tenant, tenant, LIMITS["tenant"]),
        QuotaAccount("user", tenant, user, LIMITS["user"]),
    )


def units(job: Job) -> dict[str, int]:
    return {"requests": 1, "tokens": job.total_tokens, "input": job.prompt_tokens, "output": job.max_tokens}


class QuotaMachine(RuleBasedStateMachine):
    """Keeps its own record, per account, of what was taken and given back, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.epoch = MONTH_END - 300.0  # the month ends in the middle of many runs
        self.quota = self.fresh()
        self.serial = 0
        self.open: dict[str, tuple[Job, float]] = {}
        self.waiting: set[str] = set()
        self.taken: dict[tuple[str, str, str], list[tuple[float, dict[str, int]]]] = {}

    def fresh(self) -> TokenBucketQuota:
        return TokenBucketQuota(LEASE_S, wall=lambda: self.wall)

    @property
    def wall(self) -> float:
        return self.epoch + self.now - 1000.0

    def reserve(self, quota: TokenBucketQuota, job: Job, now: float) -> QuotaDecision:
        return asyncio.run(quota.reserve(job, now))

    def note(self, job: Job, change: dict[str, int]) -> None:
        for account in job.accounts:
            key = (account.level, account.tenant, account.name)
            self.taken.setdefault(key, []).append((self.now, change))

    @rule(
        tenant=st.sampled_from("ab"), user=st.sampled_from("uv"), prompt=st.integers(1, 150), output=st.integers(1, 250)
    )
    def ask(self, tenant: str, user: str, prompt: int, output: int) -> None:
        self.serial += 1
        job = make_job(
            f"j{self.serial}", tenant, prompt=prompt, output=output, accounts=accounts(tenant, user), price=PRICE
        )
        before = self.quota.dump()
        decision = self.reserve(self.quota, job, self.now)
        assert decision.never == (job.total_tokens > 300)
        if decision.admitted:
            self.open[job.id] = (job, self.now)
            self.waiting.add(job.id)
            self.note(job, units(job))
            return
        assert decision.level in LIMITS
        assert self.reserve(self.quota, job, self.now) == decision, "a refusal has taken something"
        known = {tuple(account["key"]): account for account in before["accounts"]}
        for account in self.quota.dump()["accounts"]:
            old = known.get(tuple(account["key"]))
            for name, bucket in (old["buckets"] if old else {}).items():
                assert account["buckets"][name]["level"] >= bucket["level"], "a refusal has taken something"
        if decision.retry_after_s is not None:
            patient, now = self.fresh(), self.now
            patient.load(json.loads(json.dumps(self.quota.dump())))
            self.now = now + decision.retry_after_s
            later = self.reserve(patient, job, self.now)
            assert later.admitted or later.limit in ("concurrent", "queued", "kv_tokens") or later.retry_after_s == 1.0
            self.now = now

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0))
    def ask_again(self, pick: int) -> None:
        job, since = self.open[sorted(self.open)[pick % len(self.open)]]
        before = self.quota.concurrent(job.tenant)
        if self.now < since + LEASE_S:
            assert self.reserve(self.quota, job, self.now).admitted
            assert self.quota.concurrent(job.tenant) <= before

    @precondition(lambda self: self.waiting)
    @rule(pick=st.integers(0))
    def start(self, pick: int) -> None:
        name = sorted(self.waiting)[pick % len(self.waiting)]
        self.waiting.discard(name)
        self.quota.started(JobId(name))
        self.quota.started(JobId(name))

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0), part=st.sampled_from([0.0, 0.3, 1.0, 1.4]))
    def settle(self, pick: int, part: float) -> None:
        job, since = self.open.pop(sorted(self.open)[pick % len(self.open)])
        self.waiting.discard(job.id)
        usage = Charge(int(job.prompt_tokens * min(1.0, part)), 0, int(job.max_tokens * part))
        figures = asyncio.run(self.quota.settle(job.id, usage, self.now))
        if self.now >= since + 4 * LEASE_S:  # forgotten: what was taken stays taken, as far as it has not refilled
            assert figures["refunded"] == 0
            return
        assert figures["refunded"] == job.total_tokens - usage.total
        ran = {
            "requests": int(usage.total > 0),
            "tokens": usage.total,
            "input": usage.prompt,
            "output": usage.output,
        }
        self.note(job, {unit: ran[unit] - amount for unit, amount in units(job).items()})
        assert asyncio.run(self.quota.settle(job.id, Charge(0, 0, 999), self.now))["refunded"] == 0

    @rule(seconds=st.sampled_from([0.25, 3.0, 11.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def swap(self) -> None:
        new = self.fresh()
        new.load(json.loads(json.dumps(self.quota.dump())))
        assert new.dump() == self.quota.dump()
        self.quota = new

    @invariant()
    def never_over_admits(self) -> None:
        for (level, limit), (unit, most, window) in RATES.items():
            for key, events in self.taken.items():
                if key[0] != level:
                    continue
                # In any interval at most a full bucket, its refill and what came back can be reserved.
                reserved = back = 0
                for at, change in reversed(events):
                    amount = change[unit]
                    if change["requests"] == 1:
                        reserved += amount
                        assert reserved <= most * (1 + (self.now - at) / window) + back + 1e-6, (limit, key)
                    else:
                        back -= min(0, amount)

    @invariant()
    def holds_no_more_than_allowed(self) -> None:
        alive = [job for job, since in self.open.values() if self.now < since + LEASE_S]
        assert sum(job.total_tokens for job in alive) <= 900
        for tenant in "ab":
            assert sum(job.tenant == tenant for job in alive) <= 3
            for user in "uv":
                mine = [job for job in alive if job.tenant == tenant and job.accounts[2].name == user]
                assert sum(job.id in self.waiting for job in mine) <= 2

    def teardown(self) -> None:
        for job_id in list(self.open):
            asyncio.run(self.quota.settle(JobId(job_id), Charge(), self.now))
        self.now += 86_400.0 * 32
        for tenant in "ab":
            for user in "uv":
                for status in self.quota.status(accounts(tenant, user), self.now):
                    assert status.remaining == status.maximum, status
        for i in range(20):
            self.reserve(self.quota, make_job(f"end{i}", "z", limits=Limits()), self.now)
        assert [account["key"][2] for account in self.quota.dump()["accounts"]] == ["z"]


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
