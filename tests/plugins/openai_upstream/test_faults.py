"""What an upstream may do to a request, socket by socket, and what its caller then sees (gateway C1 to C15)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.harness import MODEL, Settlements, Site, events, token, until
from tests.plugins.openai_upstream.conftest import Front
from tests.plugins.openai_upstream.scripted import Exchange, event, piece, scripted, stream, usage


async def chat(site: Site, **body: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8, **body}
    headers = {"authorization": f"Bearer {token('alpha')}"}
    return await site.http.post("/v1/chat/completions", json=body, headers=headers)


async def test_trailing_usage_is_charged_and_not_forwarded_c9(front: Front) -> None:
    """gateway C9: the caller did not ask for the figures, the tenant is charged by them all the same."""

    async def script(exchange: Exchange) -> None:
        assert exchange.body["stream_options"] == {"include_usage": True}
        await exchange.whole(stream("one", " two", figures=usage(77, 5, cached=64)))

    async with scripted(script) as server, front(server.url) as site:
        settled = Settlements(site)
        answer = await site.complete(stream=True)
        said = events(answer.text)
        assert said[-1] == "[DONE]"
        assert not any("usage" in chunk for chunk in said[:-1])
        assert "".join(chunk["choices"][0]["text"] for chunk in said[:-1]) == "one two"
        assert [(u.prompt, u.cached, u.output) for u in settled.usages] == [(13, 64, 5)]
        whole = (await site.complete()).json()
        assert whole["usage"]["prompt_tokens"] == 77
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        assert whole["usage"]["completion_tokens"] == 5
        settled.close()
        await site.at_rest()


@pytest.mark.parametrize(("status", "code"), [(429, "upstream_throttled"), (503, "upstream_unavailable")])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_busy_upstream_is_passed_on_as_such_c11(front: Front, status: int, code: str, streamed: bool) -> None:
    """gateway C11: 429 and 503 before the body come through with their Retry-After, also on streams."""

    async def script(exchange: Exchange) -> None:
        await exchange.whole(b'{"error": {"message": "10.1.2.3 is busy"}}', status, retry_after="17")

    async with scripted(script) as server, front(server.url) as site:
        answer = await site.complete(stream=streamed)
        assert answer.status_code == status
        assert answer.headers["retry-after"] == "17"
        assert answer.json()["error"]["code"] == code
        assert "10.1.2.3" not in answer.text
        assert len(server.requests) == 1
        await site.at_rest()


@pytest.mark.parametrize("chunks", [0, 1, 50])
async def test_a_reset_is_never_an_end_that_was_made_up_c5(front: Front, chunks: int) -> None:
    """gateway C5: nothing sent yet: tried once more, then 502; else an error inside the stream. What ran is settled."""

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        for number in range(chunks):
            await exchange.event(piece(f"w{number} "))
        await asyncio.sleep(0.05)
        exchange.reset()

    async with scripted(script) as server, front(server.url) as site:
        settled = Settlements(site)
        answer = await site.complete(stream=True, max_tokens=100)
        if chunks == 0:
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "upstream_failed"
            assert len(server.requests) == 2
        else:
            said = events(answer.text)
            assert said[-1]["error"]["code"] == "upstream_failed"
            assert "[DONE]" not in said
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in said[:-1])
            assert len(server.requests) == 1
        [paid] = settled.usages
        assert (paid.prompt, paid.output) == (4, chunks)
        settled.close()
        await site.at_rest()


async def test_a_stream_that_just_ends_is_a_failure_c5(front: Front) -> None:
    """No finish reason and no ``[DONE]``: the answer may be cut short, and the caller hears so."""

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event(piece("half an"))
        await asyncio.sleep(0.05)
        exchange.close()

    async with scripted(script) as server, front(server.url) as site:
        answer = await site.complete(stream=True)
        assert events(answer.text)[-1]["error"]["code"] == "upstream_failed"


async def test_a_stream_without_done_is_whole_once_every_choice_has_its_end(front: Front) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.whole(event(piece("all of it")) + event(piece(finish="length")))

    async with scripted(script) as server, front(server.url) as site:
        answer = (await site.complete()).json()
        assert answer["choices"][0] == {"index": 0, "text": "all of it", "logprobs": None, "finish_reason": "length"}


async def test_stale_connections_cost_no_request_c15(front: Front) -> None:
    """gateway C15: the server closes idle connections just when they are used again; every request is answered."""

    async def script(exchange: Exchange) -> None:
        await exchange.whole(stream("ok"))

    async with scripted(script, idle_s=0.05) as server, front(server.url, keepalive_s=5) as site:
        statuses = []
        for number in range(30):
            answer = await site.complete(stream=True)
            statuses.append((answer.status_code, "[DONE]" in answer.text))
            await asyncio.sleep(0.046 + (number % 8) / 1000)
        assert set(statuses) == {(200, True)}
        assert server.connections > 5


async def test_a_request_that_dies_on_a_reused_connection_is_sent_again_on_a_fresh_one_c15(front: Front) -> None:
    """The race of C15, forced: the second request of a connection is answered with a reset."""
    used: dict[int, int] = {}

    async def script(exchange: Exchange) -> None:
        used[exchange.connection] = used.get(exchange.connection, 0) + 1
        if used[exchange.connection] > 1:
            exchange.reset()
            return
        await exchange.whole(stream("ok"))

    async with scripted(script) as server, front(server.url, keepalive_s=60) as site:
        for _ in range(6):
            assert (await site.complete(stream=True)).status_code == 200
        assert any(count > 1 for count in used.values())
        # Not at the expense of the gateway's retry budget, and no fault of the worker.
        assert site.dispatcher.workers[0].breaker.faults == 0


async def test_a_caller_that_leaves_closes_the_upstreams_connection_c1(front: Front) -> None:
    """gateway C1, through the gateway to an external server; A3: what ran until then is paid."""
    gone = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        for number in range(10):
            await exchange.event(piece(f"{number} "))
        await exchange.gone()
        gone.set()

    async with scripted(script) as server, front(server.url) as site:
        settled = Settlements(site)
        async with site.stream(max_tokens=2000) as response:
            async for line in response.aiter_lines():
                if "9 " in line:
                    break
        async with asyncio.timeout(30):
            await gone.wait()
        await site.at_rest()
        [paid] = settled.usages
        assert (paid.prompt, paid.output) == (4, 10)
        settled.close()


async def test_a_caller_that_leaves_before_the_first_token_stops_it_too_c3(front: Front) -> None:
    gone = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.gone()
        gone.set()

    async with scripted(script) as server, front(server.url) as site:
        asked = asyncio.create_task(site.complete())
        await until(lambda: server.requests, "it is there")
        asked.cancel()
        async with asyncio.timeout(30):
            await gone.wait()
        await site.at_rest()


async def test_each_phase_has_its_own_time_limit(front: Front) -> None:
    """First token and between chunks apart: one that begins at once may still stall, and the other way round."""

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        if exchange.body["prompt"] == [1]:
            await exchange.gone()
        await exchange.event(piece("a"))
        await asyncio.sleep(0.8)  # longer than the time to the first token allows
        await exchange.event(piece("b"))
        await exchange.gone()

    limits = {"first_token_s": 0.5, "between_chunks_s": 2.0}
    async with scripted(script) as server, front(server.url, **limits) as site:
        silent = await site.complete(prompt=[1])
        assert (silent.status_code, silent.json()["error"]["code"]) == (504, "upstream_timeout")
        assert len(server.requests) == 2  # nothing was sent: tried once more
        stalled = await site.complete(prompt=[2], stream=True)
        said = events(stalled.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in said[:-1]) == "ab"
        assert said[-1]["error"]["code"] == "upstream_timeout"
        await site.at_rest()


async def test_a_connection_that_does_not_come_about_is_given_up_early(front: Front) -> None:
    async def script(exchange: Exchange) -> None:
        raise AssertionError("never reached")

    async with scripted(script) as server:
        url = server.url
    async with front(url, probe=False, connect_s=0.5, first_token_s=60) as site:
        answer = await site.complete()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")


STATUSES: list[tuple[int, bytes, tuple[int, str]]] = [
    (400, b'{"error": {"code": "context_length_exceeded"}}', (400, "context_length_exceeded")),
    (400, b'{"error": {"message": "secret path /srv/x"}}', (400, "invalid_request")),
    (422, b"not even JSON", (400, "invalid_request")),
    (401, b"{}", (502, "upstream_failed")),
    (404, b"{}", (502, "upstream_failed")),
    (500, b"{}", (502, "upstream_failed")),
    (302, b"{}", (502, "upstream_failed")),
    (504, b"{}", (504, "upstream_timeout")),
]


async def test_what_a_status_means(front: Front) -> None:
    """security 57: and none of the server's words get through."""

    async def script(exchange: Exchange) -> None:
        status, body, _ = STATUSES[exchange.body["prompt"][0]]
        await exchange.whole(body, status, location="http://127.0.0.1:9/elsewhere")

    async with scripted(script) as server, front(server.url) as site:
        for number, (_, _, expected) in enumerate(STATUSES):
            answer = await site.complete(prompt=[number])
            site.dispatcher.workers[0].breaker.success()
            assert (answer.status_code, answer.json()["error"]["code"]) == expected
            assert "/srv/x" not in answer.text
        await site.at_rest()


NONSENSE: list[Any] = [
    "{",
    "[1, 2]",
    '{"choices": "none"}',
    {"choices": [{"index": 7, "text": "x"}]},
    {"choices": [{"index": -1, "text": "x"}]},
    {"choices": [{"index": 0, "text": 5}]},
    {"error": {"message": "the model at 10.0.0.7 broke"}},
    {"choices": [{"index": 0, "text": "", "finish_reason": "eaten_by_a_grue"}]},
    '{"choices": [{"index": 0, "text": "' + "\\ud800" + '"}]}',
    '{"error": ' + "[" * 100_000 + "]" * 100_000 + "}",
]


async def test_nonsense_is_a_failure_of_the_upstream(front: Front) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.whole(event(NONSENSE[exchange.body["prompt"][0]]) + event("[DONE]"))

    async with scripted(script) as server, front(server.url) as site:
        for number in range(len(NONSENSE)):
            answer = await site.complete(prompt=[number])
            site.dispatcher.workers[0].breaker.success()
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")
            assert "10.0.0.7" not in answer.text
        await site.at_rest()


async def test_an_endless_event_does_not_fill_the_memory(front: Front) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.head()
        while True:
            await exchange.send(b"data: " + b"x" * 2**20)

    async with scripted(script) as server, front(server.url) as site:
        assert (await site.complete()).status_code == 502


async def test_figures_without_measure_bill_nobody(front: Front) -> None:
    """security 67, 69: absurd figures are cut to what was asked for and what the server can hold."""

    async def script(exchange: Exchange) -> None:
        await exchange.whole(stream("a", figures=usage(10**15, 10**15, cached=-5)))

    async with scripted(script) as server, front(server.url, max_context=1000) as site:
        figures = (await site.complete(max_tokens=8)).json()["usage"]
        assert figures["completion_tokens"] == 8
        assert figures["prompt_tokens"] == 1000


async def test_an_upstream_that_fails_everybody_is_set_aside_e5(front: Front) -> None:
    """gateway E5: after the breaker opened, a request waits in the queue instead of failing there."""

    async def script(exchange: Exchange) -> None:
        await exchange.whole(b"{}", 500)

    async with scripted(script) as server, front(server.url) as site:
        for _ in range(3):  # two attempts each
            assert (await site.complete()).status_code == 502
        assert site.dispatcher.workers[0].breaker.is_open
        before = len(server.requests)
        asked = [asyncio.create_task(site.complete()) for _ in range(10)]
        await asyncio.sleep(0.3)
        assert len(server.requests) - before <= 1
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_malformed_requests_do_not_open_the_breaker_e3(front: Front) -> None:
    """gateway E3: what the upstream refuses as the caller's mistake says nothing about the upstream."""

    async def script(exchange: Exchange) -> None:
        if exchange.body["prompt"] == [1]:
            await exchange.whole(b'{"error": {"code": "context_length_exceeded"}}', 400)
        else:
            await exchange.whole(stream("fine"))

    async with scripted(script) as server, front(server.url) as site:
        refused = await asyncio.gather(*(site.complete(prompt=[1]) for _ in range(50)))
        assert {answer.status_code for answer in refused} == {400}
        assert not site.dispatcher.workers[0].breaker.is_open
        assert (await site.complete("beta")).json()["choices"][0]["text"] == "fine"


async def test_a_stop_string_that_only_we_see_ends_the_request_there(front: Front) -> None:
    """A server that ignores ``stop`` is cut off; what came after the stop string is not shown."""
    gone = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        assert exchange.body["stop"] == ["END"]
        await exchange.head()
        for text in ("before ", "EN", "D", " after"):
            await exchange.event(piece(text))
        await exchange.gone()
        gone.set()

    async with scripted(script) as server, front(server.url) as site:
        answer = (await site.complete(stop="END", max_tokens=50)).json()
        assert answer["choices"][0]["text"] == "before "
        assert answer["choices"][0]["finish_reason"] == "stop"
        async with asyncio.timeout(30):
            await gone.wait()
        await site.at_rest()
