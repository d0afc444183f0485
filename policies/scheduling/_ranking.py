"""Things ranked by a number that changes all the time; smallest first, ties in order of entry.

A sorted list with lazy updates: raising a rank is O(1), since the rank under which a thing stands there is a lower
bound that is corrected when it comes up. Lowering, inserting and taking out are O(log n). Each thing holds its own
``Place``, so that whoever has it looks nothing up.

Ranks and serials stand side by side in arrays, apart from the things: each look at a thing misses the processor's
caches, and that costs more than all the rest. More than ``_ROW`` stand in several rows, since moving a long one by one
costs, too.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_FEW = 32
"""Things that are refused one after the other before all are sorted."""
_ROW = 128
"""Most in a row; more than twice ``_FEW``, below which one of several joins another."""


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
_Row = tuple[Any, "array[int]", list[P]]
"""Ranks, serials and what stands under them, in order of both."""


class Places(Generic[P]):
    """Places in order of rank."""

    __slots__ = ("_places", "_ranks", "_rows", "_serial", "_serials", "_starts", "live")

    def __init__(self, *, numbers: bool = True) -> None:
        """``numbers``: ranks are floats, or whole numbers below 2**53; else anything that can be compared."""
        self._ranks: Any = array("d") if numbers else []
        self._serials = array("q")
        self._places: list[P] = []
        self._rows: list[_Row[P]] | tuple[()] = ()
        """All rows where there are several; the first is that of the three above."""
        self._starts: tuple[Any, Any] = ((), ())
        """Least rank and serial that belong in each row but the first."""
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
        del self._ranks[:], self._serials[:], self._places[:]
        self._rows = ()
        self.live = 0

    def __len__(self) -> int:
        return self.live

    def __iter__(self) -> Iterator[P]:
        """In the order in which they stand, which need not be that of their ranks."""
        return chain.from_iterable(row[2] for row in self._rows) if self._rows else iter(self._places)

    def _settled(self, number: int) -> P:
        """The one of this number, below ``_FEW``, in order of rank, when those before it stand where they belong."""
        places = self._places
        while True:
            place = places[number]
            rank = place.rank
            if rank is place.at or rank == place.at:
                place.at = rank
                return place
            ranks, serials, serial = self._ranks, self._serials, place.serial
            del ranks[number], serials[number], places[number]
            place.at = rank
            if self._rows:
                self._insert(place, rank)
                self._mend(0)
                continue
            # As in ``_insert``, here for what a call costs: this is most of what happens to a ranking of few.
            index = bisect_right(ranks, rank)
            if index and serials[index - 1] > serial and ranks[index - 1] == rank:
                index = bisect_left(serials, serial, bisect_left(ranks, rank), index)
            ranks.insert(index, rank)
            serials.insert(index, serial)
            places.insert(index, place)

    def _insert(self, place: P, rank: Any) -> None:
        ranks, serials, places, number = self._ranks, self._serials, self._places, 0
        serial = place.serial
        if self._rows:
            number = self._row(rank, serial)
            ranks, serials, places = self._rows[number]
        index = bisect_right(ranks, rank)
        if index and serials[index - 1] > serial and ranks[index - 1] == rank:
            index = bisect_left(serials, serial, bisect_left(ranks, rank), index)
        ranks.insert(index, rank)
        serials.insert(index, serial)
        places.insert(index, place)
        if len(places) > _ROW:
            self._split((ranks, serials, places), number)

    def _remove(self, place: P) -> None:
        ranks, serials, places, number = self._ranks, self._serials, self._places, 0
        rank, serial = place.at, place.serial
        if self._rows:
            number = self._row(rank, serial)
            ranks, serials, places = self._rows[number]
        index = bisect_left(ranks, rank)
        if serials[index] != serial:
            index = bisect_left(serials, serial, index, bisect_right(ranks, rank))
        del ranks[index], serials[index], places[index]
        if self._rows:
            self._mend(number)

    def _row(self, rank: Any, serial: int) -> int:
        """In which of several rows that belongs."""
        ranks, serials = self._starts
        number = bisect_right(ranks, rank)
        if number and ranks[number - 1] == rank:
            number = bisect_right(serials, serial, bisect_left(ranks, rank), number)
        return number

    def _split(self, row: _Row[P], number: int) -> None:
        """Make two rows of this one."""
        ranks, serials, places = row
        middle = len(places) // 2
        if not self._rows:
            self._rows, self._starts = [row], (ranks[:0], serials[:0])
        self._starts[0].insert(number, ranks[middle])
        self._starts[1].insert(number, serials[middle])
        rows: Any = self._rows
        rows.insert(number + 1, (ranks[middle:], serials[middle:], places[middle:]))
        del ranks[middle:], serials[middle:], places[middle:]

    def _mend(self, number: int) -> None:
        """Join one of several rows, where it has become short, with the one behind, or before."""
        rows: Any = self._rows
        if not rows or len(rows[number][2]) >= _FEW:
            return
        number = min(number, len(rows) - 2)
        for column, more in zip(rows[number], rows[number + 1], strict=True):
            column.extend(more)
        del rows[number + 1], self._starts[0][number], self._starts[1][number]
        if len(rows) == 1:
            self._rows = ()


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
