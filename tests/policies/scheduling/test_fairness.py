"""What all fair policies promise alike: shares of tokens by weight, least served first, no wait behind a flood."""

from __future__ import annotations

from typing import Any

import pytest

from policies.scheduling import _counters
from policies.testing import always, make_job
from policies.types import Charge, Job, JobId, RequeueReason
from tests.policies.scheduling.driver import Driver, build

FAIR = ["vtc", "wfq", "drr", "locality", "priority", "hierarchical"]


def pop(policy: Any) -> Job:
    job = policy.pop(0.0, always)
    assert job is not None
    return job


@pytest.mark.parametrize("name", FAIR)
def test_shares_are_of_tokens_and_not_of_requests(name: str) -> None:
    """engine J3: 32 against 2,048 input tokens, both backlogged."""
    driver = Driver(build(name), slots=4, chunk=256)
    driver.backlog(lambda n, now: (make_job(f"s{n}", "short", prompt=32, output=16, arrived_at=now), 16), depth=40)
    driver.backlog(lambda n, now: (make_job(f"l{n}", "long", prompt=2048, output=16, arrived_at=now), 16))
    driver.go(4000)
    share = driver.service["short"] / sum(driver.service.values())
    requests = sum(done.job.tenant == "short" for done in driver.log) / len(driver.log)
    assert share == pytest.approx(0.5, abs=0.03)
    assert requests > 0.9


@pytest.mark.parametrize("name", FAIR)
def test_least_served_first(name: str) -> None:
    """engine J5: three tenants with usage 1:2:4; the order must follow it."""
    policy = build(name)
    for tenant in ("four", "one", "two"):
        policy.push(make_job(f"{tenant}-before", tenant), 0.0)
    used = {"one": 1000, "two": 2000, "four": 4000}
    for _ in range(3):
        job = pop(policy)
        policy.push(make_job(f"{job.tenant}-after", job.tenant), 0.0)
        policy.charge(job, Charge(10, 0, used[job.tenant]), 1.0, True)
    assert [pop(policy).tenant for _ in range(3)] == ["one", "two", "four"]


@pytest.mark.parametrize("name", FAIR)
def test_weights_are_honoured(name: str) -> None:
    """Issue 4: 1:2:4, all backlogged."""
    driver = Driver(build(name), slots=6, chunk=64)
    for weight in (1.0, 2.0, 4.0):
        tenant = f"w{weight:.0f}"

        def make(n: int, now: float, tenant: str = tenant, weight: float = weight) -> tuple[Job, int]:
            return make_job(f"{tenant}-{n}", tenant, prompt=100, output=30, weight=weight, arrived_at=now), 10 + n % 20

        driver.backlog(make)
    driver.go(6000)
    whole = sum(driver.service.values())
    for weight in (1, 2, 4):
        assert driver.service[f"w{weight}"] / whole == pytest.approx(weight / 7, rel=0.05)


@pytest.mark.parametrize("name", FAIR)
def test_a_flood_does_not_delay_a_light_tenant(name: str) -> None:
    """gateway B1: 200 long jobs of one tenant at once, a call every now and then of another, equal weight."""
    driver = Driver(build(name), slots=8, chunk=64)
    for i in range(200):
        driver.at(0.0, make_job(f"flood{i}", "flood", prompt=500, output=100), 100)
    for i in range(40):
        driver.at(50.0 * i, make_job(f"light{i}", "light", prompt=50, output=10, arrived_at=50.0 * i), 10)
    driver.go(2000)
    waits = [done.wait for done in driver.log if done.job.tenant == "light"]
    assert len(waits) == 40
    assert max(waits) <= 109, "it gets the next slot that falls free, and a flood job runs for 108 steps"


def test_fcfs_makes_the_light_tenant_wait() -> None:
    driver = Driver(build("fcfs"), slots=8, chunk=64)
    for i in range(200):
        driver.at(0.0, make_job(f"flood{i}", "flood", prompt=500, output=100), 100)
    driver.at(50.0, make_job("light", "light", prompt=50, output=10, arrived_at=50.0), 10)
    driver.go(3000)
    assert driver.log[-1].job.tenant == "light"
    assert driver.log[-1].wait > 2000


@pytest.mark.parametrize("name", FAIR)
def test_idling_saves_nothing_up(name: str) -> None:
    """A tenant that comes late gets its share from then on, not what the others had meanwhile."""
    driver = Driver(build(name), slots=4, chunk=64)
    driver.backlog(lambda n, now: (make_job(f"a{n}", "a", prompt=50, output=20, arrived_at=now), 20))
    driver.go(1000)
    before = driver.service["a"]
    driver.backlog(lambda n, now: (make_job(f"b{n}", "b", prompt=50, output=20, arrived_at=now), 20))
    driver.go(1000)
    since = driver.service["a"] - before
    assert driver.service["b"] / (driver.service["b"] + since) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("name", FAIR)
def test_one_alone_gets_everything(name: str) -> None:
    """Work conservation: never a free slot while something waits."""
    driver = Driver(build(name), slots=4, chunk=64)
    driver.backlog(lambda n, now: (make_job(f"a{n}", "a", prompt=50, output=20, arrived_at=now), 20))
    for _ in driver.run(200):
        assert driver.filled == 4


@pytest.mark.parametrize("old", FAIR)
@pytest.mark.parametrize("new", FAIR)
def test_a_swap_keeps_debts(old: str, new: str) -> None:
    """Issue 4: counters are carried over where both sides know them; what is prepaid is not paid again."""
    first = build(old)
    for i in range(6):
        for tenant in ("greedy", "modest"):
            first.push(make_job(f"{tenant}{i}", tenant, prompt=100), 0.0)
    started = []
    for tenant in ("greedy", "modest") * 2:
        job = first.pop(0.0, lambda job, tenant=tenant: job.tenant == tenant)
        assert job is not None
        started.append(job)
    for job in started:
        if job.tenant == "greedy":
            first.charge(job, Charge(100, 0, 50_000), 1.0, True)
        else:
            first.charge(job, Charge(60, 0, 0), 1.0, False)
    second = build(new)
    second.load(first.dump())
    for job in first.drain():
        second.push(job, 2.0)
    for job in started:
        if job.tenant == "modest":
            second.charge(job, Charge(40, 0, 10), 2.0, True)
    left = [pop(second).tenant for _ in range(8)]
    assert left == ["modest"] * 4 + ["greedy"] * 4
    service = second.dump()["service"]
    assert service["greedy"] - service["modest"] == pytest.approx(200_000, rel=0.01)


@pytest.mark.parametrize("name", [*FAIR, "fcfs", "edf"])
def test_state_goes_round_trip(name: str) -> None:
    """dump → load → drain → push: the same decisions as the one that stayed."""

    def filled() -> tuple[Any, list[Job]]:
        policy = build(name)
        for i in range(30):
            job = make_job(f"j{i:02}", f"t{i % 3}", prompt=7 + 11 * i % 40, weight=1.0 + i % 3, user=f"u{i % 2}")
            policy.push(job, 0.0)
        running = [pop(policy) for _ in range(8)]
        for job in running[:4]:
            policy.charge(job, Charge(5, 2, 3), 1.0, job is running[0])
        policy.requeue(running.pop(), 1.5, RequeueReason.WORKER_LOST)
        return policy, running[1:]

    stayed, running = filled()
    gone, _ = filled()
    moved = build(name)
    moved.load(gone.dump())
    for job in gone.drain():
        moved.push(job, 2.0)
    for policy in (stayed, moved):
        for job in running:
            policy.charge(job, Charge(2, 1, 4), 3.0, True)
    ends: list[list[str]] = [[], []]
    for policy, order in zip((stayed, moved), ends, strict=True):
        while (job := policy.pop(4.0, always)) is not None:
            order.append(job.id)
            policy.charge(job, Charge(job.prompt_tokens, 0, 5), 4.0, True)
    assert len(ends[0]) == 23
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", [*FAIR, "edf", "sjf"])
def test_nothing_is_kept_of_jobs_that_are_over(name: str) -> None:
    """No growth over months: after everything ended, the state is what tenants need, not jobs."""
    policy = build(name)
    for i in range(200):
        policy.push(make_job(f"j{i}", f"t{i % 4}", user=f"u{i % 3}", deadline=1e6), 0.0)
    for i in range(0, 200, 5):
        policy.discard(JobId(f"j{i}"))
    popped = [pop(policy) for _ in range(100)]
    for job in popped[:20]:
        policy.requeue(job, 1.0, RequeueReason.WORKER_LOST)
    for job in popped[:10]:
        policy.discard(job.id)
    for job in popped[20:]:
        policy.charge(job, Charge(10, 0, 4), 2.0, True)
    while (job := policy.pop(3.0, always)) is not None:
        policy.charge(job, Charge(10, 0, 4), 3.0, True)
    policy.pop(1e9, always)  # whatever was to happen at some time has happened
    if hasattr(policy, "expired"):
        policy.expired(1e9)
    assert not jobs_in(policy), "a job is still held somewhere"


def jobs_in(thing: Any, depth: int = 0, seen: set[int] | None = None) -> list[str]:
    """Ids of jobs anywhere below a policy's attributes; the last pick is kept for ``explain``."""
    seen = set() if seen is None else seen
    if id(thing) in seen or depth > 8:
        return []
    seen.add(id(thing))
    if isinstance(thing, Job):
        return [thing.id]
    if isinstance(thing, str) and thing.startswith("j") and thing[1:].isdigit():
        return [thing]
    if isinstance(thing, dict):
        inner: list[Any] = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inner = list(thing)
    else:
        names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
        inner = [getattr(thing, name) for name in names if name != "_pick"]
        if type(thing).__name__ in ("deque", "OrderedDict"):
            inner += list(thing)
    return [job for part in inner for job in jobs_in(part, depth + 1, seen)]


@pytest.mark.parametrize("name", FAIR)
def test_a_tenant_that_comes_when_counters_are_swept_keeps_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands where everybody starts, like those whose counters may be forgotten; but it waits."""
    monkeypatch.setattr(_counters, "IDLE_KEPT", 4)
    policy = build(name)
    for i in range(20):
        policy.push(make_job(f"j{i}", f"t{i}", prompt=10, output=5), 0.0)
    assert sorted(policy.dump()["service"]) == sorted(f"t{i}" for i in range(20))
    for i in range(4, 8):
        assert policy.discard(JobId(f"j{i}"))
    left = [pop(policy) for _ in range(16)]
    for job in left:
        policy.charge(job, Charge(10, 0, 5), 0.0, True)
    assert sorted(job.id for job in left) == sorted(f"j{i}" for i in range(20) if not 4 <= i < 8)


@pytest.mark.parametrize("name", FAIR)
@pytest.mark.parametrize("drained", [False, True])
def test_lines_stay_whole_when_most_of_what_is_in_them_is_discarded(name: str, drained: bool) -> None:
    policy = build(name)

    def push(numbers: range) -> None:
        for i in numbers:
            policy.push(make_job(f"j{i}", f"t{i % 2}", user=f"u{i % 3}", arrived_at=float(i)), 0.0)

    push(range(300))
    kept = [i for i in range(300) if i % 50 < 6]
    for i in reversed(range(300)):
        if i not in kept:
            assert policy.discard(JobId(f"j{i}"))
    push(range(300, 312))
    assert len(policy) == len(kept) + 12
    jobs = policy.drain() if drained else [pop(policy) for _ in range(len(policy))]
    lines: dict[tuple[str, str | None], list[int]] = {}
    for job in jobs:
        lines.setdefault((job.tenant, job.user), []).append(int(job.id[1:]))
    assert sorted(number for line in lines.values() for number in line) == [*kept, *range(300, 312)]
    assert all(line == sorted(line) for line in lines.values())
    assert len(policy) == 0
    assert policy.pop(0.0, always) is None
