"""Building blocks of schedulers: a FIFO line per tenant, and the seat of a tenant that has a counter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from policies.scheduling._ranking import Place
from policies.spi import Fits
from policies.types import Job, JobId, RequeueReason, TenantId

_FEW = 32
Line = deque[tuple[int, Job]]
"""(place among all, job), first to last."""


class Seat(Place[TenantId]):
    """A tenant's counter, its place among those that wait, and its line."""

    __slots__ = ("counter", "last", "line")

    def __init__(self, key: TenantId, counter: float) -> None:
        super().__init__(key)
        self.counter = counter
        self.line: Any = None
        """What its lines keep for it while it has queued jobs, so that nobody looks it up; None: it has none."""
        self.last: Any = None
        """Where a line is linked entries, the last of them."""


class Lines:
    """Queued jobs in one FIFO line per tenant. Every operation is (amortised) O(1), except ``drain``.

    The first entry of a line is always live; entries of jobs that were discarded further back are swept when they
    outnumber the live ones.
    """

    __slots__ = ("_back", "_front", "_jobs", "_stale", "open")

    def __init__(self) -> None:
        self.open: dict[TenantId, Line] = {}
        """The lines, by tenant; to read."""
        self._jobs: dict[JobId, tuple[int, Job]] = {}
        self._back = 0
        self._front = 0
        self._stale = 0

    def push(self, job: Job, now: float = 0.0) -> bool:
        """Append; True when this opens the tenant's line. Raises ValueError for an id that is already queued."""
        job_id = job.id
        if job_id in self._jobs:
            raise ValueError(f"job {job_id!r} is already queued")
        self._back = order = self._back + 1
        entry = self._jobs[job_id] = (order, job)
        line = self.open.get(job.tenant)
        if line is None:
            self.open[job.tenant] = deque((entry,))
            return True
        line.append(entry)
        return False

    def push_front(self, job: Job, now: float = 0.0, reason: RequeueReason = RequeueReason.SWAP) -> bool:
        """Put before all others of its tenant: always its head. Raises ValueError likewise."""
        if job.id in self._jobs:
            raise ValueError(f"job {job.id!r} is already queued")
        self._front = order = self._front - 1
        entry = self._jobs[job.id] = (order, job)
        line = self.open.get(job.tenant)
        if line is None:
            self.open[job.tenant] = deque((entry,))
        else:
            line.appendleft(entry)
        return True

    def head(self, tenant: TenantId) -> Job:
        """The first job of a tenant that has a line."""
        return self.open[tenant][0][1]

    def head_order(self, tenant: TenantId) -> int:
        """The place of that job among all: smaller came first, returned jobs are negative."""
        return self.open[tenant][0][0]

    def pop(self, tenant: TenantId) -> Job:
        """Remove and return the first job of a tenant that has a line."""
        line = self.open[tenant]
        job = line.popleft()[1]
        del self._jobs[job.id]
        if self._stale:
            self._tidy(line)
        if not line:
            del self.open[tenant]
        return job

    def pop_if(self, seat: Seat, now: float, fits: Fits) -> Job | None:
        """Remove and return the first job of the seat's tenant, which has a line, if it fits."""
        line: Line = seat.line
        job = line[0][1]
        if not fits(job):
            return None
        line.popleft()
        del self._jobs[job.id]
        if self._stale:
            self._tidy(line)
        if not line:
            seat.line = None
            del self.open[seat.key]
        return job

    def discard(self, job_id: JobId) -> Job | None:
        """Remove a job wherever it stands; None when it is not queued."""
        entry = self._jobs.get(job_id)
        if entry is None:
            return None
        job = entry[1]
        if self.open[job.tenant][0] is entry:
            return self.pop(job.tenant)
        del self._jobs[job_id]
        self._stale += 1
        if self._stale > len(self._jobs) + _FEW:
            self._sweep()
        return job

    def drain(self) -> list[Job]:
        """Remove and return all jobs in order of arrival, returned ones first. O(n log n)."""
        entries = sorted(self._jobs.values(), key=lambda entry: entry[0])
        self.open.clear()
        self._jobs.clear()
        self._stale = 0
        return [job for _, job in entries]

    def tenants(self) -> Iterator[TenantId]:
        """Tenants with a line."""
        return iter(self.open)

    def has(self, tenant: TenantId) -> bool:
        """Whether the tenant has queued jobs."""
        return tenant in self.open

    def __len__(self) -> int:
        return len(self._jobs)

    def _tidy(self, line: Line) -> None:
        """Take stale entries off the front."""
        while line and self._jobs.get(line[0][1].id) is not line[0]:
            line.popleft()
            self._stale -= 1

    def _sweep(self) -> None:
        for line in self.open.values():
            live = [entry for entry in line if self._jobs.get(entry[1].id) is entry]
            line.clear()  # in place: seats hold it
            line.extend(live)
        self._stale = 0
