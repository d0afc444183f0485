"""Which prompt prefixes are hot, and lines of jobs that put the longest hot prefix first.

Rules
- A key is hot when a job with it was dispatched lately: the workers' caches most likely hold its block. At most
  ``max_keys`` are remembered; a wrong guess costs a recomputation, never a wrong answer.
- Keys are chained from the cache scope: no tenant's place depends on what another tenant's jobs contain, unless an
  operator lets them share a scope.
- The hot set is closed under prefixes (a chain is touched deepest first, the least recently touched key goes), so a
  match is found by bisection.
- A queued job watches the first key of its chain that is not hot. Each dispatch with that key moves at most ``MOVED``
  of those that watch it, oldest first: enough that the next job of a hot prefix is always known, and no burst when
  thousands wait for it. A match that shrank, because keys were forgotten, is corrected when its job comes up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from policies.scheduling._keyed import KeyedLines
from policies.types import Job, JobId, PrefixKey, TenantId

MOVED = 16


class HotPrefixes:
    """Prefix keys of late, least recently touched first. Touching is O(keys), matching O(log keys)."""

    def __init__(self, max_keys: int) -> None:
        self._max = max_keys
        self._keys: OrderedDict[PrefixKey, None] = OrderedDict()

    def touch(self, keys: Sequence[PrefixKey]) -> None:
        """A job with this chain was dispatched."""
        hot = self._keys
        for key in reversed(keys[: self._max]):
            hot[key] = None
            hot.move_to_end(key)
        while len(hot) > self._max:
            hot.popitem(last=False)

    def depth(self, keys: Sequence[PrefixKey]) -> int:
        """How many keys of the chain are hot, from its start."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in self._keys:
                low = middle + 1
            else:
                high = middle
        return low

    def __len__(self) -> int:
        return len(self._keys)


class PrefixLines:
    """A line per tenant (``_counters.TenantLines``). A job's key is ``ageing`` · arrival − tokens of its hot prefix."""

    def __init__(self, max_keys: int, ageing: float) -> None:
        self._hot = HotPrefixes(max_keys)
        self._ageing = ageing
        self._lines: KeyedLines[TenantId] = KeyedLines()
        self._depths: dict[JobId, int] = {}
        self._watched: dict[PrefixKey, dict[JobId, None]] = {}

    def push(self, job: Job) -> bool:
        """O(log n)."""
        changed = self._lines.push(job.tenant, job, self._key(job, self._hot.depth(job.prefix_keys)))
        self._watch(job)
        return changed

    def push_front(self, job: Job) -> bool:
        """O(log n)."""
        changed = self._lines.push_front(job.tenant, job, self._key(job, self._hot.depth(job.prefix_keys)))
        self._watch(job)
        return changed

    def head(self, tenant: TenantId) -> Job:
        """Longest hot prefix first, waits count."""
        return self._lines.head(tenant)

    def head_key(self, tenant: TenantId) -> float:
        """For comparing tenants."""
        return float(self._lines.head_key(tenant))

    def pop(self, tenant: TenantId) -> Job:
        """O(log n). ``touch`` its chain afterwards if it runs."""
        job = self._lines.pop(tenant)
        self._unwatch(job)
        return job

    def discard(self, job_id: JobId) -> Job | None:
        """O(log n)."""
        found = self._lines.discard(job_id)
        if found is None:
            return None
        self._unwatch(found[1])
        return found[1]

    def drain(self) -> list[Job]:
        """In order of arrival."""
        self._depths.clear()
        self._watched.clear()
        return self._lines.drain()

    def has(self, tenant: TenantId) -> bool:
        """Whether the tenant has queued jobs."""
        return self._lines.has(tenant)

    def touch(self, keys: Sequence[PrefixKey]) -> set[TenantId]:
        """A job with this chain was dispatched; returns tenants whose head may have changed."""
        if not keys:
            return set()
        self._hot.touch(keys)
        moved: list[JobId] = []
        for key in keys:
            watching = self._watched.get(key)
            if watching:
                moved.extend(islice(watching, MOVED))
        return self._look_again(moved)

    def shrunk(self, tenant: TenantId) -> bool:
        """Correct the head's match if keys of it were forgotten; True when that changed anything."""
        job = self._lines.head(tenant)
        if self._hot.depth(job.prefix_keys) >= self._depths.get(job.id, 0):
            return False
        self._look_again([job.id])
        return True

    def matched(self, job: Job) -> int:
        """Tokens of the job's hot prefix."""
        return self._tokens(job, self._hot.depth(job.prefix_keys))

    def __len__(self) -> int:
        return len(self._lines)

    def _look_again(self, job_ids: Iterable[JobId]) -> set[TenantId]:
        changed: set[TenantId] = set()
        for job_id in job_ids:
            job = self._lines.get(job_id)
            assert job is not None, "a job that left is not watched"
            self._unwatch(job)
            depth = self._watch(job)
            if self._lines.rekey(job_id, self._key(job, depth)):
                changed.add(job.tenant)
        return changed

    def _watch(self, job: Job) -> int:
        keys = job.prefix_keys
        if not keys:
            return 0
        depth = self._depths[job.id] = self._hot.depth(keys)
        if depth < len(keys):
            self._watched.setdefault(keys[depth], {})[job.id] = None
        return depth

    def _unwatch(self, job: Job) -> None:
        depth = self._depths.pop(job.id, None)
        if depth is None or depth == len(job.prefix_keys):
            return
        key = job.prefix_keys[depth]
        watching = self._watched[key]
        del watching[job.id]
        if not watching:
            del self._watched[key]

    def _key(self, job: Job, depth: int) -> float:
        return self._ageing * job.arrived_at - self._tokens(job, depth)

    def _tokens(self, job: Job, depth: int) -> int:
        # The chain's keys stand for the prompt's full blocks, so this is exact to a block.
        return min(job.prompt_tokens - 1, job.prompt_tokens * depth // len(job.prefix_keys)) if depth else 0
