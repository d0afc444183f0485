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
