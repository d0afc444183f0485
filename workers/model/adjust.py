"""What requests change about logits before a token is chosen: penalties, bias, bans; for all rows of a step at once."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from workers.engine.sequence import Sequence


def adjust(logits: Tensor, samplers: list[Sequence]) -> None:
    """Penalties, bias, the ban on early ends and on words, in place; rows without any are not touched.

    ``logits`` fp32 [samplers, vocab], contiguous.
    """
    vocab = logits.shape[1]
    _penalise_repetition(logits, samplers)
    _subtract_penalties(logits, samplers)
    rows: list[int] = []
    columns: list[int] = []
    amounts: list[float] = []
    for row, one in enumerate(samplers):
        for token, amount in one.params.logit_bias.items():
            if 0 <= token < vocab:
                rows.append(row)
                columns.append(token)
                amounts.append(amount)
        if one.output_len < one.params.min_tokens:
            banned = {*one.params.stop_token_ids, *(() if one.params.ignore_eos else one.eos)}
            for token in sorted(banned):
                if 0 <= token < vocab:
                    rows.append(row)
                    columns.append(token)
                    amounts.append(-math.inf)
        for token in _completing(one):
            if 0 <= token < vocab:
                rows.append(row)
                columns.append(token)
                amounts.append(-math.inf)
    if rows:
        place = torch.tensor(rows, device=logits.device), torch.tensor(columns, device=logits.device)
        logits.index_put_(place, torch.tensor(amounts, dtype=logits.dtype, device=logits.device), accumulate=True)


def _subtract_penalties(logits: Tensor, samplers: list[Sequence]) -> None:
    """logit -= frequency_penalty * count + presence_penalty, for every token already in the output (OpenAI API)."""
    vocab = logits.shape[1]
    rows = [row for row, one in enumerate(samplers) if one.params.presence_penalty or one.params.frequency_penalty]
    pairs = [row * vocab + token for row in rows for token in samplers[row].output]
    if not pairs:
        return
    device = logits.device
    place, counts = torch.unique(torch.tensor(pairs, device=device), return_counts=True)
    lines = place // vocab
    presence, frequency = (
        torch.tensor([getattr(one.params, name) for one in samplers], dtype=logits.dtype, device=device)[lines]
        for name in ("presence_penalty", "frequency_penalty")
    )
    logits.view(-1)[place] -= frequency * counts + presence


def _penalise_repetition(logits: Tensor, samplers: list[Sequence]) -> None:
    """Tokens of prompt and output: positive logits ÷ penalty, negative ones × penalty (arXiv:1909.05858)."""
    vocab = logits.shape[1]
    rows = [row for row, one in enumerate(samplers) if one.params.repetition_penalty != 1]
    if not rows:
        return
    device = logits.device
    tokens = [torch.tensor(samplers[row].tokens, device=device) for row in rows]
    lengths = torch.tensor([len(one) for one in tokens], device=device)
    place = torch.cat(tokens) + torch.tensor(rows, device=device).mul_(vocab).repeat_interleave(lengths)
    factor = torch.tensor(
        [samplers[row].params.repetition_penalty for row in rows], dtype=logits.dtype, device=device
    ).repeat_interleave(lengths)
    flat = logits.view(-1)
    before = flat[place]  # read before any is written: a token that occurs twice is penalised once
    after = torch.where(before > 0, before / factor, before * factor)
    # A penalty of next to nothing makes its tokens as likely as can be, not infinitely: nothing could be drawn then. Of
    # one that fp32 takes for 0, what cannot be drawn (-inf) makes NaN, and still cannot.
    flat[place] = after.nan_to_num_(nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)


def _completing(one: Sequence) -> Iterator[int]:
    """Tokens that would complete a banned row."""
    output, tokens = one.output_len, one.tokens
    for word in one.params.bad_words:
        before = len(word) - 1
        if 0 <= before <= output and tuple(tokens[len(tokens) - before :]) == word[:-1]:
            yield word[-1]
