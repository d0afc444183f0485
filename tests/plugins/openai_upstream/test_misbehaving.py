"""Servers that say less, more or other than the API promises: what their callers hear, and who is to blame.

What is a caller's mistake is told with its field and never counts against the server (gateway E3); what is the server's
is 502 or an error inside the stream, and no request hangs on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from typing import Any

import pytest

from tests.gateway.harness import MODEL, Settlements, Site, events, token
from tests.plugins.openai_upstream.conftest import Front, upstream
from tests.plugins.openai_upstream.scripted import Exchange, event, piece, scripted, stream, usage

from forebay_openai_upstream import call  # isort: skip


async def post(site: Site, path: str, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {token('alpha')}"}
    return await site.http.post(path, json={"model": MODEL, **body}, headers=headers)


async def chat(site: Site, **body: Any) -> Any:
    return await post(site, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=8, **body)


def breaker(site: Site) -> Any:
    return site.dispatcher.workers[0].breaker


# -- refusals ----------------------------------------------------------------------------------------------------------

LONG = "context_length_exceeded"
TOO_LONG: list[tuple[int, Any]] = [
    (400, {"error": {"message": "This model's maximum context length is 16 tokens. However, …", "code": 400}}),
    (400, {"error": {"message": "The decoder prompt (length 70) is longer than the maximum model length of 64."}}),
    (400, {"object": "error", "message": "The input (61709 tokens) is longer than the model's context length (4).",
           "type": "BadRequestError", "param": None, "code": 400}),
    (422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 1 and 9",
           "error_type": "validation"}),
    (422, {"error": "`inputs` must have less than 1024 tokens. Given: 1872", "error_type": "validation"}),
    (400, {"error": {"code": 400, "message": "x", "type": "exceed_context_size_error", "n_ctx": 9}}),
    (500, {"error": {"code": 500, "message": "Context size has been exceeded.", "type": "server_error"}}),
]  # fmt: skip
"""As vLLM, SGLang, TGI and llama-server say it."""


@pytest.mark.parametrize("in_band", [False, True], ids=["status", "in band"])
async def test_what_is_too_long_is_told_as_that_however_it_is_worded(front: Front, in_band: bool) -> None:
    """The caller's own field is named, the next pool that holds more is asked, and the server is not to blame."""

    async def script(exchange: Exchange) -> None:
        status, said = TOO_LONG[exchange.body["prompt"][0]]
        if in_band:
            said = said if "error" in said or "object" in said else {"error": said}
            await exchange.whole(event(said) + event("[DONE]"))
        else:
            await exchange.whole(json.dumps(said).encode(), status)

    async def larger(exchange: Exchange) -> None:
        await exchange.whole(stream("fits"))

    async with scripted(script) as server, front(server.url) as site:
        for number in range(len(TOO_LONG)):
            answer = await site.complete(prompt=[number])
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, LONG), number
            assert answer.json()["error"]["param"] == "prompt"
        assert breaker(site).faults == 0
        assert len(server.requests) == len(TOO_LONG)
    async with scripted(script) as server, scripted(larger) as other:
        pools = [upstream(server.url), {**upstream(other.url, "large", max_context=65536), "fallback": ["context"]}]
        async with front(pools=pools) as site:
            assert (await site.complete(prompt=[0])).json()["choices"][0]["text"] == "fits"
            await site.at_rest()


IN_BAND: list[tuple[Any, int, str]] = [
    ({"error": {"message": "secret 10.0.0.7", "type": "BadRequestError", "code": 400}}, 400, "invalid_request"),
    ({"object": "error", "message": "secret 10.0.0.7", "type": "BadRequestError", "code": 400}, 400, "invalid_request"),
    ({"error": {"message": "x", "type": "invalid_request_error", "code": None}}, 400, "invalid_request"),
    ({"error": {"message": "x", "code": "429"}}, 429, "upstream_throttled"),
    ({"error": {"message": "x", "code": "rate_limit_exceeded"}}, 429, "upstream_throttled"),
    ({"error": "Model is overloaded", "error_type": "overloaded"}, 503, "upstream_unavailable"),
    ({"error": {"message": "x", "code": 500}}, 502, "upstream_failed"),
    ({"error": {"message": "x", "type": "server_error"}}, 502, "upstream_failed"),
    ({"error": "generation failed", "error_type": "generation"}, 502, "upstream_failed"),
]


@pytest.mark.parametrize("whole", [False, True], ids=["event", "body"])
async def test_an_error_instead_of_the_first_output_means_what_its_status_would(front: Front, whole: bool) -> None:
    """gateway C11, E3: it has sent 200 already; our caller still gets the status, and blame goes where it is due."""

    async def script(exchange: Exchange) -> None:
        said = IN_BAND[exchange.body["prompt"][0]][0]
        await exchange.whole(json.dumps(said).encode() if whole else event(said))

    async with scripted(script) as server, front(server.url) as site:
        for number, (_, status, code) in enumerate(IN_BAND):
            answer = await site.complete(prompt=[number], stream=True)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), number
            assert "10.0.0.7" not in answer.text
            assert (breaker(site).faults > 0) == (status in (502, 503)), number
            breaker(site).success()
        await site.at_rest()


async def test_an_error_after_some_output_is_a_failure_whatever_it_calls_itself(front: Front) -> None:
    """Old servers give everything that goes wrong on the way the code 400; a stream that began is not to be blamed on
    its caller."""

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event(piece("half"))
        await asyncio.sleep(0.05)
        await exchange.event({"error": {"message": "engine dead", "code": 400}})
        exchange.close()

    async with scripted(script) as server, front(server.url) as site:
        said = events((await site.complete(stream=True)).text)
        assert said[-1]["error"]["code"] == "upstream_failed"


@pytest.mark.parametrize(
    ("named", "param"),
    [
        ("temperature", "temperature"),
        ("messages[0].content", "input"),
        ("max_tokens", "max_output_tokens"),
        ("response_format", "text.format.schema"),
        ("secret_internal_field", None),
        (7, None),
        (None, None),
    ],
)
async def test_the_field_that_a_server_complains_of_is_told_under_the_callers_name(
    front: Front, named: Any, param: str | None
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.whole(json.dumps({"error": {"message": "10.0.0.7", "param": named, "code": 400}}).encode(), 400)

    shape = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    async with scripted(script) as server, front(server.url) as site:
        answer = await post(site, "/v1/responses", input="hi", max_output_tokens=5, temperature=0.5, text=shape)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert "10.0.0.7" not in answer.text
        assert param is None or param in answer.json()["error"]["message"]


async def test_a_server_that_does_not_know_n_is_told_as_such(front: Front) -> None:
    async def script(exchange: Exchange) -> None:
        assert exchange.body["n"] == 2
        await exchange.whole(stream("one"))

    async with scripted(script) as server, front(server.url) as site:
        for asked, param in (({"n": 2}, "n"), ({"best_of": 2}, "best_of")):
            answer = await site.complete(**asked)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert breaker(site).faults == 0
        assert len(server.requests) == 2, "it is no use to ask again"


async def test_ids_without_a_tokenizer_are_not_echoed_as_nothing(front: Front) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.whole(stream(" there"))

    async with scripted(script) as server, front(server.url) as site:
        answer = await site.complete(prompt=[5, 6], echo=True)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")
        assert (await site.complete(prompt="hello", echo=True)).json()["choices"][0]["text"] == "hello there"


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_an_answer_that_a_filter_cut_is_one_and_nobodys_fault(front: Front) -> None:
    """As the API words it, whole and streamed, in every format; it is charged, not repeated, and opens no breaker."""

    async def script(exchange: Exchange) -> None:
        if exchange.path.endswith("/chat/completions"):
            said = {"choices": [{"index": 0, "delta": {"content": "I"}, "finish_reason": "content_filter"}]}
            await exchange.whole(event(said) + event(usage(3, 1)) + event("[DONE]"))
        else:
            await exchange.whole(stream("I", finish="content_filter", figures=usage(3, 1)))

    async with scripted(script) as server, front(server.url) as site:
        settled = Settlements(site)
        for streamed in (False, True):
            answer = await chat(site, stream=streamed)
            choices = events(answer.text)[-2]["choices"] if streamed else answer.json()["choices"]
            assert choices[0]["finish_reason"] == "content_filter"
            assert not streamed or events(answer.text)[-1] == "[DONE]"
            answer = await site.complete(stream=streamed)
            choices = events(answer.text)[-2]["choices"] if streamed else answer.json()["choices"]
            assert choices[0]["finish_reason"] == "content_filter"
            answer = await post(site, "/v1/responses", input="hi", stream=streamed)
            told = events(answer.text)[-1]["response"] if streamed else answer.json()
            assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
            assert told["output"][0]["status"] == "incomplete"
        assert len(server.requests) == 6
        assert breaker(site).faults == 0
        assert {used.output for used in settled.usages} == {1}
        settled.close()
        await site.at_rest()


async def test_comments_keep_no_request_alive(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the ends the figures are waited for once, between pieces for a piece; comments are neither."""
    monkeypatch.setattr(call, "FAREWELL_S", 0.3)

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event(piece("a"))
        if exchange.body["prompt"] == [1]:
            await exchange.event(piece(finish="stop"))
        with contextlib.suppress(ConnectionError):
            while True:
                await exchange.send(b": still here\n\n")
                await asyncio.sleep(0.02)

    async with scripted(script) as server, front(server.url, between_chunks_s=0.3) as site:
        async with asyncio.timeout(30):
            ended = await site.complete(prompt=[1])
            assert ended.json()["choices"][0]["text"] == "a"
            stalled = await site.complete(prompt=[2], stream=True)
            assert events(stalled.text)[-1]["error"]["code"] == "upstream_timeout"
        await site.at_rest()


async def test_a_choice_that_is_over_here_holds_up_no_other(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that ignores ``stop`` goes on with one choice while the other has ended: nobody waits for it."""
    monkeypatch.setattr(call, "FAREWELL_S", 0.3)
    gone = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event(piece("one"))
        await exchange.event(piece("two", "length", index=1))
        await exchange.event(piece("END"))
        with contextlib.suppress(ConnectionError):
            while True:
                await exchange.event(piece("more"))
                await asyncio.sleep(0.02)
        gone.set()

    async with scripted(script) as server, front(server.url) as site:
        async with asyncio.timeout(30):
            choices = (await site.complete(n=2, stop="END", max_tokens=2000)).json()["choices"]
            await gone.wait()
        assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("one", "stop"), ("two", "length")]
        await site.at_rest()


async def test_a_server_that_does_not_stop_fills_no_memory(front: Front) -> None:
    """``max_tokens`` is a promise to its caller, too: an answer without end is a failure before it is a megabyte."""
    sent = 0

    async def script(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.head()
        with contextlib.suppress(ConnectionError):
            while sent < 2**26:
                await exchange.event(piece("x" * 1000))
                sent += 1000

    async with scripted(script) as server, front(server.url) as site:
        answer = await site.complete(max_tokens=8)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")
        assert sent < 2**25
        await site.at_rest()


# -- forms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_in_one_piece_is_taken_as_it_is(front: Front, counted: bool, streamed: bool) -> None:
    """A server that does not stream, whatever it was asked: its answer is read, calls and all, and counted."""

    async def script(exchange: Exchange) -> None:
        calls = [
            {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": f'{{"a": {number}}}'}}
            for number in (1, 2)
        ]
        message = {"role": "assistant", "content": "Let me see.", "tool_calls": calls}
        body = {"object": "chat.completion", "choices": [{"message": message, "finish_reason": "tool_calls"}]}
        figures = {"usage": {"prompt_tokens": 9, "completion_tokens": 6, "prompt_tokens_details": None}}
        raw = json.dumps({**body, **(figures if counted else {})}).encode()
        await exchange.whole(b"\n \n" + raw)  # what some send while they compute

    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    async with scripted(script) as server, front(server.url) as site:
        settled = Settlements(site)
        answer = await chat(site, tools=tools, stream=streamed)
        if streamed:
            said = events(answer.text)
            assert said[-1] == "[DONE]"
            deltas = [chunk["choices"][0]["delta"] for chunk in said[:-1]]
            named = [one["function"]["name"] for delta in deltas for one in delta.get("tool_calls", ()) if "id" in one]
            assert named == ["look", "look"]
        else:
            message = answer.json()["choices"][0]["message"]
            assert message["content"] == "Let me see."
            assert [one["function"]["arguments"] for one in message["tool_calls"]] == ['{"a": 1}', '{"a": 2}']
        [paid] = settled.usages
        assert paid.output == (6 if counted else 8), "where nobody counts, four bytes are a token, up to max_tokens"
        settled.close()


async def test_calls_that_all_have_the_same_number_are_told_apart(front: Front) -> None:
    """Some number each call as the first; their ids and names say that they are several."""

    async def script(exchange: Exchange) -> None:
        await exchange.head()
        for number, place in (("a", "Rome"), ("b", "Oslo")):
            function = {"name": "weather", "arguments": '{"city": '}
            delta: dict[str, Any] = {"tool_calls": [{"index": 0, "id": number, "function": function}]}
            await exchange.event({"choices": [{"index": 0, "delta": delta}]})
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": f'"{place}"}}'}}]}
            await exchange.event({"choices": [{"index": 0, "delta": delta}]})
        await exchange.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        exchange.close()

    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    async with scripted(script) as server, front(server.url) as site:
        message = (await chat(site, tools=tools)).json()["choices"][0]["message"]
        assert [one["function"]["arguments"] for one in message["tool_calls"]] == [
            '{"city": "Rome"}',
            '{"city": "Oslo"}',
        ]


ODD: list[tuple[str, bytes]] = [
    ("a byte order mark", b"\xef\xbb\xbf" + stream("fine")),
    ("no label", stream("fine")),
    ("figures that are none", stream("fine", figures={"choices": [], "usage": {"prompt_tokens": "many"}})),
    ("figures in halves", stream("fine", figures={"choices": None, "usage": {"prompt_tokens": 1.5}})),
    ("TGI's word for stop", stream("fine", finish="eos_token")),
    ("no end of the last line", stream("fine").removesuffix(b"\n\n")),
    ("thinking", event({"choices": [{"index": 0, "text": "", "reasoning": "hm"}]}) + stream("fine")),
]


@pytest.mark.parametrize(("what", "body"), ODD, ids=[what for what, _ in ODD])
async def test_what_is_odd_and_harmless_is_read(front: Front, what: str, body: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 200 OK\r\n")
        if what != "no label":
            await exchange.send(b"content-type: text/plain\r\n")
        await exchange.send(b"content-length: %d\r\n\r\n" % len(body) + body)

    async with scripted(script) as server, front(server.url) as site:
        answer = await site.complete()
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "fine"
        assert answer.json()["choices"][0]["finish_reason"] == "stop"


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
BROKEN: list[tuple[str, bytes, int]] = [
    ("compressed", b"HTTP/1.1 200 OK\r\ncontent-encoding: deflate\r\nconnection: close\r\n\r\n"
     + zlib.compress(stream("x")), 502),
    ("chunks of no size", CHUNKED + b"zz\r\nhello\r\n", 502),
    ("a chunk that breaks off", CHUNKED + b"ff\r\ndata: {", 502),
    ("less than was promised", b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\ndata: {", 502),
    ("no HTTP", b"SSH-2.0-OpenSSH_9.6\r\n", 502),
    ("half a head", b"HTTP/1.1 200 OK\r\ncontent-ty", 502),
    ("a head without end", b"HTTP/1.1 200 OK\r\n" + b"x-a: b\r\n" * 20_000, 502),
    ("a line without end", b"HTTP/1.1 200 OK\r\nx-a: " + b"b" * 200_000, 502),
    ("a redirect", b"HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n", 502),
    ("no content", b"HTTP/1.1 204 X\r\n\r\n", 502),
    ("another protocol", b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", 502),
    ("a page", b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 13\r\n\r\n<html></html>", 502),
    ("nothing", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 502),
    ("a number", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n42", 502),
    ("an empty object", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", 502),
]  # fmt: skip


async def test_whatever_breaks_is_the_servers_failure_and_no_internal_one(front: Front) -> None:
    """Down to the bytes: 502, never 500, and the request is over."""

    async def script(exchange: Exchange) -> None:
        with contextlib.suppress(ConnectionError):
            await exchange.send(BROKEN[exchange.body["prompt"][0]][1])
            await asyncio.sleep(0.05)
        exchange.close()

    async with scripted(script) as server, front(server.url) as site:
        for number, (what, _, status) in enumerate(BROKEN):
            async with asyncio.timeout(30):
                answer = await site.complete(prompt=[number])
            breaker(site).success()
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, "upstream_failed"), what
        await site.at_rest()


async def test_heads_that_never_come_are_waited_for_once(front: Front) -> None:
    """Interim answers (1xx) without end, and half a head: the time to the first token runs all the while."""

    async def script(exchange: Exchange) -> None:
        with contextlib.suppress(ConnectionError):
            if exchange.body["prompt"] == [1]:
                await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-ty")
                await exchange.gone()
            while True:
                await exchange.send(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n")
                await asyncio.sleep(0.02)

    async with scripted(script) as server, front(server.url, first_token_s=0.4) as site:
        for number in (1, 2):
            async with asyncio.timeout(30):
                answer = await site.complete(prompt=[number])
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
        await site.at_rest()
