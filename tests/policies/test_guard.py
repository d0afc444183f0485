"""A policy that fails in any way, at any moment: the queue never notices, and the right successor takes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from policies.guard import PROBATION_S, STALL_S, Failover, Guarded
from policies.manager import make_manager
from policies.queue import JobQueue
from policies.registry import Registry
from policies.scheduling.fcfs import FcfsScheduler
from policies.scheduling.vtc import VtcConfig, VtcScheduler
from policies.spi import PolicyContext, SchedulingPolicy
from policies.testing import always, make_job
from policies.types import Charge, Job, JobId, RequeueReason
from tests.policies.faulty import WAYS, WITHHOLDS, Faulty, FaultyError
from tests.policies.test_queue_machine import QueueMachine

REGISTRY = Registry.from_manager(make_manager())


class Line:
    """A queue whose policy is guarded."""

    def __init__(self, policy: SchedulingPolicy, queue: Callable[[SchedulingPolicy], JobQueue] = JobQueue) -> None:
        self.failovers: list[Failover] = []
        guard = self.guarded(policy, "first")
        self.queue = queue(guard)
        guard.arm(self.queue, 0.0)

    def guarded(self, policy: SchedulingPolicy, name: str) -> Guarded:
        return Guarded(policy, name, fallback=FcfsScheduler, on_failover=self.failovers.append)

    @property
    def guard(self) -> Guarded:
        policy = self.queue.policy
        assert isinstance(policy, Guarded)
        return policy

    def swap(self, policy: SchedulingPolicy, now: float, name: str = "second") -> None:
        guard = self.guarded(policy, name)
        old = self.queue.swap(guard, now)
        assert isinstance(old, Guarded)
        guard.arm(self.queue, now, old)

    def use_everything(self, now: float) -> None:
        """Every call of a policy at least once; of what it offers, all but w7 and w8 stay queued."""
        queue = self.queue
        for i in range(10):
            queue.offer(make_job(f"w{i}", max_wait_s=1000.0), now)
        queue.expire(now)
        queue.next_expiry()
        first, second = queue.next(now, always), queue.next(now, always)
        assert first is not None
        assert second is not None
        queue.charge(first.job.id, Charge(10, 0, 1), now)
        queue.requeue(first.job.id, now, RequeueReason.WORKER_REFUSED)
        again = queue.next(now, lambda job: job.id == first.job.id)
        assert again is not None
        assert again.job.id == first.job.id
        for gone in ("w7", "w8"):
            assert queue.discard(JobId(gone))
        assert queue.next(now, lambda job: False) is None
        queue.finish(second.job.id, Charge(0, 0, 1), now)
        self.guard.dump()

    def rest(self, now: float) -> list[str]:
        found = []
        while (dispatch := self.queue.next(now, always)) is not None:
            found.append(dispatch.job.id)
        return found


def vtc() -> VtcScheduler:
    return VtcScheduler(VtcConfig().tariff())


NOT_FATAL = {"dump raises", "dump works and raises"}
"""Asked for when it is about to go: then there is nothing to take over from it."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("after", [0.0, 2 * PROBATION_S], ids=["first second", "later"])
def test_whatever_fails_nothing_is_lost(way: str, after: float) -> None:
    """The queue works as if nothing had happened; the policy before takes over in the first second, else fcfs."""
    line = Line(vtc())
    faulty = Faulty()
    for i in range(3):
        line.queue.offer(make_job(f"q{i}"), 0.0)
    line.swap(faulty, 1.0)
    started = line.queue.next(1.0, always)
    assert started is not None
    assert started.job.id == "q0"
    faulty.way = way
    line.use_everything(1.0 + after)
    assert line.rest(2.0 + after) == [f"w{i}" for i in (0, 1, 2, 3, 4, 5, 6, 9)], "in order, none missing"
    if way in NOT_FATAL:
        assert line.failovers == []
        line.swap(vtc(), 5.0, "third")
        assert line.guard.name == "third"
        return
    (failover,) = line.failovers
    assert failover.failed == "second"
    assert (failover.successor, failover.rolled_back) == (("first", True) if after == 0.0 else ("fcfs", False))
    assert line.guard.name == failover.successor
    assert not line.guard.on_probation
    assert isinstance(failover.error, FaultyError) == ("raises" in way)
    assert failover.call in way or "raises" not in way


def test_the_first_second_begins_with_the_first_dispatch() -> None:
    """A policy that was swapped in on an idle night fails at the first request of the morning: it is rolled back."""
    line = Line(vtc())
    line.swap(Faulty("pop raises"), 1.0)
    line.queue.offer(make_job("x"), 30_000.0)
    assert line.rest(30_001.0) == ["x"]
    assert line.failovers[0].rolled_back


@pytest.mark.parametrize("worked", [False, True])
def test_one_that_returns_nothing_although_all_fits_is_replaced_after_a_second(worked: bool) -> None:
    """issue 4: a swap to a policy that stalls is rolled back; one that stalls later makes way for ``fcfs``."""
    line = Line(vtc())
    for i in range(30):
        line.queue.offer(make_job(f"q{i:02}", f"t{i % 3}"), 0.0)
    faulty = Faulty()
    line.swap(faulty, 1.0)
    now = 1.0
    if worked:
        assert line.queue.next(now, always) is not None
        now += 2 * PROBATION_S
    faulty.way = WITHHOLDS
    for step in (0.0, 0.5, 0.9):
        assert line.queue.next(now + step * STALL_S, always) is None
    assert line.failovers == []
    assert line.rest(now + STALL_S) == [f"q{i:02}" for i in range(worked, 30)]
    (failover,) = line.failovers
    assert (failover.call, failover.successor) == ("pop", "fcfs" if worked else "first")
    assert failover.rolled_back is not worked
    assert "returned nothing" in str(failover.error)


@pytest.mark.parametrize("other", [3, 25], ids=["seen at a glance", "seen when all are looked at"])
def test_one_that_returns_nothing_while_something_does_not_fit_is_let_be(other: int) -> None:
    """It may keep lines of its own, and hold up what stands behind that one."""
    line = Line(Faulty(WITHHOLDS))
    for i in range(30):
        line.queue.offer(make_job(f"q{i:02}"), 0.0)
    for tick in range(40):
        assert line.queue.next(tick * 0.5 * STALL_S, lambda job: job.id != f"q{other:02}") is None
    assert line.failovers == []


def test_pauses_over_different_jobs_are_no_stall() -> None:
    """A policy that paces its jobs returns nothing now and then: what it held back may be gone long ago."""
    line = Line(Faulty(WITHHOLDS))
    for i in range(5):
        now = i * 10 * STALL_S
        line.queue.offer(make_job(f"q{i}", max_wait_s=1000.0), now)
        assert line.queue.next(now, always) is None
        assert line.queue.discard(JobId(f"q{i}"))
    assert line.failovers == []


def test_one_that_dispatches_now_and_then_is_let_be() -> None:
    faulty = Faulty()
    line = Line(faulty)
    for i in range(10):
        line.queue.offer(make_job(f"q{i}"), 0.0)
    for tick in range(10):
        faulty.way = None if tick % 2 else WITHHOLDS
        assert (line.queue.next(tick * 0.9 * STALL_S, always) is None) == (faulty.way is not None)
    assert line.failovers == []


def test_who_takes_over_again_knows_what_ran_meanwhile() -> None:
    before = vtc()
    line = Line(before)
    for i in range(4):
        for tenant in ("a", "b"):
            line.queue.offer(make_job(f"{tenant}{i}", tenant), 0.0)
    faulty = Faulty()
    line.swap(faulty, 0.0)
    running = line.queue.next(0.0, always)
    assert running is not None
    assert running.job.tenant == "a"
    line.queue.charge(running.job.id, Charge(10, 0, 500), 0.1)
    faulty.way = "charge works and raises"
    line.queue.charge(running.job.id, Charge(0, 0, 7), 0.2)
    assert line.guard.policy is before
    assert before.counters()["a"] == 10 + 2 * 507
    order = line.rest(0.3)
    assert order[:4] == ["b0", "b1", "b2", "b3"], "b is far behind now"


def test_a_predecessor_that_fails_too_is_passed_over() -> None:
    line = Line(Faulty())
    first = line.guard.policy
    assert isinstance(first, Faulty)
    line.queue.offer(make_job("x"), 0.0)
    line.swap(Faulty("pop raises"), 0.0)
    first.way = "push raises"
    assert line.rest(0.1) == ["x"]
    assert [(f.failed, f.successor, f.rolled_back) for f in line.failovers] == [("second", "fcfs", False)]


@pytest.mark.parametrize("call", ["pop", "requeue", "push"])
def test_a_predecessor_that_takes_the_jobs_and_then_fails_is_passed_over_too(call: str) -> None:
    line = Line(Faulty())
    first = line.guard.policy
    assert isinstance(first, Faulty)
    line.queue.offer(make_job("x"), 0.0)
    faulty = Faulty()
    line.swap(faulty, 0.0)
    dispatch = line.queue.next(0.0, always) if call == "requeue" else None
    faulty.way = first.way = f"{call} works and raises" if call == "pop" else f"{call} raises"
    if call == "requeue":
        assert dispatch is not None
        line.queue.requeue(dispatch.job.id, 0.1, RequeueReason.WORKER_LOST)
    elif call == "push":
        line.queue.offer(make_job("y"), 0.1)
    assert line.rest(0.2) == ["x", "y"][: 1 + (call == "push")]
    assert line.failovers[-1].successor == "fcfs"


def test_the_failed_policys_error_is_told_when_no_fallback_can_be_made() -> None:
    def broken() -> SchedulingPolicy:
        raise OSError("no fallback today")

    queue = JobQueue(FcfsScheduler())
    guard = Guarded(Faulty("pop raises"), "bad", fallback=broken)
    queue.swap(guard, 0.0)
    guard.arm(queue, 0.0)
    queue.offer(make_job("x"), 0.0)
    with pytest.raises(FaultyError):
        queue.next(0.0, always)


def test_a_policy_that_cannot_even_be_swapped_in_is_seen_by_the_swap() -> None:
    line = Line(vtc())
    line.queue.offer(make_job("x"), 0.0)
    with pytest.raises(FaultyError):
        line.swap(Faulty("push raises"), 1.0)
    assert line.guard.name == "first"
    assert line.failovers == []
    assert line.rest(2.0) == ["x"]


def test_when_even_the_fallback_fails_the_error_comes_through() -> None:
    queue = JobQueue(FcfsScheduler())
    guard = Guarded(Faulty("pop raises"), "bad", fallback=lambda: Faulty("push raises"))
    queue.swap(guard, 0.0)
    guard.arm(queue, 0.0)
    queue.offer(make_job("x"), 0.0)
    with pytest.raises(FaultyError):
        queue.next(0.0, always)
    assert queue.is_queued(JobId("x"))


class GuardedMachine(QueueMachine):
    """The queue's own state machine, with a policy that turns bad in a random way after a random while."""

    @initialize(name=st.sampled_from(["fcfs"]), cap=st.sampled_from([None, 3]))
    def start(self, name: str, cap: int | None) -> None:
        self.cap = cap
        self.line = Line(Faulty(), lambda policy: self.capped(policy, cap))
        self.queue = self.line.queue
        self.faulty: Any = self.line.guard.policy

    @rule(way=st.sampled_from(WAYS))
    def turn_bad(self, way: str) -> None:
        self.faulty.way = way

    @rule(name=st.sampled_from(["fcfs"]))
    def swap(self, name: str) -> None:
        self.faulty = Faulty()
        self.line.swap(self.faulty, self.now)


def test_random_failures_at_random_moments() -> None:
    run_state_machine_as_test(
        GuardedMachine,
        settings=settings(
            max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("name", [item.spec.name for item in REGISTRY.policies("scheduling")])
def test_a_guard_changes_nothing_about_a_policy_that_works(name: str) -> None:
    """The same events through the same queue, with and without a guard: the same dispatches."""

    def story(guarded: bool) -> list[tuple[str, str]]:
        policy: SchedulingPolicy = REGISTRY.build("scheduling", name, {}, PolicyContext())
        if guarded:
            policy = Guarded(policy, name, fallback=FcfsScheduler)
        queue = JobQueue(policy)
        if isinstance(policy, Guarded):
            policy.arm(queue, 0.0)
        seen = []
        for i in range(120):
            now = i / 8
            queue.offer(make_job(f"j{i}", f"t{i % 5}", prompt=1 + i % 40, arrived_at=now, max_wait_s=9.0), now)
            dispatch = queue.next(now, lambda job: job.prompt_tokens < 38) if i % 3 else None
            if dispatch is not None:
                seen.append((dispatch.job.id, dispatch.pick.picked_because))
                queue.finish(dispatch.job.id, Charge(5, 0, i % 7), now)
            seen.extend((job.id, "expired") for job in queue.expire(now))
        return seen

    assert story(True) == story(False)


def test_it_stands_for_the_contract() -> None:
    job: Job = make_job("x")
    guard = Guarded(FcfsScheduler(), "fcfs", fallback=FcfsScheduler)
    assert isinstance(guard, SchedulingPolicy)
    guard.push(job, 0.0)
    assert guard.discard(JobId("unknown")) is False, "not armed: it passes everything on"
