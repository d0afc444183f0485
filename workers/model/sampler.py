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
from torch.nn.functional import pad

from workers.engine.beams import Candidate
from workers.engine.plan import Sampled, SequenceFault
from workers.engine.sequence import Sequence
from workers.model.adjust import adjust
from workers.model.masks import forbid
from workers.model.philox import uniforms
from workers.protocol import TokenLogprob

_TOP_P_WIDTH = 64
"""Candidates sorted at first for top_p, eight times as many where these do not hold the mass."""
COLDEST = 1e-30
"""Temperatures below are as cold: fp32 knows no smaller ones."""
_PIECE = 64
"""Tokens whose probabilities are summed before anything is accumulated: a sum is many times quicker."""


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
    random = [row for row, one in enumerate(samplers) if one.params.temperature > 0]
    if len(random) == len(samplers):
        tokens = _draw(logits, samplers)
    else:
        tokens = logits.argmax(dim=-1)
        if random:
            tokens[random] = _draw(logits[random], [samplers[row] for row in random])
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
    """Draw by inverting the cumulative distribution at one uniform number per row. ``logits`` is overwritten.

    Probabilities are fp32, sums of them fp64: first of pieces, then within the piece where the number falls.
    A row without any possible token gets some token.
    """
    device = logits.device
    coldest = [max(one.params.temperature, COLDEST) for one in samplers]
    # The maximum goes first, so that a tiny temperature cannot make inf - inf.
    scaled = logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(torch.tensor(coldest, device=device)[:, None])
    if any(one.params.top_k > 0 or one.params.top_p < 1 or one.params.min_p > 0 for one in samplers):
        scaled.masked_fill_(scaled < _cut(scaled, samplers)[:, None], -math.inf)
    _keep_typical(scaled, samplers)
    chances = scaled.exp_()
    spare = -chances.shape[1] % _PIECE
    pieces = (pad(chances, (0, spare)) if spare else chances).view(len(samplers), -1, _PIECE)
    ends = pieces.sum(dim=-1, dtype=torch.float64).cumsum_(dim=-1)
    total = ends[:, -1]
    number = torch.from_numpy(uniforms((one.seed for one in samplers), (len(one.tokens) for one in samplers)))
    target = torch.minimum(number.to(device) * total, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    place = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = torch.where(place > 0, ends.gather(1, (place - 1).clamp_(min=0)), 0.0)
    own = pieces.gather(1, place[:, :, None].expand(-1, -1, _PIECE))[:, 0]
    inside = (own.double().cumsum_(dim=-1) + before <= target).sum(dim=-1)
    # Sums in another order differ in their last bits: what falls behind the piece is its last possible token.
    last = _PIECE - 1 - (own > 0).flip(-1).byte().argmax(dim=-1)
    found = place[:, 0] * _PIECE + torch.minimum(inside, last)
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
        part = scaled if len(rows) == len(scaled) else scaled[rows]
        cut[rows] = _top_p_cut(part, cut[rows], wanted)
    if rows := rows_where(lambda one: one.params.min_p > 0):
        floors = [math.log(min(samplers[row].params.min_p, 1.0)) for row in rows]
        cut[rows] = torch.maximum(cut[rows], torch.tensor(floors, device=scaled.device))
    return cut


def _top_p_cut(scaled: Tensor, floor: Tensor, wanted: Tensor) -> Tensor:
    """Smallest logit of the smallest set of most probable tokens that holds mass ``wanted`` (arXiv:1904.09751), of
    those that are at least ``floor``."""
    vocab, width = scaled.shape[1], _TOP_P_WIDTH
    chances = scaled.exp()
    if bool((floor > -math.inf).any()):
        chances.masked_fill_(scaled < floor[:, None], 0.0)
    total = chances.sum(dim=-1, dtype=torch.float64)
    cut = floor.clone()
    pending = torch.arange(len(scaled), device=scaled.device)
    while len(pending):
        width = min(width, vocab)
        best = (scaled if len(pending) == len(scaled) else scaled[pending]).topk(width, dim=-1).values
        mass = best.exp().double()
        mass.masked_fill_(best < floor[pending][:, None], 0.0)
        before = mass.cumsum(dim=-1) - mass
        kept = (before < (wanted[pending] * total[pending])[:, None]).sum(dim=-1).clamp_(min=1)
        done = torch.logical_or(kept < width, torch.full_like(kept, width == vocab, dtype=torch.bool))
        found = torch.maximum(best.gather(1, kept[:, None] - 1)[:, 0], floor[pending])
        cut[pending[done]] = found[done]
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
