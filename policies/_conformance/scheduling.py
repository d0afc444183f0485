"""What every scheduling policy must keep."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from policies._conformance.base import Conformance, always, make_job
from policies.queue import JobQueue
from policies.spi import SchedulingPolicy
from policies.types import Charge, Job, JobId, Pick, RequeueReason

_COUNTED = frozenset({"service", "prepaid", "prepaid_output", "lengths", "floors"})
"""Shared keys of a dump that pushing the queued jobs anew must not change. docs/policies.md says what each holds."""


class SchedulingConformance(Conformance):
    """For ``scheduling``."""

    kind = "scheduling"
    fifo_within_tenant: ClassVar[bool] = True
    """Jobs of one tenant that are alike leave in the order in which they came."""
    starvation_pops: ClassVar[int] = 2000
    """A job is picked at the latest after so many others, 0.1 s apart."""

    def make(self) -> SchedulingPolicy:
        raise NotImplementedError

    def test_every_job_leaves_once(self) -> None:
        policy = self.make()
        jobs = [make_job(f"j{i}", f"t{i % 7}", prompt=1 + i % 5) for i in range(100)]
        for job in jobs:
            policy.push(job, 0.0)
        assert len(policy) == 100
        popped = [policy.pop(1.0, always) for _ in range(100)]
        assert sorted(job.id for job in popped if job) == sorted(job.id for job in jobs)
        assert policy.pop(1.0, always) is None
        assert len(policy) == 0

    def test_a_queued_id_cannot_be_pushed_again(self) -> None:
        policy = self.make()
        policy.push(make_job("x"), 0.0)
        try:
            policy.push(make_job("x", "b"), 0.0)
        except ValueError:
            assert len(policy) == 1
        else:
            raise AssertionError("push of a queued id must raise ValueError")

    def test_order_within_a_tenant(self) -> None:
        policy = self.make()
        for i in range(60):
            policy.push(make_job(f"j{i:03}", f"t{i % 3}", arrived_at=float(i)), float(i))
        order: dict[str, list[str]] = {}
        while (job := policy.pop(60.0, always)) is not None:
            policy.charge(job, Charge(10, 0, 10), 60.0, True)
            order.setdefault(job.tenant, []).append(job.id)
        for ids in order.values():
            assert ids == sorted(ids) or not self.fifo_within_tenant, ids

    def test_a_head_that_does_not_fit_blocks_no_other_tenant(self) -> None:
        policy = self.make()
        policy.push(make_job("big", "a", prompt=1000), 0.0)
        policy.push(make_job("small", "b"), 0.0)
        job = policy.pop(1.0, lambda job: job.prompt_tokens < 100)
        assert job is not None
        assert job.id == "small"
        assert policy.pop(1.0, lambda job: job.prompt_tokens < 100) is None
        assert len(policy) == 1
        job = policy.pop(2.0, always)
        assert job is not None
        assert job.id == "big"

    def test_fits_is_asked_of_queued_jobs_only(self) -> None:
        policy = self.make()
        queued = {f"j{i}" for i in range(20)}
        for i in range(20):
            policy.push(make_job(f"j{i}", f"t{i % 4}"), 0.0)
        for gone in ("j3", "j7"):
            policy.discard(JobId(gone))
            queued.discard(gone)
        asked: list[str] = []

        def refuse(job: Job) -> bool:
            asked.append(job.id)
            return False

        assert policy.pop(0.0, refuse) is None
        assert asked
        assert set(asked) <= queued

    def test_discard_wherever_it_stands(self) -> None:
        policy = self.make()
        for i in range(10):
            policy.push(make_job(f"j{i}", f"t{i % 2}"), 0.0)
        for i in (0, 5, 9):
            assert policy.discard(JobId(f"j{i}")) is True
            assert policy.discard(JobId(f"j{i}")) is False
        assert policy.discard(JobId("never seen")) is False
        left = [policy.pop(0.0, always) for _ in range(len(policy))]
        assert sorted(job.id for job in left if job) == [f"j{i}" for i in (1, 2, 3, 4, 6, 7, 8)]

    def test_a_returned_job_goes_before_its_tenants_others(self) -> None:
        policy = self.make()
        for name in ("first", "second"):
            policy.push(make_job(name), 0.0)
        job = policy.pop(0.0, always)
        assert job is not None
        policy.requeue(job, 1.0, RequeueReason.WORKER_LOST)
        assert len(policy) == 2
        again = policy.pop(2.0, always)
        assert again is not None
        assert again.id == job.id

    def test_charges_of_jobs_it_never_popped(self) -> None:
        policy = self.make()
        policy.charge(make_job("foreign", "b"), Charge(5, 5, 1), 0.0, False)
        policy.charge(make_job("foreign", "b"), Charge(0, 0, 3), 1.0, True)
        policy.charge(make_job("corrected", "c"), Charge(-5, 5, -1), 2.0, True)
        policy.push(make_job("own", "b"), 3.0)
        assert policy.pop(3.0, always) is not None

    def test_explains_what_it_popped(self) -> None:
        policy = self.make()
        policy.push(make_job("x"), 0.0)
        job = policy.pop(0.0, always)
        assert job is not None
        pick = policy.explain(job)
        assert isinstance(pick, Pick)
        assert 0 < len(pick.picked_because) <= 200

    def test_drain_keeps_everything_in_order(self) -> None:
        policy = self.make()
        for i in range(30):
            policy.push(make_job(f"j{i:02}", f"t{i % 3}", arrived_at=float(i)), float(i))
        head = policy.pop(30.0, always)
        assert head is not None
        policy.requeue(head, 31.0, RequeueReason.WORKER_REFUSED)
        drained = policy.drain()
        assert len(policy) == 0
        assert policy.pop(32.0, always) is None
        assert sorted(job.id for job in drained) == [f"j{i:02}" for i in range(30)]
        for tenant in ("t0", "t1", "t2"):
            ids = [job.id for job in drained if job.tenant == tenant]
            assert ids == sorted(ids) or not self.fifo_within_tenant
        for job in drained:
            policy.push(job, 33.0)
        assert len(policy) == 30

    def test_dump_is_json_and_load_takes_it(self) -> None:
        policy = self.make()
        for i in range(12):
            policy.push(make_job(f"j{i}", f"t{i % 3}", weight=1.0 + i % 3), 0.0)
        for i in range(6):
            job = policy.pop(1.0, always)
            assert job is not None
            policy.charge(job, Charge(10, 0, 3), 1.0, i < 2)
        state = json.loads(json.dumps(policy.dump(), allow_nan=False))
        successor = self.make()
        successor.load(state)
        successor.load({**state, "a key of the future": [1, {"x": None}]})
        for job in policy.drain():
            successor.push(job, 2.0)
        assert len(successor) == 6
        resumed = json.loads(json.dumps(successor.dump(), allow_nan=False))
        assert resumed.keys() == state.keys()
        for key in _COUNTED & state.keys():
            assert resumed[key] == state[key], f"load did not take over {key!r}: {resumed[key]}, not {state[key]}"
        self.make().load({})

    def test_nobody_starves(self) -> None:
        for fields in ({}, {"prompt": 500}, {"weight": 0.01}, {"priority": -1}):
            policy = self.make()
            serial = 0
            for serial in range(20):
                policy.push(make_job(f"busy{serial}", f"t{serial % 4}", priority=1), 0.0)
            policy.push(make_job("quiet", "quiet", **fields), 0.0)
            for step in range(self.starvation_pops):
                now = step * 0.1
                job = policy.pop(now, always)
                assert job is not None
                if job.id == "quiet":
                    break
                policy.charge(job, Charge(10, 0, 10), now, True)
                serial += 1
                policy.push(make_job(f"busy{serial}", job.tenant, priority=1, arrived_at=now), now)
            else:
                raise AssertionError(f"a job with {fields} was not picked in {self.starvation_pops} picks")

    def test_same_events_same_order_at_any_time_of_day(self) -> None:
        assert list(_walk(self.make(), 7, 0.0)) == list(_walk(self.make(), 7, 0.0))
        assert list(_walk(self.make(), 7, 0.0)) == list(_walk(self.make(), 7, 2.0**20))

    def test_random_walks_lose_and_duplicate_nothing(self) -> None:
        for seed in range(5):
            for _ in _walk(self.make(), seed, 0.0):
                pass

    def test_swap_moves_ten_thousand_jobs(self) -> None:
        queue = JobQueue(self.make())
        for i in range(10_000):
            queue.offer(make_job(f"j{i:05}", f"t{i % 100}"), 0.0)
        running = [queue.next(1.0, always) for _ in range(50)]
        queue.swap(self.make(), 2.0)
        for dispatch in running:
            assert dispatch is not None
            queue.finish(dispatch.job.id, Charge(10, 0, 10), 3.0)
        seen: dict[str, list[str]] = {}
        while (picked := queue.next(4.0, always)) is not None:
            seen.setdefault(picked.job.tenant, []).append(picked.job.id)
        assert sum(map(len, seen.values())) == 9950
        assert all(ids == sorted(ids) for ids in seen.values()) or not self.fifo_within_tenant


def _walk(policy: SchedulingPolicy, seed: int, start: float) -> Iterator[str]:
    """Random operations against a model; yields the ids in the order in which they are popped."""
    rng = random.Random(seed)  # noqa: S311 - a reproducible walk, not a secret
    queued: dict[str, Job] = {}
    running: dict[str, Job] = {}
    for step in range(600):
        now = start + step / 64  # a power of two, so that shifting the origin rounds nothing
        action = rng.random()
        if action < 0.4:
            job = make_job(
                f"j{step}", f"t{rng.randrange(6)}", prompt=rng.randrange(1, 50), weight=rng.choice([1, 2, 4])
            )
            policy.push(replace(job, arrived_at=now), now)
            queued[job.id] = job
        elif action < 0.65:
            limit = rng.choice([25, 50])
            popped = policy.pop(now, lambda job, limit=limit: job.prompt_tokens < limit)  # type: ignore[misc]
            if popped is not None:
                assert popped.id in queued, f"{popped.id} was popped, but is not queued"
                running[popped.id] = queued.pop(popped.id)
                yield popped.id
        elif action < 0.75 and running:
            job = running.pop(rng.choice(sorted(running)))
            policy.requeue(job, now, RequeueReason.WORKER_LOST)
            queued[job.id] = job
        elif action < 0.8 and queued:
            job = queued.pop(rng.choice(sorted(queued)))
            assert policy.discard(job.id)
        elif running:
            job = running[rng.choice(sorted(running))]
            final = rng.random() < 0.5
            policy.charge(job, Charge(rng.randrange(5), rng.randrange(3), rng.randrange(5)), now, final)
            if final:
                del running[job.id]
        assert len(policy) == len(queued), f"{len(policy)} jobs are left, {len(queued)} should be"
    rest = policy.drain()
    assert sorted(job.id for job in rest) == sorted(queued)
