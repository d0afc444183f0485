"""Queued jobs in lines that are ordered by a key instead of by arrival.

Rules
- A line is a flow: a tenant, or a (class, tenant). Within it the smallest key goes first, equal keys in order of
  arrival; returned jobs stand before all others, the last returned first.
- Between flows it is the heads' keys that count, also a returned one's: it goes first in its own flow only.
- Heaps with lazy removal: O(log n) per operation; stale entries are swept when they outnumber the live ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from policies.scheduling._lines import Ranking
from policies.types import Job, JobId

F = TypeVar("F", bound=Hashable)


class _Entry(Generic[F]):
    """A queued job. ``item`` is its live heap entry: (place, order, job id); another one with its id is stale."""

    __slots__ = ("flow", "item", "job", "key", "order")

    def __init__(self, flow: F, job: Job, key: Any, order: int, item: tuple[Any, int, JobId]) -> None:
        self.flow = flow
        self.job = job
        self.key = key
        self.order = order
        self.item = item


class _Flow:
    """One line: its heap, and how many of the heap's entries are live."""

    __slots__ = ("heap", "live")

    def __init__(self) -> None:
        self.heap: list[tuple[Any, int, JobId]] = []
        self.live = 0


class KeyedLines(Generic[F]):
    """See the module's rules."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, _Entry[F]] = {}
        self._flows: dict[F, _Flow] = {}
        self._back = 0
        self._front = 0

    def push(self, flow: F, job: Job, key: Any) -> bool:
        """True when it becomes the flow's head. Raises ValueError for an id that is already queued."""
        self._back += 1
        return self._insert(flow, job, key, self._back, (1, key))

    def push_front(self, flow: F, job: Job, key: Any) -> bool:
        """Put before all others of its flow: always its head. Raises ValueError likewise."""
        self._front -= 1
        return self._insert(flow, job, key, self._front, (0, self._front))

    def rekey(self, job_id: JobId, key: Any) -> bool:
        """Change the key of a queued job; True when its flow's head or the head's key may have changed."""
        entry = self._jobs[job_id]
        if entry.key == key:
            return False
        before = self._head(entry.flow)
        entry.key = key
        if entry.order >= 0:
            entry.item = ((1, key), entry.order, job_id)
            self._heap_push(self._flows[entry.flow], entry.item)
        return entry is before or self._head(entry.flow) is entry

    def head(self, flow: F) -> Job:
        """The first job of a flow that has a line."""
        return self._head(flow).job

    def head_key(self, flow: F) -> Any:
        """Its key."""
        return self._head(flow).key

    def pop(self, flow: F) -> Job:
        """Remove and return the first job of a flow that has a line."""
        entry = self._head(flow)
        heapq.heappop(self._flows[flow].heap)
        self._remove(entry)
        return entry.job

    def discard(self, job_id: JobId) -> tuple[F, Job] | None:
        """Remove a job wherever it stands; None when it is not queued."""
        entry = self._jobs.get(job_id)
        if entry is None:
            return None
        self._remove(entry)
        return entry.flow, entry.job

    def drain(self) -> list[Job]:
        """Remove and return all jobs in order of arrival, returned ones first. O(n log n)."""
        entries = sorted(self._jobs.values(), key=lambda entry: entry.order)
        self._jobs.clear()
        self._flows.clear()
        return [entry.job for entry in entries]

    def has(self, flow: F) -> bool:
        """Whether the flow has queued jobs."""
        return flow in self._flows

    def get(self, job_id: JobId) -> Job | None:
        """The job, if it is queued."""
        entry = self._jobs.get(job_id)
        return None if entry is None else entry.job

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[F]:
        return iter(self._flows)

    def _insert(self, flow: F, job: Job, key: Any, order: int, place: Any) -> bool:
        if job.id in self._jobs:
            raise ValueError(f"job {job.id!r} is already queued")
        line = self._flows.get(flow)
        if line is None:
            line = self._flows[flow] = _Flow()
        item = (place, order, job.id)
        self._jobs[job.id] = _Entry(flow, job, key, order, item)
        line.live += 1
        self._heap_push(line, item)
        return self._head(flow).item is item

    def _remove(self, entry: _Entry[F]) -> None:
        del self._jobs[entry.job.id]
        line = self._flows[entry.flow]
        line.live -= 1
        if not line.live:
            del self._flows[entry.flow]

    def _head(self, flow: F) -> _Entry[F]:
        heap = self._flows[flow].heap
        while True:
            item = heap[0]
            entry = self._jobs.get(item[2])
            if entry is not None and entry.item is item:
                return entry
            heapq.heappop(heap)

    def _heap_push(self, line: _Flow, item: tuple[Any, int, JobId]) -> None:
        heapq.heappush(line.heap, item)
        if len(line.heap) > 2 * line.live + 64:
            line.heap = [old for old in line.heap if (e := self._jobs.get(old[2])) is not None and e.item is old]
            heapq.heapify(line.heap)


class KeyedHeads(Generic[F]):
    """Keyed lines, and their flows ranked by their heads' keys: smallest first."""

    def __init__(self) -> None:
        self.lines: KeyedLines[F] = KeyedLines()
        self._heads: Ranking[F] = Ranking()

    def push(self, flow: F, job: Job, key: Any) -> None:
        """Raises ValueError for an id that is already queued."""
        if self.lines.push(flow, job, key):
            self._set(flow, key)

    def push_front(self, flow: F, job: Job, key: Any) -> None:
        """Put before all others of its flow. Raises ValueError likewise."""
        self.lines.push_front(flow, job, key)
        self._set(flow, key)

    def first(self, accept: Callable[[Job], bool]) -> F | None:
        """The first flow whose head is accepted."""
        head = self.lines.head
        return self._heads.first(lambda flow: accept(head(flow)))

    def pop(self, flow: F) -> Job:
        """Remove and return the flow's head."""
        job = self.lines.pop(flow)
        self._rank(flow)
        return job

    def discard(self, job_id: JobId) -> Job | None:
        """Remove a job wherever it stands; None when it is not queued."""
        found = self.lines.discard(job_id)
        if found is None:
            return None
        self._rank(found[0])
        return found[1]

    def drain(self) -> list[Job]:
        """Remove and return all jobs in order of arrival."""
        self._heads.clear()
        return self.lines.drain()

    def __len__(self) -> int:
        return len(self.lines)

    def _rank(self, flow: F) -> None:
        if self.lines.has(flow):
            self._set(flow, self.lines.head_key(flow))
        else:
            self._unset(flow)

    def _set(self, flow: F, key: Any) -> None:
        self._heads.set(flow, key)

    def _unset(self, flow: F) -> None:
        self._heads.remove(flow)
