"""Deadlines: who goes first, who is given up, floors for loose ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.queue import JobQueue
from policies.spi import Expiring
from policies.testing import always, make_job
from policies.types import Charge, Job, JobId, RequeueReason
from tests.policies.scheduling.driver import Driver, build

TIGHT = {"service_class": "interactive", "priority": 1}
LOOSE = {"service_class": "batch", "priority": 0}


def order(policy: Any, now: float = 0.0) -> list[str]:
    popped = []
    while (job := policy.pop(now, always)) is not None:
        popped.append(str(job.id))
    return popped


def test_the_earliest_deadline_goes_first() -> None:
    policy = build("edf", default_s=45.0)
    policy.push(make_job("own", "a", deadline=30.0, max_wait_s=1.0), 0.0)
    policy.push(make_job("by class", "b", max_wait_s=20.0), 0.0)
    policy.push(make_job("by default", "c"), 0.0)
    policy.push(make_job("came later", "b", max_wait_s=20.0, arrived_at=5.0), 5.0)
    picked = policy.pop(6.0, always)
    assert picked is not None
    assert picked.id == "by class"
    assert policy.explain(picked).picked_because == "earliest deadline of 4 queued that fits, 14.0 s left"
    assert order(policy) == ["came later", "own", "by default"]


def test_a_loosened_deadline_waits_longer() -> None:
    """The gateway lets callers loosen theirs only; here that simply means later."""
    policy = build("edf")
    policy.push(make_job("loosened", "a", deadline=300.0), 0.0)
    policy.push(make_job("usual", "a", deadline=20.0, arrived_at=1.0), 1.0)
    assert order(policy) == ["usual", "loosened"]


def test_what_cannot_make_it_is_named_once_and_removed_by_the_queue() -> None:
    policy = build("edf", startup_s=1.0, prefill_tokens_per_s=100.0)
    assert isinstance(policy, Expiring)
    queue = JobQueue(policy)
    queue.offer(make_job("small", "a", prompt=100, deadline=10.0), 0.0)  # latest start 8
    queue.offer(make_job("large", "b", prompt=500, deadline=10.0), 0.0)  # latest start 4
    queue.offer(make_job("patient", "c"), 0.0)
    queue.offer(make_job("impatient", "d", max_wait_s=6.0, deadline=60.0), 0.0)
    assert queue.next_expiry() == 4.0
    assert queue.expire(4.0) == [], "just in time"
    assert [job.id for job in queue.expire(4.1)] == ["large"]
    assert queue.next_expiry() == 6.0
    assert [job.id for job in queue.expire(9.0)] == ["impatient", "small"]
    assert queue.next_expiry() is None
    assert queue.expire(1e6) == []
    assert len(queue) == len(policy) == 1


def test_a_returned_job_is_not_given_up() -> None:
    queue = JobQueue(build("edf"))
    queue.offer(make_job("x", deadline=10.0), 0.0)
    assert queue.next(1.0, always) is not None
    queue.requeue(JobId("x"), 50.0, RequeueReason.WORKER_LOST)
    assert queue.expire(60.0) == []
    assert queue.next_expiry() is None
    assert queue.next(60.0, always) is not None


def test_a_discarded_job_is_not_named() -> None:
    policy = build("edf")
    for i in range(5):
        policy.push(make_job(f"j{i}", deadline=float(i)), 0.0)
    policy.discard(JobId("j0"))
    assert policy.next_expired() == 1.0
    assert [job.id for job in policy.expired(2.5)] == ["j1", "j2"]
    assert policy.expired(2.5) == []


def test_in_overload_what_is_late_is_dropped_and_the_rest_is_in_time() -> None:
    def load(policy: Any) -> Driver:
        driver = Driver(policy, slots=1, chunk=100)
        for i in range(200):  # ten seconds each, one every seven
            at = 7.0 * i
            driver.at(at, make_job(f"j{i}", f"t{i % 3}", prompt=100, output=9, deadline=at + 30, arrived_at=at), 9)
        return driver.go(1400)

    driver = load(build("edf"))
    assert all(done.started <= (done.job.deadline or 0) for done in driver.log)
    assert len(driver.gone) == pytest.approx(60, abs=10)
    late = [done for done in load(build("fcfs")).log if done.started > (done.job.deadline or 0)]
    assert len(late) > 100


def test_the_loose_class_keeps_its_floor() -> None:
    """Issue 4: tight deadlines keep coming for 110 % of capacity, none of them is ever late enough to drop."""

    def load(policy: Any) -> Driver:
        driver = Driver(policy, slots=4, chunk=1000)
        rng = random.Random(2)
        now, serial = 0.0, 0
        while now < 3000:
            serial += 1
            job = make_job(f"t{serial}", "tight", prompt=20, output=20, arrived_at=now, deadline=now + 600, **TIGHT)
            driver.at(now, job, 20)
            now += rng.expovariate(1.1 * 4 / 21)
        driver.backlog(
            lambda n, now: (make_job(f"l{n}", "loose", prompt=20, output=20, arrived_at=now, deadline=9e9, **LOOSE), 20)
        )
        return driver.go(3000)

    by_class = load(build("edf")).by_class
    assert by_class["batch"] < 0.05 * sum(by_class.values()), "before the flood has filled the slots"
    driver = load(build("edf", floors={"batch": 0.2}))
    assert driver.by_class["batch"] / sum(driver.by_class.values()) == pytest.approx(0.2, abs=0.02)
    assert "floor of class batch is due" in explain_of(build("edf", floors={"batch": 0.5}))


def explain_of(policy: Any) -> str:
    for i in range(3):
        policy.push(make_job(f"t{i}", "t", deadline=5.0, **TIGHT), 0.0)
    policy.push(make_job("loose", "l", deadline=500.0, **LOOSE), 0.0)
    job = policy.pop(0.0, always)
    assert job is not None
    assert job.id == "t0"
    job = policy.pop(0.0, always)
    assert job is not None
    assert job.id == "loose"
    return str(policy.explain(job).picked_because)


def test_credits_of_floors_move_on() -> None:
    old, new = (build("edf", floors={"batch": 0.5}) for _ in range(2))
    for policy in (old, new):
        policy.push(make_job("l", "l", deadline=500.0, **LOOSE), 0.0)
        policy.push(make_job("t", "t", deadline=5.0, **TIGHT), 0.0)
    old.charge(make_job("ran", "t", **TIGHT), Charge(100, 0, 0), 0.0, True)
    new.load(old.dump())
    assert order(new) == ["l", "t"]


JOBS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=30)


@given(JOBS)
def test_if_every_deadline_can_be_met_it_is(jobs: list[tuple[int, int]]) -> None:
    """Liu and Layland: equal jobs of one second, one slot. If any order is in time, this one is."""
    waiting = [
        make_job(f"j{i}", f"t{i % 3}", arrived_at=float(at), deadline=float(at + slack))
        for i, (at, slack) in enumerate(jobs)
    ]
    policy = build("edf")
    late = run(waiting, policy)
    model = run(waiting, _Sorted())
    assert late == model


class _Sorted:
    """The plain model."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def push(self, job: Job, now: float) -> None:
        self.jobs.append(job)

    def pop(self, now: float, fits: Any) -> Job | None:
        self.jobs.sort(key=lambda job: job.deadline or 0.0)
        return self.jobs.pop(0) if self.jobs else None


def run(jobs: list[Job], policy: Any) -> int:
    """How many start after their deadline, one per second."""
    left, now, late = sorted(jobs, key=lambda job: job.arrived_at), 0.0, 0
    for _ in range(100):
        while left and left[0].arrived_at <= now:
            policy.push(left.pop(0), now)
        job = policy.pop(now, always)
        late += job is not None and now > (job.deadline or 0.0)
        now += 1.0
    return late
