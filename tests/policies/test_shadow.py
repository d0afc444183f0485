"""A candidate beside the live policy: the live one is not disturbed, the candidate is counted, a bad one is out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from policies.manager import make_manager
from policies.queue import JobQueue
from policies.registry import Registry
from policies.scheduling.fcfs import FcfsScheduler
from policies.scheduling.vtc import VtcConfig, VtcScheduler
from policies.shadow import MOST_TENANTS, OTHER, ShadowPolicy
from policies.spi import Expiring, PolicyContext, SchedulingPolicy
from policies.testing import always, make_job
from policies.types import Charge, Job, JobId
from tests.policies.faulty import WAYS, Faulty
from tests.policies.test_queue_machine import NAMES, QueueMachine

REGISTRY = Registry.from_manager(make_manager())


def build(name: str) -> Any:
    return REGISTRY.build("scheduling", name, {}, PolicyContext())


def vtc() -> VtcScheduler:
    return VtcScheduler(VtcConfig().tariff())


def shadowed(live: SchedulingPolicy, candidate: SchedulingPolicy) -> tuple[JobQueue, ShadowPolicy]:
    shadow = ShadowPolicy(live, candidate, [], 0.0)
    return JobQueue(shadow, max_passed=3), shadow


def story(queue: JobQueue) -> list[tuple[str, str]]:
    """Jobs large and small come and go; who is dispatched, and who was held back for a large one."""
    seen = []
    for i in range(150):
        now = i / 8
        queue.offer(make_job(f"j{i}", f"t{i % 5}", prompt=1 + i * 7 % 40, arrived_at=now, max_wait_s=9.0), now)
        limit = 25 if i % 4 else 60
        for _ in range(2 if i % 3 else 0):
            dispatch = queue.next(now, lambda job: job.prompt_tokens < limit, always)  # noqa: B023
            if dispatch is None:
                break
            seen.append((dispatch.job.id, dispatch.pick.picked_because))
            queue.charge(dispatch.job.id, Charge(5, 1, 0), now)
            queue.finish(dispatch.job.id, Charge(0, 0, i % 7), now)
        seen.extend((job.id, "expired") for job in queue.expire(now))
    return seen


@pytest.mark.parametrize("candidate", NAMES)
@pytest.mark.parametrize("live", ["fcfs", "vtc", "edf"])
def test_the_live_policy_is_not_disturbed(live: str, candidate: str) -> None:
    """The same dispatches in the same order, the same jobs held back, with and without a shadow."""
    alone = JobQueue(build(live), max_passed=3)
    queue, shadow = shadowed(build(live), build(candidate))
    assert story(queue) == story(alone)
    assert shadow.error is None
    assert shadow.comparison.picks > 80


@pytest.mark.parametrize("name", NAMES)
def test_the_same_policy_agrees_with_itself(name: str) -> None:
    queue, shadow = shadowed(build(name), build(name))
    story(queue)
    assert shadow.comparison.agreement == 1.0
    assert shadow.comparison.live == shadow.comparison.candidate


def test_a_fair_candidate_beside_fcfs_is_counted_by_tenant() -> None:
    """A floods before B comes: fcfs serves A alone, a fair policy would have served both alike."""
    queue, shadow = shadowed(FcfsScheduler(), vtc())
    for i in range(40):
        queue.offer(make_job(f"a{i}", "a"), 0.0)
    for i in range(40):
        queue.offer(make_job(f"b{i}", "b"), 0.0)
    for step in range(40):
        dispatch = queue.next(float(step), always)
        assert dispatch is not None
        assert dispatch.job.tenant == "a"
        queue.finish(dispatch.job.id, Charge(10, 0, 10), float(step))
    seen = shadow.comparison
    assert (seen.picks, seen.live["a"], seen.live["b"]) == (40, 40, 0)  # type: ignore[index]
    assert seen.candidate["b"] >= 38, "b is behind all the time"  # type: ignore[index]
    assert seen.same_job + seen.candidate["b"] == 40  # type: ignore[index]
    assert seen.as_json()["tenants"]["b"] == {"live": 0, "candidate": seen.candidate["b"]}  # type: ignore[index]


def test_the_candidates_books_show_what_ran_and_not_what_it_would_have_run() -> None:
    """A dispatch that did not happen is given back; one that did is paid at once, as the candidate pays."""
    candidate = vtc()
    queue, _ = shadowed(FcfsScheduler(), candidate)
    for tenant in ("a", "b"):
        for i in range(3):
            queue.offer(make_job(f"{tenant}{i}", tenant), 0.0)
    first, second = queue.next(0.0, always), queue.next(0.0, always)
    assert first is not None
    assert second is not None
    assert candidate.counters() == {"a": 20.0, "b": 0.0}, "two prompts of a, paid at dispatch; b would have been second"
    queue.finish(first.job.id, Charge(10, 0, 5), 1.0)
    queue.finish(second.job.id, Charge(4, 6, 0), 1.0)
    assert candidate.counters() == {"a": 10 + 2 * 5 + 4.0, "b": 0.0}


def test_it_starts_in_the_middle_of_a_backlog() -> None:
    live = vtc()
    queue = JobQueue(live)
    for i in range(6):
        queue.offer(make_job(f"j{i}", f"t{i % 2}", prompt=10 + i), 0.0)  # no two counters are ever equal
    assert queue.next(0.0, always) is not None
    shadow = ShadowPolicy(live, vtc(), queue.queued_jobs(), 1.0)
    for _ in range(5):
        assert shadow.pop(2.0, always) is not None
    assert shadow.comparison.agreement == 1.0
    with pytest.raises(RuntimeError, match="push"):
        ShadowPolicy(FcfsScheduler(), Faulty("push raises"), [make_job("x")], 0.0)
    loser = Faulty()
    loser.push = lambda job, now: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="holds 0 of 1"):
        ShadowPolicy(vtc_with("x"), loser, [make_job("x")], 0.0)


def vtc_with(job_id: str) -> VtcScheduler:
    policy = vtc()
    policy.push(make_job(job_id), 0.0)
    return policy


@pytest.mark.parametrize("way", WAYS)
def test_a_candidate_that_fails_is_out_and_nobody_notices(way: str) -> None:
    candidate = Faulty()
    queue, shadow = shadowed(FcfsScheduler(), candidate)
    queue.offer(make_job("first"), 0.0)
    candidate.way = way
    alone = JobQueue(FcfsScheduler(), max_passed=3)
    alone.offer(make_job("first"), 0.0)
    assert queue.discard(JobId("first"))
    assert alone.discard(JobId("first"))
    assert story(queue) == story(alone)
    harmless = {"ignores fits", "explains nothing"} | {way for way in WAYS if way.split()[0] in _NOT_ASKED}
    if way not in harmless:
        assert shadow.error is not None
        picks = shadow.comparison.picks
        queue.offer(make_job("late", arrived_at=99.0), 99.0)
        assert queue.next(99.0, always) is not None
        assert shadow.comparison.picks == picks, "it is not asked again"


_NOT_ASKED = {"explain", "expired", "next_expired", "dump", "requeue"}
"""Calls that only the live policy gets; ``requeue`` only where the two disagree, which two fcfs never do."""


def test_names_are_bounded() -> None:
    queue, shadow = shadowed(FcfsScheduler(), vtc())
    for i in range(3 * MOST_TENANTS):
        queue.offer(make_job(f"j{i}", f"t{i}"), 0.0)
        assert queue.next(0.0, always) is not None
    assert len(shadow.comparison.live) == MOST_TENANTS + 1
    assert shadow.comparison.live[OTHER] == 2 * MOST_TENANTS


def test_it_stands_for_the_contract_and_only_the_live_policy_gives_jobs_up() -> None:
    late: Job = make_job("late", deadline=1.0)
    shadow = ShadowPolicy(FcfsScheduler(), build("edf"), [], 0.0)
    assert isinstance(shadow, SchedulingPolicy)
    assert isinstance(shadow, Expiring)
    shadow.push(late, 0.0)
    assert shadow.expired(5.0) == []
    assert shadow.next_expired() is None
    assert [job.id for job in shadow.drain()] == ["late"]
    live = ShadowPolicy(build("edf"), FcfsScheduler(), [], 0.0)
    live.push(late, 0.0)
    assert [job.id for job in live.expired(5.0)] == ["late"]


class ShadowMachine(QueueMachine):
    """The queue's own state machine with a shadow behind it, any policy beside any other."""

    @initialize(name=st.sampled_from(NAMES), cap=st.sampled_from([None, 3]))
    def start(self, name: str, cap: int | None) -> None:
        self.shadow: ShadowPolicy | None = None
        super().start(name, cap)

    @rule(name=st.sampled_from(NAMES))
    def begin(self, name: str) -> None:
        """A shadow around the live policy, as the dispatcher puts one there."""
        live = self.shadow.live if self.shadow is not None else self.queue.policy
        self.shadow = ShadowPolicy(live, build(name), self.queue.queued_jobs(), self.now)
        self.queue._policy = self.shadow

    @rule(name=st.sampled_from(NAMES))
    def swap(self, name: str) -> None:
        super().swap(name)
        self.shadow = None

    def teardown(self) -> None:
        super().teardown()
        if getattr(self, "shadow", None) is not None:
            assert self.shadow is not None
            assert self.shadow.error is None


def test_random_events_beside_every_policy() -> None:
    run_state_machine_as_test(
        ShadowMachine,
        settings=settings(
            max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
