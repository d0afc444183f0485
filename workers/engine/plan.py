"""Between the planner and the model runner: what one step computes, and what came of it. Integers only, no torch."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from workers.engine.beams import Candidate
from workers.engine.sequence import Sequence
from workers.protocol import TokenLogprob


@dataclass(slots=True)
class Chunk:
    """One sequence's part of a step: tokens ``[start, start + count)`` of ``sequence.tokens + drafts`` are computed."""

    sequence: Sequence
    start: int
    count: int
    samplers: tuple[Sequence, ...] = ()
    """Sequences that each sample their next token from the chunk's last row: none while known tokens remain
    uncomputed, normally the sequence itself, and at the end of a prompt with n > 1 all its choices."""
    drafts: list[int] = field(default_factory=list)
    """Guesses of what follows the sequence's tokens, which do not have them: the last rows of ``count``."""
    wanted: int = 0
    """How many guesses the runner may still add, one row each; their blocks are there."""

    @property
    def known(self) -> int:
        """Rows that are tokens of the sequence; the others are guesses."""
        return self.count - len(self.drafts)

    @property
    def is_decode(self) -> bool:
        """One new token of a sequence whose prompt is computed, with or without guesses of what follows."""
        return self.start >= self.sequence.prompt_len and self.count - len(self.drafts) == 1


@dataclass(slots=True)
class StepPlan:
    """One step: chunks in batch order, decodes first."""

    step: int
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy (source, destination) before the forward pass: copy on write of a shared partial tail. No
    destination is a later copy's source; a source may be a later copy's destination (read all, then write all)."""
    zero: list[int] = field(default_factory=list)
    """Blocks to zero before the copies and the forward pass (purged). A plan without chunks has only these."""
    saves: list[tuple[int, int]] = field(default_factory=list)
    """(block, host slot): bytes to copy out before anything else touches the blocks (``tiers.py``)."""
    restores: list[tuple[int, int]] = field(default_factory=list)
    """(host slot, block): bytes to copy in, after the zeroing and before the copies."""
    scores: bool = False
    """Whether prompts are scored (``scoring.py``); it may be that none of them is left."""
    started_ns: int = 0
    """The caller's ``now`` at planning, for records."""

    @property
    def runs(self) -> bool:
        """Whether there is more to do than to zero blocks."""
        return bool(self.chunks or self.saves or self.restores)

    @property
    def tokens(self) -> int:
        """Rows that go through the linears: exactly the planned tokens, no padding."""
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True)
class Sampled:
    """What one sampler drew."""

    tokens: list[int]
    """One; after ``Chunk.drafts`` as many of these as the model would have chosen, and then one of its own."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    candidates: Items[Candidate] = ()
    """For a beam (``Sequence.search``), instead of tokens: its ``search.candidates`` likeliest, best first."""
    error: str | None = None
    """Why this sequence can have no token (a code of ``workers.protocol.ERRORS``): it ends, the others go on."""


@dataclass(slots=True)
class StepResult:
    """``sampled`` is parallel to the plan's samplers, flattened in chunk order."""

    sampled: list[Sampled]
    scores: list[list[TokenLogprob]] = field(default_factory=list)
    """Of each chunk that scores its prompt (``scoring.py``), in chunk order, of each such row the token behind it."""
    drafting_ns: int = 0
    """How much of the step a draft model took."""
    draft_ns: int = 0
    """What one guess for everybody took it; 0 where that is not known."""


class SequenceFault(Exception):  # noqa: N818 - a fault of some sequences, not of the runner
    """Raised by a runner that knows which sequences of a plan are to blame: only their requests fail."""

    def __init__(self, message: str, sequences: tuple[Sequence, ...]) -> None:
        super().__init__(message)
        self.sequences = sequences


class RunnerGoneError(Exception):
    """Raised by a runner that can never run a step again (one of its processes ended): the engine ends at once."""


class Runner(Protocol):
    """Runs a plan on a device; the simulator's runner only computes how long it would take."""

    def run(self, plan: StepPlan) -> StepResult:
        """Write keys and values of every chunk, return one ``Sampled`` per sampler. Called on the engine thread."""
        ...

    def zero_blocks(self, blocks: list[int]) -> None:
        """Overwrite the keys and values of ``blocks`` with zeros, at once (purge while idle)."""
        ...
