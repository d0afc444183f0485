"""Streams that wait and readers that do not read, with real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from gateway.ticket import Ticket
from policies.types import JobId, Usage
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Settlements, Site, events, pool, token, until
from workers.testing import Echo

SLOW = Echo(step_s=0.15)


async def lines(site: Site, **body: Any) -> list[str]:
    async with site.stream("alpha", **body) as response:
        assert response.status_code == 200
        return [line async for line in response.aiter_lines() if line]


async def test_a_silent_stream_says_that_it_is_alive(start: Start) -> None:
    """Comments between the events, which every client skips; none where the interval is longer than the silence."""
    async with start({"streams": {"keep_alive_s": 0.05}}, echo=SLOW) as site:
        said = await lines(site, max_tokens=8)
        assert said[-1] == "data: [DONE]"
        assert said.count(": keep-alive") >= 3
        assert said[0].startswith("data: "), "nothing before the first output"
        client = site.client()
        stream = await client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=3, stream=True)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
    async with start({"streams": {"keep_alive_s": None}}, echo=SLOW) as site:
        assert ": keep-alive" not in await lines(site, max_tokens=3)


async def test_the_last_text_does_not_wait_for_a_slow_settlement(start: Start) -> None:
    """A caller has all of the text while its reservation is being settled, and the end only after that."""
    async with start() as site:
        quota, go_on = site.gateway.parts.runtime.current.quota, asyncio.Event()
        settle = quota.settle

        async def slow(job_id: JobId, usage: Usage, now: float) -> Any:
            await go_on.wait()
            return await settle(job_id, usage, now)

        quota.settle, quota.never_waits = slow, False  # type: ignore[method-assign, attr-defined]
        async with asyncio.timeout(30), site.stream("alpha", max_tokens=3) as response:
            said = response.aiter_lines()
            while '"finish_reason":"length"' not in (line := await anext(said)):
                assert line != "data: [DONE]"
            go_on.set()
            assert [line async for line in said if line][-1] == "data: [DONE]"
        quota.settle = settle  # type: ignore[method-assign]


async def test_text_that_comes_while_an_event_is_made_is_not_lost(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events may be made in a thread: meanwhile the request goes on, and ends."""

    async def late(ticket: Ticket, make: Callable[[], bytes]) -> bytes:
        await ticket.wait_done()
        return make()

    async with start(echo=Echo(step_s=0.01)) as site, site.client() as client:
        plain = await client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=9)
        monkeypatch.setattr("gateway.delivery._made", late)
        stream = await client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=9, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == plain.choices[0].text


async def outcomes(site: Site, count: int) -> list[tuple[int, list[str]]]:
    """Status and lines of several streams that come at once."""

    async def one() -> tuple[int, list[str]]:
        async with site.stream("alpha", max_tokens=8) as response:
            return response.status_code, [line async for line in response.aiter_lines() if line]

    return list(await asyncio.gather(*(one() for _ in range(count))))


ONE_AT_A_TIME: dict[str, Any] = {
    "classes": {"interactive": {"priority": 1, "max_wait_s": 0.8}},
    "models": [pool(max_running=1)],
}


async def test_a_refusal_after_waiting_keeps_its_status(start: Start) -> None:
    """gateway B9, C11: nothing is sent before the outcome is known."""
    async with start({**ONE_AT_A_TIME, "streams": {"keep_alive_s": 0.05}}, echo=SLOW) as site:
        done = await outcomes(site, 4)
    assert {status for status, _ in done} == {200, 429}
    assert all(said[-1] == "data: [DONE]" for status, said in done if status == 200)


async def test_a_stream_may_begin_while_it_waits(start: Start) -> None:
    """For proxies that give up on silence: then the refusal comes in-band, and no end is made up."""
    streams = {"keep_alive_s": 0.05, "begin_after_s": 0.05}
    async with start({**ONE_AT_A_TIME, "streams": streams}, echo=SLOW) as site:
        done = await outcomes(site, 4)
    assert {status for status, _ in done} == {200}
    refused = [said for _, said in done if said[-1] != "data: [DONE]"]
    assert refused
    for said in refused:
        assert said[0] == ": keep-alive"
        (error,) = events("\n".join(said))
        assert error["error"]["type"] == "rate_limit_error"


async def test_a_stream_that_began_early_goes_on_as_usual(start: Start) -> None:
    streams = {"keep_alive_s": 0.05, "begin_after_s": 0.02}
    async with start({"streams": streams}, echo=Echo(step_s=0.4)) as site:
        said = await lines(site, max_tokens=2)
        assert said[0] == ": keep-alive"
        assert said[-1] == "data: [DONE]"
        async with site.client() as client:
            stream = await client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=2, stream=True)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("limit", [{"slow_reader_s": 0.5}, {"slow_reader_s": 60, "max_backlog_bytes": 65536}])
async def test_a_reader_that_does_not_read_is_given_up(start: Start, limit: dict[str, Any]) -> None:
    """By time or by what piles up: its work ends, its slot is free, what ran is settled once, and it is counted."""
    settings = {"streams": limit, "models": [pool(max_running=16, blocks=8192)]}
    async with start(settings, echo=Echo(step_s=0.002)) as site:
        settled = Settlements(site)
        body = {
            "model": MODEL,
            "prompt": list(range(5, 45)),
            "max_tokens": 4000,
            "n": 16,
            "stream": True,
            "logprobs": 1,
            "ignore_eos": True,
        }
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token('alpha')}\r\n"
        host, port = site.url.removeprefix("http://").split(":")
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(reader, (host, int(port)))
            await loop.sock_sendall(reader, f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            await until(lambda: settled.usages, "it is settled")
            assert 0 < settled.usages[0].output < 16 * 4000
            await site.at_rest()
        assert len(settled.usages) == 1
        assert site.slots("alpha") == 0
        assert await site.metric("forebay_slow_readers_total") == 1
        assert await site.metric('forebay_requests_total{class="interactive",model="echo",outcome="cancelled"') == 1
        settled.close()
        assert (await site.complete()).status_code == 200
