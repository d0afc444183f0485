"""Hypothesis drives the queue with every scheduling policy and swaps between them: nothing lost, order kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from policies.manager import make_manager
from policies.queue import JobQueue
from policies.registry import Registry
from policies.spi import PolicyContext
from policies.testing import always, make_job
from policies.types import Charge, Job, JobId, PrefixKey, RequeueReason, TenantId

REGISTRY = Registry.from_manager(make_manager())
NAMES = [item.spec.name for item in REGISTRY.policies("scheduling")]
FIFO = {"fcfs", "vtc", "wfq", "drr"}
"""Policies that promise order within a tenant, whatever its jobs are."""
KEYS = tuple(PrefixKey(f"key{i}".encode()) for i in range(3))


class QueueMachine(RuleBasedStateMachine):
    """A model beside the queue: sets of ids, and each tenant's line."""

    names = NAMES
    name = ""
    """The live policy, for what only one of them does."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.serial = 0
        self.lines: dict[str, list[str]] = {}
        self.jobs: dict[str, Job] = {}
        self.running: set[str] = set()
        self.usage: dict[str, Charge] = {}
        self.waits: dict[str, float] = {}
        self.deadlines: dict[str, float] = {}
        self.done: set[str] = set()
        self.fifo = True

    @initialize(name=st.sampled_from(NAMES), cap=st.sampled_from([None, 3]))
    def start(self, name: str, cap: int | None) -> None:
        if name not in self.names:
            name = self.names[0]
        self.cap = cap
        self.queue = self.capped(self.policy(name), cap)

    @staticmethod
    def capped(policy: Any, cap: int | None) -> JobQueue:
        """A queue with the caps that ``nothing_is_lost_or_doubled`` holds it to."""
        return JobQueue(
            policy,
            max_running_per_tenant=cap,
            max_running_tokens_per_tenant=None if cap is None else 90,
            max_running_per_class={"batch": 2},
            max_passed=4,
        )

    def policy(self, name: str) -> Any:
        self.fifo = self.fifo and name in FIFO
        self.name = name
        return REGISTRY.build("scheduling", name, {}, PolicyContext())

    def take(self, job_id: str) -> None:
        self.lines[self.jobs[job_id].tenant].remove(job_id)
        self.waits.pop(job_id, None)
        self.deadlines.pop(job_id, None)

    @rule(
        tenant=st.sampled_from("abcd"),
        prompt=st.integers(1, 40),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        wait=st.sampled_from([None, 2.0, 30.0]),
        deadline=st.sampled_from([None, 1.0, 20.0]),
        priority=st.sampled_from([0, 1, 2]),
        keys=st.integers(0, 3),
    )
    def offer(
        self,
        tenant: str,
        prompt: int,
        weight: float,
        wait: float | None,
        deadline: float | None,
        priority: int,
        keys: int,
    ) -> None:
        self.serial += 1
        job = make_job(
            f"j{self.serial}",
            tenant,
            prompt=prompt,
            weight=weight,
            max_wait_s=wait,
            deadline=None if deadline is None else self.now + deadline,
            priority=priority,
            service_class=("batch", "interactive", "urgent")[priority],
            user=(None, "u", "v")[keys % 3],
            prefix_keys=KEYS[:keys],
            arrived_at=self.now,
        )
        entry = self.queue.offer(job, self.now)
        line = self.lines.setdefault(tenant, [])
        assert entry.depth_tenant == len(line)
        line.append(job.id)
        self.jobs[job.id] = job
        self.usage[job.id] = Charge()
        if wait is not None:
            self.waits[job.id] = self.now + wait
        if job.deadline is not None:
            self.deadlines[job.id] = job.deadline

    @rule(limit=st.sampled_from([10, 25, 100]), hold=st.booleans())
    def dispatch(self, limit: int, hold: bool) -> None:
        could = always if hold else None
        dispatch = self.queue.next(self.now, lambda job: job.prompt_tokens <= limit, could)
        if dispatch is None:
            return
        job = dispatch.job
        assert job.prompt_tokens <= limit
        line = self.lines[job.tenant]
        assert job.id in line
        assert not self.fifo or line[0] == job.id
        assert len(dispatch.waited_behind) <= 5
        assert dispatch.waited_s >= 0
        self.take(job.id)
        self.running.add(job.id)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0), prompt=st.integers(0, 9), cached=st.integers(0, 9), output=st.integers(0, 9))
    def charge(self, pick: int, prompt: int, cached: int, output: int) -> None:
        job_id = sorted(self.running)[pick % len(self.running)]
        charge = Charge(prompt, cached, output)
        self.queue.charge(JobId(job_id), charge, self.now)
        self.usage[job_id] += charge

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0), output=st.integers(0, 9))
    def finish(self, pick: int, output: int) -> None:
        job_id = sorted(self.running)[pick % len(self.running)]
        rest = Charge(0, 0, output)
        assert self.queue.finish(JobId(job_id), rest, self.now) == self.usage[job_id] + rest
        self.running.discard(job_id)
        self.done.add(job_id)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0), reason=st.sampled_from(list(RequeueReason)))
    def requeue(self, pick: int, reason: RequeueReason) -> None:
        job_id = sorted(self.running)[pick % len(self.running)]
        job = self.jobs[job_id]
        self.queue.requeue(JobId(job_id), self.now, reason)
        self.running.discard(job_id)
        self.lines[job.tenant].insert(0, job_id)
        if job.max_wait_s is not None:
            self.waits[job_id] = self.now + job.max_wait_s

    @precondition(lambda self: any(self.lines.values()))
    @rule(pick=st.integers(0))
    def discard(self, pick: int) -> None:
        queued = sorted(job_id for line in self.lines.values() for job_id in line)
        job_id = queued[pick % len(queued)]
        assert self.queue.discard(JobId(job_id))
        assert not self.queue.discard(JobId(job_id))
        self.take(job_id)
        self.done.add(job_id)

    @rule(seconds=st.sampled_from([0.01, 1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        expected = {job_id for job_id, at in self.waits.items() if at <= self.now}
        if self.name == "edf":  # gives up what is too late
            expected |= {job_id for job_id, at in self.deadlines.items() if at < self.now}
        assert {job.id for job in self.queue.expire(self.now)} == expected
        for job_id in expected:
            self.take(job_id)
            self.done.add(job_id)
        following = self.queue.next_expiry()
        assert (following is None) == (not self.waits and not (self.name == "edf" and self.deadlines))

    @rule(name=st.sampled_from(NAMES))
    def swap(self, name: str) -> None:
        self.queue.swap(self.policy(name), self.now)
        for line in self.lines.values():  # to a new policy they are all new
            for job_id in line:
                if (deadline := self.jobs[job_id].deadline) is not None:
                    self.deadlines[job_id] = deadline

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "queue"):
            return
        queued = {job_id for line in self.lines.values() for job_id in line}
        assert {job.id for job in self.queue.queued_jobs()} == queued
        assert len(self.queue) == len(self.queue.policy) == len(queued)
        assert self.queue.running == len(self.running)
        assert {tenant: jobs for tenant, (jobs, _) in self.queue.backlog().items()} == {
            tenant: len(line) for tenant, line in self.lines.items() if line
        }
        for tenant in "abcd":
            seen = self.queue.snapshot(TenantId(tenant))
            assert 0 < seen.tenant_share <= 1
            assert seen.queued_tokens == sum(self.jobs[job_id].total_tokens for job_id in queued)
            if self.cap is not None:
                mine = [self.jobs[job_id] for job_id in self.running if self.jobs[job_id].tenant == tenant]
                assert self.queue.running_of(TenantId(tenant)) == len(mine) <= self.cap
                assert len(mine) <= 1 or sum(job.total_tokens for job in mine) <= 90
        assert sum(self.jobs[job_id].service_class == "batch" for job_id in self.running) <= 2

    def teardown(self) -> None:
        if not hasattr(self, "queue"):
            return
        for job_id in list(self.running):
            self.queue.finish(JobId(job_id), Charge(), self.now)
            self.done.add(job_id)
        while (dispatch := self.queue.next(self.now, always)) is not None:
            self.queue.finish(dispatch.job.id, Charge(), self.now)
            assert dispatch.job.id not in self.done
            self.done.add(dispatch.job.id)
        assert self.done == set(self.jobs)
        assert len(self.queue) == self.queue.running == 0


SETTINGS = settings(max_examples=40, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", NAMES)
def test_queue_with_one_policy(name: str) -> None:
    class Machine(QueueMachine):
        names = [name]  # noqa: RUF012 - read only

        def policy(self, wanted: str) -> Any:
            return super().policy(name)

    run_state_machine_as_test(Machine, settings=SETTINGS)


def test_queue_with_swaps_between_all_policies() -> None:
    run_state_machine_as_test(QueueMachine, settings=SETTINGS)
