"""Limits at every level from the caller's side: organisation, tenant, user, key (gateway A)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.harness import MODEL, Site, held, token, until
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = Echo(step_s=0.005)
SETTINGS: dict[str, Any] = {
    "organisations": [{"id": "acme", "limits": {"tokens_per_hour": 400, "requests_per_day": 500}}],
    "tenants": [
        {"id": "one", "organisation": "acme"},
        {"id": "two", "organisation": "acme", "limits": {"tokens_per_hour": 350}},
        {"id": "people", "user_limits": {"requests_per_minute": 5}, "limits": {"requests_per_minute": 100}},
        {"id": "holders", "key_limits": {"concurrent": 1}},
        {"id": "crowd", "limits": {"tokens_per_hour": 1000}},
        {"id": "tiny", "limits": {"tokens_per_minute": 200, "output_tokens_per_day": 150}},
        {"id": "paying", "limits": {"budget": {"currency_per_month": "0.0003", "tokens_per_month": 1000}}},
        {"id": "line", "limits": {"queued": 2}},
        {"id": "memory", "limits": {"kv_tokens": 100}},
        {"id": "long", "limits": {"tokens_per_minute": 1000}},
    ],
    "prices": {"models": {MODEL: {"input": 1, "cached_input": 0.5, "output": 5}}},
}


async def ask(site: Site, tenant: str, prompt: int = 10, output: int | None = 10, **claims: Any) -> Any:
    body: dict[str, Any] = {"model": MODEL, "prompt": [5] * prompt}
    if output is not None:
        body["max_tokens"] = output
    return await site.http.post(
        "/v1/completions", json=body, headers={"authorization": f"Bearer {token(tenant, **claims)}"}
    )


async def test_two_hundred_parallel_requests_over_admit_nothing(shared: Site) -> None:
    """gateway A1: 200 calls of 50 tokens at one instant against 1,000: 20 pass, 180 are told when to come again."""
    answers = await asyncio.gather(*(ask(shared, "crowd", 25, 25) for _ in range(200)))
    passed = [answer for answer in answers if answer.status_code == 200]
    assert sum(answer.json()["usage"]["total_tokens"] for answer in passed) <= 1000
    assert len(passed) == 20
    for answer in answers:
        assert answer.status_code in (200, 429)
        assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1


async def test_tenants_of_an_organisation_share_its_limit(shared: Site) -> None:
    """All or nothing over all levels; the answer names whose limit it is."""
    assert (await ask(shared, "one", 100, 200)).status_code == 200
    refused = await ask(shared, "two", 100, 200)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "tokens_per_hour"
    assert "Your organisation's limit tokens_per_hour" in refused.json()["error"]["message"]
    assert 1200 < int(refused.headers["retry-after"]) <= 1801
    small = await ask(shared, "two", 30, 20)
    assert small.status_code == 200, "the refusal has taken nothing from the tenant"
    assert small.headers["x-ratelimit-limit-tokens"] == "400", "the tightest of the levels"
    assert int(small.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(50, abs=2)


async def test_a_users_limit_holds_for_every_call_and_every_credential(shared: Site) -> None:
    """gateway A15: exactly 5 of 20; a new token of the same user starts nothing anew."""
    answers = [await ask(shared, "people", user="u1", sub="alice", jti=str(i)) for i in range(20)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 15
    assert "Your user's limit requests_per_minute" in answers[-1].json()["error"]["message"]
    assert (await ask(shared, "people", sub="bob")).status_code == 200


async def test_a_keys_limit_is_its_own(shared: Site) -> None:
    first, second = token("holders", jti="1"), token("holders", jti="2")
    body = {"model": MODEL, "prompt": [5] * 4, "max_tokens": 400, "stream": True}
    headers = {"authorization": f"Bearer {first}"}
    async with shared.http.stream("POST", "/v1/completions", json=body, headers=headers) as running:
        again = await shared.http.post("/v1/completions", json={**body, "stream": False}, headers=headers)
        assert again.status_code == 429
        assert "Your key's limit concurrent" in again.json()["error"]["message"]
        other = {"authorization": f"Bearer {second}"}
        assert (
            await shared.http.post("/v1/completions", json={**body, "stream": False, "max_tokens": 4}, headers=other)
        ).status_code == 200
        await running.aread()


async def test_an_omitted_max_tokens_is_what_every_limit_lets_pass(shared: Site) -> None:
    """gateway A9: no request is refused for ever for a reservation that its caller did not ask for."""
    clamped = await ask(shared, "tiny", 40, None)
    assert clamped.status_code == 200
    assert clamped.headers["x-forebay-max-tokens"] == "150; limit=output_tokens_per_day"
    refused = await ask(shared, "tiny", 40, 180)
    assert refused.status_code == 400
    assert "max_tokens can be at most 150" in refused.json()["error"]["message"]


async def test_a_budget_of_money_ends_with_the_month(shared: Site) -> None:
    """gateway A17: reserved at the highest price, settled at what ran; then 429 until the first of the month."""
    never = await ask(shared, "paying", 10, 80)
    assert never.status_code == 400
    assert "It may cost up to 0.00041, but currency_per_month is 0.0003" in never.json()["error"]["message"]
    assert "max_tokens can be at most 58" in never.json()["error"]["message"]
    assert (await ask(shared, "paying", 10, 50)).status_code == 200
    refused = await ask(shared, "paying", 10, 50)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "currency_per_month")
    assert int(refused.headers["retry-after"]) <= 31 * 86_400
    assert int(refused.headers["x-ratelimit-limit-tokens"]) == 1000
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) == 940


async def test_the_line_is_limited_by_itself(shared: Site) -> None:
    """``queued`` counts those that wait: who runs makes room again."""
    answers = await asyncio.gather(*(ask(shared, "line", 4, 4) for _ in range(12)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.json()["error"]["code"] for answer in refused} <= {"queued"}
    assert len(refused) < 12
    for _ in range(6):
        assert (await ask(shared, "line", 4, 4)).status_code == 200


async def test_kv_tokens_come_back_when_requests_end(shared: Site) -> None:
    with held(shared.dispatcher):
        asked = [asyncio.create_task(ask(shared, "memory", 20, 20)) for _ in range(4)]
        await until(lambda: len(shared.dispatcher.queue) == 2 and sum(one.done() for one in asked) == 2, "all came")
    answers = await asyncio.gather(*asked)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
    assert {a.json()["error"]["code"] for a in answers if a.status_code == 429} == {"kv_tokens"}
    assert (await ask(shared, "memory", 50, 50)).status_code == 200


async def test_the_remaining_header_falls_while_a_stream_runs(shared: Site) -> None:
    """gateway A17: what is admitted is taken at once, not at the next call; more than the limit never runs."""
    assert (await ask(shared, "long", 10, 5000)).status_code == 400
    async with shared.stream("long", prompt=[5] * 10, max_tokens=600) as running:
        assert int(running.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(390, abs=2)
        models = await shared.http.get("/v1/models", headers={"authorization": f"Bearer {token('long')}"})
        assert int(models.headers["x-ratelimit-remaining-tokens"]) < 600, "16 come back every second"
