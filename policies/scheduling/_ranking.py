"""Things ranked by a number that changes all the time; smallest first, ties in order of entry.

A sorted list with lazy updates: raising a rank is O(1), since the rank under which a thing stands there is a lower
bound that is corrected when it comes up. Lowering, inserting and taking out are O(log n). Each thing holds its own
``Place``, so that whoever has it looks nothing up.

Numbers stand side by side in an array, apart from the things: each look at a thing misses the processor's caches, and
that costs more than all the rest. More than ``_ROW`` stand in several rows, since moving a long one by one costs, too.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_FEW = 32
"""Things that are refused one after the other before all are sorted."""
_ROW = 128
"""Most in a row, unless all its ranks are equal; more than twice ``_FEW``, below which one of several joins another."""
_serial_of = attrgetter("serial")


class Place(Generic[K]):
    """Where a key stands."""

    __slots__ = ("at", "key", "rank", "serial")

    def __init__(self, key: K) -> None:
        self.key = key
        self.rank: Any = None
        self.at: Any = None
        """The rank that it stands under, at most its own; None: it is not in."""
        self.serial = 0
        """Which of two that stand under the same rank goes first."""


P = TypeVar("P", bound=Place[Any])
_Row = tuple[Any, list[P]]
"""Ranks and what stands under them, in order of rank and serial. Equal ranks are always in one row."""


class Places(Generic[P]):
    """Places in order of rank."""

    __slots__ = ("_places", "_ranks", "_rows", "_serial", "_starts", "live")

    def __init__(self, *, numbers: bool = True) -> None:
        """``numbers``: ranks are floats, or whole numbers below 2**53; else anything that can be compared."""
        self._ranks: Any = array("d") if numbers else []
        self._places: list[P] = []
        self._rows: list[_Row[P]] | tuple[()] = ()
        """All rows where there are several; the first is that of the two above."""
        self._starts: Any = ()
        """Of each row but the first: no rank in it is smaller, and all in the rows before are."""
        self.live = 0
        """How many places are in; to read."""
        self._serial = 0

    def put(self, place: P, rank: Any) -> None:
        """Insert it or change its rank."""
        at = place.at
        place.rank = rank
        if at is None:
            self.live += 1
        elif rank < at:
            self._remove(place)
        else:
            return
        self._serial = place.serial = self._serial + 1
        place.at = rank
        self._insert(place, rank)

    def take(self, place: P) -> None:
        """Take it out; it must be in."""
        self.live -= 1
        self._remove(place)
        place.at = None

    def min(self) -> Any:
        """The smallest rank. Raises IndexError when empty."""
        return self._settled(0).rank

    def top(self) -> P | None:
        """The first in order of rank; None when empty."""
        if not self.live:
            return None
        place = self._places[0]
        return place if place.rank is place.at else self._settled(0)

    def next(self, accept: Callable[[P], bool]) -> P | None:
        """The first in order of rank that ``accept`` takes, when the top was asked and refused already.

        None when it takes none. O(k log n) for k asked.
        """
        few = min(self.live, _FEW)
        for number in range(1, few):
            place = self._settled(number)
            if accept(place):
                return place
        if few == self.live:
            return None
        # Perhaps nothing is accepted: then sorting all at once is cheaper than putting one after the other right.
        rest = sorted((place.rank, place.serial, place) for place in self)
        return next((place for _, _, place in rest[few:] if accept(place)), None)

    def clear(self) -> None:
        """Take all out."""
        for place in self:
            place.at = None
        del self._ranks[:], self._places[:]
        self._rows = self._starts = ()
        self.live = 0

    def __len__(self) -> int:
        return self.live

    def __iter__(self) -> Iterator[P]:
        """In the order in which they stand, which need not be that of their ranks."""
        return chain.from_iterable(row[1] for row in self._rows) if self._rows else iter(self._places)

    def _settled(self, number: int) -> P:
        """The one of this number, below ``_FEW``, in order of rank, when those before it stand where they belong."""
        places = self._places
        while True:
            if number >= len(places) and self._rows:
                self._join(0)  # it was split off for equal ranks
                continue
            place = places[number]
            rank = place.rank
            if rank is place.at or rank == place.at:
                place.at = rank
                return place
            del self._ranks[number], places[number]
            place.at = rank
            self._insert(place, rank)
            if self._rows:
                self._mend(0)

    def _insert(self, place: P, rank: Any) -> None:
        ranks, places = self._ranks, self._places
        if self._rows:
            ranks, places = self._rows[bisect_right(self._starts, rank)]
        index = bisect_right(ranks, rank)
        if index and ranks[index - 1] == rank and places[index - 1].serial > place.serial:
            index = bisect_left(places, place.serial, bisect_left(ranks, rank), index, key=_serial_of)
        ranks.insert(index, rank)
        places.insert(index, place)
        if len(places) > _ROW:
            self._split(ranks, places)

    def _remove(self, place: P) -> None:
        ranks, places, rank, row = self._ranks, self._places, place.at, 0
        if self._rows:
            row = bisect_right(self._starts, rank)
            ranks, places = self._rows[row]
        index = bisect_left(ranks, rank)
        if places[index] is not place:
            index = bisect_left(places, place.serial, index, bisect_right(ranks, rank), key=_serial_of)
        del ranks[index], places[index]
        if self._rows:
            self._mend(row)

    def _split(self, ranks: Any, places: list[P]) -> None:
        """Make two rows of one."""
        middle = ranks[len(ranks) // 2]
        index = bisect_left(ranks, middle) or bisect_right(ranks, middle)
        if index == len(ranks):
            return
        if not self._rows:
            self._rows, self._starts = [(ranks, places)], ranks[:0]
        row = bisect_right(self._starts, ranks[0])
        self._starts.insert(row, ranks[index])
        self._rows.insert(row + 1, (ranks[index:], places[index:]))
        del ranks[index:], places[index:]

    def _mend(self, row: int) -> None:
        """Join one of several rows, where it has become short, with the one behind, or before."""
        rows = self._rows
        if rows and len(rows[row][1]) < _FEW:
            self._join(min(row, len(rows) - 2))

    def _join(self, row: int) -> None:
        """Make one row of this one of several and the one behind."""
        rows: Any = self._rows
        ranks, places = rows[row]
        ranks.extend(rows[row + 1][0])
        places.extend(rows[row + 1][1])
        del rows[row + 1], self._starts[row]
        if len(rows) == 1:
            self._rows = self._starts = ()


class Ranking(Generic[K]):
    """Places by key."""

    __slots__ = ("_by_key", "_places")

    def __init__(self) -> None:
        self._by_key: dict[K, Place[K]] = {}
        self._places: Places[Place[K]] = Places()

    def set(self, key: K, rank: Any) -> None:
        """Insert the key or change its rank."""
        place = self._by_key.get(key)
        if place is None:
            place = self._by_key[key] = Place(key)
        self._places.put(place, rank)

    def remove(self, key: K) -> None:
        """Take the key out; it must be in."""
        self._places.take(self._by_key.pop(key))

    def min(self) -> Any:
        """The smallest rank. Raises IndexError when empty."""
        return self._places.min()

    def top(self) -> K | None:
        """The first key in order of rank; None when empty."""
        place = self._places.top()
        return None if place is None else place.key

    def first(self, accept: Callable[[K], bool]) -> K | None:
        """The first key in order of rank that ``accept`` takes; None when it takes none. O(k log n) for k asked."""
        key = self.top()
        return key if key is None or accept(key) else self.next(accept)

    def next(self, accept: Callable[[K], bool]) -> K | None:
        """Like ``first``, when the top was asked and refused already."""
        place = self._places.next(lambda place: accept(place.key))
        return None if place is None else place.key

    def clear(self) -> None:
        """Forget everything."""
        self._by_key.clear()
        self._places.clear()

    def __contains__(self, key: K) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)
