"""Hypothesis drives the quota: it never over-admits, gives everything back, and its Retry-After works."""

from __future__ import annotations

import asyncio
import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies.quota.token_bucket import TokenBucketQuota
from policies.testing import make_job
from policies.types import Charge, Job, JobId, Limits, TenantId

REQUESTS, TOKENS, CONCURRENT = 7, 300, 3
LIMITS = Limits(requests_per_minute=REQUESTS, tokens_per_minute=TOKENS, concurrent=CONCURRENT)
LEASE_S = 40.0


class QuotaMachine(RuleBasedStateMachine):
    """Keeps its own record of what was taken and given back, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.quota = TokenBucketQuota(LEASE_S)
        self.now = 1000.0
        self.serial = 0
        self.open: dict[str, tuple[Job, float]] = {}
        self.taken: dict[str, list[tuple[float, int, int]]] = {"a": [], "b": []}

    def reserve(self, quota: TokenBucketQuota, job: Job, now: float):  # type: ignore[no-untyped-def]
        return asyncio.run(quota.reserve(job, now))

    @rule(tenant=st.sampled_from("ab"), prompt=st.integers(1, 150), output=st.integers(1, 250))
    def ask(self, tenant: str, prompt: int, output: int) -> None:
        self.serial += 1
        job = make_job(f"j{self.serial}", tenant, prompt=prompt, output=output, limits=LIMITS)
        before = json.dumps(self.quota.dump())
        decision = self.reserve(self.quota, job, self.now)
        assert decision.never == (job.total_tokens > TOKENS)
        if decision.admitted:
            self.open[job.id] = (job, self.now)
            self.taken[tenant].append((self.now, 1, job.total_tokens))
            return
        self.reserve(self.quota, job, self.now)
        if json.loads(before)["buckets"].get(tenant):
            levels = json.loads(json.dumps(self.quota.dump()))["buckets"][tenant]
            for name, bucket in json.loads(before)["buckets"][tenant].items():
                assert levels[name]["level"] >= bucket["level"], "a refusal has taken something"
        if decision.retry_after_s is not None:
            patient = TokenBucketQuota(LEASE_S)
            patient.load(self.quota.dump())
            later = self.reserve(patient, job, self.now + decision.retry_after_s)
            assert later.admitted or later.limit == "concurrent"

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0))
    def ask_again(self, pick: int) -> None:
        job, since = self.open[sorted(self.open)[pick % len(self.open)]]
        before = self.quota.concurrent(job.tenant)
        if self.now < since + LEASE_S:
            assert self.reserve(self.quota, job, self.now).admitted
            assert self.quota.concurrent(job.tenant) <= before

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0), part=st.sampled_from([0.0, 0.3, 1.0, 1.4]))
    def settle(self, pick: int, part: float) -> None:
        job, _ = self.open.pop(sorted(self.open)[pick % len(self.open)])
        ran = int(job.total_tokens * part)
        figures = asyncio.run(self.quota.settle(job.id, Charge(0, 0, ran), self.now))
        assert figures["refunded"] == job.total_tokens - ran
        self.taken[job.tenant].append((self.now, 0 if ran else -1, ran - job.total_tokens))
        assert asyncio.run(self.quota.settle(job.id, Charge(0, 0, 999), self.now))["refunded"] == 0

    @rule(seconds=st.sampled_from([0.25, 3.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def never_over_admits(self) -> None:
        for tenant, events in self.taken.items():
            requests = tokens = 0
            for at, request, amount in reversed(events):
                requests, tokens = requests + request, tokens + amount
                window = self.now - at
                assert requests <= REQUESTS * (1 + window / 60) + 1e-6
                if amount > 0 and request == 1:  # a settlement may overshoot; an admission may not lean on debt
                    reserved = sum(event[2] for event in events if event[1] == 1 and event[0] >= at)
                    given_back = -sum(min(0, event[2]) for event in events if event[0] >= at)
                    assert reserved <= TOKENS * (1 + window / 60) + given_back + 1e-6
            holding = [job for job, since in self.open.values() if job.tenant == tenant and self.now < since + LEASE_S]
            assert len(holding) <= CONCURRENT

    def teardown(self) -> None:
        for job_id in list(self.open):
            asyncio.run(self.quota.settle(JobId(job_id), Charge(), self.now))
        self.now += 3600.0
        for tenant in ("a", "b"):
            assert self.quota.concurrent(TenantId(tenant)) == 0
            for state in self.quota.remaining(TenantId(tenant), self.now).values():
                assert state.remaining == state.limit
        for i in range(10):
            self.reserve(self.quota, make_job(f"end{i}", "z", limits=Limits()), self.now)
        assert list(self.quota.dump()["buckets"]) == ["z"]


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
