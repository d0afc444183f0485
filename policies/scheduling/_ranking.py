"""Things ranked by a number that changes all the time; smallest first, ties in order of entry.

A heap with lazy updates: raising a rank is O(1), since the rank under which a thing stands in the heap is a lower bound
that is corrected when it comes up; lowering or inserting is O(log n). Stale entries are swept when they outnumber the
live ones. Each thing holds its own ``Place``, so that whoever has it looks nothing up.

Up to ``_SORTED`` entries are kept sorted, which is a heap as well: who was just served mostly goes near the end, and
finding that place looks at fewer entries than the way down a heap. Each look misses the processor's caches; moving the
list by one costs a fraction of a microsecond.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_FEW = 32
"""Keys that are refused one after the other before all are sorted."""
_SORTED = 2048


class Place(Generic[K]):
    """Where a key stands."""

    __slots__ = ("entry", "key", "rank")

    def __init__(self, key: K) -> None:
        self.key = key
        self.rank: Any = None
        self.entry: tuple[Any, int, Any] | None = None
        """(rank it stands under, serial, itself) in the heap; None: it is not in."""


P = TypeVar("P", bound=Place[Any])


class Places(Generic[P]):
    """Places in order of rank."""

    __slots__ = ("_heap", "_live", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, P]] = []
        self._live = 0
        self._serial = 0

    def put(self, place: P, rank: Any) -> None:
        """Insert it or change its rank."""
        entry = place.entry
        place.rank = rank
        if entry is None:
            self._live += 1
        elif not rank < entry[0]:
            return
        self._serial = serial = self._serial + 1
        place.entry = entry = (rank, serial, place)
        self._add(entry)
        if len(self._heap) > 2 * self._live + 64:
            self._heap[:] = sorted(self._entries())

    def take(self, place: P) -> None:
        """Take it out; it must be in."""
        self._live -= 1
        place.entry = None

    def min(self) -> Any:
        """The smallest rank. Raises IndexError when empty."""
        self._settle()
        return self._heap[0][0]

    def top(self) -> P | None:
        """The first in order of rank; None when empty."""
        if not self._live:
            return None
        entry = self._heap[0]
        place = entry[2]
        if place.entry is entry and place.rank == entry[0]:
            return place
        self._settle()
        return self._heap[0][2]

    def next(self, accept: Callable[[P], bool]) -> P | None:
        """The first in order of rank that ``accept`` takes, when the top was asked and refused already.

        None when it takes none. O(k log n) for k asked.
        """
        refused = [self._remove_first()]
        try:
            while len(refused) < min(self._live, _FEW):
                self._settle()
                place = self._heap[0][2]
                if accept(place):
                    return place
                refused.append(self._remove_first())
        finally:
            for entry in refused:
                self._add(entry)
        if len(refused) == self._live:
            return None
        # Perhaps nothing is accepted: then sorting all at once is cheaper than taking one after the other.
        rest = sorted((entry[2].rank, entry[1], entry[2]) for entry in self._entries())
        return next((place for _, _, place in rest[len(refused) :] if accept(place)), None)

    def clear(self) -> None:
        """Take all out."""
        for _, _, place in self._heap:
            place.entry = None
        self._heap.clear()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def __iter__(self) -> Iterator[P]:
        """In no order."""
        return (entry[2] for entry in self._entries())

    def _entries(self) -> list[tuple[Any, int, P]]:
        return [entry for entry in self._heap if entry[2].entry is entry]

    def _add(self, entry: tuple[Any, int, P]) -> None:
        heap = self._heap
        if len(heap) >= _SORTED:
            heappush(heap, entry)
        elif not heap or heap[-1] < entry:
            heap.append(entry)
        else:
            insort(heap, entry)

    def _remove_first(self) -> tuple[Any, int, P]:
        heap = self._heap
        if len(heap) <= _SORTED:
            return heap.pop(0)
        first = heappop(heap)
        if len(heap) == _SORTED:
            heap.sort()
        return first

    def _settle(self) -> None:
        """Bring a live entry with its true rank to the top."""
        heap = self._heap
        while heap:
            entry = heap[0]
            place = entry[2]
            if place.entry is not entry:
                self._remove_first()
                continue
            rank = place.rank
            if rank == entry[0]:
                return
            place.entry = entry = (rank, entry[1], place)
            if len(heap) > _SORTED:
                heapreplace(heap, entry)
                continue
            del heap[0]
            if not heap or heap[-1] < entry:
                heap.append(entry)
            else:
                insort(heap, entry)


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
