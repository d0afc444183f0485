"""Queued jobs in lines that are ordered by a key instead of by arrival.

Rules
- A line is a flow: a tenant, or a (class, tenant). Within it the smallest key goes first, equal keys in order of
  arrival; returned jobs stand before all others, the last returned first.
- Between flows it is the heads' keys that count, also a returned one's: it goes first in its own flow only.
- A line is a heap whose first entry is always live; stale ones further down are swept when they outnumber the live.
  O(log n) per operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from policies.scheduling._ranking import Ranking
from policies.types import Job, JobId

F = TypeVar("F", bound=Hashable)

# (place, order of arrival, job, flow, key). The place is the key, or before all keys for a returned job; the order is
# unique, so that a comparison ends there. An entry is live while it is the one in ``_jobs``.
_Entry = tuple[float, int, Job, F, float]
_FRONT = -math.inf


class KeyedLines(Generic[F]):
    """See the module's rules."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, _Entry[F]] = {}
        self.open: dict[F, list[_Entry[F]]] = {}
        """The lines, by flow; to read."""
        self._back = 0
        self._front = 0
        self._stale = 0

    def push(self, flow: F, job: Job, key: float) -> bool:
        """True when it becomes the flow's head. Raises ValueError for an id that is already queued."""
        job_id = job.id
        if job_id in self._jobs:
            raise ValueError(f"job {job_id!r} is already queued")
        self._back = order = self._back + 1
        self._jobs[job_id] = entry = (key, order, job, flow, key)
        heap = self.open.get(flow)
        if heap is None:
            self.open[flow] = [entry]
            return True
        heappush(heap, entry)
        return heap[0] is entry

    def push_front(self, flow: F, job: Job, key: float) -> bool:
        """Put before all others of its flow: always its head. Raises ValueError likewise."""
        if job.id in self._jobs:
            raise ValueError(f"job {job.id!r} is already queued")
        self._front = order = self._front - 1
        self._jobs[job.id] = entry = (_FRONT, order, job, flow, key)
        heappush(self.open.setdefault(flow, []), entry)
        return True

    def rekey(self, job_id: JobId, key: float) -> bool:
        """Change the key of a queued job; True when its flow's head or the head's key changed."""
        old = self._jobs[job_id]
        place, order, job, flow, before = old
        if before == key:
            return False
        fresh = (_FRONT if place == _FRONT else key, order, job, flow, key)
        self._jobs[job_id] = fresh
        heap = self.open[flow]
        was_head = heap[0] is old
        if was_head:
            heapreplace(heap, fresh)
            self._tidy(heap)
        else:
            heappush(heap, fresh)
            self._outdated()
        return was_head or self.open[flow][0] is fresh

    def head(self, flow: F) -> Job:
        """The first job of a flow that has a line."""
        return self.open[flow][0][2]

    def head_key(self, flow: F) -> float:
        """Its key."""
        return self.open[flow][0][4]

    def pop(self, flow: F) -> Job:
        """Remove and return the first job of a flow that has a line."""
        return self.advance(flow)[0]

    def advance(self, flow: F) -> tuple[Job, float | None]:
        """``pop``, and the key of the flow's next head; None when that was its last job."""
        heap = self.open[flow]
        job = heappop(heap)[2]
        del self._jobs[job.id]
        if self._stale:
            self._tidy(heap)
        if heap:
            return job, heap[0][4]
        del self.open[flow]
        return job, None

    def pop_if(self, flow: F, fits: Callable[[Job], bool]) -> Job | None:
        """``pop`` where the flow's head fits; else None."""
        return self.advance(flow)[0] if fits(self.open[flow][0][2]) else None

    def discard(self, job_id: JobId) -> tuple[F, Job] | None:
        """Remove a job wherever it stands; None when it is not queued."""
        entry = self._jobs.get(job_id)
        if entry is None:
            return None
        flow, job = entry[3], entry[2]
        if self.open[flow][0] is entry:
            self.pop(flow)
        else:
            del self._jobs[job_id]
            self._outdated()
        return flow, job

    def drain(self) -> list[Job]:
        """Remove and return all jobs in order of arrival, returned ones first. O(n log n)."""
        entries = sorted(self._jobs.values(), key=lambda entry: entry[1])
        self._jobs.clear()
        self.open.clear()
        self._stale = 0
        return [entry[2] for entry in entries]

    def has(self, flow: F) -> bool:
        """Whether the flow has queued jobs."""
        return flow in self.open

    def get(self, job_id: JobId) -> Job | None:
        """The job, if it is queued."""
        entry = self._jobs.get(job_id)
        return None if entry is None else entry[2]

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[F]:
        return iter(self.open)

    def _tidy(self, heap: list[_Entry[F]]) -> None:
        """Take stale entries off the top."""
        while heap and self._jobs.get(heap[0][2].id) is not heap[0]:
            heappop(heap)
            self._stale -= 1

    def _outdated(self) -> None:
        """One more stale entry lies somewhere. Amortised O(1)."""
        self._stale += 1
        if self._stale > len(self._jobs) + 64:
            for flow, heap in self.open.items():
                live = [entry for entry in heap if self._jobs.get(entry[2].id) is entry]
                heapify(live)
                self.open[flow] = live
            self._stale = 0


class KeyedHeads(Generic[F]):
    """Keyed lines, and their flows ranked by their heads' keys: smallest first."""

    def __init__(self) -> None:
        self.lines: KeyedLines[F] = KeyedLines()
        self._heads: Ranking[F] = Ranking()

    def push(self, flow: F, job: Job, key: float) -> None:
        """Raises ValueError for an id that is already queued."""
        if self.lines.push(flow, job, key):
            self._set(flow, key)

    def push_front(self, flow: F, job: Job, key: float) -> None:
        """Put before all others of its flow. Raises ValueError likewise."""
        self.lines.push_front(flow, job, key)
        self._set(flow, key)

    def first(self, accept: Callable[[Job], bool]) -> F | None:
        """The first flow whose head is accepted."""
        flow = self._heads.top()
        head = self.lines.head
        if flow is None or accept(head(flow)):
            return flow
        return self._heads.next(lambda flow: accept(head(flow)))

    def pop(self, flow: F) -> Job:
        """Remove and return the flow's head."""
        job, key = self.lines.advance(flow)
        if key is None:
            self._unset(flow)
        else:
            self._set(flow, key)
        return job

    def discard(self, job_id: JobId) -> Job | None:
        """Remove a job wherever it stands; None when it is not queued."""
        found = self.lines.discard(job_id)
        if found is None:
            return None
        flow, job = found
        if self.lines.has(flow):
            self._set(flow, self.lines.head_key(flow))
        else:
            self._unset(flow)
        return job

    def drain(self) -> list[Job]:
        """Remove and return all jobs in order of arrival."""
        self._heads.clear()
        return self.lines.drain()

    def __len__(self) -> int:
        return len(self.lines._jobs)

    def _set(self, flow: F, key: float) -> None:
        self._heads.set(flow, key)

    def _unset(self, flow: F) -> None:
        self._heads.remove(flow)
