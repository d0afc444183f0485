"""``/v1/responses``: what goes in, and that what comes out is exactly what the official client's types say."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import TypeAdapter

from gateway.errors import ApiError, shed
from gateway.http.common import FIELDS as COMMON
from gateway.http.responses import FIELDS, UNSUPPORTED, ResponsesFormat, parse_responses
from gateway.http.schemas import Message
from policies.types import Usage
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, events, token
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {"tenants": [{"id": "alpha"}, {"id": "small", "limits": {"max_output_tokens": 4}}]}
EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
TEXT = {"model": MODEL, "input": "hello"}


def parsed(**fields: Any) -> Any:
    return parse_responses(json.dumps({"model": "m", "input": "hello", **fields}).encode())


# -- what goes in ------------------------------------------------------------------------------------------------------


async def test_instructions_and_input_become_a_chat() -> None:
    items = [
        {"role": "user", "content": "a"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {"role": "developer", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
    ]
    request = parsed(input=items, instructions="be short", max_output_tokens=7, temperature=0.5)
    assert request.messages == (
        Message("system", "be short"),
        Message("user", "a"),
        Message("assistant", "b"),
        Message("developer", "c\nd"),
    )
    assert (request.max_tokens, request.max_tokens_param, request.params.temperature) == (7, "max_output_tokens", 0.5)
    assert parsed().messages == (Message("user", "hello"),)
    assert parsed(top_logprobs=3).params.logprobs == 3
    assert parsed(include=["message.output_text.logprobs"]).params.logprobs == 0
    assert parsed(include=["reasoning.encrypted_content"]).params.logprobs is None


async def test_a_format_is_a_chats_response_format() -> None:
    shape = {"type": "json_schema", "name": "pair", "schema": {"type": "object"}, "strict": True}
    request = parsed(text={"format": shape})
    constraint = request.constraint()
    assert constraint is not None
    assert constraint.param == "text.format.schema"
    assert '"type":"object"' in constraint.grammar
    answer = ResponsesFormat(job_id="1", model="m", created=1, request=request)._response("in_progress", [])
    assert answer["text"] == {"format": shape}
    assert "json_schema" in request.features()
    plain = parsed(text={"format": {"type": "json_object"}, "verbosity": "low"})
    assert plain.response_format is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "ignore_eos"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"model": ""}, "model"),
    ],
)
async def test_what_is_not_there_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


async def test_null_means_not_given_everywhere() -> None:
    assert parsed(**dict.fromkeys([*(FIELDS.keys() - {"model", "input"}), *UNSUPPORTED])) == parsed()
    assert COMMON.keys() <= FIELDS.keys()


# -- what comes out ----------------------------------------------------------------------------------------------------


async def test_the_official_client_creates(shared: Site) -> None:
    client = shared.client()
    answer = await client.responses.create(
        model=MODEL,
        instructions="be kind",
        input="hello",
        max_output_tokens=6,
        metadata={"a": "b"},
        user="u",
        extra_body={"ignore_eos": True},
    )
    assert (answer.status, answer.object, answer.model) == ("incomplete", "response", MODEL)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 6
    assert answer.usage.total_tokens == answer.usage.input_tokens + 6
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.output_text
    assert (answer.instructions, answer.metadata, answer.user) == ("be kind", {"a": "b"}, "u")
    again = await client.responses.create(
        model=MODEL, instructions="be kind", input="hello", max_output_tokens=6, extra_body={"ignore_eos": True}
    )
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens > 0
    assert again.output_text == answer.output_text


async def test_every_shape_is_what_the_clients_types_say(shared: Site) -> None:
    """Strictly: the client itself takes almost anything."""
    headers = {"authorization": f"Bearer {token('alpha')}"}
    body = {**TEXT, "max_output_tokens": 3, "top_logprobs": 1, "ignore_eos": True}
    whole = (await shared.http.post("/v1/responses", json=body, headers=headers)).json()
    Response.model_validate(whole, strict=True)
    streamed = (await shared.http.post("/v1/responses", json={**body, "stream": True}, headers=headers)).text
    said = events(streamed)
    for event in said:
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in said] == list(range(len(said)))
    assert [line for line in streamed.splitlines() if line.startswith("event: ")] == [
        f"event: {event['type']}" for event in said
    ]
    kinds = [event["type"] for event in said]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    final = said[-1]["response"]
    assert final["output"][0]["content"] == whole["output"][0]["content"]
    assert len(final["output"][0]["content"][0]["logprobs"]) == 3
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 3


async def test_the_official_client_streams(shared: Site) -> None:
    client = shared.client()
    stream = await client.responses.create(model=MODEL, input="ab", stream=True, max_output_tokens=30)
    said = [event async for event in stream]
    assert said[-1].type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in said if event.type == "response.output_text.delta")
    whole = await client.responses.create(model=MODEL, input="ab", max_output_tokens=30)
    assert text == whole.output_text
    async with client.responses.stream(model=MODEL, input="ab", max_output_tokens=30) as helper:
        async for _ in helper:
            pass
        if said[-1].type == "response.completed":
            assert (await helper.get_final_response()).output_text == text


async def test_limits_and_refusals_name_this_endpoints_fields(shared: Site) -> None:
    client = shared.client("small")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="hello", max_output_tokens=5)
    assert refused.value.param == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as long:
        await client.responses.create(model=MODEL, input="x" * 1_000_000)
    assert long.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="none", input="hello")


@pytest.mark.parametrize("began", [True, False])
async def test_a_stream_that_fails_says_so_in_a_way_that_clients_see(began: bool) -> None:
    answer = ResponsesFormat(job_id="1", model="m", created=1, request=parsed())
    opening = answer._opening() if began else b""
    said = events((opening + answer.failure(shed("full", "queue_full", 1.0), Usage(3, 0, 1))).decode())
    for event in said[:-1]:
        EVENT.validate_python(event, strict=True)
    assert [event["type"] for event in said] == ["response.created", "response.in_progress", "response.failed", "error"]
    assert said[2]["response"]["error"]["code"] == "rate_limit_exceeded"
    assert said[2]["response"]["usage"]["total_tokens"] == 4
    assert said[3]["error"]["code"] == said[3]["code"] == "queue_full"
    assert [event["sequence_number"] for event in said] == [0, 1, 2, 3]


async def test_the_official_client_raises_what_breaks_a_stream(start: Start) -> None:
    """gateway C5: a worker that dies after some output ends the stream with an error, never with a made-up end."""
    async with start(echo=Echo(step_s=0.02, die_after=12)) as site:
        stream = await site.client().responses.create(
            model=MODEL, input="hello", stream=True, max_output_tokens=100, extra_body={"ignore_eos": True}
        )
        said: list[str] = []

        async def read() -> None:
            async for event in stream:
                said.extend([event.type])

        with pytest.raises(openai.APIError):
            await read()
    assert "response.output_text.delta" in said
    assert said[-1] == "response.failed"
    assert not {"response.completed", "response.incomplete"} & set(said)
