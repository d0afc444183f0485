"""A candidate scheduling policy beside the live one: it hears every event, decides nothing, and is counted. Pure.

Rules
- The live policy is asked exactly as without a shadow, and its answer stands. The candidate's is only compared.
- Both look at the same queue: what the live policy dispatched has left the candidate too, as a dispatch of its own
  where it can (so that it is paid as its policy pays), else as a job that went away.
- A candidate that would have picked another job gets that one back at the front of its tenant's line, unpaid.
- A candidate that raises, or that does not hold what the live policy holds, is out: ``error`` says why. Nothing of
  it is ever seen by the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from policies.spi import Fits, Json, SchedulingPolicy
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId

MOST_TENANTS = 32
"""Tenants that are counted by name; the rest is counted under ``OTHER``."""
OTHER = TenantId("other")


@dataclass(slots=True)
class Comparison:
    """The candidate's decisions against the live ones, over all dispatches since the shadow began."""

    picks: int = 0
    """Dispatches."""
    same_job: int = 0
    same_tenant: int = 0
    """Another job of the same tenant."""
    idle: int = 0
    """The candidate would have dispatched nothing."""
    live: Counter[TenantId] = field(default_factory=Counter)
    """Dispatches by tenant."""
    candidate: Counter[TenantId] = field(default_factory=Counter)
    """What the candidate would have dispatched, by tenant."""

    @property
    def agreement(self) -> float | None:
        """Part of the dispatches in which both picked the same job; None before the first."""
        return self.same_job / self.picks if self.picks else None

    def as_json(self) -> Mapping[str, Any]:
        """For the admin API."""
        tenants = sorted({*self.live, *self.candidate})
        return {
            "picks": self.picks,
            "same_job": self.same_job,
            "same_tenant": self.same_tenant,
            "candidate_idle": self.idle,
            "agreement": None if self.agreement is None else round(self.agreement, 4),
            "tenants": {tenant: {"live": self.live[tenant], "candidate": self.candidate[tenant]} for tenant in tenants},
        }

    def count(self, live: Job, candidate: Job | None) -> None:
        """One dispatch."""
        self.picks += 1
        self._by_tenant(self.live, live.tenant)
        if candidate is None:
            self.idle += 1
            return
        self._by_tenant(self.candidate, candidate.tenant)
        if candidate.id == live.id:
            self.same_job += 1
        elif candidate.tenant == live.tenant:
            self.same_tenant += 1

    def _by_tenant(self, counts: Counter[TenantId], tenant: TenantId) -> None:
        known = tenant in self.live or tenant in self.candidate
        full = len({*self.live, *self.candidate} - {OTHER}) >= MOST_TENANTS
        counts[tenant if known or not full else OTHER] += 1


class ShadowPolicy:
    """A ``SchedulingPolicy``, and ``Expiring``: the live one, with a candidate that watches.

    O(tenants) ``fits`` of the candidate where it disagrees; otherwise what both cost.
    """

    def __init__(self, live: SchedulingPolicy, candidate: SchedulingPolicy, jobs: Iterable[Job], now: float) -> None:
        """``jobs`` are those that the live policy holds, in order of arrival. The candidate takes over its counters.

        Raises what the candidate raises, or ValueError when it does not hold these jobs afterwards.
        """
        self.live = live
        self.comparison = Comparison()
        self.error: Exception | None = None
        """Why the candidate is out."""
        self._candidate: SchedulingPolicy | None = candidate
        candidate.load(live.dump())
        for job in jobs:
            candidate.push(job, now)
        if len(candidate) != len(live):
            raise ValueError(f"the candidate holds {len(candidate)} of {len(live)} queued jobs")

    # -- SchedulingPolicy -----------------------------------------------------------------------------------------

    def push(self, job: Job, now: float) -> None:
        """Both."""
        self.live.push(job, now)
        self._mirror(lambda candidate: candidate.push(job, now))

    def pop(self, now: float, fits: Fits) -> Job | None:
        """The live policy's pick. The candidate is asked when there is one."""
        job = self.live.pop(now, fits)
        if job is not None:
            quiet: Fits = getattr(fits, "quiet", fits)  # who only watches must leave no mark in the queue's gate
            self._mirror(lambda candidate: self._compare(candidate, job, now, quiet))
        return job

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """Both."""
        self.live.requeue(job, now, reason)
        self._mirror(lambda candidate: candidate.requeue(job, now, reason))

    def discard(self, job_id: JobId) -> bool:
        """Both."""
        found = self.live.discard(job_id)
        self._mirror(lambda candidate: _check(candidate.discard(job_id) == found, f"it did not know {job_id!r}"))
        return found

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """Both."""
        self.live.charge(job, charge, now, final)
        self._mirror(lambda candidate: candidate.charge(job, charge, now, final))

    def drain(self) -> list[Job]:
        """Both are empty afterwards."""
        jobs = self.live.drain()
        self._mirror(lambda candidate: candidate.drain() and None)
        return jobs

    def dump(self) -> Json:
        """The live policy's."""
        return self.live.dump()

    def load(self, state: Json) -> None:
        """Both."""
        self.live.load(state)
        self._mirror(lambda candidate: candidate.load(state))

    def explain(self, job: Job) -> Pick:
        """The live policy's."""
        return self.live.explain(job)

    def __len__(self) -> int:
        return len(self.live)

    # -- Expiring -------------------------------------------------------------------------------------------------

    def expired(self, now: float) -> list[Job]:
        """The live policy's, where it has it: a candidate gives nothing up."""
        jobs: list[Job] = getattr(self.live, "expired", lambda now: [])(now)
        return jobs

    def next_expired(self) -> float | None:
        """Likewise."""
        at: float | None = getattr(self.live, "next_expired", lambda: None)()
        return at

    # -- inside ---------------------------------------------------------------------------------------------------

    def _mirror(self, act: Callable[[SchedulingPolicy], object]) -> None:
        candidate = self._candidate
        if candidate is None:
            return
        try:
            act(candidate)
            _check(len(candidate) == len(self.live), f"it holds {len(candidate)} of {len(self.live)} queued jobs")
        except Exception as error:
            self.error, self._candidate = error, None

    def _compare(self, candidate: SchedulingPolicy, job: Job, now: float, fits: Fits) -> None:
        """Ask the candidate, count its answer, and let it dispatch what the live policy did."""
        picked = candidate.pop(now, _fits_or(fits, job))
        self.comparison.count(job, picked)
        if picked is not None and picked.id == job.id:
            return
        if picked is not None:
            candidate.requeue(picked, now, RequeueReason.SWAP)
            candidate.discard(picked.id)  # what it paid for a dispatch that did not happen is given back
            candidate.requeue(picked, now, RequeueReason.SWAP)
        if candidate.pop(now, lambda other: other.id == job.id) is None:
            _check(candidate.discard(job.id), f"it did not know {job.id!r}")


def unshadowed(policy: SchedulingPolicy) -> SchedulingPolicy:
    """The live policy, whether it has a shadow or not."""
    return policy.live if isinstance(policy, ShadowPolicy) else policy


def _fits_or(fits: Fits, job: Job) -> Fits:
    """``fits``, and ``job`` for certain: the live policy has just found that it does."""
    return lambda other: other.id == job.id or fits(other)


def _check(held: bool, otherwise: str) -> None:
    if not held:
        raise ValueError(otherwise)
