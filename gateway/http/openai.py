"""Answers in exactly the OpenAI API's shapes, whole or as stream chunks.

Rules
- One format object per request; it remembers which choices have begun (a chat choice begins with its role).
- Text and the finish reason come in separate chunks, as from OpenAI. Only ``stop`` and ``length`` are ever said; how a
  failed request ends is the pipeline's business.
- With ``include_usage`` every chunk has ``usage: null`` and the last one has no choices.
- The bytes of a stream are the format's, too (``stream``, ``closing``, ``failure``): not every endpoint frames them
  alike.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from gateway.callforms import TAGGED, CallForm, Calls
from gateway.choices import Alternative, ChoiceDelta, ScoredToken
from gateway.errors import ApiError
from gateway.http import sse
from gateway.http.ranking import best
from gateway.http.schemas import ChatRequest, Request
from gateway.toolcalls import CallPiece, CallReader, whole_calls
from policies.types import Usage
from workers.protocol import FinishReason

Json = dict[str, Any]
GOOD_ENDS = ("stop", "length", "content_filter")
"""How an answer ends that is one. The last comes from upstreams, whose filter cut it or kept it back."""
MIN_LOGPROB = -9999.0
"""What the API says for "impossible": JSON has no minus infinity."""


@lru_cache(256)
def fingerprint(revision: str) -> str:
    """``system_fingerprint`` of a model revision: changes when seeded answers may change."""
    return "fb_" + hashlib.sha256(revision.encode()).hexdigest()[:12]


def usage_body(usage: Usage) -> Json:
    """The ``usage`` object: what ran, and how much of the prompt came from the caller's own cache."""
    prompt = usage.prompt + usage.cached
    return {
        "prompt_tokens": prompt,
        "completion_tokens": usage.output,
        "total_tokens": prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


class Answer:
    """One choice, collected for an answer in one piece."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.scored: list[ScoredToken] = []
        self.prompt: list[ScoredToken] = []
        """Of the prompt, where it is repeated with its log probabilities; choice 0 has it for all."""
        self.finish: FinishReason | None = None
        self._pieces: list[str] = []

    def add(self, delta: ChoiceDelta) -> None:
        """Take what a message brought."""
        self._pieces.append(delta.text)
        self.scored.extend(delta.scored)
        self.prompt.extend(delta.prompt)
        self.finish = delta.finish or self.finish

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self._pieces)


def collect(deltas: Iterable[ChoiceDelta], n: int) -> list[Answer]:
    """The ``n`` choices of a finished request, in order. Deltas of one choice must be in order."""
    answers = [Answer(index) for index in range(n)]
    for delta in deltas:
        answers[delta.index].add(delta)
    return answers


class Format:
    """What both endpoints share."""

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        *,
        job_id: str,
        model: str,
        created: int,
        revision: str = "",
        logprobs: int | None = None,
        include_usage: bool = False,
        request: Request | None = None,
        echo: str = "",
        scored_prompt: int = 0,
        call_form: Callable[[], CallForm] = lambda: TAGGED,
    ) -> None:
        """``logprobs``: number of alternatives asked for, None for no log probabilities at all.

        ``request``: for formats that repeat some of it. ``echo``: what each text begins with, in formats that have it;
        ``scored_prompt``: of how many tokens, where their log probabilities are told. ``call_form``: in which form the
        answer holds calls of tools; asked when there is some of it.
        """
        self.id = f"{self.prefix}-{job_id}"
        self._base: Json = {
            "id": self.id,
            "object": self.object,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint(revision),
        }
        self._logprobs = logprobs
        self._include_usage = include_usage
        box = request.toolbox if isinstance(request, ChatRequest) else None
        self._calls = Calls(box, call_form) if box is not None and box.shown else None
        """Where texts may hold calls of tools."""

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """The stream objects for one delta: none when it shows nothing."""
        raise NotImplementedError

    def full(self, answers: Sequence[Answer], usage: Usage) -> Json:
        """The whole answer. Raises ValueError for a choice that did not end well: that is no answer."""
        return {**self._base, "choices": [self._choice(answer) for answer in answers], "usage": usage_body(usage)}

    def stream(self, deltas: Iterable[ChoiceDelta]) -> bytes:
        """The bytes of a stream for some deltas; empty where they show nothing."""
        return b"".join(sse.event(chunk) for delta in deltas for chunk in self.chunks(delta))

    def closing(self, usage: Usage) -> bytes:
        """The last bytes of a stream that succeeded."""
        return (sse.event(self.usage_chunk(usage)) if self._include_usage else b"") + sse.DONE

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        """The last bytes of a stream that did not."""
        return sse.error_event(error)

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream that asked for usage."""
        return {**self._base, "object": self.chunk_object, "choices": [], "usage": usage_body(usage)}

    def _choice(self, answer: Answer) -> Json:
        raise NotImplementedError

    def _chunk(self, index: int, content: Json, reason: str | None, logprobs: Json | None) -> Json:
        chunk = {
            **self._base,
            "object": self.chunk_object,
            "choices": [{"index": index, **content, "logprobs": logprobs, "finish_reason": reason}],
        }
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    @staticmethod
    def _reason(answer: Answer) -> str:
        if answer.finish not in GOOD_ENDS:
            raise ValueError(f"choice {answer.index} ended with {answer.finish!r}, which is no answer")
        return answer.finish


class ChatFormat(Format):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self._begun: set[int] = set()
        self._readers: dict[int, CallReader] = {}

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """Role first, then text and calls of tools, then the finish reason."""
        if delta.empty:
            return []
        out = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            opening = {"delta": {"role": "assistant", "content": "", "refusal": None}}
            out.append(self._chunk(delta.index, opening, None, None))
        reader = None
        if self._calls is None:
            if delta.text or delta.scored:
                out.append(self._part(delta, {"content": delta.text}))
        else:
            reader = self._readers.setdefault(delta.index, self._calls.reader())
            out += self._parts(delta, reader, self._calls)
        if delta.finish in GOOD_ENDS:
            out.append(self._chunk(delta.index, {"delta": {}}, _reason(delta.finish, reader), None))
        return out

    def _part(self, delta: ChoiceDelta, said: Json, *, scored: bool = True) -> Json:
        return self._chunk(delta.index, {"delta": said}, None, self._scores(delta.scored if scored else ()))

    def _parts(self, delta: ChoiceDelta, reader: CallReader, calls: Calls) -> list[Json]:
        """Content and pieces of calls. The first chunk has the log probabilities of all that the delta brought."""
        shown = [reader.feed(delta.text), *([reader.finish()] if delta.finish is not None else [])]
        content = "".join(part.content for part in shown)
        parts: list[Json] = [{"content": content}] if content else []
        parts += [{"tool_calls": [self._call(calls, delta.index, piece)]} for part in shown for piece in part.calls]
        if not parts and delta.scored:
            parts.append({})
        return [self._part(delta, said, scored=place == 0) for place, said in enumerate(parts)]

    def _call(self, calls: Calls, choice: int, piece: CallPiece) -> Json:
        if piece.name is None:
            return {"index": piece.index, "function": {"arguments": piece.arguments}}
        return {"index": piece.index, **self._whole_call(calls, choice, piece)}

    def _whole_call(self, calls: Calls, choice: int, piece: CallPiece) -> Json:
        return {
            "id": calls.call_id(self.id, choice, piece.index),
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }

    def _choice(self, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.text, "refusal": None}
        reader = None
        if self._calls is not None:
            content, calls = whole_calls(reader := self._calls.reader(), answer.text)
            message["content"] = content or (None if calls else "")
            if calls:
                message["tool_calls"] = [self._whole_call(self._calls, answer.index, call) for call in calls]
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._scores(answer.scored),
            "finish_reason": _reason(self._reason(answer), reader),
        }

    def _scores(self, scored: Sequence[ScoredToken]) -> Json | None:
        if self._logprobs is None:
            return None
        return {"content": [{**_entry(s), "top_logprobs": [_entry(a) for a in s.top]} for s in scored], "refusal": None}


class CompletionFormat(Format):
    """``/v1/completions``."""

    prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, *, echo: str = "", scored_prompt: int = 0, **base: Any) -> None:
        super().__init__(**base)
        self._echo = echo
        self._scored_prompt = scored_prompt
        self._early: list[ChoiceDelta] = []
        """News of choices that were faster than the prompt's log probabilities, which choice 0 brings for all."""
        self._echoed: set[int] = set()
        self._prompt: list[ScoredToken] = []
        request = base.get("request")
        self._best = request.n if isinstance(request, Request) and request.drawn is not None else None
        """How many of the answers are given."""

    def full(self, answers: Sequence[Answer], usage: Usage) -> Json:
        """The whole answer: of more than were asked for, the likeliest."""
        self._prompt = answers[0].prompt
        return super().full(answers if self._best is None else best(answers, self._best), usage)

    def chunks(self, delta: ChoiceDelta) -> list[Json]:
        """The prompt where it is repeated, text, then the finish reason."""
        self._prompt += delta.prompt
        if len(self._prompt) < self._scored_prompt:
            self._early.append(delta)
            return []
        told, self._early = [*self._early, delta], []
        return [chunk for one in told for chunk in self._told(one)]

    def _told(self, delta: ChoiceDelta) -> list[Json]:
        if not delta.text and not delta.scored and delta.finish is None:
            return []
        out = []
        if (self._echo or self._prompt) and delta.index not in self._echoed:
            self._echoed.add(delta.index)
            scores = self._scores((), self._prompt) if self._prompt else None
            out.append(self._chunk(delta.index, {"text": self._echo}, None, scores))
        if delta.text or delta.scored:
            out.append(self._chunk(delta.index, {"text": delta.text}, None, self._scores(delta.scored)))
        if delta.finish in GOOD_ENDS:
            out.append(self._chunk(delta.index, {"text": ""}, delta.finish, None))
        return out

    def _choice(self, answer: Answer) -> Json:
        return {
            "index": answer.index,
            "text": self._echo + answer.text,
            "logprobs": self._scores(answer.scored, self._prompt),
            "finish_reason": self._reason(answer),
        }

    def _scores(self, scored: Sequence[ScoredToken], prompt: Sequence[ScoredToken] = ()) -> Json | None:
        """Of the answer's tokens, behind the prompt's where it is repeated: its first has nothing to be judged by."""
        if self._logprobs is None:
            return None
        first, judged = prompt[:1], [*prompt[1:], *scored]
        shift = len(self._echo)
        return {
            "tokens": [s.text for s in (*prompt, *scored)],
            "token_logprobs": [*(None for _ in first), *(finite(s.logprob) for s in judged)],
            "top_logprobs": [*(None for _ in first), *map(_ranked, judged)] if self._logprobs else None,
            "text_offset": [*(s.offset for s in prompt), *(shift + s.offset for s in scored)],
        }


def _reason(finish: str, reader: CallReader | None) -> str:
    """``tool_calls`` for an answer that ended well with calls."""
    return "tool_calls" if finish == "stop" and reader is not None and reader.called else finish


def _entry(token: Alternative) -> Json:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.data)}


def _ranked(scored: ScoredToken) -> dict[str, float]:
    """The alternatives, and the chosen token where it is not among them."""
    ranked = {alternative.text: finite(alternative.logprob) for alternative in scored.top}
    return ranked | {scored.text: finite(scored.logprob)}


def finite(logprob: float) -> float:
    """A log probability as JSON can hold it."""
    return max(logprob, MIN_LOGPROB) if not math.isnan(logprob) else MIN_LOGPROB
