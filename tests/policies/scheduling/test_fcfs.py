"""First come, first served."""

from __future__ import annotations

from policies.scheduling.fcfs import FcfsScheduler
from policies.testing import always, make_job
from policies.types import JobId, RequeueReason


def order(policy: FcfsScheduler) -> list[str]:
    popped = []
    while (job := policy.pop(0.0, always)) is not None:
        popped.append(str(job.id))
    return popped


def test_order_of_arrival_over_all_tenants() -> None:
    policy = FcfsScheduler()
    for i, tenant in enumerate("abcbaacb"):
        policy.push(make_job(f"j{i}", tenant), float(i))
    policy.discard(JobId("j0"))
    policy.discard(JobId("j5"))
    assert order(policy) == ["j1", "j2", "j3", "j4", "j6", "j7"]


def test_returned_jobs_go_before_everybody() -> None:
    policy = FcfsScheduler()
    for i in range(3):
        policy.push(make_job(f"j{i}", f"t{i}"), 0.0)
    job = policy.pop(0.0, always)
    assert job is not None
    policy.requeue(job, 1.0, RequeueReason.WORKER_LOST)
    assert order(policy) == ["j0", "j1", "j2"]


def test_drain_is_in_order_of_arrival_over_all_tenants() -> None:
    policy = FcfsScheduler()
    for i, tenant in enumerate("abab"):
        policy.push(make_job(f"j{i}", tenant), 0.0)
    assert [job.id for job in policy.drain()] == ["j0", "j1", "j2", "j3"]


def test_explain_counts_what_it_passed_over() -> None:
    policy = FcfsScheduler()
    policy.push(make_job("big", "a", prompt=1000), 0.0)
    policy.push(make_job("small", "b"), 0.0)
    job = policy.pop(0.0, lambda job: job.prompt_tokens < 100)
    assert job is not None
    assert policy.explain(job).picked_because == "first of 2 queued that fits; 1 earlier do not"
    job = policy.pop(0.0, always)
    assert job is not None
    assert policy.explain(job).picked_because == "arrived first of 1 queued"
    assert policy.explain(make_job("other")).picked_because == "not picked last"
