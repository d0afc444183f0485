"""Quotas from the caller's side: what concurrency, refusals and hang-ups cost (gateway A)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.harness import Settlements, Site, events, token
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = Echo(step_s=0.02)
SETTINGS: dict[str, Any] = {
    "tenants": [
        {"id": "capped", "limits": {"tokens_per_minute": 300}},
        {"id": "small", "limits": {"tokens_per_minute": 100}},
        {"id": "roomy", "limits": {"tokens_per_minute": 100000}},
        {"id": "pair", "limits": {"requests_per_minute": 2, "concurrent": 1}},
        {"id": "single", "limits": {"concurrent": 1}},
    ]
}


@pytest.fixture
def settlements(shared: Site) -> Iterator[Settlements]:
    counted = Settlements(shared)
    yield counted
    counted.close()


async def test_parallel_calls_do_not_pass_a_token_limit(shared: Site, settlements: Settlements) -> None:
    """gateway A1: reserved before they run, so 20 at once do not add up to more than the limit."""
    calls = (shared.complete("capped", prompt=[5] * 40, max_tokens=20) for _ in range(20))
    answers = await asyncio.gather(*calls)
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 15
    assert sum(usage.total for usage in settlements.usages) <= 300
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["error"]["code"] == "tokens_per_minute"
            assert int(answer.headers["retry-after"]) >= 1


async def test_a_request_that_could_never_pass_is_400(shared: Site) -> None:
    """gateway A9: not an eternal 429; and an omitted max_tokens is cut to what the limit allows, and said."""
    answer = await shared.complete("small", prompt=[5] * 40, max_tokens=200)
    assert answer.status_code == 400
    assert "tokens_per_minute" in answer.json()["error"]["message"]
    fitting = await shared.complete("small", prompt=[5] * 40, max_tokens=None)
    assert fitting.status_code == 200
    assert fitting.json()["usage"]["total_tokens"] <= 100
    assert "tokens_per_minute" in fitting.headers["x-forebay-max-tokens"]


async def test_a_caller_that_vanishes_pays_for_what_ran_and_no_more(shared: Site, settlements: Settlements) -> None:
    """gateway A3: prompt + tokens produced (± a step), the rest given back, one settlement."""
    seen = 0
    async with shared.stream("roomy", prompt=[5] * 20, max_tokens=500) as response:
        async for line in response.aiter_lines():
            seen += line.startswith("data: ")
            if seen == 50:
                break
    await shared.at_rest()
    (usage,) = settlements.usages
    assert usage.prompt == 20
    assert 50 <= usage.output <= 50 + 60
    headers = (await shared.http.get("/v1/models", headers={"authorization": f"Bearer {token('roomy')}"})).headers
    assert 100000 - int(headers["x-ratelimit-remaining-tokens"]) <= usage.total + 1


async def test_a_refusal_takes_nothing_from_any_limit(shared: Site) -> None:
    """gateway A7: B is refused for concurrency; its request unit is still there for C."""
    async with shared.stream("pair", max_tokens=100) as first:
        refused = await shared.complete("pair")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "concurrent"
        await first.aread()
    assert (await shared.complete("pair")).status_code == 200


async def test_the_slot_is_free_when_the_answer_is_complete(shared: Site) -> None:
    """Settled before the last byte: a caller of one slot may go on at once, streamed or not."""
    for _ in range(15):
        assert (await shared.complete("single", max_tokens=2)).status_code == 200
        async with shared.stream("single", max_tokens=2) as response:
            assert response.status_code == 200
            assert events((await response.aread()).decode())[-1] == "[DONE]"
