"""Answers in the API's shape: parsed by the official client's own types, over a real server."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway.choices import Alternative, ChoiceDelta, ChoiceStream, ScoredToken
from gateway.errors import unavailable
from gateway.http import sse
from gateway.http.middleware import exception_handlers, guard
from gateway.http.openai import Answer, ChatFormat, CompletionFormat, Format, collect, fingerprint, usage_body
from gateway.http.schemas import ChatRequest, parse_chat, parse_completion
from policies.types import Usage
from tests.gateway.http.serving import serving
from tests.gateway.tiny_tokenizer import EOS, tiny_tokenizer
from workers.protocol import TokenLogprob

TOKENIZER = tiny_tokenizer()
TEXT = "the café 😀 of Paris"
USAGE = Usage(prompt=5, cached=16, output=9)


def scripted(request: Any) -> list[ChoiceDelta]:
    """What a worker that says TEXT would bring, token by token, all choices interleaved."""
    tokens = [*TOKENIZER.encode_text(TEXT), EOS]
    choices = [
        ChoiceStream(
            TOKENIZER.decoder(),
            index=index,
            stops=request.stop,
            token_bytes=TOKENIZER.token_bytes if request.params.logprobs is not None else None,
        )
        for index in range(request.n)
    ]
    top = [(EOS, -3.0), (7, -math.inf)][: request.params.logprobs or 0]
    deltas = []
    for position, token in enumerate(tokens):
        last = position == len(tokens) - 1
        scores = [TokenLogprob(token, -0.25, top)]
        deltas += [choice.feed([token], scores, "stop" if last else None) for choice in choices]
    return deltas


def form(request: Any, job_id: str = "j1") -> Format:
    kind = ChatFormat if isinstance(request, ChatRequest) else CompletionFormat
    return kind(
        job_id=job_id,
        model=request.model,
        created=1_700_000_000,
        revision="r1",
        logprobs=request.params.logprobs,
        include_usage=request.include_usage,
    )


async def answer(request: Request) -> Response:
    body = await request.body()
    parsed: Any = parse_chat(body) if "chat" in request.url.path else parse_completion(body)
    shape = form(parsed)
    deltas = scripted(parsed)
    if not parsed.stream:
        return Response(json.dumps(shape.full(collect(deltas, parsed.n), USAGE)), media_type="application/json")

    async def events() -> AsyncIterator[bytes]:
        for number, delta in enumerate(deltas):
            for chunk in shape.chunks(delta):
                yield sse.event(chunk)
            if parsed.user == "fail" and number == 3:
                yield sse.error_event(unavailable("The worker was lost.", "worker_lost"))
                return
        if parsed.include_usage:
            yield sse.event(shape.usage_chunk(USAGE))
        yield sse.DONE

    return StreamingResponse(events(), headers=sse.HEADERS)


def app() -> Any:
    routes = [Route(f"/v1/{path}", answer, methods=["POST"]) for path in ("chat/completions", "completions")]
    return guard(Starlette(routes=routes, exception_handlers=exception_handlers()), max_body_bytes=2**20)


@pytest.fixture
async def client() -> AsyncIterator[AsyncOpenAI]:
    async with (
        serving(app()) as port,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as made,
    ):
        yield made


HELLO: Any = [{"role": "user", "content": "hello"}]


async def test_a_chat_in_one_piece(client: AsyncOpenAI) -> None:
    got = await client.chat.completions.create(model="m", messages=HELLO, n=2, logprobs=True, top_logprobs=2)
    assert (got.id, got.object, got.model, got.created) == ("chatcmpl-j1", "chat.completion", "m", 1_700_000_000)
    assert got.system_fingerprint == fingerprint("r1")
    assert [choice.index for choice in got.choices] == [0, 1]
    for choice in got.choices:
        assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", TEXT, None)
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == TEXT
        assert [top.logprob for top in entries[0].top_logprobs] == [-3.0, -9999.0]
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (21, 9, 30)
    assert got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens == 16


async def test_a_streamed_chat(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="m", messages=HELLO, n=2, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert [choice.delta.role for choice in mine[1:]] == [None] * (len(mine) - 1)
        assert "".join(choice.delta.content or "" for choice in mine) == TEXT
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1].delta.content is None
        assert all(choice.logprobs is None for choice in mine)


async def test_usage_of_a_stream_comes_only_when_asked_for(client: AsyncOpenAI) -> None:
    """gateway C9: asked for, the last chunk has it and no choices."""
    stream = await client.chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 30
    assert all(chunk.usage is None and chunk.choices for chunk in chunks[:-1])


async def test_the_clients_stream_helper_puts_the_answer_together(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="m", messages=HELLO, logprobs=True, stop="Paris") as stream:
        done = await stream.get_final_completion()
    choice = done.choices[0]
    assert (choice.message.content, choice.finish_reason) == (TEXT.removesuffix("Paris"), "stop")
    assert choice.logprobs is not None
    scored = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content or []).decode()
    assert scored == TEXT.removesuffix("Paris")


async def test_a_completion_in_one_piece(client: AsyncOpenAI) -> None:
    got = await client.completions.create(model="m", prompt="x", logprobs=2, n=2)
    assert (got.id, got.object) == ("cmpl-j1", "text_completion")
    for choice in got.choices:
        assert (choice.text, choice.finish_reason) == (TEXT, "stop")
        scores = choice.logprobs
        assert scores is not None
        assert scores.tokens is not None
        assert scores.token_logprobs == [-0.25] * len(scores.tokens)
        assert scores.text_offset is not None
        assert scores.top_logprobs is not None
        for token, offset, top in zip(scores.tokens, scores.text_offset, scores.top_logprobs, strict=True):
            assert token.startswith("bytes:") or TEXT[offset:].startswith(token)
            assert top[token] == -0.25
            assert len(top) == 3


async def test_a_streamed_completion(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(model="m", prompt=[5, 6], stream=True, logprobs=0)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    offsets = [offset for c in chunks if (s := c.choices[0].logprobs) and s.text_offset for offset in s.text_offset]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


async def test_an_error_inside_a_stream_reaches_the_client_as_an_error(client: AsyncOpenAI) -> None:
    """gateway C5, C7: no fabricated finish reason, no [DONE]."""
    stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True, user="fail")
    seen: list[ChatCompletionChunk] = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(APIError, match="The worker was lost") as caught:
        await read()
    assert caught.value.code == "worker_lost"
    assert seen
    assert all(chunk.choices[0].finish_reason is None for chunk in seen)


async def test_a_refusal_reaches_the_client_with_its_param_and_request_id(client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=HELLO, functions=[{"name": "f"}])
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "functions",
        "unsupported_parameter",
        "invalid_request_error",
    )
    assert caught.value.request_id
    assert caught.value.request_id.startswith("req_")


async def test_the_synchronous_client(client: AsyncOpenAI) -> None:
    def calls() -> tuple[str | None, str]:
        with OpenAI(base_url=str(client.base_url), api_key="x", max_retries=0) as plain:
            whole = plain.chat.completions.create(model="m", messages=HELLO).choices[0].message.content
            stream = plain.completions.create(model="m", prompt="x", stream=True)
            return whole, "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(calls) == (TEXT, TEXT)


# -- shapes, strictly --------------------------------------------------------------------------------------------------


def strict(**fields: Any) -> Any:
    return parse_chat(json.dumps({"model": "m", "messages": HELLO, "stream": True} | fields).encode())


def test_every_chunk_validates_strictly_and_has_no_unknown_keys() -> None:
    for request in (strict(), strict(logprobs=True, top_logprobs=1, n=3, stream_options={"include_usage": True})):
        shape = form(request)
        chunks = [chunk for delta in scripted(request) for chunk in shape.chunks(delta)] + [shape.usage_chunk(USAGE)]
        for chunk in chunks:
            parsed = ChatCompletionChunk.model_validate(json.loads(json.dumps(chunk)))
            assert not parsed.model_extra
            for choice in parsed.choices:
                assert not choice.model_extra
                assert not choice.delta.model_extra


def test_whole_answers_have_no_unknown_keys() -> None:
    request = strict(logprobs=True)
    chat = ChatCompletion.model_validate(form(request).full(collect(scripted(request), 1), USAGE))
    plain = parse_completion(b'{"model": "m", "prompt": "x", "logprobs": 1}')
    completion = Completion.model_validate(form(plain).full(collect(scripted(plain), 1), USAGE))
    for parsed in (chat, completion, chat.choices[0], chat.choices[0].message, completion.choices[0], chat.usage):
        assert parsed is not None
        assert not parsed.model_extra


def test_a_delta_that_shows_nothing_makes_no_chunk() -> None:
    assert form(strict()).chunks(ChoiceDelta(0)) == []
    assert form(parse_completion(b'{"model": "m", "prompt": "x"}')).chunks(ChoiceDelta(0)) == []


@pytest.mark.parametrize("finish", ["error", "cancelled", None])
def test_what_did_not_end_well_is_no_answer(finish: Any) -> None:
    """gateway C5: never a made-up finish reason."""
    request = strict()
    shape = form(request)
    chunks = shape.chunks(ChoiceDelta(0, "text", finish=finish, error="internal"))
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    cut = Answer(0)
    cut.add(ChoiceDelta(0, "text", finish=finish))
    with pytest.raises(ValueError, match="which is no answer"):
        shape.full([cut], USAGE)


def test_an_empty_answer_is_an_answer() -> None:
    request = strict()
    chunks = form(request).chunks(ChoiceDelta(0, finish="length"))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "", "refusal": None},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e300])
def test_impossible_tokens_have_a_number_that_json_knows(value: float) -> None:
    """security 45: no NaN or infinity leaves the gateway."""
    delta = ChoiceDelta(0, "x", scored=(ScoredToken(b"x", value, (Alternative(b"y", value),)),))
    for request in (
        strict(logprobs=True, top_logprobs=1),
        parse_completion(b'{"model":"m","prompt":"x","logprobs":1}'),
    ):
        for chunk in form(request).chunks(delta):
            assert b"-9999.0" in sse.event(chunk) or "role" in str(chunk)
            json.loads(json.dumps(chunk, allow_nan=False))


def test_events_are_one_line_each() -> None:
    data = sse.event({"text": "a\nb\r\n\u2028\u0085"})
    assert data.startswith(b"data: {")
    assert data.endswith(b"\n\n")
    assert b"\n" not in data[:-2]
    assert b"\r" not in data
    assert json.loads(data[6:])["text"] == "a\nb\r\n\u2028\u0085"


def test_usage_counts_what_ran() -> None:
    assert usage_body(Usage(prompt=3, cached=4, output=5)) == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_the_fingerprint_follows_the_revision() -> None:
    assert fingerprint("a") == fingerprint("a") != fingerprint("b")


TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f"}}]}


def with_tools(**fields: Any) -> ChatFormat:
    """The format of a chat that may call ``f``."""
    body = {"model": "m", "messages": HELLO, **TOOLS, **fields}
    return ChatFormat(job_id="j", model="m", created=1, logprobs=0, request=parse_chat(json.dumps(body).encode()))


def test_calls_are_streamed_name_first_and_whole_at_once() -> None:
    text = 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    scored = ScoredToken(b"x", -0.5)
    deltas = [ChoiceDelta(0, character, scored=(scored,)) for character in text] + [ChoiceDelta(0, finish="stop")]
    form = with_tools()
    chunks = [chunk["choices"][0] for delta in deltas for chunk in form.chunks(delta)]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Wait."
    calls = [chunk["delta"]["tool_calls"][0] for chunk in chunks if "tool_calls" in chunk["delta"]]
    assert calls[0]["function"] == {"name": "f", "arguments": ""}
    assert calls[0]["id"].startswith("call_")
    assert all(set(call) == {"index", "function"} and call["index"] == 0 for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    assert sum(len((chunk["logprobs"] or {"content": []})["content"]) for chunk in chunks) == len(text)
    [whole] = with_tools().full(collect(deltas, 1), Usage())["choices"]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Wait."
    assert whole["message"]["tool_calls"] == [
        {"id": calls[0]["id"], "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        ("plain text", "stop", "stop"),
        ('<tool_call>\n{"name": "f", "arguments": {"a', "length", "length"),
        ('<tool_call>\n{"name": "f", "arguments": {"a', "stop", "stop"),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "length", "length"),
    ],
)
def test_only_complete_calls_are_a_reason(text: str, finish: Any, reason: str) -> None:
    deltas = [ChoiceDelta(0, text, finish=finish)]
    [whole] = with_tools().full(collect(deltas, 1), Usage())["choices"]
    form = with_tools()
    streamed = [chunk["choices"][0]["finish_reason"] for delta in deltas for chunk in form.chunks(delta)]
    assert whole["finish_reason"] == streamed[-1] == reason


def test_a_text_that_looks_like_a_call_is_text_where_none_is_allowed() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    [whole] = with_tools(tool_choice="none").full(collect([ChoiceDelta(0, text, finish="stop")], 1), Usage())["choices"]
    assert whole["message"]["content"] == text
    assert whole["finish_reason"] == "stop"
