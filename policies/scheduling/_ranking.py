"""Things ranked by a number that changes all the time; smallest first, ties in order of entry.

A heap with lazy updates: raising a rank is O(1), since the rank under which a thing stands there is a lower bound that
is corrected when it comes up; so is taking out, since what is out is dropped then. Lowering and inserting are
O(log n). Each thing holds its own ``Place``, so that whoever has it looks nothing up. Up to ``_SORTED`` things the heap
is a sorted list: then the next ones are known, too, and where there are many rankings, as one of each tenant's members,
fewer things are looked at, each of which misses the processor's caches.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_FEW = 32
"""Things that are refused one after the other before all are sorted."""
_SORTED = 1024
"""More are not kept sorted: moving them in memory one by one would cost more than the processor time of a heap."""


class Place(Generic[K]):
    """Where a key stands."""

    __slots__ = ("at", "key", "rank", "serial")

    def __init__(self, key: K) -> None:
        self.key = key
        self.rank: Any = None
        self.at: Any = None
        """The rank that it stands under, at most its own; None: it is not in."""
        self.serial = 0
        """Which of two that stand under the same rank goes first; 0: it is not in."""


P = TypeVar("P", bound=Place[Any])


class Places(Generic[P]):
    """Places in order of rank."""

    __slots__ = ("_heap", "_serial", "live")

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, P]] = []
        """(rank, serial, place). It counts while the serial is the place's; sorted, unless more than ``_SORTED`` do."""
        self._serial = 0
        self.live = 0
        """How many places are in; to read."""

    def put(self, place: P, rank: Any) -> None:
        """Insert it or change its rank."""
        at = place.at
        place.rank = rank
        if at is None:
            self.live += 1
        elif not rank < at:
            return
        place.at = rank
        self._serial = place.serial = serial = self._serial + 1
        heap = self._heap
        (insort if self.live <= _SORTED else heappush)(heap, (rank, serial, place))
        if len(heap) > 2 * self.live + _FEW:  # most of them are out
            self._sort()

    def take(self, place: P) -> None:
        """Take it out; it must be in."""
        self.live -= 1
        place.at = None
        place.serial = 0
        if self.live == _SORTED:
            self._sort()

    def min(self) -> Any:
        """The smallest rank. Raises IndexError when empty."""
        place = self.top()
        if place is None:
            raise IndexError("nothing is ranked")
        return place.rank

    def top(self) -> P | None:
        """The first in order of rank; None when empty."""
        if self.live <= _SORTED:
            return self._settled(0)
        heap = self._heap
        while True:
            at, serial, place = heap[0]
            if place.serial != serial:
                heappop(heap)
            elif place.rank is at:
                return place
            else:
                place.at = rank = place.rank
                heapreplace(heap, (rank, serial, place))

    def next(self, accept: Callable[[P], bool]) -> P | None:
        """The first in order of rank that ``accept`` takes, when the top was asked and refused already.

        None when it takes none. O(k log n) for k asked.
        """
        few = min(self.live, _FEW)
        if self.live <= _SORTED:
            for number in range(1, few):
                place = self._settled(number)
                assert place is not None, "so many are in"
                if accept(place):
                    return place
        else:
            refused = [heappop(self._heap)]
            try:
                while len(refused) < few:
                    place = self.top()
                    assert place is not None, "so many are in"
                    if accept(place):
                        return place
                    refused.append(heappop(self._heap))
            finally:
                for entry in refused:
                    heappush(self._heap, entry)
        if few == self.live:
            return None
        # Perhaps nothing is accepted: then sorting all at once is cheaper than putting one after the other right.
        rest = sorted((place.rank, serial, place) for _, serial, place in self._heap if place.serial == serial)
        return next((place for _, _, place in rest[few:] if accept(place)), None)

    def _settled(self, number: int) -> P | None:
        """The one of this number, of few in order, when those before it stand where they belong; None: no more."""
        heap = self._heap
        while number < len(heap):
            at, serial, place = heap[number]
            if place.serial != serial:
                del heap[number]
            elif place.rank is at:
                return place
            else:
                del heap[number]
                place.at = rank = place.rank
                insort(heap, (rank, serial, place))
        return None

    def clear(self) -> None:
        """Take all out."""
        for _, _, place in self._heap:
            place.at = None
            place.serial = 0
        self._heap.clear()
        self.live = 0

    def __len__(self) -> int:
        return self.live

    def __iter__(self) -> Iterator[P]:
        """In the order in which they stand, which need not be that of their ranks."""
        self._sort()
        return (place for _, _, place in self._heap)

    def _sort(self) -> None:
        """Drop what is out, and sort: a sorted list is a heap."""
        self._heap[:] = sorted(entry for entry in self._heap if entry[2].serial == entry[1])


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
