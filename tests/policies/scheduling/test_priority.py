"""Priorities: who goes first, floors under a flood, ageing, reserved slots."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.spi import PolicyConfigError
from policies.testing import always, make_job
from policies.types import Charge, Job, JobId, RequeueReason
from tests.policies.scheduling.driver import Driver, build

HIGH = {"service_class": "interactive", "priority": 1}
LOW = {"service_class": "batch", "priority": 0}


def order(policy: Any, now: float = 0.0) -> list[str]:
    popped = []
    while (job := policy.pop(now, always)) is not None:
        popped.append(str(job.id))
    return popped


def test_higher_first_and_fair_inside() -> None:
    policy = build("priority")
    for i in range(2):
        policy.push(make_job(f"low{i}", "l", **LOW), 0.0)
        policy.push(make_job(f"a{i}", "a", prompt=100, **HIGH), 0.0)
        policy.push(make_job(f"b{i}", "b", prompt=100, **HIGH), 0.0)
    policy.push(make_job("top", "t", priority=7), 0.0)
    assert order(policy) == ["top", "a0", "b0", "a1", "b1", "low0", "low1"]


def test_a_low_job_runs_when_no_high_one_fits() -> None:
    policy = build("priority")
    policy.push(make_job("big", "a", prompt=900, **HIGH), 0.0)
    policy.push(make_job("low", "b", **LOW), 0.0)
    job = policy.pop(0.0, lambda job: job.prompt_tokens < 100)
    assert job is not None
    assert job.id == "low"
    assert policy.explain(job).picked_because.startswith("priority 0; least service/weight")


def flood(policy: Any, seconds: int, low_rate: float = 1.0) -> Driver:
    """High-priority jobs for 110 % of what four slots can do; low ones at ``low_rate`` times what they can do."""
    driver = Driver(policy, slots=4, chunk=1000)
    rng = random.Random(5)
    for tenant, rate, fields in (("high", 1.1, HIGH), ("low", low_rate, LOW)):
        now, serial = 0.0, 0
        while now < seconds:
            serial += 1
            output = rng.randrange(10, 31)  # 20 and one step for the prompt, on average
            job = make_job(f"{tenant}{serial}", tenant, prompt=20, output=40, arrived_at=now, **fields)
            driver.at(now, job, output)
            now += rng.expovariate(rate * 4 / 21)
    return driver


def low_share(driver: Driver) -> float:
    low = driver.service.get("low", 0.0)
    return low / (low + driver.service["high"])


@pytest.mark.parametrize(
    ("floors", "share"), [({"batch": 0.2}, 0.2), ({"0": 0.1}, 0.1), ({"batch": 0.1, "0": 0.2}, 0.3)]
)
def test_the_low_class_keeps_its_floor_under_a_flood(floors: dict[str, float], share: float) -> None:
    """gateway B3: the high band is offered at 110 % of capacity. Floors are named by class or priority and add up."""
    driver = flood(build("priority", floors=floors, ageing_s=None), 3000)
    marks = [
        (driver.service.get("low", 0.0), driver.service.get("high", 0.0)) for now in driver.run(3000) if now % 500 == 0
    ]
    for before, after in pairwise(marks):
        part = (after[0] - before[0]) / (after[0] - before[0] + after[1] - before[1])
        assert share - 0.03 <= part <= share + 0.05


def test_without_a_floor_it_starves_until_it_ages() -> None:
    starving = flood(build("priority", ageing_s=None), 3000).go(3000)
    assert low_share(starving) < 0.05
    ageing = flood(build("priority", ageing_s=100.0), 3000).go(3000)
    assert low_share(ageing) > 0.3, "aged jobs compete as equals"


def test_a_trickle_below_the_floor_gets_all_it_asks_at_once() -> None:
    driver = flood(build("priority", floors={"batch": 0.2}, ageing_s=None), 3000, low_rate=0.05).go(3000)
    waits = [done.wait for done in driver.log if done.job.tenant == "low"]
    assert len(waits) > 20
    # One slot falls free every five steps; it has to earn at most one job first, a fifth of what runs meanwhile.
    assert sorted(waits)[int(0.95 * len(waits))] <= 80


def test_a_job_moves_up_after_its_wait() -> None:
    policy = build("priority", ageing_s=10.0)
    policy.push(make_job("mid", "m", priority=1, arrived_at=0.0), 0.0)
    policy.push(make_job("high", "h", priority=2, arrived_at=0.0), 0.0)
    policy.push(make_job("low", "l", arrived_at=0.0), 0.0)
    picked = policy.pop(9.9, always)
    assert picked is not None
    assert picked.id == "high"
    for i in range(2, 5):
        policy.push(make_job(f"high{i}", "h", priority=2, arrived_at=10.0), 10.0)
    assert policy.pop(10.0, lambda job: job.id == "high2") is not None
    picked = policy.pop(10.0, always)  # mid is up with them now, and was served less
    assert picked is not None
    assert picked.id == "mid"
    assert policy.explain(picked).picked_because.startswith("priority 2, aged from 1; ")
    assert order(policy, 19.0) == ["high3", "high4", "low"]
    policy.push(make_job("low2", "l", arrived_at=0.0), 19.0)
    picked = policy.pop(20.0, always)
    assert picked is not None
    assert policy.explain(picked).picked_because.startswith("priority 2, aged from 0; "), "two steps up"


def test_a_moved_job_can_be_discarded_returned_and_charged() -> None:
    policy = build("priority", ageing_s=10.0)
    for name in ("one", "two"):
        policy.push(make_job(name, name, arrived_at=0.0), 0.0)
    policy.push(make_job("high", "h", priority=1, arrived_at=0.0), 0.0)
    assert policy.pop(10.0, lambda job: job.id == "one") is not None
    assert policy.discard(JobId("two"))
    assert not policy.discard(JobId("two"))
    policy.requeue(make_job("one", "one", arrived_at=0.0), 11.0, RequeueReason.WORKER_LOST)
    assert len(policy) == 2
    picked = policy.pop(11.0, lambda job: job.id == "one")
    assert picked is not None
    policy.charge(picked, Charge(10, 0, 3), 12.0, True)
    assert policy.dump()["prepaid"] == {}


def bulk_and_one(caps: dict[str, int] | None) -> float:
    """Bulk work for every slot, then one interactive request; returns its wait."""
    driver = Driver(build("priority"), slots=8, chunk=1000, queue_options={"max_running_per_class": caps})
    driver.backlog(lambda n, now: (make_job(f"b{n}", "bulk", prompt=50, output=200, arrived_at=now, **LOW), 200))
    driver.go(50)
    driver.offer(make_job("now", "user", arrived_at=driver.now, **HIGH), 5)
    driver.go(300)
    return next(done.wait for done in driver.log if done.job.id == "now")


def test_reserved_slots_let_the_high_class_start_while_bulk_fills_the_rest() -> None:
    """gateway B11: priority decides who starts, it stops nothing; slots are reserved by a cap on the bulk class."""
    assert bulk_and_one(None) > 100
    assert bulk_and_one({"batch": 6}) <= 1


def test_state_of_each_priority_moves_on_and_others_get_it_above_its_level() -> None:
    old = build("priority", floors={"batch": 0.2})
    tenants = (("a", HIGH, 9000), ("b", HIGH, 100), ("l", LOW, 50), ("m", LOW, 10))
    for name, fields, _ in tenants:
        for i in range(3):
            old.push(make_job(f"{name}{i}", name, **fields), 0.0)
    for name, fields, used in tenants:
        old.charge(make_job(f"{name}-before", name, **fields), Charge(used, 0, 0), 0.0, True)
    new = build("priority", floors={"batch": 0.2})
    state = old.dump()
    new.load(state)
    for job in old.drain():
        new.push(job, 1.0)
    assert new.dump()["bands"] == state["bands"]
    assert [name for name in order(new) if name[0] in "ab"] == ["b0", "b1", "b2", "a0", "a1", "a2"]
    fair = build("vtc")
    fair.load(state)
    assert fair.counters()["a"] == 8900.0
    assert fair.counters()["b"] == 0.0
    assert fair.counters()["m"] == 0.0
    with pytest.raises(ValueError, match="'bands' must map"):
        new.load({"bands": [1]})


def test_floors_are_checked() -> None:
    with pytest.raises(PolicyConfigError, match=r"add up to 1\.1"):
        build("priority", floors={"a": 0.6, "b": 0.5})


COST = st.tuples(st.integers(1, 40), st.integers(1, 20))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.lists(COST, min_size=1, max_size=4), st.lists(COST, min_size=1, max_size=4))
def test_the_floor_holds_at_every_moment(slots: int, high: list[tuple[int, int]], low: list[tuple[int, int]]) -> None:
    """f·W − (D + 2)·L while both wait, whatever the jobs cost."""
    driver = Driver(build("priority", floors={"batch": 0.3}, ageing_s=None, predict="max"), slots, chunk=9)

    def source(tenant: str, costs: list[tuple[int, int]], fields: dict[str, Any]) -> Any:
        def make(n: int, now: float) -> tuple[Job, int]:
            prompt, output = costs[n % len(costs)]
            job = make_job(f"{tenant}{n}", tenant, prompt=prompt, output=output, arrived_at=now, **fields)
            return job, output

        return make

    driver.backlog(source("high", high, HIGH))
    driver.backlog(source("low", low, LOW))
    longest = max(prompt + 2 * output for prompt, output in [*high, *low])
    for _ in driver.run(200):
        whole = sum(driver.service.values())
        assert driver.service.get("low", 0.0) >= 0.3 * whole - (slots + 2) * longest
