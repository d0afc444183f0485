"""Whether one more guess pays: how often guesses of a kind were right, and what a row more costs a step.

A guess is worth its row when the tokens it is likely to bring, per time it takes, are more than what the step brings
without it: ``chance / row > tokens / step``. Its chance is that of all guesses before it, times its own. So speculation
grows with what is copied, shrinks as steps fill up, and ends by itself where it loses.

Rules
- No clock: durations are handed in, in nanoseconds.
- Both estimates forget: what a sequence or the machine did long ago counts for little.
- A sequence begins with what is usual here, never with less than ``HOPE``, so that no traffic before it can keep it
  from ever trying; each time it does not try, it forgets a little, so that it will try again.
"""

from __future__ import annotations

KINDS = 4
HOPE = 0.4
USUAL_COUNTS = 1.5
"""So many observations is what is usual worth."""
FORGETS = 0.93
FORGETS_UNTRIED = 0.985
USUAL_FORGETS = 0.999
FIRST = (0.4, 0.5, 0.6, 0.75)
"""What is usual, by kind, before anything was seen."""
STEP_FORGETS = 0.97
ROW_AT_FIRST = 0.12
"""Of a one-row step's time, before anything was measured."""
LEAST_ROW = 0.01
SURE = 1.15
"""By how much the gain must exceed the price."""


def kind_of(match: int) -> int:
    """A longer match is right more often: 0 to 3 by how many tokens before the guess are the same."""
    return (match > 2) + (match > 4) + (match > 8)


class Odds:
    """How often guesses were right: of one sequence, or of all (``usual`` None)."""

    __slots__ = ("_right", "_seen", "_usual")

    def __init__(self, usual: Odds | None = None) -> None:
        self._usual = usual
        begin = USUAL_COUNTS * 4 if usual is None else 0.0
        self._right = [begin * chance for chance in FIRST]
        self._seen = [begin] * KINDS

    def chance(self, kind: int) -> float:
        """That the next guess of this kind is right, given that those before it are."""
        if self._usual is None:
            return self._right[kind] / self._seen[kind]
        usual = max(HOPE, self._usual.chance(kind))
        return (self._right[kind] + USUAL_COUNTS * usual) / (self._seen[kind] + USUAL_COUNTS)

    def learn(self, kind: int, right: int, wrong: int) -> None:
        """So many were right, and then one was wrong or (``wrong`` 0) there were no more."""
        keep = USUAL_FORGETS if self._usual is None else FORGETS
        self._right[kind] = self._right[kind] * keep + right
        self._seen[kind] = self._seen[kind] * keep + right + wrong
        if self._usual is not None:
            self._usual.learn(kind, right, wrong)

    def untried(self, kind: int) -> None:
        """There was a guess, but it did not seem worth its row."""
        self._right[kind] *= FORGETS_UNTRIED
        self._seen[kind] *= FORGETS_UNTRIED


class StepCost:
    """Nanoseconds of a step as ``base + row * rows``: a line through the latest steps (least squares, forgetting)."""

    __slots__ = ("_n", "_r", "_rr", "_rt", "_t", "draft")

    def __init__(self) -> None:
        self._n = self._r = self._t = self._rr = self._rt = 0.0
        self.draft = 0.0
        """Of one guess more, beside its row: a draft model's time."""

    def saw(self, rows: int, took: int, draft: int = 0) -> None:
        """A step without prompts took so long, a draft model's time left out; one guess of that took ``draft``."""
        took = max(1, took)
        if self._n:
            took = min(took, 3 * int(self._t / self._n) + 1)  # somebody else had the machine
        keep = STEP_FORGETS
        self._n = self._n * keep + 1
        self._r = self._r * keep + rows
        self._t = self._t * keep + took
        self._rr = self._rr * keep + rows * rows
        self._rt = self._rt * keep + rows * took
        if draft:
            self.draft += ((min(draft, 3 * self.draft) - self.draft) * 0.1) if self.draft else draft

    def line(self) -> tuple[float, float]:
        """(base, row). Steps of one size only say nothing about a row: then it is taken to cost its first share."""
        if not self._n:
            return 1.0, ROW_AT_FIRST
        rows, took = self._r / self._n, self._t / self._n
        spread = self._rr / self._n - rows * rows
        guess = took * ROW_AT_FIRST / (1 + ROW_AT_FIRST * (rows - 1))
        # The first share counts as much as steps that differ by a row and a half would.
        row = (self._rt / self._n - rows * took + 0.5 * guess) / (spread + 0.5)
        row = min(max(row, LEAST_ROW * took), took / rows)
        return max(0.0, took - row * rows), row
