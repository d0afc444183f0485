"""What queued jobs ask of a worker at least: the shortest prompt of each kind. Pure.

A driver that knows what its workers have left need not ask a policy, who would ask about every waiting tenant, when not
even the least demanding job of any kind could go anywhere: for instance at each step while the cache is full.

Rules
- A kind is all that a worker is chosen by, whatever room it has (``gateway.gate.takes``): class, adapter, required
  labels, whether it may leave the installation.
- Only ``JobQueue`` changes it. A job is entered when it is queued and leaves when it is not any more.
- Which jobs may be next is a guess without asking the policy: whoever's turn it is, it is the turn of the first in
  line (``heads``).
- Per kind a heap by prompt length with lazy deletion: entering and leaving are amortised O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from itertools import islice

from policies._entries import Queued
from policies.types import Job, JobId, TenantId

Kind = tuple[str, str | None, str | None, bool, tuple[tuple[str, str], ...]]


class Demand:
    """See the module's rules."""

    def __init__(self, queued: Mapping[JobId, Queued]) -> None:
        """``queued``: the queue's own table, to tell who has left."""
        self._queued = queued
        self._kinds: dict[Kind, list[tuple[int, int, Job]]] = {}
        self._counts: dict[Kind, int] = {}

    def enter(self, entry: Queued) -> None:
        """The job is in the table from now on."""
        job = entry.job
        kind = _kind(job)
        heap = self._kinds.get(kind)
        if heap is None:
            heap = self._kinds[kind] = []
        heapq.heappush(heap, (job.prompt_tokens, entry.order, job))
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if len(heap) > 2 * count + 64:
            heap[:] = [item for item in heap if self._waits(item)]
            heapq.heapify(heap)

    def leave(self, job: Job) -> None:
        """It is not in the table any more."""
        kind = _kind(job)
        left = self._counts[kind] - 1
        if left:
            self._counts[kind] = left
        else:
            del self._counts[kind], self._kinds[kind]

    def least(self) -> Iterator[Job]:
        """A queued job with the shortest prompt of each kind. O(kinds)."""
        for heap in self._kinds.values():
            while not self._waits(heap[0]):
                heapq.heappop(heap)
            yield heap[0][2]

    def heads(self, most: int, among: int) -> list[Job]:
        """The job that has waited longest of each tenant, of at most ``most`` tenants; looks at ``among`` jobs.

        What came back to the queue counts as young here.
        """
        found: dict[TenantId, Job] = {}
        for entry in islice(self._queued.values(), among):
            found.setdefault(entry.job.tenant, entry.job)
            if len(found) == most:
                break
        return list(found.values())

    def _waits(self, item: tuple[int, int, Job]) -> bool:
        entry = self._queued.get(item[2].id)
        return entry is not None and entry.order == item[1]


def _kind(job: Job) -> Kind:
    requires = tuple(sorted(job.requires.items())) if job.requires else ()
    return job.service_class, job.adapter, job.adapter_digest, job.allow_external, requires
