"""Beam search: which lines of a request go on, and which answers it ends with. Scores and tokens only, no blocks.

The method is that of transformers' ``generate(num_beams=…)``, with the same ends (its default heuristics go back to
Wu et al. 2016, arXiv:1609.08144 §7, length normalisation): per turn the best continuations of all beams together, twice
as many as beams (or more, with several end tokens) so that enough of them go on; among the best ``width`` those that
end are answers, scored by sum of log probabilities ÷ length ** ``length_penalty``.

Rules
- A beam is a ``Sequence``; the same ones live from the first turn to the last, and take each other's past by fork.
- A turn is taken when every beam has told its candidates. Until then those that have wait: no row is computed for them.
- Whoever loses its blocks loses them for all: the search starts over from the prompt (``Roster.preempt``). Its outcome
  is the same, and ``billed`` only counts what is beyond the furthest turn so far.
- Nothing is random: equal scores go by the order of beams, then of candidates.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from heapq import nlargest
from operator import attrgetter
from typing import TYPE_CHECKING

from workers.protocol import Beams

if TYPE_CHECKING:
    from workers.engine.sequence import Sequence

Candidate = tuple[int, float]
"""A token and its log probability."""

_rank = attrgetter("score")


@dataclass(frozen=True, slots=True)
class Step:
    """A beam's next token: ``parent``'s line goes on with ``token``."""

    parent: Sequence
    token: int
    score: float
    """Sum of the line's log probabilities, this token's included."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished line: its output, end token included, and its score, normalised by length."""

    tokens: list[int]
    score: float
    ended: bool
    """By an end token, not by the length limit."""


class BeamSearch:
    """Of one request. ``members`` are its beams; the first computes the prompt."""

    def __init__(self, asked: Beams, choices: int, max_tokens: int, ends: frozenset[int]) -> None:
        """``choices``: how many answers are wanted. ``ends``: tokens that end a line."""
        self.width, self.choices = asked.width, choices
        self.members: list[Sequence] = []
        self.candidates = max(2, 1 + len(ends)) * asked.width
        """Continuations that every beam has to tell."""
        self.billed = 0
        """Output tokens of all beams that were computed for the first time."""
        self.answers: list[Answer] = []
        """The best so far, best first, at most ``width``."""
        self._penalty, self._early = asked.length_penalty, asked.early_stopping
        self._max_tokens, self._ends = max_tokens, ends
        self._scores: dict[Sequence, float] = {}
        """The beams by rank; empty before the first turn."""
        self._told: dict[Sequence, Items[Candidate]] = {}
        self._turns = 0

    @property
    def lead(self) -> Sequence:
        """Computes the prompt; whatever belongs to all is kept under it."""
        return self.members[0]

    def tell(self, beam: Sequence, candidates: Items[Candidate]) -> bool:
        """A beam's best continuations, best first. True when all have told theirs: then call ``turn``."""
        self._told[beam] = candidates
        return len(self._told) >= max(1, len(self._scores))

    def turn(self) -> list[Step]:
        """The beams of the next step, best first; none when the search is over and ``answers`` are final."""
        beams = self._scores or {self.lead: 0.0}
        steps = [
            Step(beam, token, score + logprob) for beam, score in beams.items() for token, logprob in self._told[beam]
        ]
        self._told = {}
        self._turns += 1
        length = self._turns
        best = nlargest(self.candidates, steps, key=_rank)
        last = length >= self._max_tokens
        self._finish([step for step in best[: self.width] if last or step.token in self._ends], length)
        ahead = [] if last else [step for step in best if step.token not in self._ends][: self.width]
        self.billed = max(self.billed, self.width * length)
        return ahead if ahead and self._worth_going_on(ahead[0].score, length) else []

    def settle(self, beams: Items[tuple[Sequence, float]]) -> None:
        """Who carries the next step's lines, best first, with their scores."""
        self._scores = dict(beams)

    def restart(self) -> None:
        """Forget everything but what was billed."""
        self.answers, self._scores, self._told, self._turns = [], {}, {}, 0

    def _finish(self, steps: list[Step], length: int) -> None:
        found = [
            Answer([*step.parent.output, step.token], step.score / self._norm(length), step.token in self._ends)
            for step in steps
        ]
        self.answers = nlargest(self.width, [*self.answers, *found], key=_rank)

    def _norm(self, length: int) -> float:
        norm: float = float(length) ** self._penalty
        return norm

    def _worth_going_on(self, best: float, length: int) -> bool:
        """Whether the best beam may still beat the worst answer."""
        if len(self.answers) < self.width:
            return True
        if self._early is True:
            return False
        if self._early == "never" and self._penalty > 0:
            length = self._max_tokens
        return best / self._norm(length) > self.answers[-1].score


def assign(steps: Items[Step], members: Items[Sequence]) -> list[tuple[Sequence, Step]]:
    """Who carries which step, best first: a parent goes on with its best one, the others go to beams that end here."""
    parents = {step.parent for step in steps}
    idle = [member for member in members if member not in parents]
    carried: list[tuple[Sequence, Step]] = []
    for step in steps:
        if step.parent in parents:
            parents.discard(step.parent)
            carried.append((step.parent, step))
        else:
            carried.append((idle.pop(0), step))
    return carried
