"""Building blocks of schedulers: a FIFO line per tenant, and tenants ranked by a number that changes all the time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

from policies.types import Job, JobId, TenantId

_FEW = 32


class Lines:
    """Queued jobs in one FIFO line per tenant. Every operation is (amortised) O(1), except ``drain``.

    The first entry of a line is always live; entries of jobs that were discarded further back are swept when they
    outnumber the live ones.
    """

    def __init__(self) -> None:
        self._lines: dict[TenantId, deque[tuple[int, Job]]] = {}
        self._jobs: dict[JobId, tuple[int, Job]] = {}
        self._back = 0
        self._front = 0
        self._stale = 0

    def push(self, job: Job) -> bool:
        """Append; True when this opens the tenant's line. Raises ValueError for an id that is already queued."""
        job_id = job.id
        if job_id in self._jobs:
            raise ValueError(f"job {job_id!r} is already queued")
        self._back = order = self._back + 1
        entry = self._jobs[job_id] = (order, job)
        line = self._lines.get(job.tenant)
        if line is None:
            self._lines[job.tenant] = deque((entry,))
            return True
        line.append(entry)
        return False

    def push_front(self, job: Job) -> bool:
        """Put before all others of its tenant: always its head. Raises ValueError likewise."""
        if job.id in self._jobs:
            raise ValueError(f"job {job.id!r} is already queued")
        self._front = order = self._front - 1
        entry = self._jobs[job.id] = (order, job)
        line = self._lines.get(job.tenant)
        if line is None:
            self._lines[job.tenant] = deque((entry,))
        else:
            line.appendleft(entry)
        return True

    def head(self, tenant: TenantId) -> Job:
        """The first job of a tenant that has a line."""
        return self._lines[tenant][0][1]

    def head_order(self, tenant: TenantId) -> int:
        """The place of that job among all: smaller came first, returned jobs are negative."""
        return self._lines[tenant][0][0]

    def pop(self, tenant: TenantId) -> Job:
        """Remove and return the first job of a tenant that has a line."""
        line = self._lines[tenant]
        job = line.popleft()[1]
        del self._jobs[job.id]
        if self._stale:
            self._tidy(line)
        if not line:
            del self._lines[tenant]
        return job

    def discard(self, job_id: JobId) -> Job | None:
        """Remove a job wherever it stands; None when it is not queued."""
        entry = self._jobs.get(job_id)
        if entry is None:
            return None
        job = entry[1]
        if self._lines[job.tenant][0] is entry:
            return self.pop(job.tenant)
        del self._jobs[job_id]
        self._stale += 1
        if self._stale > len(self._jobs) + _FEW:
            self._sweep()
        return job

    def drain(self) -> list[Job]:
        """Remove and return all jobs in order of arrival, returned ones first. O(n log n)."""
        entries = sorted(self._jobs.values(), key=lambda entry: entry[0])
        self._lines.clear()
        self._jobs.clear()
        self._stale = 0
        return [job for _, job in entries]

    def tenants(self) -> Iterator[TenantId]:
        """Tenants with a line."""
        return iter(self._lines)

    def has(self, tenant: TenantId) -> bool:
        """Whether the tenant has queued jobs."""
        return tenant in self._lines

    def __len__(self) -> int:
        return len(self._jobs)

    def _tidy(self, line: deque[tuple[int, Job]]) -> None:
        """Take stale entries off the front."""
        while line and self._jobs.get(line[0][1].id) is not line[0]:
            line.popleft()
            self._stale -= 1

    def _sweep(self) -> None:
        for tenant, line in self._lines.items():
            self._lines[tenant] = deque(entry for entry in line if self._jobs.get(entry[1].id) is entry)
        self._stale = 0


K = TypeVar("K", bound=Hashable)


class Ranking(Generic[K]):
    """Keys ordered by a rank that may change; smallest first, ties in order of entry.

    A heap with lazy updates: raising a rank is O(1), since its old heap entry is a lower bound that is corrected when
    it comes up; lowering or inserting is O(log n). Stale entries are swept when they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._rank: dict[K, Any] = {}
        self._entry: dict[K, tuple[Any, int, K]] = {}
        self._heap: list[tuple[Any, int, K]] = []
        self._serial = 0

    def set(self, key: K, rank: Any) -> None:
        """Insert the key or change its rank."""
        self._rank[key] = rank
        entry = self._entry.get(key)
        if entry is None or rank < entry[0]:
            self._push(key, rank)

    def remove(self, key: K) -> None:
        """Take the key out; it must be in."""
        del self._rank[key]
        del self._entry[key]

    def min(self) -> Any:
        """The smallest rank. Raises IndexError when empty."""
        self._settle()
        return self._heap[0][0]

    def top(self) -> K | None:
        """The first key in order of rank; None when empty."""
        if not self._rank:
            return None
        self._settle()
        return self._heap[0][2]

    def first(self, accept: Callable[[K], bool]) -> K | None:
        """The first key in order of rank that ``accept`` takes; None when it takes none. O(k log n) for k asked."""
        key = self.top()
        return key if key is None or accept(key) else self.next(accept)

    def next(self, accept: Callable[[K], bool]) -> K | None:
        """Like ``first``, when the top was asked and refused already."""
        refused = [heappop(self._heap)]
        try:
            while len(refused) < min(len(self._rank), _FEW):
                self._settle()
                entry = self._heap[0]
                if accept(entry[2]):
                    return entry[2]
                refused.append(heappop(self._heap))
        finally:
            for entry in refused:
                heappush(self._heap, entry)
        if len(refused) == len(self._rank):
            return None
        # Perhaps nothing is accepted: then sorting all at once is cheaper than taking one after the other.
        rest = sorted((rank, self._entry[key][1], key) for key, rank in self._rank.items())
        return next((entry[2] for entry in rest[len(refused) :] if accept(entry[2])), None)

    def clear(self) -> None:
        """Forget everything."""
        self._rank.clear()
        self._entry.clear()
        self._heap.clear()

    def __contains__(self, key: K) -> bool:
        return key in self._rank

    def __len__(self) -> int:
        return len(self._rank)

    def __iter__(self) -> Iterator[K]:
        return iter(self._rank)

    def _push(self, key: K, rank: Any) -> None:
        self._serial += 1
        entry = self._entry[key] = (rank, self._serial, key)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entry) + 64:
            self._heap = list(self._entry.values())
            heapify(self._heap)

    def _settle(self) -> None:
        """Bring a live entry with its true rank to the top."""
        heap, entries, ranks = self._heap, self._entry, self._rank
        while heap:
            entry = heap[0]
            rank, serial, key = entry
            if entries.get(key) is not entry:
                heappop(heap)
                continue
            true = ranks[key]
            if true == rank:
                return
            entries[key] = fresh = (true, serial, key)
            heapreplace(heap, fresh)
