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
from collections.abc import Mapping
from itertools import islice
from typing import Any

from policies._entries import Kind, Queued
from policies.spi import Fits
from policies.types import Job, JobId, TenantId


class Demand:
    """See the module's rules."""

    def __init__(self, queued: Mapping[JobId, Queued]) -> None:
        """``queued``: the queue's own table, to tell who has left."""
        self._queued = queued
        self._kinds: dict[Any, Kind] = {}

    def enter(self, entry: Queued) -> None:
        """The job is in the table from now on."""
        job = entry.job
        requires = tuple(sorted(job.requires.items())) if job.requires else ()
        name = (job.service_class, job.adapter, job.adapter_digest, job.allow_external, requires)
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = Kind(name)
        entry.kind = kind
        kind.jobs += 1
        heap = kind.shortest
        heapq.heappush(heap, (job.prompt_tokens, entry.order, job))
        if len(heap) > 2 * kind.jobs + 64:
            heap[:] = [item for item in heap if self._waits(item)]
            heapq.heapify(heap)

    def leave(self, entry: Queued) -> None:
        """It is not in the table any more."""
        kind = entry.kind
        assert kind is not None, "it was entered"
        kind.jobs -= 1
        if not kind.jobs:
            del self._kinds[kind.name]

    def least(self) -> list[Job]:
        """A queued job with the shortest prompt of each kind. O(kinds)."""
        queued, least = self._queued, []
        for kind in self._kinds.values():
            heap = kind.shortest
            _, order, job = heap[0]
            while (entry := queued.get(job.id)) is None or entry.order != order:
                heapq.heappop(heap)
                _, order, job = heap[0]
            least.append(job)
        return least

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

    def all_fit(self, fits: Fits, most: int | None = None) -> bool:
        """Whether every queued job fits, of the ``most`` that came first; ends with the first that does not."""
        return all(fits(entry.job) for entry in islice(self._queued.values(), most))

    def first(self) -> JobId:
        """The queued job that came first; there must be one."""
        return next(iter(self._queued))

    def _waits(self, item: tuple[int, int, Job]) -> bool:
        entry = self._queued.get(item[2].id)
        return entry is not None and entry.order == item[1]
