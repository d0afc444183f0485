"""Sequences that wait for blocks, in order of arrival. The gateway orders the backlog; this line is short by design.

Rules
- First come, first served, and nobody overtakes a head that does not fit: the order of finishing follows it. Who waits
  for the disk is overtaken meanwhile.
- A preempted sequence comes back at its old rank, so before everything that was never admitted.
- Every operation is O(1) in the fresh ones and O(log n) in the preempted ones (at most ``max_running``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from workers.engine.sequence import Sequence

by_arrival = attrgetter("arrival")


def find(line: list[Sequence], sequence: Sequence) -> int:
    """Index of ``sequence`` in a list sorted by arrival, or -1."""
    index = bisect_left(line, sequence.arrival, key=by_arrival)
    return index if index < len(line) and line[index] is sequence else -1


class WaitingLine:
    """Not yet admitted, and preempted sequences."""

    def __init__(self) -> None:
        self._fresh: OrderedDict[int, Sequence] = OrderedDict()
        self._returned: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned)

    def append(self, sequence: Sequence) -> None:
        """Add a new arrival; its rank is above all others'."""
        self._fresh[sequence.arrival] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """Add one at its rank among those that had been admitted."""
        insort(self._returned, sequence, key=by_arrival)

    def head(self) -> Sequence | None:
        """The next to admit."""
        for line in (self._returned, self._fresh.values()):  # not by ``__iter__``: asked for each that is admitted
            for sequence in line:
                if sequence.fetch is None or not sequence.fetching:
                    return sequence
        return None

    def __iter__(self) -> Iterator[Sequence]:
        """In the order in which they are admitted."""
        yield from self._returned
        yield from self._fresh.values()

    @property
    def returned(self) -> int:
        """How many had been admitted before."""
        return len(self._returned)

    def discard(self, sequence: Sequence) -> bool:
        """Take one out, whatever its place. False when it does not wait here."""
        if self._fresh.pop(sequence.arrival, None) is not None:
            return True
        index = find(self._returned, sequence)
        if index >= 0:
            del self._returned[index]
        return index >= 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.arrival in self._fresh or find(self._returned, sequence) >= 0
