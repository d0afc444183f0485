"""Workers with a disk hear what the next requests begin with: keys only, seldom, and not more than is of use."""

from __future__ import annotations

import pytest

from gateway.hints import AGAIN_S, EVERY_S, MOST_JOBS, MOST_KEYS, Hints
from gateway.worker_handle import WorkerHandle
from policies.queue import JobQueue
from policies.scheduling.fcfs import FcfsScheduler
from policies.types import Job, JobId, PrefixKey, TenantId
from tests.gateway.test_worker_handle import HELLO, Line
from workers.protocol import Prefetch, StepOutputs, TierStats, WorkerStats

NOW = 100.0


def keys(name: str, count: int = 3) -> tuple[PrefixKey, ...]:
    return tuple(PrefixKey(f"{name}/{place}".encode().ljust(32)) for place in range(count))


def job(name: str, tenant: str = "t", count: int = 3, **requires: str) -> Job:
    return Job(JobId(name), TenantId(tenant), "m", 48, 16, 0.0, prefix_keys=keys(name, count), requires=requires)


class Site:
    """A queue, and workers of which some have files."""

    def __init__(self, *disks: int, labels: dict[str, str] | None = None) -> None:
        self.queue = JobQueue(FcfsScheduler())
        self.hints = Hints()
        self.lines: list[Line] = []
        self.workers: list[WorkerHandle] = []
        for number, held in enumerate(disks):
            worker = WorkerHandle(
                f"m/p-{number}", model="m", pool="p", labels=labels or {}, incarnation=1, clock=lambda: NOW
            )
            line = Line()
            worker.opened(line, HELLO)
            self.workers.append(worker)
            self.lines.append(line)
            self.report(number, held)

    def report(self, number: int, held: int, *hot: PrefixKey) -> None:
        tiers = {"host": TierStats(bytes=9), "disk": TierStats(bytes=held)}
        stats = WorkerStats(hot_prefixes=[bytes(key) for key in hot], tiers=tiers if held >= 0 else {})
        self.workers[number].received(StepOutputs(1, [], stats))

    def give(self, now: float) -> list[list[tuple[bytes, ...]]]:
        """What each worker is told."""
        for line in self.lines:
            line.sent.clear()
        self.hints.give(self.queue.demand, self.workers, now)
        assert all(isinstance(message, Prefetch) for line in self.lines for message in line.sent)
        return [[tuple(message.keys) for message in line.sent if isinstance(message, Prefetch)] for line in self.lines]


def test_the_first_in_line_of_each_tenant_is_told_of() -> None:
    site = Site(1)
    for one in (job("a1", "a"), job("a2", "a"), job("b1", "b")):
        site.queue.offer(one, NOW)
    assert site.give(NOW) == [[keys("a1"), keys("b1")]]
    assert site.give(NOW + EVERY_S / 2) == [[]], "not in every turn"
    assert site.give(NOW + EVERY_S * 2) == [[]], "nor again at once"
    assert site.queue.discard(JobId("a1"))
    assert site.give(NOW + EVERY_S * 4) == [[keys("a2")]], "whose turn has come"
    assert site.give(NOW + AGAIN_S * 2) == [[keys("a2"), keys("b1")]], "a hint may have met a busy disk"


def test_bounds() -> None:
    site = Site(1, 1, 1, 1, 1, 1)
    for number in range(MOST_JOBS + 3):
        site.queue.offer(job(f"j{number}", f"t{number}", MOST_KEYS + 5 if not number else 1), NOW)
    told = site.give(NOW)
    assert [len(one) for one in told] == [MOST_JOBS] * 4 + [0, 0]
    assert len(told[0][0]) == MOST_KEYS


@pytest.mark.parametrize("held", [-1, 0])
def test_a_worker_without_files_hears_nothing(held: int) -> None:
    site = Site(held)
    site.queue.offer(job("a"), NOW)
    assert site.give(NOW) == [[]]


def test_the_worker_that_holds_the_beginning_is_the_likely_one() -> None:
    site = Site(1, 1, 1)
    site.report(1, 1, keys("a")[0])
    site.report(2, 1, keys("b")[0])
    site.queue.offer(job("a"), NOW)
    assert site.give(NOW) == [[], [keys("a")], []]


def test_only_those_that_may_run_it() -> None:
    site = Site(1, labels={"hardware": "cpu"})
    site.queue.offer(job("a", hardware="gpu"), NOW)
    site.queue.offer(job("b", "u", hardware="cpu"), NOW)
    assert site.give(NOW) == [[keys("b")]]


def test_a_worker_that_has_gone_breaks_nothing() -> None:
    site = Site(1, 1)
    site.lines[0].broken = True
    site.queue.offer(job("a"), NOW)
    assert site.give(NOW) == [[], [keys("a")]]
