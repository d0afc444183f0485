"""What becomes of requests when their worker is lost, or refuses them."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, pool, token, until
from workers.testing import Echo


async def test_equal_requests_get_one_strike_per_loss(start: Start) -> None:
    """security 59: several callers may send the same; one loss makes none of them a proven killer."""
    async with start({}, echo=Echo(step_s=0.01)) as site:
        calls = [asyncio.create_task(site.complete(max_tokens=150)) for _ in range(4)]
        await until(lambda: site.dispatcher.in_flight == 4, "all run")
        worker = site.dispatcher.workers[0]
        assert worker.hello is not None
        os.kill(worker.hello.pid, signal.SIGKILL)
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 4
        assert (await site.complete(max_tokens=60)).status_code == 200
        await site.at_rest()


async def test_equal_killers_cost_two_workers_together(start: Start) -> None:
    """security 59: also those that had not started are quarantined with the one that is caught."""
    async with start({"models": [pool(max_running=2)]}, echo=Echo(step_s=0.01, poison=77)) as site:
        answers = await asyncio.gather(*(site.complete(prompt=[5, 77, 6]) for _ in range(8)))
        assert {answer.json()["error"]["code"] for answer in answers} == {"quarantined"}
        await until(lambda: site.dispatcher.ready == 1, "a new worker")
        assert site.dispatcher.workers[0].incarnation - 1 <= 2
        await site.at_rest()


CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4})
TURN = ("/v1/responses", {"input": "hi", "max_output_tokens": 4})
TEXT = ("/v1/completions", {"prompt": "hi", "max_tokens": 4})


@pytest.mark.parametrize(
    ("code", "params"),
    [("prompt_too_long", ["messages", "input", "prompt"]), ("grammar", ["response_format", "text.format", "tools"])],
)
async def test_what_a_worker_refuses_is_named_as_its_caller_named_it(
    start: Start, code: str, params: list[str]
) -> None:
    shape = {"type": "json_object"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    shaped: list[tuple[str, dict[str, Any]]] = [
        (CHAT[0], {**CHAT[1], "response_format": shape}),
        (TURN[0], {**TURN[1], "text": {"format": shape}}),
        (CHAT[0], {**CHAT[1], "response_format": shape, "tools": tools}),
    ]
    asked: list[tuple[str, dict[str, Any]]] = [CHAT, TURN, TEXT] if code == "prompt_too_long" else shaped
    async with start(echo=Echo(fail_with=code)) as site:
        headers = {"authorization": f"Bearer {token('alpha')}"}
        for (path, body), param in zip(asked, params, strict=True):
            answer = await site.http.post(path, json={"model": MODEL, **body}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
