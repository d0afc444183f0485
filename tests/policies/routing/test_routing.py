"""Where a job goes."""

from __future__ import annotations

from typing import Any

from policies.routing.least_loaded import LeastLoaded
from policies.routing.prefix_affinity import PrefixAffinity, PrefixAffinityConfig
from policies.routing.round_robin import RoundRobin
from policies.testing import make_job
from policies.types import Job, PrefixKey, RouteDecision, WorkerView


def worker(name: str, inflight: int = 0, *hot: PrefixKey, **fields: Any) -> WorkerView:
    fields = {"max_running": 8, "total_blocks": 100, **fields}
    return WorkerView(name, "m", "p", inflight=inflight, hot_prefixes=frozenset(hot), **fields)


def chain(name: str, length: int) -> tuple[PrefixKey, ...]:
    return tuple(PrefixKey(f"{name}-{i}".encode()) for i in range(length))


def affinity(**config: Any) -> PrefixAffinity:
    return PrefixAffinity(PrefixAffinityConfig(**config))


def job(name: str, keys: tuple[PrefixKey, ...] = (), tenant: str = "a") -> Job:
    return make_job(name, tenant, prompt=len(keys) * 16 + 5, prefix_keys=keys)


def test_least_loaded_compares_shares_of_slots_then_tokens_then_names() -> None:
    policy = LeastLoaded()
    assert policy.choose(job("x"), [worker("a", 2, max_running=2), worker("b", 3)], 0.0) == RouteDecision("b", "load")
    assert policy.choose(job("x"), [worker("a", 1, inflight_tokens=900), worker("b", 1)], 0.0).worker == "b"
    assert policy.choose(job("x"), [worker("b"), worker("a")], 0.0).worker == "a"
    assert policy.choose(job("x"), [worker("a"), worker("b", waiting=2)], 0.0).worker == "a"
    assert policy.choose(job("x"), [worker("a", 9)], 0.0) == RouteDecision("a", "only")


def test_round_robin_survives_workers_that_come_and_go() -> None:
    policy = RoundRobin()
    names = ["a", "b", "c"]
    assert [policy.choose(job("x"), [worker(name) for name in names], 0.0).worker for _ in range(4)] == [*"abca"]
    assert policy.choose(job("x"), [worker("c"), worker("a")], 0.0).worker == "c"
    assert policy.choose(job("x"), [worker("b"), worker("a")], 0.0).worker == "a"


def test_a_prefix_goes_where_it_went_before() -> None:
    policy = affinity()
    keys = chain("s", 4)
    first = policy.choose(job("1", keys), [worker("a", 1), worker("b")], 0.0)
    assert first == RouteDecision("b", "load")
    again = policy.choose(job("2", keys[:3] + chain("other", 2)), [worker("a"), worker("b", 1)], 0.0)
    assert again == RouteDecision("b", "prefix", 48)


def test_a_workers_own_report_counts() -> None:
    keys = chain("s", 4)
    decision = affinity().choose(job("1", keys), [worker("a"), worker("b", 1, keys[2])], 0.0)
    assert decision == RouteDecision("b", "prefix", 48)


def test_the_whole_prompt_never_hits() -> None:
    keys = chain("s", 2)
    whole = make_job("x", prompt=32, prefix_keys=keys)
    assert affinity().choose(whole, [worker("a", 0, keys[1]), worker("b")], 0.0).prefix_hit_tokens == 31


def test_affinity_yields_when_its_worker_is_overloaded() -> None:
    """gateway E7: one hot prefix must not pile everything on one worker."""
    policy = affinity()
    keys = chain("hot", 4)
    inflight = dict.fromkeys("abcd", 0)
    hits = 0
    for i in range(200):
        decision = policy.choose(job(f"{i}", keys), [worker(name, n) for name, n in inflight.items()], 0.0)
        inflight[decision.worker] += 1
        hits += decision.reason == "prefix"
        if i >= 40:
            oldest = sorted(inflight, key=lambda name: -inflight[name])[i % 2]
            inflight[oldest] -= 1
        mean = sum(inflight.values()) / 4
        assert max(inflight.values()) <= 1.5 * mean + 2
    assert hits >= 160


def test_misses_spread_over_the_workers() -> None:
    """gateway E7: max/min in flight <= 2 under misses."""
    policy = affinity()
    inflight = {"a": 6, "b": 0, "c": 0}
    for i in range(30):
        chosen = policy.choose(job(f"{i}", chain(f"unique{i}", 3)), [worker(n, c) for n, c in inflight.items()], 0.0)
        inflight[chosen.worker] += 1
        assert chosen.reason == "load"
    assert max(inflight.values()) <= 2 * min(inflight.values())


def test_another_tenants_traffic_changes_no_choice() -> None:
    """gateway D9: keys are chained from the scope, so the same text of two tenants has different keys."""
    quiet, busy = affinity(), affinity()
    workers = [worker("a"), worker("b", 1)]
    for i in range(20):
        busy.choose(job(f"b{i}", chain("tenant-b", 4), "b"), [worker("b"), worker("a", 1)], 0.0)
    keys = chain("tenant-a", 4)
    assert busy.choose(job("x", keys), workers, 0.0) == quiet.choose(job("x", keys), workers, 0.0)


def test_the_index_is_bounded_and_forgets_the_ends_of_prompts_first() -> None:
    policy = affinity(index_keys=6)
    shared = chain("system", 2)
    for i in range(50):
        policy.choose(job(f"{i}", shared + chain(f"u{i}", 3)), [worker("a"), worker("b")], 0.0)
        assert len(policy) <= 6
    assert policy.choose(job("x", shared + chain("new", 3)), [worker("a"), worker("b")], 0.0).prefix_hit_tokens == 32
    policy.choose(job("long", chain("long", 100)), [worker("a"), worker("b")], 0.0)
    assert len(policy) <= 6
