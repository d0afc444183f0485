"""When a worker whose cache fills up gets its next job: evenly spaced, so that answers also end evenly spaced.

Answers that begin together and are about equally long end together. A cache filled at once then overflows (sequences
are preempted and computed again), empties at once, and meanwhile nobody gets in, whatever the scheduling policy says:
the next to be served waits for a whole answer. Nothing in continuous batching pulls such a clump apart again. Spacing
does: under pressure a job is sent when the previous one has had its part of the cache to itself, so that as much begins
as ends in a steady state (Little's law: jobs in flight = rate × residence).

Rules
- A job of P prompt and O output tokens holds P + t tokens in step t: P·O + O²/2 token-steps of the M that the cache
  offers per step, so the next job may follow (P·O + O²/2) / M steps later. O is learned: what share of their
  ``max_tokens`` recent answers had.
- Below ``FREE`` of the cache committed (P + O/2 per job in flight) jobs are sent at once: an idle worker fills up fast.
- Answers of different length end apart by themselves; the more they differ, the less is spaced, and from a coefficient
  of variation of ``MAX_SPREAD`` on nothing is. Neither is anything before ``MIN_ANSWERS`` have ended.
- Counted in the worker's own steps: no clock here, and a slow worker is not rushed.
"""

from __future__ import annotations

FREE = 0.6
MAX_SPREAD = 0.5
MIN_ANSWERS = 8
BURST_STEPS = 2
"""Steps by which a job may be sent early when the last one was late."""
_KEEP = 1 - 1 / 64


class Answers:
    """What recent answers of one model were like. Exponentially weighted; O(1)."""

    def __init__(self) -> None:
        self._count = 0.0
        self._share = 0.0
        self._tokens = 0.0
        self._squares = 0.0
        self.slack: float | None = None
        """By what factor jobs may follow faster than the steady state needs; None: no spacing."""

    def ended(self, tokens: int, max_tokens: int) -> None:
        """One answer ran to its end: ``tokens`` of at most ``max_tokens``."""
        self._count = self._count * _KEEP + 1
        self._share = self._share * _KEEP + min(1.0, tokens / max(1, max_tokens))
        self._tokens = self._tokens * _KEEP + tokens
        self._squares = self._squares * _KEEP + tokens * tokens
        self.slack = self._measure()

    def expected(self, max_tokens: int) -> float:
        """How long an answer of at most ``max_tokens`` will probably be."""
        return max_tokens * (self._share / self._count if self._count else 1.0)

    def _measure(self) -> float | None:
        if self._count < MIN_ANSWERS * _KEEP**MIN_ANSWERS or not self._tokens:
            return None
        mean = self._tokens / self._count
        variance = max(0.0, self._squares / self._count - mean * mean)
        spread = variance**0.5 / mean
        return None if spread >= MAX_SPREAD else 1.0 / (1.0 - spread / MAX_SPREAD)


class Pace:
    """Of one worker."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._due = 0.0
        self._step = 0
        self._committed = 0.0
        self._capacity = 1

    def begin(self, step: int, committed: float, capacity: int) -> None:
        """A turn begins: the worker's last step, the footprints of what is in flight there, the tokens it holds."""
        if step < self._step:  # another worker has taken the place
            self._due = 0.0
        self._step, self._committed, self._capacity = step, committed, max(1, capacity)

    def footprint(self, prompt: int, output: int) -> float:
        """Tokens that a job holds on average while it runs. ``output``: its ``max_tokens``."""
        return prompt + self._answers.expected(output) / 2

    @property
    def rest(self) -> int:
        """Steps until another job may be sent; 0: now."""
        if self._committed <= FREE * self._capacity or self._answers.slack is None:
            return 0
        return max(0, -int(-(self._due - self._step) // 1))

    def sent(self, prompt: int, output: int) -> None:
        """A job was sent."""
        expected = self._answers.expected(output)
        held = prompt + expected / 2
        steps = held * expected / (self._capacity * (self._answers.slack or 1.0))
        self._due = max(self._step - BURST_STEPS, min(self._due, self._step)) + steps
        self._committed += held
