"""Tools that a model may call, calls that it made, and the form in which both are text.

A call is written ``<tool_call>`` line break ``{"name": …, "arguments": {…}}`` line break ``</tool_call>``, as Hermes
and Qwen models write theirs. The grammar (``grammars.py``) enforces it to the letter, so that reading it back
(``toolcalls.py``) is exact: ``CLOSE`` has a line break before a tag, and JSON has neither that nor a bare line break in
a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

OPEN = "<tool_call>"
NAME, ARGUMENTS = '\n{"name": "', '", "arguments": '
CLOSE = "}\n</tool_call>"
MAX_CALLS = 16
"""Most calls of one answer."""

Choice = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the caller can run."""

    name: str
    parameters: dict[str, Any]
    """JSON schema of its arguments, an object."""
    document: Mapping[str, Any]
    """As the API words it: ``{"type": "function", "function": {…}}``."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What a request says of tools."""

    tools: tuple[Tool, ...]
    choice: Choice = "auto"
    parallel: bool = True
    """May one answer hold several calls?"""
    named: str | None = None
    """With ``choice="named"``: the one that must be called."""
    allowed: tuple[str, ...] | None = None
    """The names of those that may be called, of all that the model sees; None: any."""

    @property
    def shown(self) -> tuple[Tool, ...]:
        """Tools that the model gets to see: none when it may not call any."""
        return () if self.choice == "none" else self.tools

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Tools that it may call."""
        return tuple(
            tool
            for tool in self.shown
            if self.named in (None, tool.name) and (self.allowed is None or tool.name in self.allowed)
        )

    @property
    def asked(self) -> dict[str, Any]:
        """The fields as the API words them, for an upstream. What may not be called it does not get: few servers know
        how to allow some of them."""
        choice = {"type": "function", "function": {"name": self.named}} if self.choice == "named" else self.choice
        given = self.tools if self.allowed is None else self.callable
        fields: dict[str, Any] = {"tools": [dict(tool.document) for tool in given], "tool_choice": choice}
        return fields if self.parallel else {**fields, "parallel_tool_calls": False}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in a message of the assistant."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    def text(self) -> str:
        """As the model writes it."""
        return f"{OPEN}{NAME}{self.name}{ARGUMENTS}{self.arguments}{CLOSE}"

    @property
    def document(self) -> dict[str, Any]:
        """As the API words it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: the arguments as an object."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": json.loads(self.arguments)},
        }
