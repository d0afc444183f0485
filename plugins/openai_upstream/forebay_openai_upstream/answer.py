"""What the server says, as JSON → text, ends and figures of each choice.

Rules
- Figures are provisional while it streams: one output token per piece of text, since a piece holds at least one. What
  the server counts replaces them as soon as it says so, at the latest before the end is reported.
- They never exceed what was asked for: a server that counts nonsense cannot bill a tenant for it.
- An end is reported once, after everything that belongs to the request was read: the figures come behind it.
- Bounded by what was asked for, also what is said: a server that does not stop fills nobody's memory.
- A whole answer is read like an event with everything in it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from workers.protocol import FinishReason, TextLogprob

FINISHES: dict[str, FinishReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "eos_token": "stop",  # TGI's words for it
    "stop_sequence": "stop",
    "length": "length",
    "content_filter": "content_filter",
}
"""Ends that the gateway knows; it says itself that an answer holds calls. Another one is a failure: it is not made up
as one of these."""
TOKEN_CHARS, SPARE_CHARS = 256, 4096
"""What a token may spell at most on average, and what an answer may have besides: no tokenizer comes near."""
TOKEN_BYTES = 4
"""What a token is taken to have where nobody counted, as the gateway does (``EstimatedTokenizer``)."""
MAX_TOP = 21
"""Alternatives that are kept of a token's log probabilities: as many as can be asked for, and the token itself."""
NONSENSE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What reading somebody else's JSON may raise."""
CALL, ARGUMENTS, CALLED = '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>"
"""Calls of tools as text, in the form that the gateway reads back."""


class ServerError(Exception):
    """The server failed, or says what makes no sense. The text is for the operator's log."""


class ReportedError(ServerError):
    """It says itself that it failed, inside its answer."""

    def __init__(self, said: Any) -> None:
        super().__init__("it reported an error inside the stream")
        self.said = said
        """Its words: to be looked at (``refusals.py``), not to be passed on."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    """Text, or (Mistral's reasoning models) parts of text and thought."""
    tool_calls: list[_Call] | None = None
    refusal: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    """Its older name."""


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
    message: _Delta | None = None
    """In a whole answer, instead."""
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


_NOTHING = msgspec.Raw(b"null")


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _NOTHING
    error: Any = None
    object: Any = None


class _Embeddings(msgspec.Struct):
    data: msgspec.Raw = _NOTHING
    usage: msgspec.Raw = _NOTHING
    error: Any = None
    object: Any = None


_chunks = msgspec.json.Decoder(_Chunk)
_embeddings = msgspec.json.Decoder(_Embeddings)
_usages = msgspec.json.Decoder(_Usage | None)


@dataclass(slots=True)
class Choice:
    """One choice so far."""

    text: list[str] = field(default_factory=list)
    """New since the last report."""
    logprobs: list[TextLogprob] = field(default_factory=list)
    scored: int = 0
    """How many tokens have had theirs."""
    tokens: int = 0
    """Output tokens so far."""
    finish: FinishReason | None = None
    dropped: bool = False
    """Nobody wants more of it."""
    news: bool = False
    chars: int = 0
    """Of all its text."""
    call: int | None = None
    """The call that is being written; one ends where the next begins, or with the answer."""
    named: str | None = None
    """What the server calls it."""
    argued: bool = False
    """It has arguments; one without takes an empty object."""
    behind: str = ""
    """Said while a call was open: it goes behind the call, whose arguments it would spoil."""

    def calls(self, said: list[_Call]) -> str:
        """Pieces of calls as text. Raises ServerError for pieces that are out of order."""
        text = ""
        for piece in said:
            function = piece.function or _Function()
            # Some number all calls alike: there a name and an id of its own begin the next one.
            again = piece.index == self.call and function.name and piece.id and piece.id != self.named
            if again or piece.index != self.call:
                follows = again or piece.index == (0 if self.call is None else self.call + 1)
                if not function.name or not follows:
                    raise ServerError("a call of a tool begins in the middle")
                text += self.called() + CALL + msgspec.json.encode(function.name).decode() + ARGUMENTS
                self.call, self.named, self.argued = piece.index, piece.id, False
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
        self.counted = False
        """The server said how many tokens there are."""
        self.pieces = 0
        """What came of any choice so far: a server that goes on has more of it."""
        self._max_tokens = max_tokens
        self._max_prompt = max_prompt

    @property
    def finished(self) -> bool:
        """Whether every choice that is still wanted has its end."""
        return all(choice.finish is not None or choice.dropped for choice in self.choices)

    @property
    def short(self) -> bool:
        """Whether it has all of some choices and nothing of the others: it does not know ``n``."""
        ended = [choice for choice in self.choices if choice.finish is not None]
        silent = [choice for choice in self.choices if choice.finish is None and not choice.tokens]
        return bool(ended and silent) and len(ended) + len(silent) == len(self.choices)

    @property
    def begun(self) -> bool:
        """Whether there was any output, or the end of one."""
        return any(choice.tokens or choice.finish for choice in self.choices)

    def take(self, data: bytes) -> None:
        """One event of a stream. Raises ServerError."""
        try:
            chunk = _chunks.decode(data)
        except NONSENSE as error:
            raise ServerError(f"an event is not as expected: {type(error).__name__}") from None
        if chunk.error or chunk.object == "error":
            raise ReportedError(msgspec.json.decode(data))
        for said in chunk.choices or ():
            if not 0 <= said.index < len(self.choices):
                raise ServerError(f"choice {said.index} was not asked for")
            self._add(self.choices[said.index], said)
        self._counted(chunk.usage)

    def take_whole(self, data: bytes) -> None:
        """An answer in one piece, from a server that does not stream. Raises ServerError."""
        self.take(data)
        if not self.counted:  # it is one piece, but hardly one token
            for choice in self.choices:
                size = sum(len(text.encode()) for text in choice.text)
                choice.tokens = min(self._max_tokens, max(choice.tokens, size // TOKEN_BYTES))

    def take_embeddings(self, data: bytes) -> None:
        """The whole answer of an embeddings request: its ``data`` becomes the text. Raises ServerError."""
        try:
            body = _embeddings.decode(data)
        except NONSENSE as error:
            raise ServerError(f"the answer is not as expected: {type(error).__name__}") from None
        if body.error or body.object == "error":
            raise ReportedError(msgspec.json.decode(data))
        if bytes(body.data)[:1] != b"[":
            raise ServerError("the answer holds no list of vectors")
        self._counted(body.usage)
        [choice] = self.choices
        choice.text, choice.tokens, choice.finish, choice.news = [bytes(body.data).decode()], 0, "stop", True

    def _add(self, choice: Choice, said: _Choice) -> None:
        if choice.finish is not None:
            return
        self.pieces += 1
        delta = said.delta or said.message
        text = (_text(delta.content) or delta.refusal or "") if delta is not None else (said.text or "")
        news = bool(text) or (delta is not None and bool(delta.content))
        if choice.call is not None:
            choice.behind += text
            text = ""
        if delta is not None and delta.tool_calls:
            text += choice.calls(delta.tool_calls)
        if text or news or (delta is not None and (delta.reasoning or delta.reasoning_content)):
            choice.tokens = min(choice.tokens + 1, self._max_tokens)
            choice.news = True
        choice.chars += len(text)
        if choice.chars + len(choice.behind) > SPARE_CHARS + TOKEN_CHARS * self._max_tokens:
            raise ServerError(f"more text than {self._max_tokens} tokens can be")
        if text:
            choice.text.append(text)
        if said.logprobs is not None:
            self._score(choice, _scored(said.logprobs))
        if said.finish_reason is not None:
            if said.finish_reason not in FINISHES:
                raise ServerError(f"it ended with {said.finish_reason[:40]!r}, which cannot be passed on")
            choice.finish = FINISHES[said.finish_reason]
            if said.finish_reason != "length" or choice.behind:  # a call that something follows was not cut
                choice.text.append(choice.called())
            choice.news = True

    def _score(self, choice: Choice, scored: list[TextLogprob]) -> None:
        """Log probabilities, of as many tokens as there may be."""
        kept = scored[: max(0, self._max_tokens - choice.scored)]
        choice.scored += len(kept)
        choice.logprobs.extend(kept)

    def _counted(self, said: msgspec.Raw) -> None:
        """Figures in the server's words; what makes no sense is none: the answer is as good without them."""
        with contextlib.suppress(*NONSENSE):
            if (usage := _usages.decode(said)) is not None:
                self._count(usage)

    def _count(self, usage: _Usage) -> None:
        """The server's own figures; they are of the whole request, and go to the choices in proportion."""
        if usage.prompt_tokens is not None and usage.prompt_tokens > 0:
            self.prompt_tokens = min(usage.prompt_tokens, self._max_prompt)
            cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else 0
            self.cached_tokens = max(0, min(cached or 0, self.prompt_tokens))
        if usage.completion_tokens is not None and usage.completion_tokens > 0:
            self._spread(usage.completion_tokens)
            self.counted = True

    def _spread(self, total: int) -> None:
        left = total - sum(choice.tokens for choice in self.choices)
        for choice in self.choices:  # one choice takes all of it; several, as much as each may have
            more = max(0, min(left, self._max_tokens - choice.tokens))
            choice.tokens += more
            left -= more


def _text(content: str | list[Any] | None) -> str:
    """What is to be shown of it."""
    if not isinstance(content, list):
        return content or ""
    texts = (part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text")
    return "".join(text for text in texts if isinstance(text, str))


def _scored(logprobs: _Logprobs) -> list[TextLogprob]:
    if logprobs.content is not None:
        return [TextLogprob(_bytes(entry), entry.logprob, _alternatives(entry)) for entry in logprobs.content]
    tokens, values = logprobs.tokens or [], logprobs.token_logprobs or []
    tops = logprobs.top_logprobs or [None] * len(tokens)
    return [
        TextLogprob(token.encode(), value, [(name.encode(), at) for name, at in islice((top or {}).items(), MAX_TOP)])
        for token, value, top in zip(tokens, values, tops, strict=False)
        if value is not None
    ]


def _alternatives(entry: _Scored) -> list[tuple[bytes, float]]:
    return [(_bytes(top), top.logprob) for top in (entry.top_logprobs or [])[:MAX_TOP]]


def _bytes(entry: _Top) -> bytes:
    if entry.bytes is not None and all(0 <= byte < 256 for byte in entry.bytes):
        return bytes(entry.bytes)
    return entry.token.encode("utf-8", "replace")
