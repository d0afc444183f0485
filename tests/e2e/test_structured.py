"""Structured output of the real model through the official client."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.harness import MODEL, Server


class Person(BaseModel):
    name: str
    age: int
    colour: Literal["red", "green"]


ASK: list[Any] = [{"role": "user", "content": "Describe a person as JSON with name, age and colour."}]


def test_the_clients_parse_gives_an_object(server: Server) -> None:
    answer = server.client().chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=150, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert person.name


def test_streamed_and_whole_are_the_same_json_and_choices_differ(server: Server) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {
            "name": "cities",
            "schema": {
                "type": "array",
                "items": {"type": "string", "maxLength": 12},
                "minItems": 2,
                "maxItems": 2,
            },
        },
    }
    arguments: Any = {"model": MODEL, "messages": ASK, "response_format": form, "max_tokens": 60, "seed": 5, "n": 3}
    client = server.client()
    whole = client.chat.completions.create(**arguments)
    values = [json.loads(choice.message.content or "") for choice in whole.choices]
    assert all(len(value) == 2 for value in values)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [json.loads(text) for text in texts] == values


def test_bad_schemas_are_400_each_after_a_good_one(server: Server) -> None:
    """security 39, engine F1: the worker goes on as if nothing had been."""
    client = server.client()
    pid = server.workers()[0].pid
    for schema in ({"type": "nope"}, {"pattern": "(?<=x)y", "type": "string"}, {"not": {}}, {"$ref": "#/missing"}):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(
                model=MODEL,
                messages=ASK,
                response_format={"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}},  # type: ignore[arg-type]
            )
        assert error.value.param == "response_format.json_schema.schema"
        good = client.chat.completions.create(
            model=MODEL, messages=ASK, response_format={"type": "json_object"}, max_tokens=4
        )
        assert (good.choices[0].message.content or "").startswith("{")
    assert server.workers()[0].pid == pid


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
OTHER: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


def test_tool_calls_there_and_back(server: Server) -> None:
    """The call is valid, streamed and whole are the same, and its result is taken in."""
    client = server.client()
    arguments: Any = {
        "model": MODEL,
        "messages": QUESTION,
        "tools": [WEATHER, OTHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0,
        "max_tokens": 120,
    }
    answer = client.chat.completions.create(**arguments)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}

    with client.chat.completions.stream(**arguments) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert len(names) > 1
    assert set(names) == {"get_weather"}
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == call.function.arguments

    talk = [
        *QUESTION,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Rain, 4 degrees."},
    ]
    after = client.chat.completions.create(
        model=MODEL, messages=talk, tools=[WEATHER], tool_choice="none", max_tokens=8
    )
    assert after.choices[0].message.tool_calls is None
    assert after.choices[0].message.content


def test_tools_auto_required_and_parallel(server: Server) -> None:
    client = server.client()
    arguments: Any = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER, OTHER], "max_tokens": 100, "seed": 2}
    required = client.chat.completions.create(**arguments, tool_choice="required", n=3)
    for choice in required.choices:
        calls = choice.message.tool_calls or []
        assert calls
        if choice.finish_reason == "tool_calls":
            assert all(isinstance(json.loads(call.function.arguments), dict) for call in calls)  # type: ignore[union-attr]
    single = client.chat.completions.create(**arguments, tool_choice="required", parallel_tool_calls=False)
    assert len(single.choices[0].message.tool_calls or []) == 1
    auto = client.chat.completions.create(**arguments, n=2)
    for choice in auto.choices:
        assert choice.message.content or choice.message.tool_calls


def test_only_what_is_allowed_is_called(server: Server) -> None:
    """``allowed_tools``, in both APIs' forms: the model sees all of them and calls those."""
    client = server.client()
    name = OTHER["function"]["name"]
    some: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        tools=[WEATHER, OTHER],
        tool_choice={"type": "allowed_tools", "allowed_tools": some},
        n=4,
        seed=3,
        max_tokens=100,
    )
    called = [call for choice in answer.choices for call in choice.message.tool_calls or []]
    assert called
    assert {call.function.name for call in called} == {name}  # type: ignore[union-attr]
    flat = client.responses.create(
        model=MODEL,
        input=QUESTION,
        tools=[FLAT, {"type": "function", **OTHER["function"]}],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": name}]},
        max_output_tokens=100,
    )
    assert {item.name for item in flat.output if item.type == "function_call"} == {name}


def test_a_tool_whose_schema_does_not_compile_is_named(server: Server) -> None:
    broken: Any = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}}
    with pytest.raises(openai.BadRequestError) as error:
        server.client().chat.completions.create(model=MODEL, messages=QUESTION, tools=[broken])
    assert error.value.param == "tools"


FLAT: Any = {"type": "function", **WEATHER["function"]}


class Lookup(BaseModel):
    city: str


def test_responses_call_functions_there_and_back(server: Server) -> None:
    client = server.client()
    arguments: Any = {
        "model": MODEL,
        "input": QUESTION,
        "tools": [FLAT, {"type": "function", "name": "get_time", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "get_weather"},
        "temperature": 0,
        "max_output_tokens": 120,
    }
    answer = client.responses.create(**arguments)
    [call] = answer.output
    assert call.type == "function_call"
    assert (answer.status, call.status, call.name) == ("completed", "completed", "get_weather")
    assert set(json.loads(call.arguments)) == {"city", "unit"}

    with client.responses.stream(**arguments) as stream:
        said = list(stream)
        final = stream.get_final_response()
    pieces = [event for event in said if event.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 1
    assert pieces[-1].snapshot == call.arguments
    [streamed] = final.output
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)

    talk: Any = [*QUESTION, call.model_dump(exclude_none=True)]
    talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain, 4 degrees."})
    after = client.responses.create(model=MODEL, input=talk, tools=[FLAT], tool_choice="none", max_output_tokens=8)
    assert after.output_text
    assert [item.type for item in after.output] == ["message"]


def test_responses_parse_a_function_and_name_a_broken_one(server: Server) -> None:
    client = server.client()
    parsed = client.responses.parse(
        model=MODEL,
        input=QUESTION,
        tools=[openai.pydantic_function_tool(Lookup)],  # type: ignore[list-item]  # as the client documents it
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=100,
        temperature=0,
    )
    [call] = parsed.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Lookup)
    assert call.status == "completed"
    broken: Any = {"type": "function", "name": "f", "parameters": {"properties": {"a": {"type": "x"}}}}
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model=MODEL, input=QUESTION, tools=[broken])
    assert error.value.param == "tools"
