"""Gauges over a whole gateway."""

from __future__ import annotations

import asyncio
import time

from policies.scheduling.fcfs import FcfsScheduler
from policies.spi import Fits
from policies.types import Job
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site

STALLED = f'forebay_stalled{{model="{MODEL}"}}'


class Idle(FcfsScheduler):
    """Keeps every job, and never picks one."""

    def pop(self, now: float, fits: Fits) -> Job | None:
        return None


async def becomes(site: Site, wanted: float) -> None:
    """Scrape until the gauge says so: between two turns it does, while one is due it is 0."""
    deadline = time.monotonic() + 10
    while (found := await site.metric(STALLED)) != wanted:
        assert time.monotonic() < deadline, f"{STALLED} stays {found}"
        await asyncio.sleep(0.02)


async def test_a_queue_that_stands_still_beside_free_workers_shows(start: Start) -> None:
    async with start() as site:
        assert await site.metric(STALLED) == 0
        idle = site.dispatcher.swap(Idle(), "idle", probation=False)
        assert await site.metric(STALLED) == 0, "nobody waits"
        call = asyncio.create_task(site.complete())
        await becomes(site, 1)
        assert not call.done()
        assert site.dispatcher.workers[0].stats.running == 0
        site.dispatcher.swap(idle, "fcfs", probation=False)
        assert (await call).status_code == 200
        await becomes(site, 0)
        await site.at_rest()
