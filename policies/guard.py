"""A scheduling policy that may fail at any call, and loses nothing when it does. Pure: no clock, no I/O, no logging.

Rules
- ``Guarded`` is what the live queue holds. While the policy behind it keeps its contract, it only passes calls on.
- It fails by raising, by returning a job that is not queued or does not fit, by not knowing a queued job, by holding
  another number of jobs than the queue, or by returning nothing for ``STALL_S`` although all that is queued fits. Then
  a successor gets every queued job, in order, and answers the same call: the queue, and so the caller, never sees the
  failure. The failed policy is not asked again.
- Successor in its *first second at work* (``PROBATION_S`` from its first dispatch): the policy that it replaced, whose
  counters were kept up with the work that ran meanwhile. Afterwards: a new ``fallback`` (``fcfs``).
- What the queue holds is the truth, never what a policy says that it holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from policies.demand import Demand
from policies.spi import Fits, Json, SchedulingPolicy
from policies.types import Charge, Job, JobId, Pick, RequeueReason

PROBATION_S = 1.0
STALL_S = 1.0
_GLANCE = 16
"""Queued jobs that are looked at whenever nothing is returned; all of them only after ``STALL_S``."""
T = TypeVar("T")


class Held(Protocol):
    """What a guard must know of the queue around it; ``policies.queue.JobQueue``."""

    def queued_jobs(self) -> list[Job]:
        """All queued jobs in order of arrival, returned ones first."""
        ...

    def is_queued(self, job_id: JobId) -> bool:
        """Whether the job waits."""
        ...

    @property
    def demand(self) -> Demand:
        """What they ask for."""
        ...

    def __len__(self) -> int:
        """Queued jobs."""
        ...


class BrokenPromise(RuntimeError):  # noqa: N818 - what it is
    """A policy did not raise, but did what no policy may do."""


@dataclass(frozen=True, slots=True)
class Failover:
    """A policy failed and another one took its place."""

    failed: str
    """Its name."""
    call: str
    """The method that it failed in."""
    error: Exception
    successor: str
    rolled_back: bool
    """The successor is the policy that the failed one had replaced."""


class Guarded:
    """A ``SchedulingPolicy``, and ``Expiring``. Passes on until it is armed, so that a swap sees what fails in it."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        name: str,
        *,
        fallback: Callable[[], SchedulingPolicy],
        fallback_name: str = "fcfs",
        on_failover: Callable[[Failover], None] = lambda failover: None,
    ) -> None:
        """``fallback`` makes a policy that can be relied on. ``on_failover`` is told inside the failed call."""
        self.name = name
        """Of the policy that is asked now."""
        self._policy = policy
        self._fallback = (fallback_name, fallback)
        self._on_failover = on_failover
        self._queue: Held | None = None
        self._previous: tuple[str, SchedulingPolicy] | None = None
        self._ends: float | None = None
        self._now = 0.0
        self._unexpiring: SchedulingPolicy | None = None
        """The policy, once it was found to have no ``expired``."""
        self._silent: tuple[float, JobId] | None = None
        """When it first returned nothing although what was looked at fits, and the first job that waited then; None: it
        has returned something since. With that job gone, nobody has waited all the time."""

    def arm(self, queue: Held, now: float, previous: Guarded | None = None) -> None:
        """``queue`` holds this policy from now on, in place of ``previous``, which the swap has emptied."""
        self._queue = queue
        self._now = now
        self._previous = None if previous is None else (previous.name, previous.policy)

    @property
    def policy(self) -> SchedulingPolicy:
        """The policy that is asked now."""
        return self._policy

    @policy.setter
    def policy(self, policy: SchedulingPolicy) -> None:
        """Put another one there that holds the same jobs: a ``ShadowPolicy`` around it, or what was inside one."""
        self._policy = policy

    @property
    def on_probation(self) -> bool:
        """Whether it would be rolled back if it failed now."""
        return self._previous is not None and (self._ends is None or self._now < self._ends)

    # -- SchedulingPolicy -----------------------------------------------------------------------------------------

    def push(self, job: Job, now: float) -> None:
        """As the policy's."""
        self._at(now)
        self._done("push", lambda: self._policy.push(job, now))

    def pop(self, now: float, fits: Fits) -> Job | None:
        """As the policy's; what it returns is queued and fits."""
        self._at(now)
        try:
            job = self._popped(now, fits)
        except Exception as error:
            self._fail("pop", error)
            job = self._done("pop", lambda: self._popped(now, fits))
        if job is not None and self._previous is not None and self._ends is None:
            self._ends = now + PROBATION_S
        return job

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """As the policy's."""
        self._at(now)
        self._done("requeue", lambda: self._policy.requeue(job, now, reason))

    def discard(self, job_id: JobId) -> bool:
        """As the policy's. The queue has let go of the job already: the policy must know it."""
        if self._queue is None:
            return self._policy.discard(job_id)
        try:
            if not self._policy.discard(job_id):
                raise BrokenPromise(f"it does not know the queued job {job_id!r}")
        except Exception as error:
            self._fail("discard", error)
        return True

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """As the policy's. On probation the policy before it is charged too, so that it could go on at once."""
        self._at(now)
        if self._previous is not None:
            try:
                self._previous[1].charge(job, charge, now, final)
            except Exception:
                self._previous = None  # it cannot be relied on either
        try:
            self._policy.charge(job, charge, now, final)
        except Exception as error:
            rolled_back = self._fail("charge", error).rolled_back
            if not rolled_back:  # whom it was rolled back to was charged above
                self._done("charge", lambda: self._policy.charge(job, charge, now, final))

    def drain(self) -> list[Job]:
        """As the policy's."""
        return self._policy.drain()

    def dump(self) -> Json:
        """As the policy's. From a live one that cannot: nothing, so that it can be swapped out all the same."""
        if self._queue is None:
            return self._policy.dump()
        with contextlib.suppress(Exception):
            state = self._policy.dump()
            if isinstance(state, dict):
                return state
        return {}

    def load(self, state: Json) -> None:
        """As the policy's."""
        self._policy.load(state)

    def explain(self, job: Job) -> Pick:
        """As the policy's; the queue still holds the job that was just popped."""
        try:
            pick = self._policy.explain(job)
            if not isinstance(pick, Pick):
                raise BrokenPromise(f"it returned {type(pick).__name__} instead of a Pick")
        except Exception as error:
            if self._queue is None:
                raise
            self._fail("explain", error, without=job.id)
            return Pick("its policy could not say why")
        return pick

    def __len__(self) -> int:
        return len(self._policy)

    # -- Expiring -------------------------------------------------------------------------------------------------

    def expired(self, now: float) -> list[Job]:
        """As the policy's, where it has it."""
        self._at(now)
        if self._policy is self._unexpiring:
            return []

        def ask() -> list[Job]:
            give_up: Callable[[float], list[Job]] | None = getattr(self._policy, "expired", None)
            if give_up is None:
                self._unexpiring = self._policy
                return []
            jobs = give_up(now)
            if not all(isinstance(job, Job) for job in jobs):
                raise BrokenPromise("it named something that is no job")
            return list(jobs)

        return self._asked("expired", ask, [])

    def next_expired(self) -> float | None:
        """As the policy's, where it has it."""

        def ask() -> float | None:
            at = getattr(self._policy, "next_expired", _never)()
            return None if at is None else float(at)

        return self._asked("next_expired", ask, None)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _at(self, now: float) -> None:
        self._now = now
        if self._ends is not None and now >= self._ends:
            self._previous = None

    def _done(self, call: str, work: Callable[[], T]) -> T:
        """``work``, by whoever takes over where the policy fails: the one before it, and after that the fallback."""
        for _ in range(2):
            try:
                return work()
            except Exception as error:
                self._fail(call, error)
        return work()

    def _asked(self, call: str, ask: Callable[[], T], otherwise: T) -> T:
        try:
            return ask()
        except Exception as error:
            self._fail(call, error)
            return otherwise

    def _popped(self, now: float, fits: Fits) -> Job | None:
        """One pop, held against the queue."""
        queue, policy = self._queue, self._policy
        job = policy.pop(now, fits)
        if queue is None:
            return job
        if job is not None:
            if not queue.is_queued(job.id):
                raise BrokenPromise(f"it returned {job.id!r}, which is not queued")
            if getattr(fits, "passed", None) is not job and not getattr(fits, "quiet", fits)(job):
                raise BrokenPromise(f"it returned {job.id!r}, which does not fit")
        expected = len(queue) - (job is not None)
        if len(policy) != expected:
            raise BrokenPromise(f"it holds {len(policy)} jobs where {expected} are queued")
        if job is not None:
            self._silent = None
        elif expected and self._stalls(queue, getattr(fits, "quiet", fits), now):
            raise BrokenPromise(f"for {STALL_S:g} s it has returned nothing although all that is queued fits")
        return job

    def _stalls(self, queue: Held, fits: Fits, now: float) -> bool:
        """It has returned nothing: whether it could have all the time. A head that does not fit may hold others up."""
        silent = self._silent
        if not queue.demand.all_fit(fits, _GLANCE):
            self._silent = None
        elif silent is None or not queue.is_queued(silent[1]):
            self._silent = now, queue.demand.first()
        elif now - silent[0] >= STALL_S:
            self._silent = now, queue.demand.first()
            return queue.demand.all_fit(fits)
        return False

    def _fail(self, call: str, error: Exception, without: JobId | None = None) -> Failover:
        """Hand every queued job (but ``without``) to a successor. Raises ``error`` where none takes them."""
        if self._queue is None:
            raise error
        rolled_back = self.on_probation
        failed, jobs = self.name, [job for job in self._queue.queued_jobs() if job.id != without]
        for name, policy in self._successors(rolled_back):
            if _takes(policy, jobs, self._now):
                self.name, self._policy = name, policy
                break
            rolled_back = False
        else:
            raise error
        self._previous = self._silent = None
        failover = Failover(failed, call, error, self.name, rolled_back)
        self._on_failover(failover)
        return failover

    def _successors(self, previous: bool) -> Iterator[tuple[str, SchedulingPolicy]]:
        if previous and self._previous is not None:
            yield self._previous
        name, make = self._fallback
        with contextlib.suppress(Exception):  # then the failed policy's own error is the one to tell
            made = make()
            yield name, made


def _takes(policy: SchedulingPolicy, jobs: list[Job], now: float) -> bool:
    """Whether the policy takes all these jobs and says so."""
    try:
        for job in jobs:
            policy.push(job, now)
        return len(policy) == len(jobs)
    except Exception:
        return False


def _never() -> None:
    return None
