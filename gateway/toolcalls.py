"""From an answer's text, as it comes, to what the caller is shown: content, and calls of tools in pieces.

Rules
- The text is in the form of ``toolbox.py`` here; ``jsoncalls.py`` reads others. What does not come to its end
  (``max_tokens``) stays what it is: a call that lacks its name is not shown, arguments that were cut are shown as far
  as they went.
- Pieces depend on the text alone, not on how it was cut; only what may become a mark is held back.
- White space around calls is no content.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from gateway.toolbox import ARGUMENTS, CLOSE, NAME, OPEN

_HEAD = re.compile(f'{re.escape(NAME)}([^"]*){re.escape(ARGUMENTS)}')


@dataclass(frozen=True, slots=True)
class CallPiece:
    """News of one call: its ``name`` comes first and once, then its arguments in fragments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """What some text brought."""

    content: str = ""
    calls: tuple[CallPiece, ...] = ()


class CallReader(ABC):
    """Reads one choice. A subclass knows one form of calls."""

    mark: ClassVar[str]
    """What a call begins with."""

    def __init__(self) -> None:
        self.begun = 0
        """Calls whose name is known."""
        self.ended = 0
        """Calls that are complete."""
        self._held = ""
        self._state: Callable[[], bool] = self._text
        """Takes what it can from the held text, and says whether there may be more to do."""
        self._content: list[str] = []
        self._calls: list[CallPiece] = []

    def feed(self, text: str) -> Shown:
        """Take the next piece of text."""
        self._held += text
        while self._state():
            pass
        return self._shown()

    def finish(self) -> Shown:
        """The text has ended: what was held back as a possible mark is none."""
        if self._speaking:
            self._say(self._held)
        elif self._state == self._arguments and self._held:
            self._argue(self._held)
        self._held = ""
        return self._shown()

    @property
    def called(self) -> bool:
        """It holds calls, all of them complete."""
        return 0 < self.ended == self.begun

    @property
    def _speaking(self) -> bool:
        """What is held is text, unless more comes."""
        return self._state == self._text

    def _shown(self) -> Shown:
        shown = Shown("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return shown

    def _say(self, text: str) -> None:
        if text and not (self.begun and text.isspace()):
            self._content.append(text)

    def _begin(self, name: str, arguments: int) -> None:
        """A call begins; its arguments do at that place of the held text."""
        self._calls.append(CallPiece(self.begun, name=name))
        self.begun += 1
        self._held = self._held[arguments:]
        self._state = self._arguments

    def _argue(self, text: str) -> None:
        if text:
            self._calls.append(CallPiece(self.ended, arguments=text))

    # -- states ---------------------------------------------------------------------------------------------------

    def _text(self) -> bool:
        at = self._held.find(self.mark)
        if at < 0:
            keep = _overlap(self._held, self.mark)
            # White space may stand before a call.
            keep = max(keep, len(self._held) - len(self._held[: len(self._held) - keep].rstrip()))
            self._say(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        self._say(self._held[:at].rstrip())
        self._held = self._held[at + len(self.mark) :]
        self._state = self._head
        return True

    @abstractmethod
    def _head(self) -> bool:
        """What stands between the mark and the arguments."""

    @abstractmethod
    def _arguments(self) -> bool:
        """The arguments, up to the end of the call."""


class TaggedCalls(CallReader):
    """Calls between tags."""

    mark = OPEN

    def _head(self) -> bool:
        match = _HEAD.match(self._held)
        if match is None:
            return False
        self._begin(match[1], match.end())
        return True

    def _arguments(self) -> bool:
        at = self._held.find(CLOSE)
        keep = 0 if at >= 0 else _overlap(self._held, CLOSE)
        end = at if at >= 0 else len(self._held) - keep
        self._argue(self._held[:end])
        self._held = self._held[end + (len(CLOSE) if at >= 0 else 0) :]
        if at < 0:
            return False
        self.ended += 1
        self._state = self._text
        return True


def whole_calls(reader: CallReader, text: str) -> tuple[str, list[CallPiece]]:
    """Content and calls of a whole text; each call in one piece."""
    shown = (reader.feed(text), reader.finish())
    names: list[str] = []
    arguments: list[list[str]] = []
    for piece in (piece for part in shown for piece in part.calls):
        if piece.name is not None:
            names.append(piece.name)
            arguments.append([])
        arguments[piece.index].append(piece.arguments)
    calls = [CallPiece(i, name, "".join(parts)) for i, (name, parts) in enumerate(zip(names, arguments, strict=True))]
    return "".join(part.content for part in shown), calls


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that begins ``mark`` and is not all of it."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
