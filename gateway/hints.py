"""Tells workers with a disk tier what the requests that come next begin with, so that it is in memory when they come.

Rules
- A hint holds chain keys, which say nothing without the server's secret: no request, no tenant, no content.
- Which job is next is the policy's secret until it is asked for it. So the first in line of a few tenants are told of,
  each at most every ``AGAIN_S``; one whose turn it is not yet costs a read, and nothing else.
- To the worker that has the beginning of its prompt in memory, else to all that may run it: who has no such file
  ignores it, and so does one whose disk is busy.
- Bounded in jobs, workers, keys and how often; a model without a disk tier costs a look at its workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.desk import try_send
from gateway.gate import suits
from gateway.worker_handle import WorkerHandle, WorkerState
from policies.demand import Demand
from policies.types import Job, JobId
from workers.protocol import Prefetch

EVERY_S = 0.1
AGAIN_S = 2.0
MOST_JOBS = 4
MOST_WORKERS = 4
MOST_KEYS = 4096
"""128 KiB of keys: 65,536 tokens in blocks of 16."""
AMONG = 256
"""Queued jobs that are looked at, or one tenant's thousands would cost every turn."""


class Hints:
    """Of one model."""

    def __init__(self) -> None:
        self._next = 0.0
        self._told: dict[JobId, float] = {}
        """When the job was told of last; of those that are first in line now."""

    def give(self, queued: Demand, workers: Iterable[WorkerHandle], now: float) -> None:
        """After a turn that left jobs queued. ``workers``: those that run requests."""
        able = [worker for worker in workers if _reads(worker)]
        if not able or now < self._next:
            return
        self._next = now + EVERY_S
        heads = queued.heads(MOST_JOBS, AMONG)
        self._told = {job.id: self._told[job.id] for job in heads if job.id in self._told}
        for job in heads:
            if job.prefix_keys and now - self._told.get(job.id, -AGAIN_S) >= AGAIN_S:
                self._told[job.id] = now
                message = Prefetch(keys=[bytes(key) for key in job.prefix_keys[:MOST_KEYS]])
                for worker in likely(job, able, now):
                    try_send(worker, message)


def _reads(worker: WorkerHandle) -> bool:
    """Whether it has anything on a disk."""
    tier = worker.stats.tiers.get("disk")
    return tier is not None and tier.bytes > 0 and worker.state is WorkerState.READY


def likely(job: Job, workers: Sequence[WorkerHandle], now: float) -> list[WorkerHandle]:
    """Where it will probably run, of those that may run it."""
    able = [worker for worker in workers if suits(worker, job)]
    if len(able) < 2:
        return able
    hot = [(worker, worker.view(now).hot_prefixes) for worker in able]
    for key in reversed(job.prefix_keys):
        holding = [worker for worker, keys in hot if key in keys]
        if holding:
            return holding[:MOST_WORKERS]
    return able[:MOST_WORKERS]
