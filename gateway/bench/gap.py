"""The largest gap of a running stream while long prompts arrive, and what it is held against on the same engine.

A long prompt is computed in chunks, so a stream beside it waits for one of them and its own step at a time. Both are
measured just before: the longest step of such a prompt alone, and the stream's gaps until the prompts come. A prompt's
last chunk takes longer than its first, since its tokens attend to all before them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from gateway.bench import load, metrics
from gateway.bench.load import Load, Timeline

ALONE = 3
"""Prompts of each kind that are measured alone; their median counts."""

Run = Callable[[Load], list[Timeline]]
"""Runs a load on the engine under test."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Milliseconds."""

    largest_gap_ms: float
    first_chunk_ms: float
    """A prompt of ``chunk`` tokens, alone."""
    longest_chunk_ms: float
    """The longest step of a whole prompt, alone."""
    step_ms: float
    """The stream's median gap before the prompts came."""

    @property
    def limit_ms(self) -> float:
        """One chunk's time and one step."""
        return self.longest_chunk_ms + self.step_ms

    @property
    def of_limit(self) -> float:
        """The largest gap's part of ``limit_ms``."""
        return self.largest_gap_ms / self.limit_ms


def measure(
    run: Run, label: str, vocab: int, chunk: int, *, stream: tuple[int, int], prompts: int, length: int, at_token: int
) -> tuple[Gap, list[Timeline]]:
    """The gap, and the timelines of the stream and of the prompts. ``chunk``: the engine's budget of a step, in tokens.

    ``stream``: its input and output tokens; ``prompts`` of ``length`` tokens come with its ``at_token``-th token.
    """
    first = run(load.uniform(f"{label}/first", ALONE, min(chunk, length), 2, vocab, 1))
    whole = run(load.uniform(f"{label}/alone", ALONE, length, 2, vocab, 1))
    lines = run(load.interrupted(label, vocab, stream=stream, prompts=prompts, length=length, at_token=at_token))
    gaps = metrics.gaps(lines[0])
    found = Gap(
        largest_gap_ms=_ms(max(gaps)),
        first_chunk_ms=_ms(statistics.median(line.longest_step for line in first)),
        longest_chunk_ms=_ms(statistics.median(line.longest_step for line in whole)),
        step_ms=_ms(statistics.median(gaps[: at_token - 1])),
    )
    return found, lines


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
