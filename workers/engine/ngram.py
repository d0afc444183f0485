"""What followed the last tokens where they stood before: guesses without a model.

Prompt lookup (Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, arXiv:2304.04487) over prompt and answer of one
sequence, with an index that only grows.

Rules
- The index knows every row of ``shortest`` tokens by the place after its latest occurrence, and from there the places
  before. A row that ends with the last token is looked up before it is entered, so nothing is found at its own place.
- Of the ``LOOKS`` latest places the one with the longest common context wins (up to ``longest`` tokens, then the
  latest); one that went on being right is kept until it is wrong.
- ``propose`` takes in at most ``STRIDE`` tokens, so a long prompt delays no step; until all are in, it guesses nothing.
- A token costs about 100 bytes until its sequence ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

STRIDE = 1024
LOOKS = 16
MEASURED = 16
"""A match is measured up to so many tokens."""
_BITS = 21
"""Of a token in a row's key. Longer ids may give two rows one key: what then is common is found out by looking."""


class NgramIndex:
    """Of one sequence whose tokens only grow."""

    __slots__ = ("_at", "_before", "_key", "_latest", "_longest", "_shortest", "_source")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._latest: dict[int, int] = {}
        """By row: the place after its latest occurrence."""
        self._before = array("i", [-1])
        """By place: the place before with the same row, -1 for none."""
        self._at = 0
        """Tokens whose rows are entered."""
        self._key = 0
        """Of the last row entered."""
        self._source: int | None = None
        """The place from which the token at ``_at`` is expected to be a copy."""

    def propose(self, tokens: Sequence[int], count: int) -> tuple[list[int], int]:
        """Up to ``count`` guesses of what follows ``tokens``, and how many tokens before the place are the same."""
        end = len(tokens)
        if not self._take_in(tokens, end - 1):
            return [], 0
        if self._source is not None and tokens[self._source] == tokens[end - 1]:
            place = self._source + 1
            length = self._common(tokens, place, end, MEASURED)
        else:
            place, length = self._look_up(tokens, end)
            if place < 0:
                self._source = None
                return [], 0
            self._source = place - 1
        guesses = list(tokens[place : place + count])
        period = end - place  # what is copied from reaches into the guesses themselves
        while len(guesses) < count:
            guesses.append(guesses[len(guesses) - period])
        return guesses, length

    def _look_up(self, tokens: Sequence[int], end: int) -> tuple[int, int]:
        """The place to copy from and its common context, or -1."""
        best, longest = -1, self._shortest - 1
        if end > self._shortest:
            mask = (1 << _BITS * self._shortest) - 1
            place = self._latest.get((self._key << _BITS | tokens[end - 1]) & mask, -1)
            for _ in range(LOOKS):
                if place < 0 or longest >= self._longest:
                    break
                length = self._common(tokens, place, end, self._longest)
                if length > longest:
                    best, longest = place, length
                place = self._before[place]
        return best, longest

    @staticmethod
    def _common(tokens: Sequence[int], place: int, end: int, most: int) -> int:
        """How many tokens before ``place`` are those before ``end``."""
        length = 0
        most = min(place, most)
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def _take_in(self, tokens: Sequence[int], end: int) -> bool:
        """Enter the rows that end before ``end``. False when there are more of them than one call takes."""
        latest, append, shortest, key = self._latest, self._before.append, self._shortest, self._key
        stop = min(end, self._at + STRIDE)
        mask = (1 << _BITS * shortest) - 1
        for at in range(self._at + 1, stop + 1):
            token = tokens[at - 1]
            if self._source is not None:
                self._source = self._source + 1 if tokens[self._source] == token else None
            key = (key << _BITS | token) & mask
            if at < shortest:
                append(-1)
                continue
            append(latest.get(key, -1))
            latest[key] = at
        self._at, self._key = max(self._at, stop), key
        return stop == end
