"""Device time as workers report it, on its way into the ledger.

Rules
- A worker's kinds are cumulative: what counts is the difference to what it said last. One that has just begun, or has
  less than before and so is a new process, counts from zero; one that ran before this gateway from its first report.
- What is gathered is handed to the live quota policy every ``FLUSH_S``, and kept when it cannot be stored. Without a
  policy that stores it, only the sums since the start are kept.
- Jobs are named by id; the ledger knows whose they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from gateway import log
from policies.spi import UsageReports
from policies.types import DeviceTime, DeviceUse, JobId

FLUSH_S = 1.0
YOUNG_NS = 3 * 10**9
"""A worker whose first report holds no more than this has begun under this gateway: it reports every second."""
_log = log.get("device_time")
_UseKey = tuple[str, str, str, str]


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


class DeviceBook:
    """Gathers and hands on. On the event loop only."""

    def __init__(self, quota: Callable[[], object], *, day: Callable[[], str] = _today) -> None:
        """``quota`` gives the live quota policy."""
        self._quota = quota
        self._day = day
        self._jobs: dict[JobId, DeviceTime] = {}
        self._use: dict[_UseKey, int] = {}
        self._seen: dict[tuple[str, str], dict[str, int]] = {}

    def ran_for(self, job_id: JobId, device: DeviceTime) -> None:
        """A worker told what a job took."""
        self._jobs[job_id] = self._jobs.get(job_id, DeviceTime()) + device

    def worker(self, model: str, name: str, kinds: Mapping[str, int]) -> None:
        """A worker told where its time went since it began."""
        before = self._seen.get((model, name))
        self._seen[model, name] = dict(kinds)
        total = sum(kinds.values())
        if before is None and total > YOUNG_NS:
            return
        if before is None or total < sum(before.values()):
            before = {}
        day = self._day()
        for kind, ns in kinds.items():
            if ns > before.get(kind, 0):
                key = (day, model, name, kind)
                self._use[key] = self._use.get(key, 0) + ns - before.get(kind, 0)

    async def flush(self) -> None:
        """Hand on what there is."""
        jobs, use = self._jobs, self._use
        self._jobs, self._use = {}, {}
        quota = self._quota()
        if not isinstance(quota, UsageReports) or not (jobs or use):
            return
        if await quota.devices_ran(jobs, [DeviceUse(*key, ns) for key, ns in use.items()]):
            return
        for job_id, device in jobs.items():
            self.ran_for(job_id, device)
        for key, ns in use.items():
            self._use[key] = self._use.get(key, 0) + ns

    async def run(self) -> None:
        """Flush again and again."""
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                await self.flush()
            except Exception as error:
                _log.error("device_time_not_stored", failure=log.describe(error))
