"""Workers of one model whose contexts differ."""

from __future__ import annotations

import asyncio

from gateway.pool import WorkerState
from tests.gateway.conftest import Start
from tests.gateway.harness import pool, until


async def test_a_long_request_goes_to_the_worker_that_holds_it(start: Start) -> None:
    """The model's context is the longest of its workers'; the others refuse what is too long for them."""
    two = pool(blocks=32)  # of 16 tokens
    two["pools"] = [
        {**two["pools"][0], "name": "a-small", "engine": {**two["pools"][0]["engine"], "max_context": 128}},
        {**two["pools"][0], "name": "b-large"},
    ]
    async with start({"models": [two]}) as site:
        await until(lambda: site.dispatcher.ready == 2, "both")
        long = [site.complete(prompt=[5] * 100, max_tokens=100) for _ in range(6)]
        several = site.complete(prompt=[5] * 60, max_tokens=60, n=3)
        short = [site.complete(prompt=[6] * 20, max_tokens=20) for _ in range(6)]
        answers = await asyncio.gather(*long, several, *short)
        assert [answer.status_code for answer in answers] == [200] * 13, [answer.text for answer in answers]
        small = next(handle for handle in site.dispatcher.workers if handle.pool == "a-small")
        assert small.step > 0, "it has its part of what it can hold"
        large = next(handle for handle in site.dispatcher.workers if handle.pool == "b-large")
        large.state = WorkerState.DRAINING
        waits = asyncio.create_task(site.complete(prompt=[5] * 100, max_tokens=100))
        await until(lambda: len(site.dispatcher.queue) == 1, "it waits for the worker that holds it")
        assert (await site.complete("beta", max_tokens=20)).status_code == 200, "and stops nobody else"
        large.state = WorkerState.READY
        site.dispatcher.wake()
        assert (await waits).status_code == 200
