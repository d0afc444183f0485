"""Adds guesses to a plan, and learns from what came of them.

Rules
- Guesses take what a step has left: its budget after decodes, prompts and admissions, and blocks that are free beyond
  one for each running sequence. Nobody gives way to a guess.
- A guess is in ``Chunk.drafts`` only. It becomes a token of the sequence in ``commit``, when the runner says that the
  model would have chosen it; else it leaves no trace but a block that the sequence needs next.
- A method that guesses while planning fills ``drafts``; one that guesses on the device (a draft model) is told by
  ``Chunk.wanted`` how many it may add, and blocks for these are there.
- No clock: a step's duration is the difference of the two ``now`` that planner and commit were called with.
"""

from __future__ import annotations

from workers.engine.ngram import NgramIndex
from workers.engine.odds import KINDS, SURE, Odds, StepCost, kind_of
from workers.engine.plan import Chunk, StepPlan, StepResult
from workers.engine.roster import Roster
from workers.engine.sequence import Sequence
from workers.speculation import Speculation


class Drafter:
    """What speculation keeps of one sequence."""

    __slots__ = ("index", "kind", "odds")

    def __init__(self, index: NgramIndex | None, usual: Odds) -> None:
        self.index = index
        self.odds = Odds(usual)
        self.kind = 0
        """Of the guesses under way."""


class Drafting:
    """Of one engine."""

    def __init__(self, roster: Roster, config: Speculation, budget: int) -> None:
        """``budget``: most rows of a step."""
        self._roster = roster
        self._config = config
        self._budget = budget
        self._usual = Odds()
        self._cost = StepCost()
        self.accepted = 0
        """Guesses that became tokens."""
        self.rejected = 0

    def fill(self, plan: StepPlan) -> None:
        """Add guesses to the decodes of a plan that is otherwise complete."""
        rows = plan.tokens
        room = self._budget - rows
        if room <= 0:
            return
        decodes = [chunk for chunk in plan.chunks if chunk.is_decode and chunk.samplers]
        base, row = self._cost.line()
        tokens = float(len(decodes))
        price = SURE * (row + self._cost.draft / max(1.0, tokens))
        for chunk in decodes:
            most = min(self._config.tokens, room, self._left(chunk.sequence))
            if most <= 0:
                continue
            drafter = self._drafter(chunk.sequence)
            found, guesses, kind = self._guesses(chunk.sequence, drafter, most)
            if not guesses:
                continue
            if not found and not self._cost.draft:
                guesses = 1  # what a guess of the draft model costs is not known yet
            chance = drafter.odds.chance(kind)
            likely, count = 1.0, 0
            while count < guesses:
                likely *= chance
                if likely * (base + row * rows) <= price * tokens:
                    break
                count += 1
                rows += 1
                tokens += likely
            afforded = self._afford(chunk, count)
            rows -= count - afforded
            room -= afforded
            if not afforded:
                drafter.odds.untried(kind)
                continue
            drafter.kind = kind
            if found:
                chunk.drafts = found[:afforded]
                chunk.count += afforded
            else:
                chunk.wanted = afforded

    def _left(self, sequence: Sequence) -> int:
        """Guesses that could still become tokens beside the one that a step gives anyhow."""
        if sequence.search is not None or sequence.siblings:
            return 0
        return sequence.max_tokens - sequence.output_len - 1

    def _drafter(self, sequence: Sequence) -> Drafter:
        drafter = sequence.drafter
        if drafter is None:
            config = self._config
            index = NgramIndex(config.ngram_min, config.ngram_max) if config.method == "ngram" else None
            drafter = sequence.drafter = Drafter(index, self._usual)
        return drafter

    @staticmethod
    def _guesses(sequence: Sequence, drafter: Drafter, most: int) -> tuple[list[int], int, int]:
        """The guesses, or none yet where a draft model will make them; how many there can be, and their kind."""
        if drafter.index is None:
            return [], most, KINDS - 1
        found, match = drafter.index.propose(sequence.tokens, most)
        return found, len(found), kind_of(match)

    def _afford(self, chunk: Chunk, count: int) -> int:
        """How many of the guesses have a place, after taking blocks that nobody else needs."""
        roster, sequence = self._roster, chunk.sequence
        size = roster.limits.block_size
        if roster.many is not None:
            return min(count, roster.many.stretch(sequence, chunk.start + count + 1) - chunk.start - 1)
        wanted = (chunk.start + count) // size + 1
        while len(sequence.blocks) < wanted:
            if roster.pool.available - roster.promised <= len(roster.running):
                break
            block = roster.grow(sequence)
            if block < 0:
                break
            sequence.blocks.append(block)
        return min(count, len(sequence.blocks) * size - chunk.start - 1)

    def learn(self, plan: StepPlan, result: StepResult, took: int) -> None:
        """What a step took, and how often each of its guesses was right. Before it is booked."""
        cursor = 0
        decodes = True
        for chunk in plan.chunks:
            decodes = decodes and chunk.is_decode
            if chunk.drafts:
                right = max(0, len(result.sampled[cursor].tokens) - 1)
                drafter = chunk.sequence.drafter
                assert drafter is not None
                drafter.odds.learn(drafter.kind, right, right < len(chunk.drafts))
            cursor += len(chunk.samplers)
        if decodes and plan.chunks:
            self._cost.saw(plan.tokens, took - result.drafting_ns, result.draft_ns)

    def count(self, accepted: int, rejected: int) -> None:
        """Guesses that became tokens, and that did not."""
        self.accepted += accepted
        self.rejected += rejected
