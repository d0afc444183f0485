"""Building block of schedulers: a FIFO line per tenant."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from policies.spi import Fits
from policies.types import Job, JobId, RequeueReason, TenantId

_FEW = 32


def _always(job: Job) -> bool:
    return True


class Lines:
    """Queued jobs in one FIFO line per tenant. Every operation is (amortised) O(1), except ``drain``.

    The first entry of a line is always live; entries of jobs that were discarded further back are swept when they
    outnumber the live ones.
    """

    __slots__ = ("_back", "_front", "_jobs", "_stale", "open")

    def __init__(self) -> None:
        self.open: dict[TenantId, deque[tuple[int, Job]]] = {}
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
        job = self.pop_if(tenant, 0.0, _always)
        assert job is not None
        return job

    def pop_if(self, tenant: TenantId, now: float, fits: Fits) -> Job | None:
        """``pop`` where the tenant's head fits; else None."""
        line = self.open[tenant]
        job = line[0][1]
        if not fits(job):
            return None
        line.popleft()
        del self._jobs[job.id]
        if self._stale:
            self._tidy(line)
        if not line:
            del self.open[tenant]
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

    def _tidy(self, line: deque[tuple[int, Job]]) -> None:
        """Take stale entries off the front."""
        while line and self._jobs.get(line[0][1].id) is not line[0]:
            line.popleft()
            self._stale -= 1

    def _sweep(self) -> None:
        for tenant, line in self.open.items():
            self.open[tenant] = deque(entry for entry in line if self._jobs.get(entry[1].id) is entry)
        self._stale = 0
