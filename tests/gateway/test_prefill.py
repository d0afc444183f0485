"""Prefill and decode workers behind one gateway: who computes what, what is billed, and what happens without them."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, until
from workers.testing import Echo

LONG = [5, 6, 7, 8, 9] * 40
SHORT = [5, 6, 7, 8]


def model(*roles: str, **engine: Any) -> dict[str, Any]:
    pools = [
        {"name": role, "launch": {"use": "echo"}, "engine": {"blocks": 256, "max_running": 8, "role": role, **engine}}
        for role in roles
    ]
    return {"models": [{"name": MODEL, "source": "model", "pools": pools}]}


async def everybody(site: Site, count: int = 2) -> None:
    await until(lambda: len(site.dispatcher.workers) == count, "all workers are there")


async def transfers(site: Site) -> dict[str, int]:
    """What the decode worker's metrics say, by result."""
    worker = next(one for one in site.dispatcher.workers if one.pool == "decode")
    assert worker.hello is not None
    text = (await site.http.get(f"http://127.0.0.1:{worker.hello.metrics_port}/metrics")).text
    start = 'forebay_kv_transfer_seconds_count{result="'
    lines = [line.removeprefix(start) for line in text.splitlines() if line.startswith(start)]
    return {line.partition('"')[0]: int(float(line.rsplit(" ", 1)[1])) for line in lines}


async def test_a_long_prompt_is_computed_by_the_prefill_worker_and_billed_once(start: Start) -> None:
    async with start(model("prefill", "decode")) as site:
        await everybody(site)
        roles = {one["name"]: one["role"] for one in (await site.admin.get("/admin/workers")).json()["workers"]}
        assert roles == {f"{MODEL}/prefill-0": "prefill", f"{MODEL}/decode-0": "decode"}
        for cached in (0, 192):
            answer = await site.complete(prompt=LONG)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert usage["prompt_tokens"] == len(LONG)
            assert (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) == cached
        assert await transfers(site) == {"ok": 2}
        assert await site.metric('forebay_service_tokens_total{class="interactive",kind="prompt"') == len(LONG) + 8
        await site.at_rest()


async def test_a_short_prompt_is_not_handed_over(start: Start) -> None:
    async with start(model("prefill", "decode")) as site:
        await everybody(site)
        assert (await site.complete(prompt=SHORT)).status_code == 200
        assert await transfers(site) == {}


async def test_streams_and_choices_go_the_same_way(start: Start) -> None:
    async with start(model("prefill", "decode"), echo=Echo(shift=1)) as site:
        await everybody(site)
        expected = [LONG[shift : shift + 8] for shift in (0, 1)]
        answer = await site.complete(prompt=LONG, n=2, logprobs=0)
        assert len(answer.json()["choices"]) == len(expected)
        async with site.stream(prompt=LONG) as response:
            text = (await response.aread()).decode()
        assert "[DONE]" in text
        assert (await transfers(site))["ok"] == 2
        await site.at_rest()


async def test_a_decode_worker_runs_everything_while_no_prefill_worker_lives(start: Start) -> None:
    """The one that had the prompt is killed in the middle of it: its caller notices nothing but the time."""
    async with start(model("prefill", "decode", max_step_tokens=16), echo=Echo(step_s=0.05)) as site:
        await everybody(site)
        running = asyncio.create_task(site.complete(prompt=LONG))
        prefill = next(one for one in site.dispatcher.workers if one.pool == "prefill")
        await until(lambda: prefill.inflight and prefill.stats.used_blocks, "it computes")
        assert prefill.hello is not None
        os.kill(prefill.hello.pid, signal.SIGKILL)
        answer = await running
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert sum((await transfers(site)).values()) == 1
        assert "ok" not in await transfers(site)
        await site.at_rest()


async def test_a_prefill_worker_alone_gets_no_request(start: Start) -> None:
    """It waits for a worker that runs requests."""
    async with start(model("prefill", "decode"), echo=Echo()) as site:
        await everybody(site)
        decode = next(one for one in site.dispatcher.workers if one.pool == "decode")
        assert site.dispatcher.ready == 1
        assert decode.hello is not None
        os.kill(decode.hello.pid, signal.SIGKILL)
        await until(lambda: site.dispatcher.ready == 0, "it is gone")
        prefill = next(one for one in site.dispatcher.workers if one.pool == "prefill")
        assert (await site.complete(prompt=SHORT)).status_code == 200
        assert prefill.step == 0


async def test_a_caller_that_leaves_frees_both_workers(start: Start) -> None:
    async with start(model("prefill", "decode", max_step_tokens=16), echo=Echo(step_s=0.05)) as site:
        await everybody(site)
        running = asyncio.create_task(site.complete(prompt=LONG))
        prefill = next(one for one in site.dispatcher.workers if one.pool == "prefill")
        await until(lambda: prefill.inflight, "it was sent")
        running.cancel()
        await until(lambda: not prefill.inflight, "its part is over")
        await site.at_rest()


async def test_prompts_wait_in_the_queue_and_short_ones_go_past(start: Start) -> None:
    """The prefill worker's own line stays short: whose turn it is, the policy says."""
    async with start(model("prefill", "decode", max_step_tokens=16), echo=Echo(step_s=0.02)) as site:
        await everybody(site)
        prefill = next(one for one in site.dispatcher.workers if one.pool == "prefill")
        longs = [asyncio.create_task(site.complete(prompt=[number, *LONG])) for number in range(5, 13)]
        await until(lambda: len(site.dispatcher.queue) >= 4, "they wait here")
        assert prefill.inflight <= 3
        assert not site.dispatcher.stalled()
        assert (await site.complete("beta", prompt=SHORT)).status_code == 200
        assert len(site.dispatcher.queue) >= 1, "it went past them"
        for answer in await asyncio.gather(*longs):
            assert answer.status_code == 200
        assert await transfers(site) == {"ok": 8}
        await site.at_rest()


async def test_a_purge_reaches_both(start: Start) -> None:
    async with start(model("prefill", "decode")) as site:
        await everybody(site)
        await site.complete(prompt=LONG)
        answer = await site.admin.delete("/admin/tenants/alpha/cache")
        assert answer.status_code == 200
        await until(lambda: all(not one.stats.cached_blocks for one in site.dispatcher.workers), "nothing is cached")
        again = await site.complete(prompt=LONG)
        assert (again.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0) == 0
        assert await transfers(site) == {"ok": 2}
