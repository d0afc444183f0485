"""A draft model: a smaller one guesses what the larger one will say (Leviathan et al. 2023, arXiv:2211.17192).

Its keys and values lie in a cache of their own under the same block numbers: block tables, prefix hits, copies,
preemption and purges are the engine's and hold for both.

Rules
- The larger model computes every token; the smaller one only those of sequences that want guesses, before it guesses.
  ``_filled`` says for each block how many of its first slots hold the smaller model's keys and values of what the block
  holds now: what the engine writes into a block makes the rest of it unknown, a guess makes it known again.
- A slot that is not filled is never read, so nothing of who had the block before reaches a guess.
- Missing tokens are computed within the step's budget, so a long prompt is caught up in several steps; meanwhile there
  are no guesses. Two sequences never write one block in the same pass.
- Guesses are the smaller model's likeliest tokens: ``engine/verify.py`` takes them for what they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from workers.engine.plan import Chunk, Runner, StepPlan, StepResult
from workers.engine.sequence import Sequence

SHORT = 2
"""Rows of a sequence up to which catching up counts as one guess: the last token, and a guess that was right."""


@runtime_checkable
class Guesser(Protocol):
    """A runner of the smaller model."""

    def likeliest(self, chunks: list[Chunk]) -> list[int]:
        """Compute chunks, write their keys and values; the likeliest next token of each chunk that samples."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (source, destination); all sources are read before any destination is written."""
        ...

    def zero_blocks(self, blocks: list[int]) -> None:
        """Overwrite blocks with zeros."""
        ...


class Target(Runner, Protocol):
    """A runner of the larger model."""

    def logits(self, chunk: Chunk) -> Tensor:
        """fp32 logits [count, vocab] of every row of one chunk."""
        ...


class DraftRunner:
    """``workers.engine.plan.Runner`` of a model with a draft model beside it."""

    def __init__(
        self,
        runner: Target,
        guesser: Guesser,
        *,
        blocks: int,
        block_size: int,
        budget: int,
        longest: int,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """``budget``: most rows of a pass of the draft model. ``longest``: tokens that it can see."""
        self.runner, self.guesser = runner, guesser
        self._size, self._budget, self._longest, self._clock = block_size, budget, longest, clock_ns
        self._filled = np.zeros(blocks, dtype=np.int64)

    def run(self, plan: StepPlan) -> StepResult:
        """Guess for the chunks that want it, then run the plan. Raises what the two runners raise."""
        self._follow(plan)
        began = self._clock()
        each = self._guess([chunk for chunk in plan.chunks if chunk.wanted])
        spent = self._clock() - began
        result = self.runner.run(plan)
        result.drafting_ns, result.draft_ns = spent, each
        return result

    def logits(self, chunk: Chunk) -> Tensor:
        """The larger model's (see ``Target``)."""
        self.forget(chunk.sequence.blocks)
        return self.runner.logits(chunk)

    def zero_blocks(self, blocks: list[int]) -> None:
        """Overwrite both models' keys and values of ``blocks`` with zeros, at once."""
        self.runner.zero_blocks(blocks)
        self.forget(blocks)
        self.guesser.zero_blocks(blocks)

    def forget(self, blocks: list[int]) -> None:
        """The larger model's keys and values of these blocks are others now."""
        if blocks:
            self._filled[blocks] = 0

    def _follow(self, plan: StepPlan) -> None:
        """Do to the draft's cache what the plan does to the blocks before the forward pass."""
        filled, size = self._filled, self._size
        if plan.zero:
            self.forget(plan.zero)
            self.guesser.zero_blocks(plan.zero)
        if plan.restores:
            self.forget([block for _, block in plan.restores])
        if plan.copies:
            sources, targets = zip(*plan.copies, strict=True)
            self.guesser.copy_blocks(plan.copies)
            filled[list(targets)] = filled[list(sources)]
        for chunk in plan.chunks:
            blocks, first = chunk.sequence.blocks, chunk.start // size
            last = (chunk.start + chunk.count + chunk.wanted - 1) // size
            filled[blocks[first]] = min(int(filled[blocks[first]]), chunk.start % size)
            if last > first:
                filled[blocks[first + 1 : last + 1]] = 0

    def _guess(self, chunks: list[Chunk]) -> int:
        """Put guesses into the chunks that can have some. Returns nanoseconds of one guess for all, 0: not known."""
        if not chunks:
            return 0
        began = self._clock()
        live, rows = self._catch_up(chunks)
        passes = 1
        if rows > SHORT:
            passes, began = 0, self._clock()
        while live := [(chunk, one) for chunk, one in live if len(chunk.drafts) < chunk.wanted]:
            pairs = [(one, len(one.tokens) - 1) for _, one in live]
            found = self.guesser.likeliest([Chunk(one, start, 1, (one,)) for one, start in pairs])
            for one, start in pairs:
                self._wrote(one, start, start + 1)
            self._take(live, found)
            passes += 1
        for chunk in chunks:
            chunk.count += len(chunk.drafts)
            chunk.wanted = 0
        return (self._clock() - began) // passes if passes else 0

    def _catch_up(self, chunks: list[Chunk]) -> tuple[list[tuple[Chunk, Sequence]], int]:
        """Compute what the draft model has not seen, and the first guess of those that then have seen all.

        Returns these, and most rows of a sequence.
        """
        budget, busy = self._budget, set[int]()
        rows: list[Chunk] = []
        live: list[tuple[Chunk, Sequence]] = []
        for chunk in chunks:
            end = chunk.start + 1
            if end + chunk.wanted > self._longest:
                continue
            start = self._missing(chunk)
            count = min(end - start, budget)
            touched = chunk.sequence.blocks[start // self._size : (end - 1) // self._size + 1]
            if count < 1 or not busy.isdisjoint(touched):
                continue
            busy.update(touched)
            budget -= count
            one = _shadow(chunk.sequence)
            whole = start + count == end
            rows.append(Chunk(one, start, count, (one,) if whole else ()))
            if whole:
                live.append((chunk, one))
        if rows:
            rows.sort(key=lambda row: row.count > 1)  # runners rely on decodes coming first
            samples = [row.sequence for row in rows if row.samplers]
            found = dict(zip(map(id, samples), self.guesser.likeliest(rows), strict=True))
            for row in rows:
                self._wrote(row.sequence, row.start, row.start + row.count)
            self._take(live, [found[id(one)] for _, one in live])
        return live, max((row.count for row in rows), default=SHORT + 1)

    @staticmethod
    def _take(live: list[tuple[Chunk, Sequence]], found: list[int]) -> None:
        for (chunk, one), token in zip(live, found, strict=True):
            chunk.drafts.append(token)
            one.tokens.append(token)

    def _missing(self, chunk: Chunk) -> int:
        """The first position up to the chunk's that the draft model has not computed."""
        size = self._size
        whole, rest = divmod(chunk.start, size)
        filled = self._filled[chunk.sequence.blocks[: whole + 1]]
        gaps = np.flatnonzero(filled[:whole] < size)
        if len(gaps):
            return int(gaps[0]) * size + int(filled[gaps[0]])
        return whole * size + min(int(filled[whole]), rest)

    def _wrote(self, sequence: Sequence, start: int, end: int) -> None:
        size = self._size
        for index in range(start // size, (end - 1) // size + 1):
            self._filled[sequence.blocks[index]] = min(size, end - index * size)


def _shadow(sequence: Sequence) -> Sequence:
    """A sequence over the same blocks whose tokens may be guessed further."""
    return Sequence(
        id=sequence.id,
        index=sequence.index,
        tokens=list(sequence.tokens),
        prompt_len=sequence.prompt_len,
        max_tokens=sequence.max_tokens,
        params=sequence.params,
        scope=sequence.scope,
        blocks=sequence.blocks,
    )
