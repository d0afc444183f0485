"""Messages with tools, as a model's chat template can take them.

A template that knows ``tools`` and writes calls as we do (``<tool_call>``) gets them as they are, which is what its
model was trained on. For any other, the tools are described in the system message, calls become text of the assistant,
and results text of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gateway.toolbox import ARGUMENTS, CLOSE, NAME, OPEN, Tool

if TYPE_CHECKING:
    from gateway.http.schemas import Message

Messages = list[dict[str, Any]]
_EXAMPLE = f'{OPEN}{NAME}the function\'s name{ARGUMENTS}{{"its": "arguments"}}{CLOSE}'
_RULES = (
    "You can call functions. Each line between the tags describes one, with a JSON schema of its arguments.\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call a function, write its name and its arguments in this form and nothing after it:\n"
    f"{_EXAMPLE.replace('{', '{{').replace('}', '}}')}\n"
    "The result comes back between <tool_response> tags. Answer without a call when none is needed."
)


def rendered(
    messages: Sequence[Message], tools: Sequence[Tool], *, native: bool
) -> tuple[Messages, list[Mapping[str, Any]] | None]:
    """Messages for a template, and the tools that it gets beside them, if it is one that knows (``native``)."""
    if native:
        return as_they_are(messages), [tool.document for tool in tools] or None
    return described(messages, tools), None


def as_they_are(messages: Sequence[Message]) -> Messages:
    """For a template that knows tools."""
    shown: Messages = []
    for message in messages:
        one: dict[str, Any] = {"role": _role(message.role), "content": message.content}
        if message.tool_calls:
            one["tool_calls"] = [call.for_template() for call in message.tool_calls]
        if message.tool_call_id is not None:
            one["tool_call_id"] = message.tool_call_id
        shown.append(one)
    return shown


def described(messages: Sequence[Message], tools: Sequence[Tool]) -> Messages:
    """For a template that knows none."""
    shown: Messages = []
    for place, message in enumerate(messages):
        role, content = _role(message.role), message.content
        if message.tool_calls:
            content = "\n".join([*filter(None, [content]), *(call.text() for call in message.tool_calls)])
        if role == "tool":
            response = f"<tool_response>\n{content}\n</tool_response>"
            if place and messages[place - 1].role == "tool":
                shown[-1]["content"] += f"\n{response}"
                continue
            role, content = "user", response
        shown.append({"role": role, "content": content})
    if tools:
        rules = _RULES.format(tools="\n".join(map(_line, tools)))
        if shown and shown[0]["role"] == "system":
            shown[0]["content"] += f"\n\n{rules}"
        else:
            shown.insert(0, {"role": "system", "content": rules})
    return shown


def _role(role: str) -> str:
    """The templates of open models know "system"; "developer" is its newer name."""
    return "system" if role == "developer" else role


def _line(tool: Tool) -> str:
    return json.dumps(tool.document["function"], ensure_ascii=False)
