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
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

from policies.scheduling._ranking import Place, Places
from policies.types import Job, JobId

F = TypeVar("F", bound=Hashable)

# (place, order of arrival, job, line, key). The place is the key, or before all keys for a returned job; the order is
# unique, so that a comparison ends there. An entry is live while it is the one in ``_jobs``.
_Entry = tuple[float, int, Job, "Line[F]", float]
_FRONT = -math.inf


class Line(Place[F]):
    """The jobs of a flow, and its place where flows are ranked."""

    __slots__ = ("heap",)

    def __init__(self, flow: F) -> None:
        super().__init__(flow)
        self.heap: list[_Entry[F]] = []
        """To read: the first is live."""


class KeyedLines(Generic[F]):
    """See the module's rules."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, _Entry[F]] = {}
        self.open: dict[F, Line[F]] = {}
        """By flow; to read."""
        self._back = 0
        self._front = 0
        self._stale = 0

    def push(self, flow: F, job: Job, key: float) -> Line[F] | None:
        """The flow's line when the job becomes its head. Raises ValueError for an id that is already queued."""
        job_id, line = job.id, self.open.get(flow)
        if job_id in self._jobs:
            raise ValueError(f"job {job_id!r} is already queued")
        if line is None:
            line = self.open[flow] = Line(flow)
        self._back = order = self._back + 1
        self._jobs[job_id] = entry = (key, order, job, line, key)
        heappush(line.heap, entry)
        return line if line.heap[0] is entry else None

    def push_front(self, flow: F, job: Job, key: float) -> Line[F]:
        """Put before all others of its flow: always its head. Raises ValueError likewise."""
        if job.id in self._jobs:
            raise ValueError(f"job {job.id!r} is already queued")
        line = self.open.get(flow)
        if line is None:
            line = self.open[flow] = Line(flow)
        self._front = order = self._front - 1
        self._jobs[job.id] = entry = (_FRONT, order, job, line, key)
        heappush(line.heap, entry)
        return line

    def rekey(self, job_id: JobId, key: float) -> bool:
        """Change the key of a queued job; True when its flow's head or the head's key changed."""
        old = self._jobs[job_id]
        place, order, job, line, before = old
        if before == key:
            return False
        fresh = (_FRONT if place == _FRONT else key, order, job, line, key)
        self._jobs[job_id] = fresh
        heap = line.heap
        was_head = heap[0] is old
        if was_head:
            heapreplace(heap, fresh)
            self._tidy(heap)
        else:
            heappush(heap, fresh)
            self._outdated()
        return was_head or heap[0] is fresh

    def pop(self, line: Line[F]) -> Job:
        """Remove and return the first job of an open line; with the last one, the line."""
        heap = line.heap
        job = heappop(heap)[2]
        del self._jobs[job.id]
        if self._stale:
            self._tidy(heap)
        if not heap:
            del self.open[line.key]
        return job

    def discard(self, job_id: JobId) -> tuple[Line[F], Job] | None:
        """Remove a job wherever it stands; None when it is not queued. The line it stood in may be empty then."""
        entry = self._jobs.get(job_id)
        if entry is None:
            return None
        line, job = entry[3], entry[2]
        if line.heap[0] is entry:
            self.pop(line)
        else:
            del self._jobs[job_id]
            self._outdated()
        return line, job

    def drain(self) -> list[Job]:
        """Remove and return all jobs in order of arrival, returned ones first. O(n log n)."""
        entries = sorted(self._jobs.values(), key=lambda entry: entry[1])
        self._jobs.clear()
        self.open.clear()
        self._stale = 0
        return [entry[2] for entry in entries]

    def get(self, job_id: JobId) -> Job | None:
        """The job, if it is queued."""
        entry = self._jobs.get(job_id)
        return None if entry is None else entry[2]

    def is_new(self, job: Job) -> bool:
        """Whether it is queued and was not returned."""
        entry = self._jobs.get(job.id)
        return entry is not None and entry[2] is job and entry[1] > 0

    def __len__(self) -> int:
        return len(self._jobs)

    def _tidy(self, heap: list[_Entry[F]]) -> None:
        """Take stale entries off the top."""
        while heap and self._jobs.get(heap[0][2].id) is not heap[0]:
            heappop(heap)
            self._stale -= 1

    def _outdated(self) -> None:
        """One more stale entry lies somewhere. Amortised O(1)."""
        self._stale += 1
        if self._stale > len(self._jobs) + 64:
            for line in self.open.values():
                line.heap[:] = [entry for entry in line.heap if self._jobs.get(entry[2].id) is entry]
                heapify(line.heap)
            self._stale = 0


class KeyedHeads(Generic[F]):
    """Keyed lines, ranked by their heads' keys: smallest first."""

    def __init__(self) -> None:
        self.lines: KeyedLines[F] = KeyedLines()
        self._heads: Places[Any] = Places()
        """Lines."""

    def push(self, flow: F, job: Job, key: float) -> None:
        """Raises ValueError for an id that is already queued."""
        line = self.lines.push(flow, job, key)
        if line is not None:
            self._ranked(line)

    def push_front(self, flow: F, job: Job, key: float) -> None:
        """Put before all others of its flow. Raises ValueError likewise."""
        self._ranked(self.lines.push_front(flow, job, key))

    def first(self, accept: Callable[[Job], bool]) -> Line[F] | None:
        """The first line whose head is accepted."""
        line: Line[F] | None = self._heads.top()
        if line is None or accept(line.heap[0][2]):
            return line
        return self._heads.next(lambda line: accept(line.heap[0][2]))

    def pop(self, line: Line[F]) -> Job:
        """Remove and return the line's head."""
        job = self.lines.pop(line)
        self._ranked(line)
        return job

    def discard(self, job_id: JobId) -> Job | None:
        """Remove a job wherever it stands; None when it is not queued."""
        found = self.lines.discard(job_id)
        if found is None:
            return None
        line, job = found
        self._ranked(line)
        return job

    def drain(self) -> list[Job]:
        """Remove and return all jobs in order of arrival."""
        self._heads.clear()
        return self.lines.drain()

    def __len__(self) -> int:
        return len(self.lines._jobs)

    def _ranked(self, line: Line[F]) -> None:
        """The line has another head now, or none."""
        if line.heap:
            self._heads.put(line, line.heap[0][4])
        else:
            self._heads.take(line)
