"""Beam search over the engine as it is: every step asks for each beam's next tokens, and keeps the best beams.

Beams share their past through the prefix cache, block by block, as requests of one tenant do; nothing else of the
engine knows of beams. The score of a beam is the sum of its log probabilities (no length normalisation: all are
equally long, and end tokens do not end one).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.bench.engine import BenchEngine


@dataclass(slots=True)
class Search:
    """What a search produced and how much of its memory was shared."""

    beams: list[tuple[float, tuple[int, ...]]]
    """(score, prompt and answer), best first."""
    shared: list[int] = field(default_factory=list)
    """After each step: blocks that all beams take together."""
    apart: list[int] = field(default_factory=list)
    """After each step: blocks if each beam had its own."""
    cached: int = 0
    """Prompt tokens that the engine took from its cache, over all steps."""
    asked: int = 0
    """Prompt tokens over all steps."""


def search(engine: BenchEngine, prompt: Sequence[int], width: int, length: int) -> Search:
    """``length`` tokens with ``width`` beams."""
    block_size = engine.loaded.block_size
    found = Search([(0.0, tuple(prompt))])
    for _ in range(length):
        answers = engine.score([tokens for _, tokens in found.beams], width)
        candidates = [
            (score + logprob, (*tokens, token))
            for (score, tokens), answer in zip(found.beams, answers, strict=True)
            for token, logprob in answer.top
        ]
        found.cached += sum(answer.cached for answer in answers)
        found.asked += sum(len(tokens) for _, tokens in found.beams)
        found.beams = heapq.nlargest(width, candidates)
        lines = [tokens for _, tokens in found.beams]
        found.shared.append(distinct_blocks(lines, block_size))
        found.apart.append(sum(-(-len(tokens) // block_size) for tokens in lines))
    return found


def distinct_blocks(lines: Sequence[tuple[int, ...]], block_size: int) -> int:
    """Blocks that the lines take when equal beginnings are stored once: full ones shared, a partial tail per line."""
    full = {tokens[:end] for tokens in lines for end in range(block_size, len(tokens) + 1, block_size)}
    return len(full) + sum(len(tokens) % block_size > 0 for tokens in lines)
