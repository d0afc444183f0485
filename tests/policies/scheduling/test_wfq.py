"""Start-time fair queueing: tags by hand, the bound by property, predictions that are wrong."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.scheduling._lengths import Lengths
from policies.scheduling.wfq import WfqScheduler
from policies.testing import always, make_job
from policies.types import Charge, Job, RequeueReason
from tests.policies.scheduling.driver import TARIFF, Driver, build, widest


def wfq(predict: Any = "max") -> WfqScheduler:
    return WfqScheduler(TARIFF, Lengths(predict))


def pop(policy: WfqScheduler) -> Job:
    job = policy.pop(0.0, always)
    assert job is not None
    return job


def test_tags_by_hand() -> None:
    """SIGCOMM'96: start tag = max(virtual time, finish tag of the one before), finish = start + cost ÷ weight."""
    policy = wfq()
    for name in ("a1", "a2"):
        policy.push(make_job(name, "a", prompt=10, output=5), 0.0)  # cost 20
    for name in ("b1", "b2"):
        policy.push(make_job(name, "b", prompt=10, output=15, weight=4.0), 0.0)  # cost 40, 10 by weight
    assert pop(policy).id == "a1"
    assert pop(policy).id == "b1"
    assert policy.counters() == {"a": 20.0, "b": 10.0}
    job = pop(policy)
    assert (job.id, policy.explain(job).virtual_start) == ("b2", 10.0)
    policy.push(make_job("c1", "c", prompt=10, output=5), 0.0)
    assert policy.counters()["c"] == 10.0, "one that comes starts at the start tag dispatched last"
    assert [pop(policy).id, pop(policy).id] == ["c1", "a2"]


def test_after_an_idle_spell_everybody_starts_at_the_largest_tag() -> None:
    policy = wfq()
    policy.push(make_job("a1", "a", prompt=500, output=50), 0.0)
    job = pop(policy)
    policy.charge(job, Charge(500, 0, 50), 1.0, True)
    policy.push(make_job("b1", "b"), 2.0)
    policy.push(make_job("a2", "a"), 2.0)
    assert policy.counters() == {"a": 600.0, "b": 600.0}


def test_while_something_runs_a_newcomer_starts_at_virtual_time() -> None:
    policy = wfq()
    policy.push(make_job("a1", "a", prompt=500, output=50), 0.0)
    pop(policy)
    policy.push(make_job("b1", "b"), 0.0)
    policy.push(make_job("a2", "a"), 0.0)
    assert policy.counters() == {"a": 600.0, "b": 0.0}


def test_the_tag_is_corrected_by_what_ran() -> None:
    policy = wfq("max")
    policy.push(make_job("x", prompt=100, output=50), 0.0)
    job = pop(policy)
    assert policy.counters() == {"a": 200.0}
    policy.charge(job, Charge(100, 0, 20), 1.0, False)
    assert policy.counters() == {"a": 200.0}, "it was predicted"
    policy.charge(job, Charge(), 1.0, True)
    assert policy.counters() == {"a": 140.0}, "30 tokens were never produced"
    learning = wfq("mean")
    learning.push(make_job("one", prompt=10, output=50), 0.0)
    learning.charge(pop(learning), Charge(10, 0, 4), 0.0, True)
    learning.push(make_job("two", prompt=10, output=50), 0.0)
    job = pop(learning)
    before = learning.counters()["a"]
    learning.charge(job, Charge(10, 0, 4), 1.0, False)
    assert learning.counters()["a"] == before, "four were predicted"
    learning.charge(job, Charge(0, 0, 3), 1.0, False)
    assert learning.counters()["a"] == before + 6.0, "three more were not"


def test_a_retry_is_not_charged_twice() -> None:
    policy = wfq()
    policy.push(make_job("x", prompt=100, output=10), 0.0)
    job = pop(policy)
    policy.charge(job, Charge(100, 0, 4), 1.0, False)
    policy.requeue(job, 2.0, RequeueReason.WORKER_LOST)
    job = pop(policy)
    policy.charge(job, Charge(0, 0, 6), 3.0, True)
    assert policy.counters() == {"a": 120.0}


COSTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=6)
WEIGHT = st.sampled_from([1.0, 2.0, 5.0])
Costs = list[tuple[int, int]]


def race(policy: Any, slots: int, a: Costs, b: Costs, ra: float, rb: float, guess: int | None) -> tuple[Any, float]:
    """Two backlogged tenants; returns Wa/ra − Wb/rb after every step, and (D + 1)(la/ra + lb/rb)."""
    driver = Driver(policy, slots, chunk=7)

    def source(tenant: str, costs: Costs, weight: float) -> Any:
        def make(serial: int, now: float) -> tuple[Job, int]:
            prompt, output = costs[serial % len(costs)]
            most = output if guess is None else guess
            job = make_job(f"{tenant}{serial}", tenant, prompt=prompt, output=most, weight=weight, arrived_at=now)
            return job, output

        return make

    driver.backlog(source("a", a, ra))
    driver.backlog(source("b", b, rb))
    service = driver.service
    differences = [0.0, *(service.get("a", 0.0) / ra - service.get("b", 0.0) / rb for _ in driver.run(150))]

    def longest(costs: Costs) -> float:
        return float(max(prompt + 2 * max(output, guess or 0) for prompt, output in costs))

    return differences, (slots + 1) * (longest(a) / ra + longest(b) / rb)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), COSTS, COSTS, WEIGHT, WEIGHT)
def test_the_bound_holds_over_any_interval(slots: int, a: Costs, b: Costs, ra: float, rb: float) -> None:
    """SFQ(D): |Wi/ri − Wj/rj| ≤ (D + 1)(li/ri + lj/rj) while both wait."""
    differences, bound = race(build("wfq", predict="max"), slots, a, b, ra, rb, None)
    assert widest(differences) <= bound


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6), COSTS, COSTS, WEIGHT, WEIGHT, st.integers(1, 30), st.sampled_from(["max", "mean", "quantile"])
)
def test_wrong_predictions_keep_it_from_the_start_on(
    slots: int, a: Costs, b: Costs, ra: float, rb: float, guess: int, predict: str
) -> None:
    differences, bound = race(build("wfq", predict=predict), slots, a, b, ra, rb, guess)
    assert max(map(abs, differences)) <= bound


def test_fcfs_does_not_keep_the_bound() -> None:
    differences, bound = race(build("fcfs"), 2, [(10, 10)], [(10, 20)], 5.0, 1.0, None)
    assert widest(differences) > bound
