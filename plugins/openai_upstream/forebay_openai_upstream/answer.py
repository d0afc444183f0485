"""What the server says, as JSON → text, ends and figures of each choice.

Rules
- Figures are provisional while it streams: one output token per piece of text, since a piece holds at least one. What
  the server counts replaces them as soon as it says so, at the latest before the end is reported.
- They never exceed what was asked for: a server that counts nonsense cannot bill a tenant for it.
- An end is reported once, after everything that belongs to the request was read: the figures come behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from workers.protocol import FinishReason, TextLogprob

FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "stop"}
"""Ends that the gateway knows; it says itself that an answer holds calls. Another one (a filter's) is a failure: it is
not made up as one of these."""
CALL, ARGUMENTS, CALLED = '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>"
"""Calls of tools as text, in the form that the gateway reads back."""


class ServerError(Exception):
    """The server failed, or says what makes no sense. The text is for the operator's log."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class _Top(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[int] | None = None


class _Scored(_Top):
    top_logprobs: list[_Top] | None = None


class _Logprobs(msgspec.Struct):
    """Of a chat (``content``) or of a completion (the three lists)."""

    content: list[_Scored] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Embeddings(msgspec.Struct):
    data: msgspec.Raw
    usage: _Usage | None = None


_chunks = msgspec.json.Decoder(_Chunk)
_embeddings = msgspec.json.Decoder(_Embeddings)


@dataclass(slots=True)
class Choice:
    """One choice so far."""

    text: list[str] = field(default_factory=list)
    """New since the last report."""
    logprobs: list[TextLogprob] = field(default_factory=list)
    tokens: int = 0
    """Output tokens so far."""
    finish: FinishReason | None = None
    news: bool = False
    call: int | None = None
    """The call that is being written; one ends where the next begins, or with the answer."""
    argued: bool = False
    """It has arguments; one without takes an empty object."""
    behind: str = ""
    """Said while a call was open: it goes behind the call, whose arguments it would spoil."""

    def calls(self, said: list[_Call]) -> str:
        """Pieces of calls as text. Raises ServerError for pieces that are out of order."""
        text = ""
        for piece in said:
            function = piece.function or _Function()
            if piece.index != self.call:
                if not function.name or piece.index != (0 if self.call is None else self.call + 1):
                    raise ServerError("a call of a tool begins in the middle")
                text += self.called() + CALL + msgspec.json.encode(function.name).decode() + ARGUMENTS
                self.call, self.argued = piece.index, False
            text += function.arguments or ""
            self.argued = self.argued or bool(function.arguments)
        return text

    def called(self) -> str:
        """The end of the call that is being written, if there is one, and what was said meanwhile."""
        if self.call is None:
            return ""
        said, self.behind = self.behind, ""
        return f"{'' if self.argued else '{}'}{CALLED}\n{said}"


class Answer:
    """All choices of one request, and what it cost."""

    def __init__(self, choices: int, *, max_tokens: int, max_prompt: int) -> None:
        self.choices = [Choice() for _ in range(choices)]
        self.prompt_tokens = 0
        """As the server counted; 0: not said."""
        self.cached_tokens = 0
        self._max_tokens = max_tokens
        self._max_prompt = max_prompt

    @property
    def finished(self) -> bool:
        """Whether every choice has its end."""
        return all(choice.finish is not None for choice in self.choices)

    @property
    def begun(self) -> bool:
        """Whether there was any output, or the end of one."""
        return any(choice.tokens or choice.finish for choice in self.choices)

    def take(self, data: bytes) -> None:
        """One event of a stream. Raises ServerError."""
        try:
            chunk = _chunks.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerError(f"an event is not as expected: {type(error).__name__}") from None
        if chunk.error:
            raise ServerError("it reported an error inside the stream")
        for said in chunk.choices:
            if not 0 <= said.index < len(self.choices):
                raise ServerError(f"choice {said.index} was not asked for")
            self._add(self.choices[said.index], said)
        if chunk.usage is not None:
            self._count(chunk.usage)

    def take_embeddings(self, data: bytes) -> None:
        """The whole answer of an embeddings request: its ``data`` becomes the text. Raises ServerError."""
        try:
            body = _embeddings.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerError(f"the answer is not as expected: {type(error).__name__}") from None
        if bytes(body.data)[:1] != b"[":
            raise ServerError("the answer holds no list of vectors")
        if body.usage is not None:
            self._count(body.usage)
        [choice] = self.choices
        choice.text, choice.tokens, choice.finish, choice.news = [bytes(body.data).decode()], 0, "stop", True

    def _add(self, choice: Choice, said: _Choice) -> None:
        if choice.finish is not None:
            return
        delta = said.delta
        text = (delta.content or delta.refusal or "") if delta is not None else (said.text or "")
        news = bool(text)
        if choice.call is not None:
            choice.behind += text
            text = ""
        if delta is not None and delta.tool_calls:
            text += choice.calls(delta.tool_calls)
        if text or news or (delta is not None and delta.reasoning_content):
            choice.tokens = min(choice.tokens + 1, self._max_tokens)
            choice.news = True
        if text:
            choice.text.append(text)
        if said.logprobs is not None:
            choice.logprobs.extend(_scored(said.logprobs))
        if said.finish_reason is not None:
            if said.finish_reason not in FINISHES:
                raise ServerError(f"it ended with {said.finish_reason[:40]!r}, which cannot be passed on")
            choice.finish = FINISHES[said.finish_reason]
            if said.finish_reason != "length" or choice.behind:  # a call that something follows was not cut
                choice.text.append(choice.called())
            choice.news = True

    def _count(self, usage: _Usage) -> None:
        """The server's own figures; they are of the whole request, and go to the choices in proportion."""
        if usage.prompt_tokens is not None and usage.prompt_tokens > 0:
            self.prompt_tokens = min(usage.prompt_tokens, self._max_prompt)
            cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else 0
            self.cached_tokens = max(0, min(cached or 0, self.prompt_tokens))
        if usage.completion_tokens is not None and usage.completion_tokens > 0:
            self._spread(usage.completion_tokens)

    def _spread(self, total: int) -> None:
        left = total - sum(choice.tokens for choice in self.choices)
        for choice in self.choices:  # one choice takes all of it; several, as much as each may have
            more = max(0, min(left, self._max_tokens - choice.tokens))
            choice.tokens += more
            left -= more


def _scored(logprobs: _Logprobs) -> list[TextLogprob]:
    if logprobs.content is not None:
        return [
            TextLogprob(_bytes(entry), entry.logprob, [(_bytes(top), top.logprob) for top in entry.top_logprobs or ()])
            for entry in logprobs.content
        ]
    tokens, values = logprobs.tokens or [], logprobs.token_logprobs or []
    tops = logprobs.top_logprobs or [None] * len(tokens)
    return [
        TextLogprob(token.encode(), value, [(name.encode(), other) for name, other in (top or {}).items()])
        for token, value, top in zip(tokens, values, tops, strict=False)
        if value is not None
    ]


def _bytes(entry: _Top) -> bytes:
    if entry.bytes is not None and all(0 <= byte < 256 for byte in entry.bytes):
        return bytes(entry.bytes)
    return entry.token.encode("utf-8", "replace")
