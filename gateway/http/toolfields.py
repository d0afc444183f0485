"""``tools``, ``tool_choice``, ``parallel_tool_calls``, and the calls within messages: read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec

from gateway.errors import ApiError, bad_request
from gateway.http.jsonfields import Field, crowded, read, scrap
from gateway.http.jsonfields import field as spec
from gateway.http.structure import NAME, check_schema_size
from gateway.toolbox import Tool, Toolbox, ToolCall

MAX_TOOLS = 128
_ANY: dict[str, Any] = {"type": "object"}
_DOCUMENTED = ("name", "description", "parameters", "strict")


class Function(msgspec.Struct):
    """``tools[].function``."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: str
    function: Function | None = None


class Named(msgspec.Struct):
    """A function by its name."""

    name: str


class AllowedTool(msgspec.Struct):
    """``tool_choice.allowed_tools.tools[]``."""

    function: Named | None = None
    type: str = "function"


class AllowedTools(msgspec.Struct):
    """``tool_choice.allowed_tools``."""

    mode: str
    tools: list[AllowedTool]


class _Choice(msgspec.Struct):
    type: str
    function: Named | None = None
    allowed_tools: AllowedTools | None = None


class Allowed(NamedTuple):
    """Some of the functions, by their names: whether one must be called, or may be."""

    mode: str
    names: tuple[str | None, ...]
    """None: something that is no function."""


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
    tools = (_tool(f"tools[{i}]", tool) for i, tool in enumerate(given))
    return assembled(tools, _chosen(choice), parallel(fields))


def _chosen(choice: str | _Choice) -> str | Named | Allowed:
    if isinstance(choice, str):
        return choice
    if choice.type == "function" and choice.function is not None:
        return choice.function
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        listed = choice.allowed_tools.tools
        names = (tool.function.name if tool.type == "function" and tool.function else None for tool in listed)
        return Allowed(choice.allowed_tools.mode, tuple(names))
    raise bad_request(
        'tool_choice must have the form {"type": "function", "function": {"name": …}} or {"type": "allowed_tools", '
        '"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": …}}]}}, got the type '
        f"{scrap(choice.type)}.",
        param="tool_choice",
    )


def parallel(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Whether one answer may hold several calls. Raises ApiError 400."""
    return read(fields, "parallel_tool_calls", _PARALLEL, True)


def assembled(given: Iterable[Tool], choice: str | Named | Allowed, several: bool) -> Toolbox | None:
    """The toolbox, checked as a whole; None without tools. Raises ApiError 400 with ``param``."""
    tools = tuple(islice(given, MAX_TOOLS + 1))
    if not tools:
        if choice not in ("auto", "none"):
            raise bad_request("tool_choice needs tools; send the functions that may be called.", param="tool_choice")
        return None
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools takes at most {MAX_TOOLS} functions; send fewer.", param="tools")
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
        return Toolbox(tools, choice, several)  # type: ignore[arg-type]  # one of the three
    if isinstance(choice, Allowed):
        return Toolbox(tools, _allowed_mode(choice, names), several, allowed=_allowed_names(choice))
    if choice.name not in names:
        raise bad_request(f"tool_choice names {scrap(choice.name)}, which is not among tools.", param="tool_choice")
    return Toolbox(tools, "named", parallel=False, named=choice.name)


def _allowed_mode(choice: Allowed, names: Set[str]) -> Literal["auto", "required"]:
    """Its mode, once all of it is known to be right. Raises ApiError 400."""
    if choice.mode not in ("auto", "required"):
        raise bad_request(f"tool_choice: the mode must be auto or required, got {scrap(choice.mode)}.", "tool_choice")
    wrong = [name for name in choice.names if name not in names]
    if wrong or not choice.names:
        what = "no function at all" if not wrong else scrap(wrong[0]) if wrong[0] else "something that is no function"
        raise bad_request(f"tool_choice allows {what}; allow functions that are among tools.", param="tool_choice")
    return "required" if choice.mode == "required" else "auto"


def _allowed_names(choice: Allowed) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in choice.names if name is not None))


def _tool(path: str, tool: _Tool) -> Tool:
    if tool.type != "function" or tool.function is None:
        raise bad_request(f"{path} must be a function: only these are supported.", param=f"{path}.type")
    return function_tool(f"{path}.function", tool.function)


def function_tool(path: str, function: Function) -> Tool:
    """A function, checked. Raises ApiError 400 below ``path``."""
    if not NAME.fullmatch(function.name):
        raise _bad_name(f"{path}.name", function.name)
    parameters = function.parameters or _ANY
    if parameters.get("type", "object") != "object":
        raise bad_request(
            f"{path}.parameters must be the schema of an object: arguments have names.", param=f"{path}.parameters"
        )
    document = {name: value for name in _DOCUMENTED if (value := getattr(function, name)) is not None}
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
    return made_call(f"{path}.function", call.id, call.function)


def made_call(path: str, name: str, function: CalledFunction) -> ToolCall:
    """A call, checked; ``name`` is the call's own. Raises ApiError 400 below ``path``."""
    if not NAME.fullmatch(function.name):
        raise _bad_name(f"{path}.name", function.name)
    param = f"{path}.arguments"
    if (complaint := crowded(function.arguments.encode(errors="replace"))) is not None:
        raise bad_request(f"{param} holds {complaint}.", param=param, code="too_many_values")
    try:
        value = msgspec.json.decode(function.arguments)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise bad_request(f"{param} must be a JSON object written as a string.", param=param)
    return ToolCall(name, function.name, function.arguments)


def _bad_name(param: str, name: str) -> ApiError:
    return bad_request(f"{param} must be 1 to 64 letters, digits, '_' or '-', got {scrap(name)}.", param=param)
