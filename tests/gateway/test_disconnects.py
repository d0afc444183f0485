"""Callers that leave while they wait, are computed, or read (gateway C1, C3)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.gate import MAX_WAITING
from policies.types import Usage
from tests.gateway.harness import Settlements, Site, pool, tickets, until
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = Echo(step_s=0.02)
SETTINGS: dict[str, Any] = {"models": [pool(max_running=1, max_step_tokens=16)]}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("where", ["queue", "prefill", "decode"])
async def test_a_caller_that_leaves_leaves_nothing_behind(shared: Site, where: str, stream: bool) -> None:
    """gateway C1, C3: out of the queue, out of the engine, blocks free, settled: long before its answer would end."""
    settlements = Settlements(shared)
    left_before = await shared.metric("forebay_client_disconnects_total")
    dispatcher = shared.dispatcher
    stats = dispatcher.workers[0]
    occupants = []
    if where == "queue":
        occupants = [asyncio.create_task(shared.complete("beta", max_tokens=1000)) for _ in range(1 + MAX_WAITING)]
        await until(lambda: dispatcher.in_flight == 1 + MAX_WAITING, "the worker and its line are full")
    prompt = [5] * (1600 if where == "prefill" else 16)  # a hundred steps of 16 tokens
    call = asyncio.create_task(shared.complete(prompt=prompt, max_tokens=1000, stream=stream))
    if where == "queue":
        await until(lambda: len(dispatcher.queue) == 1, "it is queued")
    elif where == "prefill":
        await until(lambda: stats.stats.used_blocks > 1, "it is computed")
        assert all(ticket.usage.output == 0 for ticket in tickets(shared))
    else:
        await until(lambda: any(ticket.usage.output > 3 for ticket in tickets(shared)), "it has output")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: len(settlements.usages) == 1, "settled")
    await until(lambda: len(dispatcher.queue) == 0 and dispatcher.in_flight == len(occupants), "gone")
    if not occupants:
        await until(lambda: stats.stats.used_blocks == 0, "its blocks are free")
    assert settlements.usages[0].output < 500
    if where == "queue":
        assert settlements.usages[0] == Usage()
    for task in occupants:
        task.cancel()
    await asyncio.gather(*occupants, return_exceptions=True)
    settlements.close()
    await shared.at_rest()
    left = await shared.metric("forebay_client_disconnects_total") - left_before
    assert left == 1 + len(occupants)
