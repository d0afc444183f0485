"""``/v1/responses``: what goes in, and that what comes out is exactly what the official client's types say."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import TypeAdapter

from gateway.callforms import TAGGED, Calls
from gateway.choices import ChoiceDelta, ScoredToken
from gateway.errors import ApiError, shed
from gateway.http.common import FIELDS as COMMON
from gateway.http.openai import collect
from gateway.http.response_output import Output
from gateway.http.responses import FIELDS, UNSUPPORTED, ResponsesFormat, parse_responses
from gateway.http.schemas import Message, parse_chat
from gateway.toolbox import ARGUMENTS, CLOSE, NAME, OPEN, Toolbox, ToolCall
from policies.types import Usage
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, events, token
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {"tenants": [{"id": "alpha"}, {"id": "small", "limits": {"max_output_tokens": 4}}]}
EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)
TEXT = {"model": MODEL, "input": "hello"}
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}


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
    plain = parsed(text={"format": {"type": "json_object"}, "verbosity": "medium"})
    assert plain.response_format is not None


async def test_calls_and_their_results_become_a_chats() -> None:
    second = {**CALL, "call_id": "c2", "arguments": "{}"}
    other = {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]}
    said = {"role": "assistant", "content": "let me see"}
    request = parsed(input=[{"role": "user", "content": "1+1"}, said, CALL, second, RESULT, other], tools=[TOOL])
    first, again = ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "add", "{}")
    assert request.messages == (
        Message("user", "1+1"),
        Message("assistant", "let me see", (first, again)),
        Message("tool", "2", tool_call_id="c1"),
        Message("tool", "3", tool_call_id="c2"),
    )
    assert parsed(input=[CALL, RESULT]).messages[0] == Message("assistant", "", (first,))
    assert request.features() == {"tools"}


async def test_tools_are_a_chats_and_come_back_in_this_apis_form() -> None:
    named = {"type": "function", "name": "add"}
    request = parsed(tools=[TOOL], tool_choice=named, parallel_tool_calls=False)
    chat = {"type": "function", "function": {name: value for name, value in TOOL.items() if name != "type"}}
    assert (
        request.toolbox
        == parse_chat(
            json.dumps(
                {
                    "model": "m",
                    "messages": [{"role": "user", "content": "x"}],
                    "tools": [chat],
                    "tool_choice": {"type": "function", "function": {"name": "add"}},
                }
            ).encode()
        ).toolbox
    )
    answer = ResponsesFormat(job_id="1", model="m", created=1, request=request)._response("in_progress", [])
    assert answer["tools"] == [{**TOOL, "strict": True}]
    assert (answer["tool_choice"], answer["parallel_tool_calls"]) == (named, False)
    assert parsed(tools=[TOOL], tool_choice="none").constraint() is None


async def test_some_tools_may_be_allowed() -> None:
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    request = parsed(tools=[TOOL, {**TOOL, "name": "sub"}], tool_choice=some)
    assert request.toolbox is not None
    assert [tool.name for tool in request.toolbox.callable] == ["add"]
    answer = ResponsesFormat(job_id="1", model="m", created=1, request=request)._response("in_progress", [])
    assert answer["tool_choice"] == some
    Response.model_validate(answer, strict=True)


async def test_an_answer_s_own_fields_can_be_sent_back() -> None:
    """What a response says of reasoning asks for nothing; clients copy it into the next request."""
    answer = ResponsesFormat(job_id="1", model="m", created=1, request=parsed())._response("in_progress", [])
    same = ("reasoning", "text", "tools", "tool_choice", "store", "truncation", "parallel_tool_calls", "background")
    assert parsed(**{name: answer[name] for name in same}) == parsed()


ANSWERS = {
    "calls": ("stop", 'Sure. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'),
    "two calls": (
        "stop",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "add", '
        '"arguments": {"a": "}\\n"}}\n</tool_call>',
    ),
    "cut call": ("length", 'A <tool_call>\n{"name": "add", "arguments": {"a": 1'),
    "cut name": ("length", 'A <tool_call>\n{"name": "ad'),
    "filtered": ("content_filter", 'A <tool_call>\n{"name": "add", "arguments": {"a": 1'),
    "text": ("stop", "1 < 2, and that is <tool"),
    "nothing": ("stop", ""),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("step", [1, 3, 7, 1000])
async def test_items_are_the_same_streamed_and_whole(name: str, step: int) -> None:
    """The stream's events build what the whole answer holds, log probabilities included."""
    finish, text = ANSWERS[name]
    request = parsed(tools=[TOOL], top_logprobs=1)
    cuts = [text[at : at + step] for at in range(0, len(text), step)]
    scored = [ScoredToken(cut.encode(), -1.0, offset=at * step) for at, cut in enumerate(cuts)]
    deltas = [ChoiceDelta(0, cut, scored=(score,)) for cut, score in zip(cuts, scored, strict=True)]
    last = ChoiceDelta(0, finish=finish)  # type: ignore[arg-type]
    whole = ResponsesFormat(job_id="1", model="m", created=1, request=request).full(
        collect([*deltas, last], 1), Usage(3, 0, 5)
    )
    Response.model_validate(whole, strict=True)
    streaming = ResponsesFormat(job_id="1", model="m", created=1, request=request)
    said = events((streaming.stream([*deltas, last]) + streaming.closing(Usage(3, 0, 5))).decode())
    for event in said:
        EVENT.validate_python(event, strict=True)
    assert said[-1]["response"]["output"] == whole["output"]
    assert said[-1]["type"] == f"response.{whole['status']}" == f"response.{ENDS[finish]}"
    built: dict[int, str] = {}
    for event in said:
        if event["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
            built[event["output_index"]] = built.get(event["output_index"], "") + event["delta"]
    kinds = [item["type"] for item in whole["output"]]
    for index, item in enumerate(whole["output"]):
        expected = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert built.get(index, "") == expected
        if item["type"] == "message":
            told = item["content"][0]["logprobs"]
            assert [score["token"] for score in told] == [
                cut for at, cut in enumerate(cuts) if at * step < len(expected)
            ]
    assert kinds == {"calls": ["message", "function_call"], "two calls": ["function_call"] * 2}.get(name, kinds)
    assert [item["status"] for item in whole["output"]] == {
        "calls": ["completed"] * 2,
        "two calls": ["completed"] * 2,
        "cut call": ["completed", "incomplete"],
        "filtered": ["completed", "incomplete"],
        "cut name": ["incomplete"],
    }.get(name, ["completed"])


ENDS = {"stop": "completed", "length": "incomplete", "content_filter": "incomplete"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{**TOOL, "name": f"f{i}"} for i in range(129)]}, "tools"),
        ({"tools": [{**TOOL, "description": "d" * 70_000}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "ignore_eos": True}, "ignore_eos"),
        ({"tools": [TOOL], "max_tool_calls": 2}, "max_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"reasoning": {"effort": None, "summary": "auto"}}, "reasoning"),
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
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c1"}]}, "input[1].output"),
        ({"input": [CALL, CALL]}, "input[1].call_id"),
        ({"input": [{**CALL, "arguments": "no object"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "arguments": "[1]"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "name": "no name"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [CALL, {**RESULT, "output": [{"type": "input_image"}]}]}, "input[1].output[0].type"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
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


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_text_behind_a_call_is_a_message_of_its_own(step: int) -> None:
    """No grammar of ours lets it pass, but an upstream may write anything."""
    call = f"{OPEN}{NAME}f{ARGUMENTS}{{}}{CLOSE}"
    text, output = f"hi{call}later{call}", Output("1", Calls(Toolbox(()), lambda: TAGGED))
    for begin in range(0, len(text), step):
        list(output.take(ChoiceDelta(0, text[begin : begin + step])))
    list(output.take(ChoiceDelta(0, finish="stop")))
    items = output.items()
    assert [item["type"] for item in items] == ["message", "function_call", "message", "function_call"]
    assert [item["content"][0]["text"] for item in items[::2]] == ["hi", "later"]
    assert len({item["id"] for item in items}) == 4
    assert {item["status"] for item in items} == {"completed"}
