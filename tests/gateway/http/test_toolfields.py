"""``tools`` and what belongs to them: what is taken, what is refused and with which ``param``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.http.schemas import ChatRequest, parse_chat


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode())


def refused(**fields: Any) -> str | None:
    with pytest.raises(ApiError) as error:
        chat(**fields)
    assert error.value.status == 400
    assert len(error.value.message) < 400
    return error.value.param


def grammar(**fields: Any) -> str:
    constraint = chat(**fields).constraint()
    assert constraint is not None
    assert constraint.param == "tools"
    return constraint.grammar


def test_choices() -> None:
    two = [tool("f"), tool("g", parameters={"type": "object", "properties": {"x": {"type": "integer"}}})]
    assert "TEXT" in grammar(tools=two)
    assert "TEXT" not in grammar(tools=two, tool_choice="required")
    named = grammar(tools=two, tool_choice={"type": "function", "function": {"name": "g"}})
    assert '\\"g\\"' in named
    assert '\\"f\\"' not in named
    assert "{0,15}" not in named
    assert "{0,15}" not in grammar(tools=two, parallel_tool_calls=False)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}}
    assert '"const":5' in grammar(tools=two, response_format=form)
    assert "TEXT" not in grammar(tools=two, response_format=form)


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_some_of_them_may_be_allowed() -> None:
    """The model sees all, and calls those: the grammar knows no others. An upstream is sent those alone."""
    three = [tool(name) for name in ("f", "g", "h")]
    text = grammar(tools=three, tool_choice=allowed("h", "f"))
    assert "TEXT" in text
    assert [f'\\"{name}\\"' in text for name in ("f", "g", "h")] == [True, False, True]
    assert "TEXT" not in grammar(tools=three, tool_choice=allowed("g", mode="required"))
    assert "{0,15}" in grammar(tools=three, tool_choice=allowed("g", mode="required"))
    box = chat(tools=three, tool_choice=allowed("h", "f", "f", mode="required")).toolbox
    assert box is not None
    assert [each.name for each in box.shown] == ["f", "g", "h"]
    assert [each["function"]["name"] for each in box.asked["tools"]] == ["f", "h"]
    assert box.asked["tool_choice"] == "required"


def test_none_and_no_tools_leave_the_text_alone() -> None:
    assert chat(tools=[tool()], tool_choice="none").constraint() is None
    for nothing in ({"tools": []}, {"tools": None, "tool_choice": "auto"}, {"tool_choice": "none"}):
        request = chat(**nothing)
        assert request.toolbox is None
        assert request == chat()


def test_features() -> None:
    assert chat(tools=[tool()]).features() == {"tools"}
    assert chat(tools=[tool()], n=2).features() == {"tools", "n"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(""), tool("g")]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool(description="d" * 70_000)]}, "tools"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed()}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed("f", "g")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed("f", mode="none")}, "tool_choice"),
        ({"tool_choice": allowed("f")}, "tool_choice"),
        (
            {
                "tools": [tool()],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}},
            },
            "tool_choice",
        ),
        ({"tools": [tool()], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
        ({"tools": [tool()], "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool()], "min_tokens": 2}, "min_tokens"),
        ({"tools": [tool()], "use_beam_search": True}, "tools"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields) == param


def call(name: str = "f", arguments: Any = "{}", **fields: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def test_calls_and_results_in_messages() -> None:
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call(arguments='{"a": 1}')]},
        {"role": "tool", "tool_call_id": "c", "content": "result"},
    ]
    request = chat(messages=messages)
    assert request.messages[1].tool_calls[0].arguments == '{"a": 1}'
    assert request.messages[2].tool_call_id == "c"
    assert request.constraint() is None


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"role": "assistant", "tool_calls": [call(arguments="{")]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call(arguments="[1]")]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call(arguments={"a": 1})]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call(arguments='{"a": 1e999}')]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [call(name="</tool_call>")]}, "tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [call(type="custom")]}, "tool_calls[0].type"),
        ({"role": "user", "content": "x", "tool_calls": [call()]}, "tool_calls"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "function_call"),
        ({"role": "tool", "tool_call_id": "c"}, "content"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_a_wrong_call_in_a_message_is_named(message: dict[str, Any], where: str) -> None:
    assert refused(messages=[{"role": "user", "content": "x"}, message]) == f"messages[1].{where}"
