"""Messages with tools, as a model's chat template can take them.

A template that knows ``tools`` gets them and the messages as they are, but for what it would refuse (``callforms.py``
says which layout a template gets): that is what its model was trained on. For any other, the tools are described in the
system message, calls become text of the assistant, and results text of the user.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
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


def one_by_one(messages: Sequence[Message]) -> Messages:
    """For a template that knows messages of one call and no text: each call in its own, with its result behind it."""
    laid: list[Message] = []
    left = deque(messages)
    while left:
        message = left.popleft()
        if not message.tool_calls:
            laid.append(message)
            continue
        results: dict[str | None, list[Message]] = {}
        while left and left[0].role == "tool":
            result = left.popleft()
            results.setdefault(result.tool_call_id, []).append(result)
        if message.content:
            laid.append(replace(message, tool_calls=()))
        for call in message.tool_calls:
            laid.append(replace(message, content="", tool_calls=(call,)))
            laid += results.get(call.id, ())
        names = {call.id for call in message.tool_calls}
        laid += [result for name, found in results.items() if name not in names for result in found]
    return as_they_are(laid)


def short_named(messages: Sequence[Message], name: Callable[[str], str], *, system: bool, remarks: bool) -> Messages:
    """For a template that takes certain names of calls only: ``name`` makes one of any.

    ``system``: it shows a system message wherever the chat ends; else behind a result the last question has to hold it.
    ``remarks``: it shows text beside calls; else that is left out.
    """
    laid = [
        replace(
            message,
            content="" if message.tool_calls and not remarks else message.content,
            tool_calls=tuple(replace(call, id=name(call.id)) for call in message.tool_calls),
            tool_call_id=None if message.tool_call_id is None else name(message.tool_call_id),
        )
        for message in messages
    ]
    first, last = laid[0], laid[-1]
    asked = max((place for place, message in enumerate(laid) if message.role == "user"), default=None)
    if _role(first.role) == "system" and last.role != "user" and asked is not None and not system:
        question = laid[asked]
        laid[asked] = replace(question, content=f"{first.content}\n\n{question.content}")
        del laid[0]
    return as_they_are(laid)


def described(messages: Sequence[Message], tools: Sequence[Tool]) -> Messages:
    """For a template that knows none."""
    shown: Messages = []
    responses: list[str] = []
    """Of results in a row: one message of the user."""
    for place, message in enumerate(messages):
        role, content = _role(message.role), message.content
        if message.tool_calls:
            content = "\n".join([*filter(None, [content]), *(call.text() for call in message.tool_calls)])
        if role == "tool":
            responses.append(f"<tool_response>\n{content}\n</tool_response>")
            if place + 1 < len(messages) and messages[place + 1].role == "tool":
                continue
            role, content = "user", "\n".join(responses)
            responses = []
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
