"""Which prompt prefixes are hot, and lines of jobs that put the longest hot prefix first.

Rules
- A key is hot when a job with it was dispatched lately: the workers' caches most likely hold its block. At most
  ``max_keys`` are remembered; a wrong guess costs a recomputation, never a wrong answer.
- Keys are chained from the cache scope: no tenant's place depends on what another tenant's jobs contain, unless an
  operator lets them share a scope.
- The hot set is closed under prefixes (a chain is touched deepest first, the least recently touched key goes), so a
  match is found by bisection.
- A queued job watches the first key of its chain that is not hot. Each dispatch has ``MOVED`` of the jobs that watch
  its keys looked at again, those that know least and came first before the others: so the next job of a hot prefix
  is known, and there is no burst when thousands wait for it. A match that shrank, because keys were forgotten, is
  corrected when its job comes up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice

from policies.scheduling._keyed import KeyedLines, Line
from policies.scheduling._lines import Seat
from policies.spi import Fits
from policies.types import Job, JobId, PrefixKey, RequeueReason, TenantId

MOVED = 2


class HotPrefixes:
    """Prefix keys of late, least recently touched first. Touching is O(keys), matching O(log keys)."""

    def __init__(self, max_keys: int) -> None:
        self._max = max_keys
        self._keys: OrderedDict[PrefixKey, None] = OrderedDict()
        self.forgot = False
        """Whether any key was ever forgotten: else no match can shrink."""

    def touch(self, keys: Sequence[PrefixKey]) -> None:
        """A job with this chain was dispatched."""
        hot = self._keys
        for key in reversed(keys[: self._max]):
            hot[key] = None
            hot.move_to_end(key)
        while len(hot) > self._max:
            hot.popitem(last=False)
            self.forgot = True

    def depth(self, keys: Sequence[PrefixKey], low: int = 0) -> int:
        """How many keys of the chain are hot, from its start; at least ``low``."""
        high = len(keys)
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
        self.open = self._lines.open
        self._depths: dict[JobId, int] = {}
        self._watched: dict[PrefixKey, dict[JobId, None]] = {}

    def push(self, job: Job, now: float) -> bool:
        """O(log n)."""
        if not job.prefix_keys:
            return self._lines.push(job.tenant, job, self._ageing * job.arrived_at) is not None
        depth = self._hot.depth(job.prefix_keys)
        changed = self._lines.push(job.tenant, job, self._key(job, depth))
        self._watch(job, depth)
        return changed is not None

    def push_front(self, job: Job, now: float, reason: RequeueReason) -> bool:
        """O(log n)."""
        depth = self._hot.depth(job.prefix_keys)
        self._lines.push_front(job.tenant, job, self._key(job, depth))
        self._watch(job, depth)
        return True

    def pop_if(self, seat: Seat, now: float, fits: Fits) -> Job | None:
        """O(log n); longest hot prefix first, waits count. ``touch`` its chain afterwards."""
        line: Line[TenantId] = seat.line
        if not fits(line.heap[0][2]):
            return None
        job = self._lines.pop(line)
        if not line.heap:
            seat.line = None
        if job.prefix_keys:
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
        return tenant in self.open

    def touch(self, job: Job) -> Collection[TenantId]:
        """The job was dispatched; returns tenants whose head may have changed."""
        keys = job.prefix_keys
        if not keys:
            return ()
        self._hot.touch(keys)
        moved: list[JobId] = []
        watched = self._watched
        for key in keys:
            if key in watched:
                moved.extend(islice(watched[key], MOVED - len(moved)))
                if len(moved) == MOVED:
                    break
        changed: dict[TenantId, None] = {}  # in order: a set's order differs from process to process
        for job_id in moved:
            if self._look_again(job_id, self._depths[job_id] + 1):  # the key that it watched is hot now
                changed[self._job(job_id).tenant] = None
        return changed

    def shrunk(self, tenant: TenantId) -> bool:
        """Correct the head's match if keys of it were forgotten; True when that changed anything."""
        job = self.open[tenant].heap[0][2]
        if self._hot.depth(job.prefix_keys) >= self._depths.get(job.id, 0):
            return False
        self._look_again(job.id, 0)
        return True

    def matched(self, job: Job) -> int:
        """Tokens of the job's hot prefix."""
        if not job.prefix_keys:
            return 0
        return self._tokens(job, self._hot.depth(job.prefix_keys))

    @property
    def forgot(self) -> bool:
        """Whether a match may have shrunk."""
        return self._hot.forgot

    def __len__(self) -> int:
        return len(self._lines)

    def _job(self, job_id: JobId) -> Job:
        job = self._lines.get(job_id)
        assert job is not None, "a job that left is not watched"
        return job

    def _look_again(self, job_id: JobId, low: int) -> bool:
        """Match anew, of which ``low`` keys are known to; True when its tenant's head changed."""
        job = self._job(job_id)
        self._unwatch(job)
        depth = low if low >= len(job.prefix_keys) else self._hot.depth(job.prefix_keys, low)
        self._watch(job, depth)
        return self._lines.rekey(job_id, self._key(job, depth))

    def _watch(self, job: Job, depth: int) -> None:
        keys = job.prefix_keys
        if not keys:
            return
        self._depths[job.id] = depth
        if depth < len(keys):
            watching = self._watched.get(keys[depth])
            if watching is None:
                self._watched[keys[depth]] = {job.id: None}
            else:
                watching[job.id] = None

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
