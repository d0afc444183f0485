"""Shortest first: mean waits, learning, and nobody waiting for ever."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.testing import always, make_job
from policies.types import Charge, JobId, RequeueReason
from tests.policies.scheduling.driver import Driver, build


def order(policy: Any) -> list[str]:
    popped = []
    while (job := policy.pop(0.0, always)) is not None:
        popped.append(str(job.id))
    return popped


def test_cost_by_weight_decides_and_waiting_counts() -> None:
    policy = build("sjf", predict="max", ageing=10.0)
    policy.push(make_job("long", "a", prompt=200, output=0), 0.0)
    policy.push(make_job("short", "b", prompt=50, output=0), 0.0)
    policy.push(make_job("heavy", "c", prompt=160, output=0, weight=4.0), 0.0)
    policy.push(make_job("later", "d", prompt=60, output=0, arrived_at=10.0), 10.0)
    policy.push(make_job("too late", "e", prompt=60, output=0, arrived_at=15.0), 15.0)
    assert order(policy) == ["heavy", "short", "later", "long", "too late"]


def test_it_learns_how_long_a_tenants_answers_are() -> None:
    policy = build("sjf")
    for i in range(5):
        for tenant, output in (("brief", 4), ("wordy", 200)):
            policy.push(make_job(f"{tenant}{i}", tenant, output=256), 0.0)
            job = policy.pop(0.0, lambda job, tenant=tenant: job.tenant == tenant)
            assert job is not None
            policy.charge(job, Charge(10, 0, output), 0.0, True)
    policy.push(make_job("w", "wordy", output=256), 1.0)
    policy.push(make_job("b", "brief", output=256), 1.0)
    job = policy.pop(1.0, always)
    assert job is not None
    assert job.id == "b"
    assert policy.explain(job).picked_because == (
        "shortest of 2 queued that fits, waits count: 4 output tokens expected"
    )
    successor = build("sjf")
    successor.load(policy.dump())
    successor.push(make_job("w2", "wordy", output=256), 1.0)
    successor.push(make_job("b2", "brief", output=256), 1.0)
    assert order(successor) == ["b2", "w2"]


def test_a_returned_job_goes_before_its_tenants_shorter_ones_but_not_before_others() -> None:
    policy = build("sjf", predict="max")
    policy.push(make_job("long", "a", prompt=500, output=0), 0.0)
    job = policy.pop(0.0, always)
    assert job is not None
    policy.push(make_job("short", "a", prompt=10, output=0), 0.0)
    policy.push(make_job("other", "b", prompt=100, output=0), 0.0)
    policy.requeue(job, 1.0, RequeueReason.WORKER_LOST)
    assert order(policy) == ["other", "long", "short"]
    assert policy.discard(JobId("long")) is False


def load(policy: Any, rate: float) -> Driver:
    """Short jobs of 9 seconds at a rate per second, one of 61 seconds per 50 of them; one slot."""
    rng = random.Random(3)
    driver = Driver(policy, slots=1, chunk=1000)
    now = 0.0
    for i in range(int(rate * 3000)):
        now += rng.expovariate(rate)
        driver.at(now, make_job(f"s{i}", f"t{i % 5}", prompt=10, output=8, arrived_at=now), 8)
        if i % 50 == 0:
            driver.at(now, make_job(f"long{i}", "long", prompt=500, output=60, arrived_at=now), 60)
    return driver.go(3000)


def test_the_mean_wait_is_less_than_first_come_first_served() -> None:
    def mean(policy: Any) -> float:
        waits = [done.wait for done in load(policy, 0.095).log]
        return sum(waits) / len(waits)

    assert mean(build("sjf", ageing=1.0)) < 0.75 * mean(build("fcfs"))


def test_without_ageing_the_long_starve_and_with_it_they_do_not() -> None:
    """Issue 4: no starvation in overload; a long job's wait is bounded by what came soon after it."""
    starving, ageing = (load(build("sjf", ageing=rate), 0.125).log for rate in (0.0, 4.0))
    assert sum(done.job.tenant == "long" for done in starving) <= 2
    long = [done for done in ageing if done.job.tenant == "long"]
    assert len(long) >= 5
    for done in long:  # its key is 620 against 26: 148.5 seconds of waiting
        before = ageing[: ageing.index(done)]
        assert max(other.job.arrived_at for other in before) <= done.job.arrived_at + 150


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from([1.0, 4.0]), st.integers(0, 9)), min_size=2, max_size=40)
)
def test_nobody_is_overtaken_by_what_comes_too_late(jobs: list[tuple[int, float, int]]) -> None:
    """A job is overtaken only by jobs that come within (its cost ÷ weight) ÷ ageing after it."""
    ageing = 16.0
    policy = build("sjf", predict="max", ageing=ageing)
    now, gone, everything = 0.0, set(), []
    for i, (cost, weight, gap) in enumerate(jobs):
        now += gap
        job = make_job(f"j{i}", f"t{i % 4}", prompt=cost, output=0, weight=weight, arrived_at=now)
        policy.push(job, now)
        everything.append(job)
        if i % 2:
            picked = policy.pop(now, always)
            assert picked is not None
            gone.add(picked.id)
            for other in everything:
                if other.id not in gone:
                    within = other.prompt_tokens / other.weight / ageing
                    assert picked.arrived_at <= other.arrived_at + within
