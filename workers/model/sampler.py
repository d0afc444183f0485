"""Logits → tokens, for all samplers of a step at once.

Order per row: penalties, logit bias, bans (``adjust.py``), grammar (``masks.py``) → (greedy: argmax) → temperature →
top_k → top_p over what top_k left → min_p → typical_p over what all of them left → draw. Log probabilities are those of
the model's own distribution, before any of it. Beams tell their likeliest tokens by that distribution
(``engine/beams.py`` chooses).

Rules
- A row's token depends on its logits, its parameters, its seed and its position only: never on the other rows.
- top_k and top_p cut at a logit, and whatever equals the cut stays: equal logits are never split by an arbitrary order.
- What a grammar forbids is -inf before anything is drawn. A row whose grammar failed or leaves no token gets none, and
  the reason; this is the only place that waits for a grammar.
- NaN counts as -inf, +inf as the largest number; unknown token ids in a bias are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from workers.engine.beams import Candidate
from workers.engine.plan import Sampled, SequenceFault
from workers.engine.sequence import Sequence
from workers.model.adjust import adjust
from workers.model.masks import forbid
from workers.model.philox import uniforms
from workers.protocol import TokenLogprob

_TOP_P_WIDTH = 1024
"""Candidates sorted at first for top_p; most distributions hold their mass there, a full sort costs milliseconds."""


def sample(logits: Tensor, samplers: list[Sequence]) -> list[Sampled]:
    """One token for every sampler, candidates for a beam. ``logits`` fp32 [samplers, vocab] is overwritten.

    Raises SequenceFault naming the samplers whose row has no finite logit: the model is broken for them, not unlucky.
    """
    if not samplers:
        return []
    if not bool(logits.amax(dim=-1).isfinite().all()):
        broken = (~logits.isfinite().any(dim=-1)).tolist()
        if any(broken):
            named = tuple(one for one, bad in zip(samplers, broken, strict=True) if bad)
            raise SequenceFault("no finite logit", named)
        logits = logits.nan_to_num_(nan=-math.inf, posinf=torch.finfo(logits.dtype).max, neginf=-math.inf)
    reporting = [row for row, one in enumerate(samplers) if one.params.logprobs is not None]
    raw = logits[reporting].log_softmax(dim=-1) if reporting else None
    beams = [row for row, one in enumerate(samplers) if one.search is not None]
    likeliest = _candidates(logits[beams], [samplers[row] for row in beams]) if beams else []
    adjust(logits, samplers)
    stuck = forbid(logits, samplers)
    tokens = logits.argmax(dim=-1)
    random = [row for row, one in enumerate(samplers) if one.params.temperature > 0]
    if random:
        drawn = _draw(logits[random], [samplers[row] for row in random])
        # A row without any possible token keeps argmax's answer instead of the draw's.
        possible = logits[random].amax(dim=-1) > -math.inf
        tokens[random] = torch.where(possible, drawn, tokens[random])
    chosen = tokens.tolist()
    results = [Sampled([token]) for token in chosen]
    if raw is not None:
        for row, report in zip(reporting, _logprobs(raw, tokens[reporting], samplers, reporting), strict=True):
            results[row].logprobs.append(report)
    for row, candidates in zip(beams, likeliest, strict=True):
        results[row] = Sampled([], candidates=candidates)
    for row in stuck:
        results[row] = Sampled([], error="grammar")
    return results


def _candidates(logits: Tensor, beams: list[Sequence]) -> list[list[Candidate]]:
    """The likeliest tokens of each row with their log probabilities, as many as its search asks for."""
    wanted = [one.search.candidates if one.search is not None else 0 for one in beams]
    best = logits.log_softmax(dim=-1).topk(max(wanted), dim=-1)
    rows = zip(wanted, best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(ids[:count], values[:count], strict=True)) for count, ids, values in rows]


def _draw(logits: Tensor, samplers: list[Sequence]) -> Tensor:
    """Draw by inverting the cumulative distribution at one uniform number per row, in double precision."""
    device = logits.device
    params = [one.params for one in samplers]
    temperature = torch.tensor([one.temperature for one in params], dtype=torch.float64, device=device)
    # The maximum goes first, so that a tiny temperature cannot make inf - inf.
    scaled = ((logits - logits.amax(dim=-1, keepdim=True)).double() / temperature[:, None]).float()
    scaled.masked_fill_(scaled < _cut(scaled, samplers)[:, None], -math.inf)
    _keep_typical(scaled, samplers)
    cumulative = scaled.exp().double().cumsum(dim=-1)
    total = cumulative[:, -1]
    number = torch.from_numpy(uniforms((one.seed for one in samplers), (len(one.tokens) for one in samplers)))
    target = torch.minimum(number.to(device) * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return found.clamp_(max=logits.shape[1] - 1)


def _cut(scaled: Tensor, samplers: list[Sequence]) -> Tensor:
    """fp32 [rows]: the smallest scaled logit that top_k, top_p and min_p all keep. Each row's maximum is 0."""
    cut = torch.full((len(samplers),), -math.inf, device=scaled.device)
    vocab = scaled.shape[1]

    def rows_where(wanted: Callable[[Sequence], bool]) -> list[int]:
        return [row for row, one in enumerate(samplers) if wanted(one)]

    if rows := rows_where(lambda one: 0 < one.params.top_k < vocab):
        counts = torch.tensor([samplers[row].params.top_k for row in rows], device=scaled.device)
        best = scaled[rows].topk(int(counts.max()), dim=-1).values
        cut[rows] = best.gather(1, counts[:, None] - 1)[:, 0]
    if rows := rows_where(lambda one: one.params.top_p < 1):
        wanted = torch.tensor([samplers[row].params.top_p for row in rows], dtype=torch.float64, device=scaled.device)
        cut[rows] = _top_p_cut(scaled[rows].masked_fill(scaled[rows] < cut[rows][:, None], -math.inf), wanted)
    if rows := rows_where(lambda one: one.params.min_p > 0):
        floors = [math.log(min(samplers[row].params.min_p, 1.0)) for row in rows]
        cut[rows] = torch.maximum(cut[rows], torch.tensor(floors, device=scaled.device))
    return cut


def _top_p_cut(scaled: Tensor, wanted: Tensor) -> Tensor:
    """Smallest logit of the smallest set of most probable tokens that holds mass ``wanted`` (arXiv:1904.09751)."""
    vocab, width = scaled.shape[1], _TOP_P_WIDTH
    total = scaled.exp().sum(dim=-1, dtype=torch.float64)
    cut = torch.full((len(scaled),), -math.inf, device=scaled.device)
    pending = torch.arange(len(scaled), device=scaled.device)
    while len(pending):
        width = min(width, vocab)
        best = scaled[pending].topk(width, dim=-1).values
        before = best.exp().double().cumsum(dim=-1) - best.exp().double()
        kept = (before < (wanted[pending] * total[pending])[:, None]).sum(dim=-1).clamp_(min=1)
        done = torch.logical_or(kept < width, torch.full_like(kept, width == vocab, dtype=torch.bool))
        cut[pending[done]] = best.gather(1, kept[:, None] - 1)[:, 0][done]
        pending, width = pending[~done], width * 8
    return cut


def _keep_typical(scaled: Tensor, samplers: list[Sequence]) -> None:
    """Locally typical sampling (arXiv:2202.00666), in place: of the tokens left, the smallest set with mass typical_p
    whose surprise is closest to the distribution's entropy. Tokens that are equally close stay together."""
    rows = [row for row, one in enumerate(samplers) if one.params.typical_p < 1]
    if not rows:
        return
    part = scaled[rows].double()
    surprise = -part.log_softmax(dim=-1)
    chance = part.softmax(dim=-1)
    entropy = (surprise * chance).nansum(dim=-1, keepdim=True)
    closest, order = (surprise - entropy).abs().sort(dim=-1)
    wanted = torch.tensor([samplers[row].params.typical_p for row in rows], dtype=torch.float64, device=scaled.device)
    last = (chance.gather(1, order).cumsum(dim=-1) < wanted[:, None]).sum(dim=-1).clamp_(max=scaled.shape[1] - 1)
    limit = closest.gather(1, last[:, None])
    scaled[rows] = scaled[rows].masked_fill((surprise - entropy).abs() > limit, -math.inf)


def _logprobs(raw: Tensor, tokens: Tensor, samplers: list[Sequence], rows: list[int]) -> list[TokenLogprob]:
    """Chosen token and best alternatives of every reporting row. ``raw`` [len(rows), vocab] are log probabilities."""
    wanted = [min(samplers[row].params.logprobs or 0, raw.shape[1]) for row in rows]
    best = raw.topk(max(wanted), dim=-1)
    chosen = raw.gather(1, tokens[:, None])[:, 0].tolist()
    ids, values = best.indices.tolist(), best.values.tolist()
    return [
        TokenLogprob(token, chosen[line], list(zip(ids[line][:count], values[line][:count], strict=True)))
        for line, (token, count) in enumerate(zip(tokens.tolist(), wanted, strict=True))
    ]
