"""What followed the last tokens where they stood before: guesses without a model.

Prompt lookup (Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, arXiv:2304.04487) over prompt and answer of one
sequence, with an index that only grows.

Rules
- The index knows rows of ``shortest`` and of ``longest`` tokens by the place after their latest occurrence. A row that
  ends with the last token is looked up before it is entered, so nothing is found at its own place.
- A place that went on being right is kept until it is wrong: the longest common context wins over the latest one.
- ``propose`` takes in at most ``STRIDE`` tokens, so a long prompt delays no step; until all are in, it guesses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

STRIDE = 2048
MEASURED = 16
"""A match is measured up to so many tokens."""

Row = tuple[int, ...]


class NgramIndex:
    """Of one sequence whose tokens only grow."""

    __slots__ = ("_at", "_longest", "_rows", "_shortest", "_source")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._rows: tuple[dict[Row, int], dict[Row, int]] = ({}, {})
        """Of ``shortest`` and of ``longest`` tokens: the place after each."""
        self._at = 0
        """Tokens whose rows are entered."""
        self._source: int | None = None
        """The place from which the token at ``_at`` is expected to be a copy."""

    def propose(self, tokens: Sequence[int], count: int) -> tuple[list[int], int]:
        """Up to ``count`` guesses of what follows ``tokens``, and how many tokens before the place are the same."""
        end = len(tokens)
        if not self._take_in(tokens, end - 1):
            return [], 0
        if self._source is not None and tokens[self._source] == tokens[end - 1]:
            place = self._source + 1
        else:
            place = self._look_up(tokens, end)
            self._source = None
        if place < 0:
            return [], 0
        length = 1
        most = min(place, MEASURED)
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        if self._source is None:
            self._source = place - 1
        guesses = list(tokens[place : place + count])
        period = end - place  # what is copied from reaches into the guesses themselves
        while len(guesses) < count:
            guesses.append(guesses[len(guesses) - period])
        return guesses, length

    def _look_up(self, tokens: Sequence[int], end: int) -> int:
        short, long = self._rows
        if end > self._longest:
            place = long.get(tuple(tokens[end - self._longest : end]), -1)
            if place >= 0:
                return place
        return short.get(tuple(tokens[end - self._shortest : end]), -1) if end > self._shortest else -1

    def _take_in(self, tokens: Sequence[int], end: int) -> bool:
        """Enter the rows that end before ``end``. False when there are more of them than one call takes."""
        short, long = self._rows
        shortest, longest = self._shortest, self._longest
        stop = min(end, self._at + STRIDE)
        for at in range(self._at + 1, stop + 1):
            if self._source is not None:
                self._source = self._source + 1 if tokens[self._source] == tokens[at - 1] else None
            if at >= shortest:
                short[tuple(tokens[at - shortest : at])] = at
            if at >= longest:
                long[tuple(tokens[at - longest : at])] = at
        self._at = max(self._at, stop)
        return stop == end
