"""The prompt as a completion repeats it (``echo``): its text, and with ``logprobs`` its tokens with theirs.

Rules
- Every token of the prompt has an entry, one without text (a begin token) as well, so that entries and the ids that
  were sent can be counted off against each other. The first has no log probability: nothing stands before it.
- Entries come from the worker that runs the attempt, counted like output: what was seen is skipped. They are as many as
  the prompt has tokens when the first token of the answer comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.choices import Alternative, Decoder, ScoredToken
from workers.protocol import SequenceOutput


def echoed(prompt: str | Sequence[int], decoder: Decoder) -> str:
    """The prompt's text; ids are told as their text."""
    return prompt if isinstance(prompt, str) else "".join([*map(decoder.push, prompt), decoder.finish()])


class PromptScores:
    """Of one attempt of a request."""

    def __init__(self, tokens: Sequence[int], decoder: Decoder, token_bytes: Callable[[int], bytes]) -> None:
        self._tokens = tokens
        self._decoder = decoder
        self._token_bytes = token_bytes
        self._told = 0
        """Tokens whose entries were handed out."""
        self._offset = 0

    def take(self, output: SequenceOutput) -> tuple[ScoredToken, ...]:
        """The entries that a worker's message brings; with the first one the prompt's first token."""
        entries = [] if self._told else [self._entry(self._tokens[0], 0.0, ())]
        new = max(0, output.prompt_scored + 1 - self._told)
        for score in output.prompt_logprobs[max(0, len(output.prompt_logprobs) - new) :]:
            top = tuple(Alternative(self._token_bytes(token), logprob) for token, logprob in score.top)
            entries.append(self._entry(score.token, score.logprob, top))
        return tuple(entries)

    def _entry(self, token: int, logprob: float, top: tuple[Alternative, ...]) -> ScoredToken:
        entry = ScoredToken(self._token_bytes(token), logprob, top, self._offset)
        self._offset += len(self._decoder.push(token))
        self._told += 1
        return entry
