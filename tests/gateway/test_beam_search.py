"""Beam search through the whole gateway: answers, usage, charges, slots, limits, cancels."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.gateway.harness import Settlements, Site, tickets, until
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {
    "tenants": [
        {"id": "alpha", "limits": {"tokens_per_minute": 100000}},
        {"id": "narrow", "limits": {"max_output_tokens": 20, "tokens_per_minute": 10000}},
    ]
}
SEARCH = {"use_beam_search": True, "n": 2, "best_of": 3, "ignore_eos": True}


async def test_answers_come_best_first_and_all_beams_are_billed(shared: Site) -> None:
    settled = Settlements(shared)
    client = shared.client()
    answer = await client.completions.create(
        model="echo",
        prompt=[11, 12, 13],
        max_tokens=5,
        n=2,
        best_of=3,
        extra_body={"use_beam_search": True, "ignore_eos": True},
    )
    await shared.at_rest()
    settled.close()
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].text != answer.choices[1].text
    alone = await client.completions.create(model="echo", prompt=[11, 12, 13], max_tokens=5, temperature=0)
    assert answer.choices[0].text == alone.choices[0].text, "the echo's likeliest line is its greedy one"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 3 * 5)
    assert [(usage.prompt, usage.output) for usage in settled.usages] == [(3, 15)]


async def test_chats_search_too(shared: Site) -> None:
    client = shared.client()
    answer = await client.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        n=2,
        extra_body={"use_beam_search": True, "ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 4


async def test_limits_count_beams(shared: Site) -> None:
    fits = await shared.complete("narrow", **SEARCH, max_tokens=6)
    assert fits.status_code == 200
    over = await shared.complete("narrow", **SEARCH, max_tokens=7)
    assert (over.status_code, over.json()["error"]["param"]) == (400, "max_tokens")
    assert "3 x 7" in over.json()["error"]["message"]
    omitted = await shared.complete("narrow", **SEARCH, max_tokens=None)
    assert omitted.headers["x-forebay-max-tokens"] == "6; limit=max_output_tokens"


async def test_too_large_a_search_is_the_callers_mistake(shared: Site) -> None:
    answer = await shared.complete(**SEARCH, max_tokens=3000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_stream_of_beams_is_refused(shared: Site) -> None:
    answer = await shared.complete(**SEARCH, stream=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


async def test_a_slow_search_is_no_missing_first_token(start: Start) -> None:
    """Its answers come at the end, but its progress counts as output."""
    changes = {**SETTINGS, "timeouts": {"drain_s": 5, "first_token_s": 1.5}}
    async with start(changes, echo=Echo(step_s=0.08)) as site:
        answer = await site.complete(**SEARCH, max_tokens=24)
        assert answer.status_code == 200


async def test_charges_come_while_it_runs_and_a_leaver_frees_everything(start: Start) -> None:
    async with start(SETTINGS, echo=Echo(step_s=0.02)) as site:
        asked = asyncio.create_task(site.complete(**SEARCH, max_tokens=500))
        await until(lambda: any(ticket.usage.output >= 9 for ticket in tickets(site)), "beams are charged live")
        assert site.dispatcher.workers[0].stats.running == 3
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await site.at_rest()
