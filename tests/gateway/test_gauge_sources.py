"""What a scrape says of live queues and workers: drains and first starts are no outage, competitors are per model."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

from gateway.gauge_sources import worker_gauges
from gateway.pool import Pool
from gateway.worker_handle import LossKind, WorkerHandle, WorkerLoss
from tests.gateway.conftest import Start
from tests.gateway.harness import pool, tickets, until
from workers.testing import Echo


def up(handle: WorkerHandle) -> bool | None:
    pools = [cast(Pool, SimpleNamespace(handles=[handle]))]
    [gauge] = worker_gauges(pools)().workers
    return gauge.up


def test_a_first_start_is_awaited_and_a_restart_is_missed() -> None:
    def made(incarnation: int) -> WorkerHandle:
        return WorkerHandle("w", model="m", pool="p", labels={}, incarnation=incarnation, clock=time.monotonic)

    assert up(made(1)) is None
    assert up(made(2)) is False
    lost = made(1)
    lost.closed(WorkerLoss(LossKind.EXITED, "it ended", exit_code=1))
    assert up(lost) is False


async def test_a_worker_that_drains_is_not_down(start: Start) -> None:
    async with start({"models": [pool(2)]}, echo=Echo(step_s=0.01)) as site:
        call = asyncio.create_task(site.complete(max_tokens=3000))
        [handle] = await until(lambda: [handle for handle in site.dispatcher.workers if handle.inflight], "it runs")
        handle.drain()  # what the console does
        assert handle.state == "draining"
        assert await site.metric(f'forebay_worker_up{{worker="{handle.name}"}}') == 1
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_figures_by_model_are_of_its_own_queue(start: Start) -> None:
    other: dict[str, Any] = {**pool(), "name": "second"}
    async with start({"models": [pool(max_running=1), other]}, echo=Echo(step_s=0.01)) as site:
        calls = [asyncio.create_task(site.complete("alpha", max_tokens=2000)) for _ in range(4)]
        calls += [asyncio.create_task(site.complete("beta", model="second", max_tokens=2000))]
        await until(lambda: sum(bool(ticket.first_token_at) for ticket in tickets(site)) >= 1, "it runs")
        await until(lambda: len(site.dispatcher.queue) >= 1, "some wait")

        async def of(name: str, model: str, tenant: str) -> float:
            return await site.metric(f'forebay_{name}{{class="interactive",model="{model}",tenant="{tenant}"}}')

        assert await of("model_due_share", "echo", "alpha") == 1
        assert await of("model_service_share", "echo", "alpha") == 1
        assert await of("model_queue_depth", "echo", "alpha") == len(site.dispatcher.queue)
        assert await of("model_queue_depth", "second", "alpha") == 0
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
