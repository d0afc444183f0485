"""What a step may still compute of prompts: so many rows, and beside decodes no more than so much work.

A prompt's token attends to all tokens before it: at ``twice_at`` tokens of context it takes twice as long as at the
start. Chunks of equally many tokens would take longer and longer, and so would the gaps in streams that decode beside
them. So a budget of b rows is also one of work: what b tokens take at the start of a prompt, of several prompts of u =
``USUAL`` tokens where b is more, so that work is in proportion to b. Work of r rows that start at position s, with t =
``twice_at``, each token times 2t:

    W(r, s) = sum of 2t + 2 (s + i) + 1 for i in 0..r-1 = r (r + 2 (t + s)),   at most b (min(b, u) + 2t)

Rules
- No step has more than ``max_step_tokens`` rows, but for the end of one prompt: beside it decodes are not counted, up
  to an eighth of the budget (``overrun``). A prompt as long as the budget would otherwise end one step later beside a
  single decode, and whoever comes behind it would begin with its remainder. So no step takes longer than one of prompts
  alone and one of decodes.
- Where nobody decodes, nobody waits for the step's end: work is not counted.
- The first prompt of a step gets at least a quarter of its rows, however deep it is: it gets on, and linears of very
  few rows would read all weights for them.
- Whoever gets less than it wants is the step's last prompt: what would be left, too little for a token so deep, would
  only cut up the prompt that comes next.
"""

from __future__ import annotations

from math import isqrt

from workers.config import MEAN_REQUEST_TOKENS

USUAL = MEAN_REQUEST_TOKENS
LEAST = 4
"""The first prompt gets at least one of so many parts of the rows."""


class Allowance:
    """Of one step, after its decodes. ``rows`` are left, in numbers; O(1)."""

    __slots__ = ("_extra", "_least", "_over", "_twice_at", "_work", "rows")

    def __init__(self, rows: int, overrun: int = 0, twice_at: int = 0) -> None:
        """``twice_at`` in tokens; 0: work is not counted."""
        self.rows = rows
        self._over = overrun
        self._twice_at = twice_at
        self._work = self._whole(rows)
        self._extra = self._whole(rows + overrun) - self._work
        self._least = -(-rows // LEAST)

    @property
    def open(self) -> bool:
        """Whether the start of a prompt would get a row."""
        return self.rows > 0 and (not self._twice_at or self._work >= self._of(1, 0))

    def fit(self, start: int, wanted: int, known: int) -> int:
        """How many of ``wanted`` rows at position ``start`` there is room for. ``known``: where the prompt ends."""
        if start + wanted == known and wanted <= self._most(start, self._over, self._extra):
            return wanted
        return min(wanted, max(self._most(start), self._least))

    def book(self, start: int, rows: int, wanted: int) -> None:
        """That many rows are in the plan now; of fewer than ``wanted`` nothing is left."""
        self.rows = self.rows - rows if rows == wanted else 0
        self._work -= self._of(rows, start)
        self._least = 0

    def _most(self, start: int, rows: int = 0, work: int = 0) -> int:
        """Rows at ``start`` that there is room for, were there so many rows and so much work more."""
        if not self._twice_at:
            return self.rows + rows
        origin = self._twice_at + start
        return min(self.rows + rows, isqrt(max(0, origin * origin + self._work + work)) - origin)

    def _whole(self, rows: int) -> int:
        """The work of so many rows of budget."""
        return rows * (min(rows, USUAL) + 2 * self._twice_at)

    def _of(self, rows: int, start: int) -> int:
        """W(rows, start)."""
        return rows * (rows + 2 * (self._twice_at + start))
