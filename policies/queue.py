"""The queue of one model around a scheduling policy: every job in it is queued, running or gone.

Rules
- Pure: no I/O, no clock, no logging; the caller passes ``now``, which never runs backwards. The gateway's dispatcher
  and the simulator drive the same class.
- The policy decides the order; this class owns who is queued and who runs, so a policy can be replaced at any moment
  and a failing one can lose nothing.
- A job leaves exactly once: ``finish`` after it ran, ``discard`` or ``expire`` before.
- A policy's exception comes through to the caller; its job stays queued or running here, and ``swap`` hands it on.
  What left in an ``expire`` that raised is returned by the next one.
- Work is charged to the policy that is live when it is reported, whoever popped the job.
"""

from __future__ import annotations

import contextlib
import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from policies._entries import InFlight, Queued, TenantLine
from policies.caps import Beside, Caps, Gate, Running
from policies.demand import Demand
from policies.service import ServiceBook
from policies.spi import Fits, SchedulingPolicy
from policies.types import Charge, Job, JobId, Pick, QueueSnapshot, RequeueReason, TenantId, Usage

MAX_BEHIND = 5
MAX_PASSED = 1
"""More, and small jobs keep the room of a large one small for as long as they come, whoever's turn it is."""


@dataclass(slots=True)
class Entry:
    """What a job found when it joined the queue."""

    position: int
    """1-based place in its tenant's line; the order between tenants is the policy's and not fixed yet."""
    depth: int
    """Jobs queued before it, of all tenants."""
    depth_tenant: int
    """Jobs of its tenant queued before it."""


@dataclass(slots=True)
class Dispatch:
    """A job to run now, and why."""

    job: Job
    pick: Pick
    waited_s: float
    """Seconds in the queue, over all its stays."""
    waited_behind: tuple[tuple[TenantId, int], ...]
    """At most 5 (tenant, tokens served while this job waited), most first; its own tenant included."""
    attempt: int = 1
    """2 and up after a requeue."""


class JobQueue:
    """See the module's rules. Amortised O(log n) per operation beside what the policy itself costs.

    The caps bound what may run at once (``caps.py``; None: no cap), ``max_passed`` how often a job is overtaken.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        *,
        max_running_per_tenant: int | None = None,
        max_running_tokens_per_tenant: int | None = None,
        max_running_per_class: Mapping[str, int] | None = None,
        max_passed: int = MAX_PASSED,
    ) -> None:
        self._policy = policy
        self._caps = Running(Caps(max_running_per_tenant, max_running_tokens_per_tenant, max_running_per_class or {}))
        self.max_passed = max_passed
        """Most times that a job which does not fit, but could, is overtaken. May be changed at any time."""
        self._queued: dict[JobId, Queued] = {}
        self._running: dict[JobId, InFlight] = {}
        self.demand = Demand(self._queued)
        """What the queued jobs ask for at least; to read."""
        self._lines: dict[TenantId, TenantLine] = {}
        self._weight_sum, self._tokens = 0.0, 0
        self._back = self._front = 0
        self.left_over = True
        """Jobs stayed when workers were last filled. What has only just come, and waits for that, is no backlog."""
        self._expiry: list[tuple[float, int, JobId]] = []
        self._held: JobId | None = None
        self._owed: list[Job] = []
        self._book = ServiceBook()

    # -- a job's way through ------------------------------------------------------------------------------------

    def offer(self, job: Job, now: float) -> Entry:
        """Enqueue. Raises ValueError when the id is already queued or running."""
        if job.id in self._queued or job.id in self._running:
            raise ValueError(f"job {job.id!r} is already in the queue")
        line = self._lines.get(job.tenant)
        depth, depth_tenant = len(self._queued), line.queued if line else 0
        self._policy.push(job, now)
        self._book.advance(now, self._busy)
        self._back += 1
        self._enter(Queued(job, self._back, now, self._book.mark()))
        return Entry(depth_tenant + 1, depth, depth_tenant)

    def next(
        self, now: float, fits: Fits, could_fit: Fits | None = None, beside: Beside | None = None
    ) -> Dispatch | None:
        """Take the job to run now, or None when nothing that is queued fits.

        ``could_fit(job)`` says whether a job would fit if nothing else ran. With it, a job that was overtaken
        ``max_passed`` times because it did not fit, but could, is next: everything else waits until it fits, so a large
        job does not starve behind a stream of small ones. Without it nothing is ever held back. ``beside`` lets past
        what would not take the held job's room.
        """
        if not self._queued:
            return None
        gate = Gate(self._caps, self.held(could_fit), fits, beside)
        job = self._policy.pop(now, gate)
        if job is None:
            return None
        if job.id not in self._queued:
            raise RuntimeError(f"scheduling policy {type(self._policy).__name__} returned {job.id!r}, not queued")
        # Everything that a policy can fail at comes first: then the job is still queued here, and a swap recovers it.
        pick = self._policy.explain(job)
        self._book.advance(now, self._busy)
        entry = self._leave(job.id)
        for refused in gate.refused:
            other = self._queued.get(refused)
            if other is None:
                continue
            other.passed += 1
            if (
                other.passed >= self.max_passed
                and self._held is None
                and could_fit is not None
                and could_fit(other.job)
            ):
                self._held = other.job.id
        waited = entry.waited_s + now - entry.since
        used = entry.usage
        self._running[job.id] = InFlight(job, entry.order, waited, entry.attempt, used.prompt, used.cached, used.output)
        self._caps.add(job)
        behind = self._book.since(entry.epoch, MAX_BEHIND) if waited else ()
        return Dispatch(job, pick, waited, behind, entry.attempt)

    def charge(self, job_id: JobId, charge: Charge, now: float) -> None:
        """Account work that ran for a running job. Raises KeyError when it is not running."""
        running = self._running[job_id]
        # Plain numbers: this runs for every sequence in every step.
        running.prompt += charge.prompt
        running.cached += charge.cached
        running.output += charge.output
        self._serve(running.job, charge, now)
        self._policy.charge(running.job, charge, now, False)

    def finish(self, job_id: JobId, rest: Charge, now: float) -> Usage:
        """End a running job, with what was not charged yet; returns its whole usage.

        Raises KeyError when it is not running: a job is finished exactly once.
        """
        running = self._running.pop(job_id)
        self._caps.remove(running.job)
        self._serve(running.job, rest, now)
        usage = Usage(running.prompt + rest.prompt, running.cached + rest.cached, running.output + rest.output)
        self._book.ended(running.job.total_tokens, usage.total)
        self._policy.charge(running.job, rest, now, True)
        return usage

    def requeue(self, job_id: JobId, now: float, reason: RequeueReason) -> None:
        """Put a running job back at the front of its tenant's line; its max_wait_s counts anew.

        Several jobs that come back together: use ``requeue_all``, which keeps their order. Raises KeyError when it is
        not running.
        """
        running = self._running[job_id]
        self._policy.requeue(running.job, now, reason)
        del self._running[job_id]
        self._caps.remove(running.job)
        self._book.advance(now, bool(self._queued))
        self._front -= 1
        entry = Queued(running.job, self._front, now, self._book.mark(), running.waited_s, running.attempt + 1)
        entry.usage = running.usage
        self._enter(entry)

    def requeue_all(self, job_ids: Iterable[JobId], now: float, reason: RequeueReason) -> None:
        """``requeue`` for all jobs of a lost worker, so that they stand in the order in which they first came."""
        for job_id in sorted(job_ids, key=lambda job_id: self._running[job_id].order, reverse=True):
            self.requeue(job_id, now, reason)

    def discard(self, job_id: JobId) -> bool:
        """Remove a queued job (its client is gone). False when it is not queued."""
        if job_id not in self._queued:
            return False
        self._leave(job_id)
        if not self._policy.discard(job_id):
            raise RuntimeError(f"scheduling policy {type(self._policy).__name__} lost job {job_id!r}")
        return True

    def expire(self, now: float) -> list[Job]:
        """Remove and return the jobs whose ``max_wait_s`` is over or that the policy gives up. O(log n) each.

        Where the policy fails on the way, its exception comes through, and the next call returns what left by then
        (and nothing else, so that the policy has no say in it).
        """
        if not self._owed:
            self._expire(now)
        over, self._owed = self._owed, []
        return over

    def _expire(self, now: float) -> None:
        while self._expiry and self._expiry[0][0] <= now:
            _, order, job_id = heapq.heappop(self._expiry)
            entry = self._queued.get(job_id)
            if entry is not None and entry.order == order:
                self._give_up(entry.job)
        if (expired := getattr(self._policy, "expired", None)) is not None:
            for job in expired(now):
                if job.id in self._queued:
                    self._give_up(job)

    def _give_up(self, job: Job) -> None:
        self._owed.append(job)  # before the policy is asked: it leaves here whatever the policy does
        self.discard(job.id)

    def next_expiry(self) -> float | None:
        """When ``expire`` will next find something (may be early, never late); None when nothing can expire."""
        if self._owed:
            return -math.inf
        while self._expiry and not self._is_live(self._expiry[0]):
            heapq.heappop(self._expiry)
        times = [self._expiry[0][0]] if self._expiry else []
        if (ask := getattr(self._policy, "next_expired", None)) is not None and (at := ask()) is not None:
            times.append(at)
        return min(times, default=None)

    @property
    def owes(self) -> bool:
        """Whether jobs left in an ``expire`` that raised, and wait to be returned by the next one."""
        return bool(self._owed)

    # -- the policy ---------------------------------------------------------------------------------------------

    @property
    def policy(self) -> SchedulingPolicy:
        """The live scheduling policy."""
        return self._policy

    def swap(self, policy: SchedulingPolicy, now: float, *, carry_state: bool = True) -> SchedulingPolicy:
        """Replace the policy, keeping every job and each tenant's order; returns the old one, emptied.

        The new policy gets the old one's counters, then every queued job; only when it holds them all does it take
        over. Any failure before that raises and leaves the queue and the old policy as they were.
        ``carry_state=False`` keeps the counters that ``policy`` has (roll back to a policy that ran before).
        """
        old = self._policy
        if policy is old:
            raise ValueError("the policy to swap in is the live one")
        if len(policy):
            raise ValueError(f"the policy to swap in already holds {len(policy)} jobs; build a new one")
        if carry_state:
            policy.load(old.dump())
        # The old policy is emptied last: the jobs and their order are known here, so until then it can go on as it was.
        for entry in sorted(self._queued.values(), key=lambda entry: entry.order):
            policy.push(entry.job, now)
        if len(policy) != len(self._queued):
            raise RuntimeError(
                f"scheduling policy {type(policy).__name__} holds {len(policy)} of {len(self._queued)} jobs"
            )
        self._policy = policy
        with contextlib.suppress(Exception):  # often it goes because it is broken; nothing depends on it any more
            old.drain()
        return old

    # -- what others may see ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._queued)

    @property
    def running(self) -> int:
        """Jobs dispatched and not finished."""
        return len(self._running)

    def running_of(self, tenant: TenantId) -> int:
        """Running jobs of one tenant."""
        return self._caps.jobs_of(tenant)

    @property
    def caps(self) -> Caps:
        """The caps on running jobs. May be replaced at any time; what runs already goes on."""
        return self._caps.caps

    @caps.setter
    def caps(self, caps: Caps) -> None:
        self._caps.caps = caps

    def is_queued(self, job_id: JobId) -> bool:
        """Whether the job waits here."""
        return job_id in self._queued

    def queued_jobs(self) -> list[Job]:
        """In order of arrival, returned ones first. O(n log n); for the admin view."""
        return [entry.job for entry in sorted(self._queued.values(), key=lambda entry: entry.order)]

    def backlog(self) -> Mapping[TenantId, tuple[int, int]]:
        """(jobs, tokens) queued per tenant with queued work."""
        return {tenant: (line.queued, line.tokens) for tenant, line in self._lines.items()}

    def snapshot(self, tenant: TenantId, *, weight: float | None = None, workers_ready: int = 1) -> QueueSnapshot:
        """What admission may look at, in O(1). ``weight`` is used when the tenant has nothing queued (default 1)."""
        line = self._lines.get(tenant)
        own = line.weight if line else (1.0 if weight is None else weight)
        total = self._weight_sum if line else self._weight_sum + own
        return QueueSnapshot(
            queued=len(self._queued),
            queued_tenant=line.queued if line else 0,
            queued_tokens=self._tokens,
            queued_tokens_tenant=line.tokens if line else 0,
            tenant_share=min(1.0, own / total),
            service_rate=self._book.rate,
            workers_ready=workers_ready,
            used_ratio=self._book.used_ratio,
        )

    def served(self) -> Mapping[TenantId, int]:
        """Tokens served per tenant (prompt, cached and output)."""
        return self._book.totals()

    def shares(self, now: float) -> Mapping[TenantId, float]:
        """Each tenant's part of the tokens served in about the last half minute."""
        return self._book.shares(now)

    def virtual_lag(self, now: float) -> Mapping[TenantId, float]:
        """Backlogged tenants: recent tokens ÷ weight behind the best-served of them."""
        return self._book.virtual_lag(self._lines, now)

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        """Whether workers were at it while jobs waited: a backlog in front of no worker measures nobody's rate."""
        return self.left_over and bool(self._queued) and bool(self._running)

    def _enter(self, entry: Queued) -> None:
        job = entry.job
        self._queued[job.id] = entry
        self.demand.enter(entry)
        line = self._lines.get(job.tenant)
        if line is None:
            line = self._lines[job.tenant] = TenantLine(job.weight)
            self._weight_sum += job.weight
        elif line.weight != job.weight:
            self._weight_sum += job.weight - line.weight
            line.weight = job.weight
        line.queued += 1
        line.tokens += job.total_tokens
        self._tokens += job.total_tokens
        if job.max_wait_s is not None:
            heapq.heappush(self._expiry, (entry.since + job.max_wait_s, entry.order, job.id))
            if len(self._expiry) > 2 * len(self._queued) + 64:
                self._expiry = [item for item in self._expiry if self._is_live(item)]
                heapq.heapify(self._expiry)

    def _leave(self, job_id: JobId) -> Queued:
        entry = self._queued.pop(job_id)
        job = entry.job
        self.demand.leave(entry)
        line = self._lines[job.tenant]
        line.queued -= 1
        line.tokens -= job.total_tokens
        self._tokens -= job.total_tokens
        if not line.queued:
            del self._lines[job.tenant]
            # Reset at empty, so that rounding errors of the running sum do not pile up over months.
            self._weight_sum = self._weight_sum - line.weight if self._lines else 0.0
        if self._held == job_id:
            self._held = None
        return entry

    def _is_live(self, item: tuple[float, int, JobId]) -> bool:
        entry = self._queued.get(item[2])
        return entry is not None and entry.order == item[1]

    def _serve(self, job: Job, charge: Charge, now: float) -> None:
        backlogged = self.left_over and bool(self._queued)
        self._book.advance(now, backlogged)
        self._book.serve(job.tenant, job.weight, charge.total, now, backlogged)

    def held(self, could_fit: Fits | None) -> Job | None:
        """The job for which others wait now, if any."""
        if self._held is None:
            return None
        job = self._queued[self._held].job
        if could_fit is None or not could_fit(job):
            self._held = None
            return None
        # One that waits for its own tenant or class is no reason for the others to wait.
        return job if self._caps.allows(job) else None
