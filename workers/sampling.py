"""How a request's tokens are picked: part of ``Generate`` (``protocol.py``)."""

from __future__ import annotations

from typing import Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to pick tokens. Defaults are the OpenAI API's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    seed: int | None = None
    """Choice ``i`` of a request draws from the stream of ``seed + i``: n choices equal n seeded single runs."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt and output, multiplies the negative ones; 1 = off."""
    typical_p: float = 1.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Rows of tokens that the output never completes."""
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """Number of top alternatives per token (0 = only the chosen one's); None = off."""
    prompt_logprobs: bool = False
    """With ``logprobs``: of the prompt's tokens too."""
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end tokens. Stop *strings* are the gateway's: it sees the text."""


class Beams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Search for the likeliest answers instead of drawing them. ``SamplingParams`` then counts for its ends only."""

    width: int
    """Beams: lines that are followed at once, at least ``Generate.n``."""
    length_penalty: float = 1.0
    """An answer's score is the sum of its log probabilities ÷ length ** this; above 0 favours long answers."""
    early_stopping: bool | Literal["never"] = False
    """True: end with ``width`` answers. False: when the best beam, as long as it is, cannot beat the worst of them.
    ``never``: when it could not at whatever length."""
