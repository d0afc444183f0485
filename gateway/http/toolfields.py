"""``tools``, ``tool_choice``, ``parallel_tool_calls``, and the calls within messages: read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.errors import ApiError, bad_request
from gateway.http.jsonfields import Field, read, scrap
from gateway.http.jsonfields import field as spec
from gateway.http.structure import NAME, check_schema_size
from gateway.toolbox import Tool, Toolbox, ToolCall

MAX_TOOLS = 128
_ANY: dict[str, Any] = {"type": "object"}


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: str
    function: _Function | None = None


class _Named(msgspec.Struct):
    name: str


class _Choice(msgspec.Struct):
    type: str
    function: _Named | None = None


class CalledFunction(msgspec.Struct):
    """``messages[].tool_calls[].function``."""

    name: str
    arguments: str


class Called(msgspec.Struct):
    """``messages[].tool_calls[]``."""

    id: str
    function: CalledFunction
    type: str = "function"


_TOOLS: Field[list[_Tool]] = spec(list[_Tool])
_CHOICE: Field[str | _Choice] = spec(str | _Choice)
_PARALLEL: Field[bool] = spec(bool)

FIELDS: Mapping[str, Field[Any]] = {"tools": _TOOLS, "tool_choice": _CHOICE, "parallel_tool_calls": _PARALLEL}


def toolbox(fields: Mapping[str, msgspec.Raw]) -> Toolbox | None:
    """What a chat says of tools; None where it names none. Raises ApiError 400 with ``param``."""
    given = read(fields, "tools", _TOOLS, [])
    choice = read(fields, "tool_choice", _CHOICE, "auto")
    parallel = read(fields, "parallel_tool_calls", _PARALLEL, True)
    if not given:
        if choice not in ("auto", "none"):
            raise bad_request("tool_choice needs tools; send the functions that may be called.", param="tool_choice")
        return None
    if len(given) > MAX_TOOLS:
        raise bad_request(f"tools takes at most {MAX_TOOLS} functions, got {len(given)}.", param="tools")
    tools = tuple(_tool(f"tools[{i}]", tool) for i, tool in enumerate(given))
    names = {tool.name for tool in tools}
    if len(names) < len(tools):
        raise bad_request("tools: two functions have the same name; give each its own.", param="tools")
    check_schema_size([tool.document for tool in tools], "tools")
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise bad_request(
                f"tool_choice must be auto, none, required or name a function, got {scrap(choice)}.",
                param="tool_choice",
            )
        return Toolbox(tools, choice, parallel)  # type: ignore[arg-type]  # one of the three
    if choice.type != "function" or choice.function is None:
        raise bad_request(
            'tool_choice must have the form {"type": "function", "function": {"name": …}}.', param="tool_choice"
        )
    if choice.function.name not in names:
        raise bad_request(
            f"tool_choice names {scrap(choice.function.name)}, which is not among tools.", param="tool_choice"
        )
    return Toolbox(tools, "named", parallel=False, named=choice.function.name)


def _tool(path: str, tool: _Tool) -> Tool:
    if tool.type != "function" or tool.function is None:
        raise bad_request(f"{path} must be a function: only these are supported.", param=f"{path}.type")
    function = tool.function
    if not NAME.fullmatch(function.name):
        raise _bad_name(f"{path}.function.name", function.name)
    parameters = function.parameters or _ANY
    if parameters.get("type", "object") != "object":
        raise bad_request(
            f"{path}.function.parameters must be the schema of an object: arguments have names.",
            param=f"{path}.function.parameters",
        )
    document = {key: value for key, value in msgspec.structs.asdict(function).items() if value is not None}
    return Tool(
        function.name,
        {"type": "object", **parameters},
        {"type": "function", "function": {**document, "parameters": parameters}},
    )


def calls(path: str, given: list[Called] | None) -> tuple[ToolCall, ...]:
    """The calls of an assistant's message. Raises ApiError 400 with ``param``."""
    return tuple(_call(f"{path}[{i}]", call) for i, call in enumerate(given or ()))


def _call(path: str, call: Called) -> ToolCall:
    if call.type != "function":
        raise bad_request(f"{path}.type must be 'function', got {scrap(call.type)}.", param=f"{path}.type")
    if not NAME.fullmatch(call.function.name):
        raise _bad_name(f"{path}.function.name", call.function.name)
    param = f"{path}.function.arguments"
    try:
        value = msgspec.json.decode(call.function.arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(f"{param} must be a JSON object written as a string.", param=param)
    return ToolCall(call.id, call.function.name, call.function.arguments)


def _bad_name(param: str, name: str) -> ApiError:
    return bad_request(f"{param} must be 1 to 64 letters, digits, '_' or '-', got {scrap(name)}.", param=param)
