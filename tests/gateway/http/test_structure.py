"""``response_format``: what is taken, what is refused and with which ``param``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.grammars import ANY_OBJECT, json_text
from gateway.http.schemas import ChatRequest, parse_chat, parse_completion

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, "required": ["b", "a"]}


def chat(form: Any, **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": form, **fields}
    return parse_chat(json.dumps(body).encode())


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **fields}}


@pytest.mark.parametrize("form", [None, {}, {"type": "text"}])
def test_plain_text(form: Any) -> None:
    request = chat(form)
    assert request.constraint() is None
    assert request.features() == frozenset()


def test_any_object() -> None:
    constraint = chat({"type": "json_object"}).constraint()
    assert constraint is not None
    assert (constraint.grammar, constraint.param) == (json_text(ANY_OBJECT), "response_format")


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_enforced_strict_or_not_and_keeps_its_order(strict: bool | None) -> None:
    request = chat(named(strict=strict, description="d"))
    constraint = request.constraint()
    assert constraint is not None
    assert constraint.param == "response_format.json_schema.schema"
    assert constraint.grammar == json_text(SCHEMA)
    assert constraint.grammar.index('"b"') < constraint.grammar.index('"a"')
    assert request.features() == {"json_schema"}


def test_a_schema_may_be_left_out() -> None:
    constraint = chat(named(schema=None)).constraint()
    assert constraint is not None
    assert constraint.grammar == json_text(ANY_OBJECT)


def test_completions_take_it_too() -> None:
    body = {"model": "m", "prompt": "x", "response_format": {"type": "json_object"}}
    assert parse_completion(json.dumps(body).encode()).constraint() is not None


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"json_object": False}, "response_format"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": 5}, "response_format.type"),
        ("json_object", "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "a b"}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "n" * 65}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": []}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": "{}"}}, "response_format.json_schema.schema"),
        (named(schema={"enum": ["x" * 66_000]}), "response_format.json_schema.schema"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_format_names_its_part(form: Any, param: str) -> None:
    """security 39: ``{"json_object": false}`` among them."""
    with pytest.raises(ApiError) as error:
        chat(form)
    assert (error.value.status, error.value.param) == (400, param)
    assert len(error.value.message) < 400


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_nothing_else_may_decide_where_the_text_ends(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as error:
        chat({"type": "json_object"}, **fields)
    assert error.value.param == next(iter(fields))
    assert chat({"type": "json_object"}, ignore_eos=False, min_tokens=0).constraint() is not None


def test_features_of_a_plain_request() -> None:
    assert chat(None, n=2, logprobs=True).features() == {"n", "logprobs"}
