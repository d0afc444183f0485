"""Calls whose arguments end where their JSON does: those of Mistral and Llama models.

Rules
- The grammar enforces the form, so a reader need not doubt it: JSON is followed by its braces and quotes alone.
- Mistral models write a control token, ``[TOOL_CALLS]``, and behind it a list ``[{"name": …, "arguments": {…}}, …]``
  or, since their later tokenizers, ``name[ARGS]{…}``, each call with a mark of its own. Names that the model gives its
  calls (``"id"``, ``[CALL_ID]``) are read over: two calls of a conversation could have the same.
- Llama 3 models answer with a call and nothing else: ``{"name": …, "parameters": {…}}``, maybe behind
  ``<|python_tag|>``. So a text is a call when it begins like one of a tool that may be called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

from gateway.toolcalls import CallReader

MARK = "[TOOL_CALLS]"
ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
TAG = "<|python_tag|>"
LISTED = ('{"name": "', '", "arguments": ')
LISTED_ID = ', "id": "'
BARE = ('{"name": "', '", "parameters": ')
"""What stands around a call's name."""

_OUTSIDE, _QUOTED = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_LISTED = re.compile(r'\s*\[?\{"name": "([^"]*)", "arguments": ')
_BEHIND_LISTED = re.compile(r'(?:, "id": "[A-Za-z0-9]*")?\}(, |\])')
_BEHIND_MARK = re.compile(rf"([A-Za-z0-9_-]+)(?:{re.escape(CALL_ID)}[A-Za-z0-9]*)?{re.escape(ARGS)}")


class ObjectEnd:
    """Finds the end of one JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """Where in the next piece it ends (behind its last brace); None while it goes on. O(n) over all pieces."""
        at = 0
        if self._escaped and text:
            self._escaped, at = False, 1
        while match := (_QUOTED if self._quoted else _OUTSIDE).search(text, at):
            at, found = match.end(), match[0]
            if self._quoted and found == "\\":
                if at == len(text):
                    self._escaped = True
                    return None
                at += 1
            elif found == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if found in "{[" else -1
                if self._depth == 0:
                    return at
        return None


class _JsonCalls(CallReader):
    """A call ends where its arguments do; ``_behind`` reads on from there."""

    begins: ClassVar[re.Pattern[str]]
    """From the mark, or the call before, to a call's arguments; its first group is the name."""

    def __init__(self) -> None:
        super().__init__()
        self._end = ObjectEnd()

    def _head(self) -> bool:
        match = self.begins.match(self._held)
        if match is not None:
            self._begin(match[1], match.end())
        return match is not None

    def _arguments(self) -> bool:
        end = self._end.find(self._held)
        self._argue(self._held[:end])
        self._held = "" if end is None else self._held[end:]
        if end is None:
            return False
        self.ended += 1
        self._end = ObjectEnd()
        self._state = self._behind
        return True

    def _behind(self) -> bool:
        """What stands behind the arguments. Here: nothing."""
        self._state = self._text
        return True


class ListedCalls(_JsonCalls):
    """Mistral's list."""

    mark = MARK
    begins = _LISTED

    def _behind(self) -> bool:
        match = _BEHIND_LISTED.match(self._held)
        if match is None:
            return False
        self._state = self._text if match[1] == "]" else self._head
        self._held = self._held[match.end() :]
        return True


class ArgsCalls(_JsonCalls):
    """Mistral's later form."""

    mark = MARK
    begins = _BEHIND_MARK


class BareCalls(_JsonCalls):
    """Llama's: the whole answer is one call, or text."""

    mark = TAG

    def __init__(self, names: Iterable[str]) -> None:
        """``names``: of the tools that may be called."""
        super().__init__()
        heads = {f"{BARE[0]}{name}{BARE[1]}{{": name for name in names}
        self._begins = {**heads, **{TAG + head: name for head, name in heads.items()}}
        self._state = self._start

    @property
    def _speaking(self) -> bool:
        return self._state in (self._start, self._plain)

    def _start(self) -> bool:
        if any(begin.startswith(self._held) and begin != self._held for begin in self._begins):
            return False
        begun = next((begin for begin in self._begins if self._held.startswith(begin)), None)
        if begun is None:
            self._state = self._plain
        else:
            self._begin(self._begins[begun], len(begun) - 1)
        return True

    def _head(self) -> bool:
        return False  # the start has read it

    def _behind(self) -> bool:
        if not self._held:
            return False
        self._held = self._held.removeprefix("}")
        self._state = self._plain
        return True

    def _plain(self) -> bool:
        self._say(self._held)
        self._held = ""
        return False
