"""What official clients do on 429 and 503: wait as they are told, and come again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest

from policies.spi import PolicyUnavailableError
from policies.types import Job, QuotaDecision
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, pool, token, until
from tests.gateway.test_dispatch import drop
from workers.testing import Echo

ASKED: dict[str, Any] = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 8}
ONE = {"tenants": [{"id": "alpha", "limits": {"concurrent": 1}}], "models": [pool(max_running=1)]}


async def held_until(site: Site, refusals: int, client: asyncio.Task[Any]) -> None:
    """Have the only slot taken until so many requests were refused for it; ``client`` comes again after that."""
    while await site.metric('forebay_requests_total{class="interactive",model="echo",outcome="throttled"') < refusals:
        assert not client.done()
        await asyncio.sleep(0.005)


async def test_a_client_waits_out_a_429(start: Start) -> None:
    """At least as long as Retry-After says; one that may not retry is told what happened."""
    async with start(ONE, echo=Echo(step_s=0.05)) as site:
        holder = asyncio.create_task(site.complete(max_tokens=3000))
        await until(lambda: site.dispatcher.in_flight, "the slot is taken")
        with pytest.raises(openai.RateLimitError) as refused:
            await site.client().completions.create(**ASKED)
        wait_s = int(refused.value.response.headers["retry-after"])
        assert refused.value.code == "concurrent"
        began = time.monotonic()
        patient = asyncio.create_task(site.client(max_retries=2).completions.create(**ASKED))
        await held_until(site, 2, patient)
        await drop([holder])
        assert (await patient).choices[0].finish_reason == "length"
        assert time.monotonic() - began >= wait_s
        assert await site.metric("forebay_requests_total{") == 4


async def test_a_synchronous_client_and_a_stream_do_so_too(start: Start) -> None:
    async with start(ONE, echo=Echo(step_s=0.05)) as site:
        holder = asyncio.create_task(site.complete(max_tokens=3000))
        await until(lambda: site.dispatcher.in_flight, "the slot is taken")

        def stream() -> str:
            with openai.OpenAI(base_url=f"{site.url}/v1", api_key=token("alpha"), max_retries=3) as client:
                chunks = client.completions.create(**ASKED, stream=True)
                return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

        patient = asyncio.create_task(asyncio.to_thread(stream))
        await held_until(site, 1, patient)
        await drop([holder])
        assert await patient
        assert await site.metric('forebay_requests_total{class="interactive",model="echo",outcome="throttled"') == 1


async def test_a_client_waits_out_a_503(start: Start) -> None:
    """A dependency that is down for a moment: the official client comes again when it was told to, and is served."""
    async with start() as site:
        quota: Any = site.gateway.parts.runtime.current.quota
        reserve, down = quota.reserve, iter([1.0, 1.0, 1.0])

        async def flaky(job: Job, now: float) -> QuotaDecision:
            for retry_after_s in down:
                raise PolicyUnavailableError("the store is away", retry_after_s=retry_after_s)
            decision: QuotaDecision = await reserve(job, now)
            return decision

        quota.reserve = flaky
        with pytest.raises(openai.InternalServerError) as refused:
            await site.client().completions.create(**ASKED)
        assert (refused.value.status_code, refused.value.response.headers["retry-after"]) == (503, "1")
        began = time.monotonic()
        answer = await site.client(max_retries=2).completions.create(**ASKED)
        assert answer.choices[0].finish_reason == "length"
        assert time.monotonic() - began >= 2
        quota.reserve = reserve
