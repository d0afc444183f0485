"""Log probabilities of known tokens (prompts), as ``engine/scoring.py`` asks for them."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine import scoring
from workers.engine.plan import Chunk
from workers.protocol import TokenLogprob

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Scored:
    """One chunk's rows that score."""

    rows: range
    """Among the rows whose logits are wanted."""
    tokens: list[int]
    """What each of them scores."""
    top: int
    """Alternatives beside it."""


def scored(chunk: Chunk, wanted: int) -> Scored | None:
    """The chunk's rows that score, if any; ``wanted`` rows of logits come before them."""
    rows = scoring.rows(chunk)
    if not rows:
        return None
    first = range(wanted, wanted + len(rows))
    return Scored(first, scoring.targets(chunk), chunk.sequence.params.logprobs or 0)


def score(logits: Tensor, every: Items[Scored]) -> list[list[TokenLogprob]]:
    """The model's own log probabilities. ``logits`` fp32 [rows wanted, vocab] is not changed.

    NaN counts as impossible; so does everything in a row without a finite logit.
    """
    found = []
    for one in every:
        part = logits[one.rows.start : one.rows.stop].nan_to_num(nan=-math.inf, posinf=_LARGEST, neginf=-math.inf)
        chances = part.log_softmax(dim=-1).nan_to_num_(nan=-math.inf, neginf=-math.inf)
        tokens = torch.tensor(one.tokens, device=logits.device)
        own = chances.gather(1, tokens[:, None])[:, 0].tolist()
        best = chances.topk(min(one.top, chances.shape[1]), dim=-1)
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        found.append(
            [
                TokenLogprob(token, chance, list(zip(ids, values, strict=True)))
                for token, chance, (ids, values) in zip(one.tokens, own, tops, strict=True)
            ]
        )
    return found
