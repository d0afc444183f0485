"""What goes into ``/v1/responses`` beside plain fields: the items of ``input``, and ``tools``. They become a chat's.

Rules
- Items are the messages of a conversation, the calls that the model made, and their results. A call belongs to the
  assistant's message before it, as in a chat; a result answers a call that stands before it.
- Tools are functions only, in this API's flat form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from gateway.errors import ApiError, bad_request
from gateway.http import toolfields
from gateway.http.jsonfields import Field, read, scrap
from gateway.http.jsonfields import field as spec
from gateway.http.schemas import MAX_MESSAGES, Message
from gateway.toolbox import Tool, Toolbox

ROLES = ("system", "developer", "user", "assistant")
ITEMS = ("message", "function_call", "function_call_output")


class _Part(msgspec.Struct):
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": ["input_text", "output_text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct):
    role: Annotated[str | None, msgspec.Meta(extra_json_schema={"enum": list(ROLES)})] = None
    content: str | list[_Part] | None = None
    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(ITEMS)})] = "message"
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[_Part] | None = None


class _FlatTool(toolfields.Function):
    name: str = ""
    type: str = ""


class _FlatAllowed(msgspec.Struct):
    name: str | None = None
    type: str = "function"


class _FlatChoice(msgspec.Struct):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[_FlatAllowed] | None = None


def _input(value: str | list[_Item]) -> str | None:
    if isinstance(value, list) and not 1 <= len(value) <= MAX_MESSAGES:
        return f"takes a text or 1 to {MAX_MESSAGES} items, got {len(value)}"
    return None


INPUT = spec(str | list[_Item], _input, "A text, or the conversation so far: messages, calls and their results.")
_TOOLS: Field[list[_FlatTool]] = spec(list[_FlatTool])
_CHOICE: Field[str | _FlatChoice] = spec(str | _FlatChoice)

TOOL_FIELDS: Mapping[str, Field[Any]] = {**toolfields.FIELDS, "tools": _TOOLS, "tool_choice": _CHOICE}


# Tools ----------------------------------------------------------------------------------------------------------------


def toolbox(fields: Mapping[str, msgspec.Raw]) -> Toolbox | None:
    """What a request says of tools; None where it names none. Raises ApiError 400 with ``param``."""
    given = read(fields, "tools", _TOOLS, [])
    choice = read(fields, "tool_choice", _CHOICE, "auto")
    return toolfields.assembled(_tools(given), _chosen(choice), toolfields.parallel(fields))


def _chosen(choice: str | _FlatChoice) -> str | toolfields.Named | toolfields.Allowed:
    if isinstance(choice, str):
        return choice
    if choice.type == "function" and choice.name is not None:
        return toolfields.Named(choice.name)
    if choice.type == "allowed_tools" and choice.mode is not None and choice.tools is not None:
        names = (tool.name if tool.type == "function" else None for tool in choice.tools)
        return toolfields.Allowed(choice.mode, tuple(names))
    raise bad_request(
        'tool_choice must have the form {"type": "function", "name": …} or {"type": "allowed_tools", "mode": "auto", '
        f'"tools": [{{"type": "function", "name": …}}]}}, got the type {scrap(choice.type)}.',
        param="tool_choice",
    )


def _tools(given: Sequence[_FlatTool]) -> Iterable[Tool]:
    for place, tool in enumerate(given):
        path = f"tools[{place}]"
        if tool.type != "function":
            raise bad_request(
                f"{path}.type must be 'function', got {scrap(tool.type)}: only these are supported.",
                param=f"{path}.type",
            )
        yield toolfields.function_tool(path, tool)


def told(box: Toolbox | None) -> dict[str, Any]:
    """The fields of a response that repeat what was said of tools."""
    if box is None:
        return {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    choice: Any = {"type": "function", "name": box.named} if box.choice == "named" else box.choice
    if box.allowed is not None:
        listed = [{"type": "function", "name": name} for name in box.allowed]
        choice = {"type": "allowed_tools", "mode": box.choice, "tools": listed}
    tools = [
        {"type": "function", "parameters": tool.parameters, "strict": True, **tool.document["function"]}
        for tool in box.tools
    ]
    return {"parallel_tool_calls": box.parallel, "tool_choice": choice, "tools": tools}


# Items ----------------------------------------------------------------------------------------------------------------


def messages(fields: Mapping[str, msgspec.Raw]) -> Sequence[Message]:
    """``input`` as a chat's messages. Raises ApiError 400 with ``param``."""
    value: str | list[_Item] | None = read(fields, "input", INPUT, None)
    if value is None:
        raise bad_request("input is missing; send a string or a list of items.", param="input")
    if isinstance(value, str):
        return [Message("user", value)]
    found: list[Message] = []
    asked: set[str] = set()
    """Calls so far."""
    for place, item in enumerate(value):
        path = f"input[{place}]"
        if item.type == "message":
            found.append(_message(path, item))
        elif item.type == "function_call":
            _add_call(path, item, found, asked)
        elif item.type == "function_call_output":
            found.append(_result(path, item, asked))
        else:
            raise bad_request(
                f"{path}.type must be one of {', '.join(ITEMS)}, got {scrap(item.type)}: other items are not "
                "implemented.",
                param=f"{path}.type",
                code="unsupported_parameter",
            )
    return found


def _add_call(path: str, item: _Item, found: list[Message], asked: set[str]) -> None:
    name = _given(path, "call_id", item.call_id)
    if name in asked:
        raise bad_request(f"{path}.call_id names a call that stands before it; each has its own.", f"{path}.call_id")
    function = toolfields.CalledFunction(_given(path, "name", item.name), _given(path, "arguments", item.arguments))
    call = toolfields.made_call(path, name, function)
    asked.add(name)
    if not found or found[-1].role != "assistant":
        found.append(Message("assistant", ""))
    found[-1] = replace(found[-1], tool_calls=(*found[-1].tool_calls, call))


def _result(path: str, item: _Item, asked: set[str]) -> Message:
    name = _given(path, "call_id", item.call_id)
    if name not in asked:
        raise bad_request(
            f"{path}.call_id is {scrap(name)}, but no function_call before it has that; send the call as well.",
            param=f"{path}.call_id",
        )
    return Message("tool", _text(f"{path}.output", _given(path, "output", item.output)), tool_call_id=name)


def _given(path: str, name: str, value: Any) -> Any:
    if value is None:
        raise bad_request(f"{path}.{name} is missing.", param=f"{path}.{name}")
    return value


def _message(path: str, item: _Item) -> Message:
    if item.role not in ROLES:
        raise bad_request(
            f"{path}.role must be one of {', '.join(ROLES)}, got {scrap(item.role or '')}.", param=f"{path}.role"
        )
    if item.content is None:
        raise bad_request(f"{path}.content is missing; send a string or text parts.", param=f"{path}.content")
    return Message(item.role, _text(f"{path}.content", item.content))


def _text(path: str, content: str | list[_Part]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(f"{path}[{i}]", part) for i, part in enumerate(content))


def _part(path: str, part: _Part) -> str:
    if part.type not in ("input_text", "output_text", "refusal"):
        raise _not_text(path, part)
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise bad_request(f"{path}.{name} is missing; send a string.", param=f"{path}.{name}")
    return text


def _not_text(path: str, part: _Part) -> ApiError:
    return bad_request(
        f"{path}.type must be 'input_text', got {scrap(part.type)}: only text goes in and out.", param=f"{path}.type"
    )
