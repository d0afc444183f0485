"""Deficit round robin: turns by hand, the bound by property, tokens instead of requests."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.testing import always, make_job
from policies.types import Charge, Job
from tests.policies.scheduling.driver import build, widest


def pop(policy: Any) -> Job:
    job = policy.pop(0.0, always)
    assert job is not None
    return job


def fill(policy: Any, tenant: str, count: int, cost: int, **fields: Any) -> None:
    for i in range(count):
        policy.push(make_job(f"{tenant}{i}", tenant, prompt=cost, output=0, **fields), 0.0)


def test_each_in_turn_for_its_quantum() -> None:
    policy = build("drr", quantum=100, predict="max")
    fill(policy, "a", 6, 50)
    fill(policy, "b", 6, 100, weight=2.0)
    fill(policy, "c", 6, 30)
    order = [pop(policy).tenant for _ in range(16)]
    # a: 50 + 50. b: 100 + 100. c: 30 four times, 20 over: that is 20 less next time.
    assert order == [*"aabbcccc", *"aabbcc", *"aa"]
    assert policy.explain(make_job("other")).picked_because == "not picked last"


def test_one_that_joins_comes_last_in_the_round_and_brings_no_credit() -> None:
    policy = build("drr", quantum=100, predict="max")
    fill(policy, "a", 9, 100)
    fill(policy, "b", 9, 100)
    assert [pop(policy).tenant for _ in range(5)] == [*"ababa"]
    fill(policy, "new", 9, 100)
    assert [pop(policy).tenant for _ in range(5)] == ["b", "new", "a", "b", "new"]


def test_a_debt_outlives_an_empty_line() -> None:
    policy = build("drr", quantum=100, predict="none")
    fill(policy, "a", 1, 10)
    fill(policy, "b", 9, 100)
    policy.charge(pop(policy), Charge(10, 0, 145), 0.0, True)  # 300 in all: three rounds, and last in the fourth
    fill(policy, "a", 1, 10)
    assert [pop(policy).tenant for _ in range(6)] == [*"bbbbab"]


def test_rounds_in_which_nobody_may_run_are_skipped() -> None:
    policy = build("drr", quantum=0.001, predict="max")
    for tenant in ("a", "b"):
        fill(policy, tenant, 3, 1000)
    asked = 0

    def fits(job: Job) -> bool:
        nonlocal asked
        asked += 1
        return True

    for _ in range(6):
        assert policy.pop(0.0, fits) is not None
    assert asked == 6


COSTS = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 20_000)), min_size=1, max_size=6)
WEIGHTS = st.floats(0.01, 100, allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(COSTS, COSTS, WEIGHTS, WEIGHTS, st.one_of(st.floats(0.5, 50), st.floats(50, 50_000)))
def test_the_bound_holds_over_any_interval(
    a: list[int], b: list[int], one: float, other: float, quantum: float
) -> None:
    """|Wi/Qi − Wj/Qj| ≤ 1 + L/Qi + L/Qj while both wait; a third that comes and goes does not matter."""
    policy = build("drr", quantum=quantum, predict="max")
    weights = {"a": one, "b": other, "c": 1.0}
    costs = {"a": a, "b": b, "c": [50]}
    work = dict.fromkeys(weights, 0)
    differences = [0.0]
    serial = 0

    def push(tenant: str) -> None:
        nonlocal serial
        serial += 1
        cost = costs[tenant][serial % len(costs[tenant])]
        policy.push(make_job(f"j{serial}", tenant, prompt=cost, output=0, weight=weights[tenant]), 0.0)

    for tenant in "aabb":
        push(tenant)
    for step in range(300):
        job = pop(policy)
        work[job.tenant] += job.prompt_tokens
        differences.append(work["a"] / (quantum * one) - work["b"] / (quantum * other))
        if job.tenant != "c":
            push(job.tenant)
        if step % 7 == 0:
            push("c")
    longest = max(*a, *b)
    bound = 1 + longest / (quantum * one) + longest / (quantum * other)
    assert widest(differences) <= bound * (1 + 1e-9)
