"""The queue core: a job's ways through it, caps, holding, swap, figures for telemetry."""

from __future__ import annotations

import math
from typing import Any

import pytest

from policies.caps import Caps
from policies.queue import MAX_BEHIND, JobQueue
from policies.scheduling._tariff import Tariff
from policies.scheduling.fcfs import FcfsScheduler
from policies.scheduling.vtc import VtcScheduler
from policies.testing import always, make_job
from policies.types import Charge, Job, JobId, RequeueReason, TenantId
from tests.policies.faulty import Faulty


def vtc() -> VtcScheduler:
    return VtcScheduler(Tariff(1.0, 2.0, 0.0))


def ids(queue: JobQueue, now: float = 0.0) -> list[str]:
    """Dispatch and finish everything, in order."""
    order = []
    while (dispatch := queue.next(now, always)) is not None:
        order.append(str(dispatch.job.id))
        queue.finish(dispatch.job.id, Charge(), now)
    return order


def test_entry_says_what_the_job_found() -> None:
    """gateway F9: position and depth at entry."""
    queue = JobQueue(FcfsScheduler())
    queue.offer(make_job("a1", "a"), 0.0)
    queue.offer(make_job("b1", "b"), 0.0)
    entry = queue.offer(make_job("a2", "a"), 0.0)
    assert (entry.position, entry.depth, entry.depth_tenant) == (2, 2, 1)


def test_an_id_is_offered_once_while_it_is_queued_or_running() -> None:
    queue = JobQueue(FcfsScheduler())
    queue.offer(make_job("x"), 0.0)
    with pytest.raises(ValueError, match="already in the queue"):
        queue.offer(make_job("x"), 0.0)
    queue.next(0.0, always)
    with pytest.raises(ValueError, match="already in the queue"):
        queue.offer(make_job("x"), 0.0)
    queue.finish(JobId("x"), Charge(), 1.0)
    queue.offer(make_job("x"), 2.0)


def test_dispatch_explains_wait_and_whom_it_waited_behind() -> None:
    """gateway F9: wait, policy's reason and whom it waited behind, at most five."""
    queue = JobQueue(vtc())
    for i in range(8):
        queue.offer(make_job(f"early{i}", f"t{i}"), 0.0)
    early = [queue.next(0.0, always) for _ in range(8)]
    queue.charge(JobId("early0"), Charge(1000, 0, 0), 1.0)  # before the job came: not "meanwhile"
    queue.offer(make_job("late", "me"), 2.0)
    for i, dispatch in enumerate(early):
        assert dispatch is not None
        queue.finish(dispatch.job.id, Charge(10, 5, i), 3.0)
    dispatch = queue.next(5.5, always)
    assert dispatch is not None
    assert dispatch.waited_s == 3.5
    assert dispatch.waited_behind == (("t7", 22), ("t6", 21), ("t5", 20), ("t4", 19), ("t3", 18))
    assert len(dispatch.waited_behind) == MAX_BEHIND
    assert "service/weight" in dispatch.pick.picked_because
    assert dispatch.pick.virtual_start is not None


def test_finish_exactly_once_and_whole_usage() -> None:
    queue = JobQueue(vtc())
    queue.offer(make_job("x"), 0.0)
    queue.next(0.0, always)
    queue.charge(JobId("x"), Charge(10, 0, 1), 1.0)
    assert queue.finish(JobId("x"), Charge(0, 0, 4), 2.0) == Charge(10, 0, 5)
    for again in (lambda: queue.finish(JobId("x"), Charge(), 3.0), lambda: queue.charge(JobId("x"), Charge(), 3.0)):
        with pytest.raises(KeyError):
            again()
    assert queue.running == 0
    assert queue.served() == {"a": 15}


def test_cap_on_running_jobs_per_tenant() -> None:
    queue = JobQueue(FcfsScheduler(), max_running_per_tenant=2)
    for i in range(5):
        queue.offer(make_job(f"a{i}", "a"), 0.0)
    queue.offer(make_job("b0", "b"), 0.0)
    got = [dispatch.job.id for _ in range(6) if (dispatch := queue.next(0.0, always))]
    assert got == ["a0", "a1", "b0"]
    assert queue.running_of(TenantId("a")) == 2
    queue.finish(JobId("a0"), Charge(), 1.0)
    dispatch = queue.next(1.0, always)
    assert dispatch is not None
    assert dispatch.job.id == "a2"
    with pytest.raises(ValueError, match="max_running_per_tenant must be at least 1, got 0"):
        JobQueue(FcfsScheduler(), max_running_per_tenant=0)


def test_cap_on_running_tokens_per_tenant() -> None:
    """Issue 4: most tokens that a tenant's running jobs can occupy; a larger job runs alone instead of never."""
    queue = JobQueue(FcfsScheduler(), max_running_tokens_per_tenant=100)
    for i, prompt in enumerate((40, 30, 40)):
        queue.offer(make_job(f"a{i}", "a", prompt=prompt), 0.0)  # and ten of output each
    queue.offer(make_job("b0", "b", prompt=500), 0.0)
    queue.offer(make_job("b1", "b"), 0.0)
    got = [dispatch.job.id for _ in range(5) if (dispatch := queue.next(0.0, always))]
    assert got == ["a0", "a1", "b0"]
    queue.finish(JobId("a1"), Charge(), 1.0)
    dispatch = queue.next(1.0, always)
    assert dispatch is not None
    assert dispatch.job.id == "a2"
    assert queue.next(1.0, always) is None
    queue.finish(JobId("b0"), Charge(), 2.0)
    assert ids(queue) == ["b1"]


def test_caps_per_class_and_caps_that_change() -> None:
    """gateway B11: a cap on the bulk class reserves the other slots."""
    queue = JobQueue(FcfsScheduler(), max_running_per_class={"batch": 1})
    for i in range(3):
        queue.offer(make_job(f"b{i}", f"t{i}", service_class="batch"), 0.0)
    queue.offer(make_job("i0", "t0"), 0.0)
    got = [dispatch.job.id for _ in range(4) if (dispatch := queue.next(0.0, always))]
    assert got == ["b0", "i0"]
    queue.caps = Caps(jobs_per_class={"batch": 2})
    got = [dispatch.job.id for _ in range(4) if (dispatch := queue.next(0.0, always))]
    assert got == ["b1"]
    with pytest.raises(ValueError, match=r"max_running_per_class\.batch must be at least 1, got 0"):
        Caps(jobs_per_class={"batch": 0})


def test_a_capped_job_is_never_held_for() -> None:
    """It waits for its own tenant's jobs: nobody else has to."""
    queue = JobQueue(FcfsScheduler(), max_running_tokens_per_tenant=100, max_passed=1)
    queue.offer(make_job("a0", "a", prompt=60), 0.0)
    queue.offer(make_job("a1", "a", prompt=60), 0.0)
    for i in range(20):
        queue.offer(make_job(f"b{i}", f"t{i}"), 0.0)
    got = [dispatch.job.id for _ in range(22) if (dispatch := queue.next(0.0, always, always))]
    assert len(got) == 21
    assert "a1" not in got


def test_jobs_of_a_lost_worker_come_back_in_their_order() -> None:
    queue = JobQueue(FcfsScheduler())
    for i in range(6):
        queue.offer(make_job(f"a{i}"), float(i))
    for _ in range(4):
        queue.next(6.0, always)
    queue.requeue_all([JobId("a2"), JobId("a0"), JobId("a3")], 7.0, RequeueReason.WORKER_LOST)
    assert queue.running == 1
    assert ids(queue, 8.0) == ["a0", "a2", "a3", "a4", "a5"]


def test_a_returned_job_waits_on() -> None:
    queue = JobQueue(vtc())
    queue.offer(make_job("x"), 0.0)
    queue.next(2.0, always)
    queue.charge(JobId("x"), Charge(10, 0, 0), 3.0)
    queue.requeue(JobId("x"), 10.0, RequeueReason.WORKER_LOST)
    dispatch = queue.next(11.0, always)
    assert dispatch is not None
    assert (dispatch.waited_s, dispatch.attempt) == (3.0, 2)
    assert queue.finish(JobId("x"), Charge(0, 0, 1), 12.0) == Charge(10, 0, 1)


def test_expire_takes_what_waited_too_long_and_nothing_else() -> None:
    """gateway B9: the wait that runs out is the queue's own business, whatever the workers do."""
    queue = JobQueue(vtc())
    queue.offer(make_job("short", max_wait_s=5.0), 0.0)
    queue.offer(make_job("long", max_wait_s=50.0), 0.0)
    queue.offer(make_job("patient"), 0.0)
    queue.offer(make_job("runs", "b", max_wait_s=5.0), 0.0)
    dispatch = queue.next(1.0, lambda job: job.id == "runs")
    assert dispatch is not None
    assert queue.next_expiry() == 5.0
    assert queue.expire(4.9) == []
    assert [job.id for job in queue.expire(5.0)] == ["short"]
    assert queue.next_expiry() == 50.0
    queue.discard(JobId("long"))
    assert queue.next_expiry() is None
    assert queue.expire(1000.0) == []
    assert ids(queue) == ["patient"]


def test_the_wait_counts_anew_after_a_return() -> None:
    queue = JobQueue(FcfsScheduler())
    queue.offer(make_job("x", max_wait_s=5.0), 0.0)
    queue.next(4.0, always)
    queue.requeue(JobId("x"), 20.0, RequeueReason.WORKER_LOST)
    assert queue.expire(24.0) == []
    assert [job.id for job in queue.expire(25.0)] == ["x"]


@pytest.mark.parametrize("way", ["discard raises", "discard works and raises", "denies a job", "expired raises"])
def test_what_expires_while_the_policy_fails_is_returned_all_the_same(way: str) -> None:
    """A job that left the queue has a caller who must be told, whatever became of the policy."""
    policy = Faulty()
    queue = JobQueue(policy)
    for number in range(3):
        queue.offer(make_job(f"j{number}", max_wait_s=5.0), 0.0)
    queue.offer(make_job("patient"), 0.0)
    policy.way = way
    told: list[str] = []
    for _ in range(8):
        try:
            told += [job.id for job in queue.expire(6.0)]
        except RuntimeError:
            assert not queue.owes or queue.next_expiry() == -math.inf, "the caller comes back for them at once"
    assert told == ["j0", "j1", "j2"]
    assert not queue.owes
    assert [job.id for job in queue.queued_jobs()] == ["patient"]


def test_a_large_job_is_not_overtaken_for_ever() -> None:
    """DESIGN §8: nobody starves, also not behind a stream of small jobs that always fit."""
    queue = JobQueue(FcfsScheduler(), max_passed=3)
    free = 10
    queue.offer(make_job("large", "large", prompt=10), 0.0)
    running: list[JobId] = []

    def fits(job: Job) -> bool:
        return job.prompt_tokens <= free

    order: list[str] = []
    free -= 2  # something runs already
    for step in range(50):
        queue.offer(make_job(f"s{step}", f"t{step}", prompt=1), float(step))
        while (dispatch := queue.next(float(step), fits, lambda job: job.prompt_tokens <= 10)) is not None:
            free -= dispatch.job.prompt_tokens
            running.append(dispatch.job.id)
            order.append(str(dispatch.job.id))
        if step == 6:
            free += 2
        if running:
            done = running.pop(0)
            free += 10 if done == "large" else 1
            queue.finish(done, Charge(), float(step))
    assert "large" in order
    assert order.index("large") < 10


def test_what_could_never_fit_holds_nobody_up() -> None:
    queue = JobQueue(FcfsScheduler(), max_passed=1)
    queue.offer(make_job("never", "never", prompt=100), 0.0)
    for i in range(20):
        queue.offer(make_job(f"s{i}", f"t{i}"), 0.0)

    def small(job: Job) -> bool:
        return job.prompt_tokens < 50

    assert sum(queue.next(1.0, small, small) is not None for _ in range(21)) == 20
    assert len(queue) == 1


def test_snapshot_shows_depth_tokens_share_and_rate() -> None:
    queue = JobQueue(vtc())
    assert queue.snapshot(TenantId("a")).tenant_share == 1.0
    queue.offer(make_job("a1", "a", weight=3.0), 0.0)
    queue.offer(make_job("b1", "b", prompt=20, output=30), 0.0)
    seen = queue.snapshot(TenantId("a"), workers_ready=2)
    assert (seen.queued, seen.queued_tenant, seen.queued_tokens, seen.queued_tokens_tenant) == (2, 1, 70, 20)
    assert seen.tenant_share == 0.75
    assert (seen.service_rate, seen.workers_ready) == (None, 2)
    assert queue.snapshot(TenantId("new"), weight=4.0).tenant_share == 0.5
    queue.next(0.0, always)
    for second in range(1, 11):
        queue.charge(JobId("a1"), Charge(0, 0, 100), float(second))
    rate = queue.snapshot(TenantId("a")).service_rate
    assert rate == pytest.approx(100.0, rel=0.1)
    assert queue.backlog() == {"b": (1, 50)}
    assert [job.id for job in queue.queued_jobs()] == ["b1"]


def test_shares_and_lag_follow_the_work() -> None:
    queue = JobQueue(vtc())
    for tenant, weight in (("a", 1.0), ("b", 3.0)):
        for i in range(2):
            queue.offer(make_job(f"{tenant}{i}", tenant, weight=weight), 0.0)
        queue.next(0.0, lambda job, tenant=tenant: job.tenant == tenant)  # type: ignore[misc]
    queue.charge(JobId("a0"), Charge(0, 0, 100), 1.0)
    queue.charge(JobId("b0"), Charge(0, 0, 300), 1.0)
    assert queue.shares(1.0) == {"a": 0.25, "b": 0.75}
    assert queue.virtual_lag(1.0) == {"a": 0.0, "b": 0.0}
    queue.charge(JobId("a0"), Charge(0, 0, 100), 1.0)
    assert queue.virtual_lag(1.0) == {"a": 0.0, "b": 100.0}


class Failing(FcfsScheduler):
    """Fails at one of the steps of a swap."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def load(self, state: Any) -> None:
        if self.step == "load":
            raise RuntimeError("load")

    def push(self, job: Job, now: float) -> None:
        if self.step == "push" and len(self) == 3:
            raise RuntimeError("push")
        if self.step != "lose" or len(self) < 3:
            super().push(job, now)


@pytest.mark.parametrize("step", ["load", "push", "lose"])
def test_a_failed_swap_changes_nothing(step: str) -> None:
    """DESIGN §4: a failure before the assignment changes nothing; the old policy still has all its jobs."""
    old = vtc()
    queue = JobQueue(old)
    for i in range(6):
        queue.offer(make_job(f"j{i}", f"t{i % 2}"), 0.0)
    before = old.dump()
    with pytest.raises(RuntimeError):
        queue.swap(Failing(step), 1.0)
    assert queue.policy is old
    assert len(old) == 6
    assert old.dump() == before
    assert sorted(ids(queue)) == [f"j{i}" for i in range(6)]


def test_swap_keeps_counters_jobs_and_running_work() -> None:
    queue = JobQueue(vtc())
    for i in range(4):
        for tenant in ("a", "b"):
            queue.offer(make_job(f"{tenant}{i}", tenant), 0.0)
    first, second = queue.next(0.0, always), queue.next(0.0, always)
    assert first is not None
    assert second is not None
    queue.charge(first.job.id, Charge(10, 0, 500), 1.0)
    queue.requeue(second.job.id, 1.0, RequeueReason.WORKER_REFUSED)
    new = vtc()
    old = queue.swap(new, 2.0)
    assert len(old) == 0
    assert new.counters() == {"a": 1010.0, "b": 10.0}
    queue.finish(first.job.id, Charge(0, 0, 5), 3.0)
    assert new.counters()["a"] == 1020.0
    order = ids(queue, 4.0)
    assert [job for job in order if job[0] == "b"] == ["b0", "b1", "b2", "b3"]
    assert [job for job in order if job[0] == "a"] == ["a1", "a2", "a3"]
    assert order[:4] == ["b0", "b1", "b2", "b3"], "b is behind by 1000 and must go first"


def test_swap_refuses_a_used_policy_and_itself() -> None:
    queue = JobQueue(FcfsScheduler())
    used = FcfsScheduler()
    used.push(make_job("x"), 0.0)
    with pytest.raises(ValueError, match="already holds 1 jobs"):
        queue.swap(used, 0.0)
    with pytest.raises(ValueError, match="the live one"):
        queue.swap(queue.policy, 0.0)


class Broken(FcfsScheduler):
    def explain(self, job: Job) -> Any:
        raise RuntimeError("broken")

    def discard(self, job_id: JobId) -> bool:
        raise RuntimeError("broken")

    def dump(self) -> Any:
        raise RuntimeError("broken")

    def drain(self) -> Any:
        raise RuntimeError("broken")


def test_a_broken_policy_loses_nothing_and_can_be_rolled_back() -> None:
    good = vtc()
    queue = JobQueue(good)
    for i in range(4):
        queue.offer(make_job(f"j{i}"), 0.0)
    queue.swap(Broken(), 1.0)
    with pytest.raises(RuntimeError, match="broken"):
        queue.next(2.0, always)
    with pytest.raises(RuntimeError, match="broken"):
        queue.discard(JobId("j3"))
    assert len(queue) == 3
    queue.swap(good, 3.0, carry_state=False)
    assert ids(queue) == ["j0", "j1", "j2"]


class Foreign(FcfsScheduler):
    def pop(self, now: float, fits: Any) -> Job | None:
        return make_job("made up")


def test_a_policy_that_makes_up_jobs_is_caught() -> None:
    queue = JobQueue(Foreign())
    queue.offer(make_job("x"), 0.0)
    with pytest.raises(RuntimeError, match="'made up', not queued"):
        queue.next(0.0, always)
    assert queue.is_queued(JobId("x"))


def test_a_backlog_before_no_worker_measures_no_rate() -> None:
    """gateway B7: jobs that waited half a minute for the first worker say nothing of how fast it is."""
    queue = JobQueue(FcfsScheduler())
    for i in range(20):
        queue.offer(make_job(f"j{i}", prompt=100, output=100), float(i))
    for second in range(3):
        dispatch = queue.next(30.0 + second, always)
        assert dispatch is not None
        queue.charge(dispatch.job.id, Charge(100, 0, 0), 31.0 + second)
        queue.finish(dispatch.job.id, Charge(), 31.0 + second)
    assert queue.snapshot(TenantId("a")).service_rate == pytest.approx(100.0, rel=0.15)


def test_what_only_waits_for_the_next_filling_is_no_backlog() -> None:
    """Between a job's coming and that a busy event loop may pass time: no worker's rate, though work runs meanwhile."""
    queue = JobQueue(FcfsScheduler())
    queue.offer(make_job("first"), 0.0)
    for turn in range(1, 50):
        assert queue.next(float(turn), always) is not None
        queue.left_over = len(queue) > 0
        queue.offer(make_job(f"j{turn}"), float(turn))
        queue.charge(JobId("first"), Charge(0, 0, 1), turn + 0.5)
    assert queue.snapshot(TenantId("a")).service_rate is None
    queue.left_over = True
    queue.charge(JobId("first"), Charge(0, 0, 100), 51.5)
    assert queue.snapshot(TenantId("a")).service_rate == pytest.approx(100 / 2, rel=0.15)
