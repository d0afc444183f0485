"""A response's output items as they come, and the events that tell of them: a message of text, then calls of functions.

Rules
- Items come one after the other and are closed in order: a message is closed when a call begins, a call when the next
  one does, the last one at the end. An answer without any output is an empty message.
- Text behind a call, which only an upstream's free text can hold, is a message of its own.
- The same deltas give the same items, however they are grouped; a whole answer is one delta whose events nobody reads.
- Log probabilities belong to text. Those of tokens that spell a call have no place in this API and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.callforms import Calls
from gateway.choices import Alternative, ChoiceDelta, ScoredToken
from gateway.http.openai import Json, finite
from gateway.toolbox import CLOSE
from gateway.toolcalls import CallPiece, CallReader, Shown

Event = tuple[str, Json]
"""Its type and its fields."""
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Ends of an answer that is not complete."""


@dataclass(slots=True)
class Text:
    """A message under way."""

    id: str
    pieces: list[str] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    status: str = "in_progress"

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)

    def part(self) -> Json:
        """Its only part."""
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": scores(self.scored)}

    def item(self) -> Json:
        """As the API words it."""
        return {**self._head(), "content": [self.part()]}

    def begun(self) -> Json:
        """Likewise, before its part is there."""
        return {**self._head(), "content": []}

    def _head(self) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "status": self.status}

    def ends(self, place: Json) -> Iterator[Event]:
        """What is said when it is complete."""
        part, at = self.part(), {**place, "content_index": 0}
        yield "response.output_text.done", {**at, "text": part["text"], "logprobs": part["logprobs"]}
        yield "response.content_part.done", {**at, "part": part}


@dataclass(slots=True)
class Call:
    """A call under way."""

    id: str
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)
    status: str = "in_progress"

    def item(self) -> Json:
        """As the API words it."""
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": "".join(self.pieces),
            "status": self.status,
        }

    def begun(self) -> Json:
        """Likewise: a call has no parts."""
        return self.item()

    def ends(self, place: Json) -> Iterator[Event]:
        """What is said when it is complete."""
        arguments = "".join(self.pieces)
        yield "response.function_call_arguments.done", {**place, "name": self.name, "arguments": arguments}


class Output:
    """The items of one response."""

    def __init__(self, job_id: str, calls: Calls | None) -> None:
        """``calls``: where its text may hold calls of functions."""
        self.finish: str | None = None
        self._job = job_id
        self._calls = calls
        self._reader: CallReader | None = None
        """From the first text on, with ``calls``."""
        self._items: list[Text | Call] = []
        self._scored: list[ScoredToken] = []
        """Tokens whose text has not become part of the message."""
        self._length = 0
        """Characters of the message so far."""

    @property
    def status(self) -> str:
        """Of the whole response, once it has ended."""
        return "completed" if self.why_incomplete is None else "incomplete"

    @property
    def why_incomplete(self) -> str | None:
        """As the API words it; None while it runs, and where it is complete."""
        return _CUT.get(self.finish or "")

    def items(self) -> list[Json]:
        """All of them; one that is under way is ``incomplete``: nothing comes after it."""
        items = [item.item() for item in self._items]
        return [{**item, "status": "incomplete"} if item["status"] == "in_progress" else item for item in items]

    def take(self, delta: ChoiceDelta) -> Iterator[Event]:
        """News of the answer, and what is to be said of them."""
        self._scored.extend(delta.scored)
        for shown in self._read(delta):
            if shown.content or self._calls is None:
                yield from self._say(shown.content)
            for piece in shown.calls:
                yield from self._call(piece)
        if delta.finish is not None:
            self.finish = delta.finish
            if not self._items:
                yield from self._open(Text(f"msg_{self._job}"))
            yield from self._close(self._last_status())

    def _read(self, delta: ChoiceDelta) -> list[Shown]:
        if self._calls is None:
            return [Shown(delta.text)] if delta.text or delta.scored else []
        if self._reader is None:
            self._reader = self._calls.reader()
        *ends, rest = delta.text.split(CLOSE)  # what is read at once tells content first: text behind a call is later
        shown = [self._reader.feed(text) for text in (*(end + CLOSE for end in ends), rest)]
        return [*shown, *([self._reader.finish()] if delta.finish is not None else [])]

    def _say(self, content: str) -> Iterator[Event]:
        message = self._items[-1] if self._items else None
        if not isinstance(message, Text):
            yield from self._close("completed")
            message = Text(f"msg_{self._job}_{len(self._items)}" if self._items else f"msg_{self._job}")
            yield from self._open(message)
        message.pieces.append(content)
        due = self._due(message, len(content))
        message.scored += due
        at = {**self._place(), "content_index": 0}
        yield "response.output_text.delta", {**at, "delta": content, "logprobs": scores(due)}

    def _due(self, message: Text, length: int) -> list[ScoredToken]:
        """The tokens of so many more characters; behind a call nobody knows where in the text they are."""
        if message is not self._items[0]:
            return []
        self._length += length
        due = [token for token in self._scored if self._calls is None or token.offset < self._length]
        self._scored = self._scored[len(due) :]
        return due

    def _call(self, piece: CallPiece) -> Iterator[Event]:
        if piece.name is not None:
            assert self._calls is not None
            yield from self._close("completed")
            name = self._calls.call_id(f"resp_{self._job}", 0, piece.index)
            yield from self._open(Call(f"fc_{self._job}_{piece.index}", name, piece.name))
        if piece.arguments:
            self._items[-1].pieces.append(piece.arguments)
            yield "response.function_call_arguments.delta", {**self._place(), "delta": piece.arguments}

    def _open(self, item: Text | Call) -> Iterator[Event]:
        self._items.append(item)
        yield "response.output_item.added", {"output_index": len(self._items) - 1, "item": item.begun()}
        if isinstance(item, Text):
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": item.part()}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._items:
            return
        item = self._items[-1]
        item.status = status
        yield from item.ends(self._place())
        yield "response.output_item.done", {"output_index": len(self._items) - 1, "item": item.item()}

    def _last_status(self) -> str:
        """Of the last item: a call that is complete is so, also where its answer was cut right behind it."""
        if self._reader is not None and isinstance(self._items[-1], Call):
            return "completed" if self._reader.called else "incomplete"
        return self.status

    def _place(self) -> Json:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}


def scores(scored: Sequence[ScoredToken]) -> list[Json]:
    """Log probabilities as this API words them."""
    return [{**_entry(token), "top_logprobs": [_entry(other) for other in token.top]} for token in scored]


def _entry(token: Alternative) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.data)}
