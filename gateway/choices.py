"""From one sequence's tokens to the text of one choice: never half a character, stop strings removed, billing exact.

Rules
- Text and figures depend on the tokens alone, not on how they were grouped into messages.
- A token is billed when it was produced before the choice ended: the token that completes a stop string is, those that
  the engine produced after it (it cannot know) are not. An end token is billed and has no text.
- A choice ends once: by the engine's word, or here by a stop string (``stopped``; the engine has to be told).
  Afterwards everything fed is ignored.
- A token's log probability goes out with the end of its text, so the entries and the text of a stream stay aligned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from gateway.stops import StopMatcher
from workers.protocol import FinishReason, SequenceOutput, TokenLogprob

if TYPE_CHECKING:
    from gateway.echo import PromptScores


class Decoder(Protocol):
    """What is needed of ``workers.tokenizer.IncrementalDecoder``."""

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is incomplete, or for a special token."""
        ...

    def finish(self) -> str:
        """What is left when no more tokens come."""
        ...


@dataclass(frozen=True, slots=True)
class Alternative:
    """One token of a top list. ``data`` are its bytes, which may be part of a character."""

    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The bytes as text, or ``bytes:\\xe2\\x82`` when they are no whole character, to tell tokens apart."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


@dataclass(frozen=True, slots=True)
class ScoredToken(Alternative):
    """A token with its log probability, the alternatives, and where its text starts in the choice's."""

    top: tuple[Alternative, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one message brought for one choice."""

    index: int
    text: str = ""
    billed: int = 0
    """Tokens billed by it; ``ChoiceStream.billed`` is their sum."""
    scored: tuple[ScoredToken, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    """With ``finish="error"``: a code of ``workers.protocol.ERRORS``, or ``lost_output``."""
    prompt: tuple[ScoredToken, ...] = ()
    """Tokens of the prompt, where it is repeated with them (``echo.py``)."""
    stopped: bool = False
    """Ended here by a stop string while the engine still runs: cancel the sequence."""

    @property
    def empty(self) -> bool:
        """Nothing that a caller could see."""
        return not self.text and not self.scored and self.finish is None and not self.prompt


class ChoiceStream:
    """One choice of one request. Not thread-safe; one per attempt."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        index: int = 0,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        token_bytes: Callable[[int], bytes] | None = None,
        prompt: PromptScores | None = None,
        silent: bool = False,
    ) -> None:
        """``token_bytes`` switches log probabilities on. Stop strings begin after the first ``min_tokens`` tokens.

        ``silent``: no output was asked for. What is made all the same is neither shown nor billed.
        """
        self.index = index
        self.billed = 0
        """Output tokens so far that are billed and charged (cumulative)."""
        self.finish: FinishReason | None = None
        self._decoder = decoder
        self._stops = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._token_bytes = token_bytes
        self._prompt = prompt
        self._silent = silent
        self._received = 0
        self._decoded = 0
        """Characters decoded so far, shown or held back."""
        self._shown = 0
        self._waiting: deque[tuple[int, ScoredToken]] = deque()
        """Scored tokens with the length of text that must be shown before they are."""

    def take(self, output: SequenceOutput) -> ChoiceDelta:
        """Feed a worker's message. Its counter is cumulative: what was seen is skipped, a gap ends the choice."""
        if self._prompt is None or self.finish is not None:
            return self._taken(output)
        return replace(self._taken(output), prompt=self._prompt.take(output))

    def _taken(self, output: SequenceOutput) -> ChoiceDelta:
        if self.finish is not None:
            return ChoiceDelta(self.index)
        if self._silent:
            return self._close([], 0, "length" if output.finish == "stop" else output.finish, output.error)
        new = max(0, output.output_tokens - self._received)
        if output.text is not None:
            return self._take_text(output, output.text, new)
        if new > len(output.tokens):
            return self._close([], 0, "error", "lost_output")
        skip = len(output.tokens) - new
        return self.feed(output.tokens[skip:], output.logprobs[skip:], output.finish, output.error)

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] = (),
        finish: FinishReason | None = None,
        error: str | None = None,
    ) -> ChoiceDelta:
        """Feed the next tokens (``logprobs`` parallel to them), and how the sequence ended if it did."""
        if self.finish is not None:
            return ChoiceDelta(self.index)
        pieces: list[str] = []
        billed = 0
        for position, token in enumerate(tokens):
            self._received += 1
            billed += 1
            start = self._decoded
            piece = self._decoder.push(token)
            self._decoded += len(piece)
            if self._token_bytes is not None and position < len(logprobs):
                scored = self._scored(logprobs[position], start, self._token_bytes)
                self._waiting.append((max(self._decoded, start + 1), scored))
            pieces.append(self._show(piece))
            if self._stops.stopped:
                break
        return self._close(pieces, billed, finish, error)

    def _take_text(self, output: SequenceOutput, text: str, new: int) -> ChoiceDelta:
        """An upstream's message: its scored tokens spell its text, one after the other."""
        self._received += new
        start = self._decoded
        self._decoded += len(text)
        for entry in output.text_logprobs if self._token_bytes is not None else ():
            top = tuple(Alternative(token, logprob) for token, logprob in entry.top)
            scored = ScoredToken(entry.token, entry.logprob, top, start)
            start = min(self._decoded, start + len(entry.token.decode(errors="ignore")))
            self._waiting.append((start, scored))
        return self._close([self._show(text)], new, output.finish, output.error)

    def _show(self, piece: str) -> str:
        if self._received > self._min_tokens:
            piece = self._stops.push(piece)
        self._shown += len(piece)
        return piece

    def _close(self, pieces: list[str], billed: int, finish: FinishReason | None, error: str | None) -> ChoiceDelta:
        """Make the delta; end the choice when the engine ended it or a stop string did."""
        self.billed += billed
        if finish is not None and not self._stops.stopped:
            self._drop_end_token(finish)
            rest = self._decoder.finish()
            self._decoded += len(rest)
            pieces.append(self._show(rest))
            if not self._stops.stopped:
                held = self._stops.flush()
                self._shown += len(held)
                pieces.append(held)
        stopped_early = self._stops.stopped and finish is None
        if self._stops.stopped:
            finish, error = "stop", None
        elif finish == "error":
            error = error or "internal"
        self.finish = finish
        return ChoiceDelta(
            self.index, "".join(pieces), billed, tuple(self._released()), finish, error, stopped=stopped_early
        )

    def _scored(self, entry: TokenLogprob, start: int, token_bytes: Callable[[int], bytes]) -> ScoredToken:
        top = tuple(Alternative(token_bytes(token), logprob) for token, logprob in entry.top)
        return ScoredToken(token_bytes(entry.token), entry.logprob, top, start)

    def _drop_end_token(self, finish: FinishReason) -> None:
        """The end token has no text and is no part of the answer: the API lists no log probability for it."""
        if finish == "stop" and self._waiting and self._waiting[-1][0] > self._decoded:
            self._waiting.pop()

    def _released(self) -> list[ScoredToken]:
        """Scored tokens whose text is shown by now; at the end also those that a stop string cut in the middle."""
        out: list[ScoredToken] = []
        while self._waiting:
            until, scored = self._waiting[0]
            cut_inside = self.finish is not None and (not self._stops.stopped or scored.offset < self._shown)
            if until > self._shown and not cut_inside:
                break
            out.append(scored)
            self._waiting.popleft()
        return out
