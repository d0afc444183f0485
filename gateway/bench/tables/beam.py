"""What a beam search of the engine holds, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.bench.engine import BenchEngine


@dataclass(slots=True)
class Search:
    """What a search produced and how much of its memory was shared."""

    beams: list[list[int]] = field(default_factory=list)
    """The answers, best first."""
    shared: list[int] = field(default_factory=list)
    """After each step with several beams: blocks that all take together."""
    apart: list[int] = field(default_factory=list)
    """After each such step: blocks if each beam had its own."""


def search(engine: BenchEngine, prompt: Sequence[int], width: int, length: int) -> Search:
    """``length`` tokens with ``width`` beams, alone in the engine; end tokens end none."""
    found = Search()
    for held in engine.search(prompt, width, length):
        found.beams = held.answers
        if held.beams > 1:
            found.shared.append(held.blocks)
            found.apart.append(held.blocks + held.spared)
    return found
