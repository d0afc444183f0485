"""Clients that leave, at any moment, many of them (gateway C1, C3, C17; security 79)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.e2e.harness import CROWD, MODEL, Server, until

REQUESTS = 1000
DROPPED = 0.3
AT_ONCE = 48
SEED = 20


async def drive(server: Server) -> tuple[int, int]:
    """Send all requests, leave some at random moments; how many were answered and how many left."""
    rng = random.Random(SEED)
    url = server.info["url"] + "/v1/completions"
    headers = server.authorization("crowd")
    gate = asyncio.Semaphore(AT_ONCE)
    answered = left = 0

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal answered, left
        drop_after = rng.expovariate(1 / 0.08) if rng.random() < DROPPED else None
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": [504, 3575, 282, rng.randrange(1000, 4000), 314],
            "max_tokens": 30 if drop_after is not None else rng.randrange(1, 4),
            "ignore_eos": True,
            "stream": bool(rng.getrandbits(1)),
        }
        async with gate:
            try:
                async with asyncio.timeout(drop_after):
                    answer = await client.post(url, json=body, headers=headers)
                    assert answer.status_code == 200, answer.text
                    answered += 1
            except TimeoutError:
                left += 1

    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    async with httpx.AsyncClient(limits=limits, timeout=60) as client:
        await asyncio.gather(*(one(client, number) for number in range(REQUESTS)))
    return answered, left


async def test_a_thousand_requests_a_third_of_them_dropped(server: Server) -> None:
    """Afterwards nothing is held: no block, no slot, no queue entry; and the worker is the same process."""
    [before] = server.workers()
    answered, left = await drive(server)
    assert answered + left == REQUESTS
    assert left > REQUESTS * DROPPED / 2, "too few were dropped to show anything"
    until(lambda: at_rest(server), "every block, slot and queue entry given back")
    [after] = server.workers()
    assert after.pid == before.pid
    assert await admitted_at_once(server, CROWD + 2) == CROWD, "a concurrency slot was lost or made up"


def at_rest(server: Server) -> bool:
    """Nothing queued, nothing in flight, and free + cached = all blocks, by the worker's own count."""
    [worker] = server.admin("/admin/workers").json()["workers"]
    [queue] = server.admin("/admin/queue").json()["models"]
    blocks = worker["kv_blocks"]
    return bool(
        blocks["used"] == 0
        and blocks["free"] + blocks["cached"] == worker["blocks"]
        and worker["running"] == worker["waiting"] == worker["inflight"] == 0
        and queue["queued"] == queue["running"] == queue["in_flight"] == 0
    )


async def admitted_at_once(server: Server, count: int) -> int:
    """How many of ``count`` simultaneous requests are let in; the others must hit the tenant's own limit."""
    url = server.info["url"] + "/v1/completions"
    body = {"model": MODEL, "prompt": [504, 3575, 282], "max_tokens": 40, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=count)) as client:
        answers = await asyncio.gather(
            *(client.post(url, json=body, headers=server.authorization("crowd")) for _ in range(count))
        )
    refused = [answer.json()["error"] for answer in answers if answer.status_code == 429]
    assert all("concurrent" in error["code"] for error in refused), refused
    return sum(answer.status_code == 200 for answer in answers)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_frees_its_blocks(server: Server, stream: bool) -> None:
    """gateway C1: 2,000 tokens asked for, gone after a few; what it produced is what is counted."""
    url = server.info["url"] + "/v1/chat/completions"
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": stream,
    }
    async with httpx.AsyncClient(timeout=60) as client:
        request = asyncio.create_task(client.post(url, json=body, headers=server.authorization("assist")))
        await asyncio.to_thread(until, lambda: not at_rest(server), "the request at work")
        await asyncio.sleep(0.3)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await asyncio.to_thread(until, lambda: at_rest(server), "its blocks given back")
