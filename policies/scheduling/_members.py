"""The lower level of ``hierarchical``: a tenant's members, as its inner policy sees them.

Rules
- The scheduler owns seats and insides; nothing here decides anything.
- A job reaches its inner policy when that is first asked for anything, in order of arrival: until then nothing inside
  can depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from policies.spi import Json, SchedulingPolicy
from policies.types import Job, JobId, TenantId

_set = object.__setattr__


class Member(Job):
    """A job as the inner policy sees it: tenant and weight are its member's, all else is the job's.

    Copying all fields would cost more than a whole inner policy. The few that policies read most are set, the others
    are looked up in the job when they are asked for.
    """

    __slots__ = ("_job",)

    def __init__(self, job: Job, tenant: TenantId, weight: float) -> None:
        _set(self, "tenant", tenant)
        _set(self, "weight", weight)
        _set(self, "_job", job)
        _set(self, "id", job.id)
        _set(self, "prompt_tokens", job.prompt_tokens)
        _set(self, "max_tokens", job.max_tokens)
        _set(self, "model", job.model)

    def __getattr__(self, name: str) -> Any:
        """Called for fields that are not set here."""
        return getattr(self._job, name)


class Seat:
    """A job of this policy: itself, its stand-in outside, and how the inner policy sees it (None: it never did)."""

    __slots__ = ("inner", "job", "queued", "stand_in")

    def __init__(self, job: Job, stand_in: Job) -> None:
        self.job = job
        self.inner: Job | None = None
        self.stand_in = stand_in
        self.queued = True


class Inside:
    """A tenant's inner policy, made when it is asked for, and how many of its jobs are here.

    ``state``: what an earlier one dumped; None: nothing.
    """

    __slots__ = ("_coming", "_make", "_member", "_policy", "_state", "running")

    def __init__(self, make: Callable[[], SchedulingPolicy], member: Callable[[Seat], Job], state: Json | None) -> None:
        self._make = make
        self._member = member
        self._state = state
        self._policy: SchedulingPolicy | None = None
        self._coming: deque[tuple[Seat, float]] = deque()
        self.running = 0

    @property
    def policy(self) -> SchedulingPolicy:
        """With all jobs in it."""
        policy = self._policy
        if policy is None:
            policy = self._make()
            if self._state is not None:
                policy.load(self._state)
                self._state = None
            self._policy = policy
        while self._coming:
            seat, now = self._coming[0]
            policy.push(self._member(seat), now)
            self._coming.popleft()
        return policy

    @property
    def idle(self) -> bool:
        """Whether none of its jobs is here."""
        return not self.running and not self._coming and (self._policy is None or not len(self._policy))

    def push(self, seat: Seat, now: float) -> None:
        """For when the policy is next asked for."""
        self._coming.append((seat, now))

    def drain(self) -> list[JobId]:
        """In the policy's order; those that it has not seen last."""
        jobs = [] if self._policy is None else [job.id for job in self._policy.drain()]
        jobs += [seat.job.id for seat, _ in self._coming]
        self._coming.clear()
        return jobs

    def dump(self) -> Json:
        """Its counters. Members whose jobs it has not seen come back from idle then, here or elsewhere."""
        return (self._state or {}) if self._policy is None else self._policy.dump()

    def load(self, state: Json) -> None:
        """Replace them."""
        if self._policy is None:
            self._state = state
        else:
            self.policy.load(state)
