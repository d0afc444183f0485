"""Order in which cached blocks are given up: least recently used, but a tenant's flood first eats its own cache.

Rules
- Holds exactly the cached blocks: those that nobody uses and whose content can still be hit.
- Two intrusive doubly linked lists over plain integer lists: one over all blocks, one per owner. Every operation is
  O(1); finding the owner with most over its weight is O(log owners), amortised, through a lazily mended heap.
- An owner's share of the pool is ``share * total * weight / sum of weights``, over the owners with cached blocks.
- An owner without cached blocks is forgotten, so that changing tenants never grow this.

Whose block goes when ``owner`` needs one:
1. the oldest of all, if its owner is over its share (plain LRU while nobody is protected);
2. else the requester's own oldest, if the requester is over its share;
3. else the oldest of whoever holds most per weight, if over its share;
4. else the requester's own oldest; 5. else the oldest of all: running work goes before anybody's cache.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace, nlargest

REASONS = ("lru", "own", "over_share", "pressure")
"""Why a block was evicted: rule 1, rules 2 and 4, rule 3, rule 5."""


class _Owner:
    __slots__ = ("count", "head", "heaped", "name", "tail", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.count = 0
        self.head = -1
        self.tail = -1
        self.heaped = 0
        """The count under which the heap's newest entry knows it; never below ``count`` while that is above 0."""


class EvictionOrder:
    """The cached blocks of a pool with ``total`` blocks. ``share`` in [0, 1]; 0 = plain LRU."""

    def __init__(self, total: int, share: float = 1.0) -> None:
        self._total = total
        self._share = share
        self._next = [-1] * total
        self._prev = [-1] * total
        self._own_next = [-1] * total
        self._own_prev = [-1] * total
        self._owner_of: list[_Owner | None] = [None] * total
        self._head = -1
        self._tail = -1
        self._owners: dict[str, _Owner] = {}
        self._weights = 0.0
        self._heap: list[tuple[float, int, _Owner]] = []
        self._pushes = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def owned(self, owner: str) -> int:
        """Cached blocks of one owner."""
        entry = self._owners.get(owner)
        return entry.count if entry else 0

    def largest(self, most: int) -> dict[str, int]:
        """Cached blocks of the ``most`` owners that have most. O(owners)."""
        found = nlargest(most, self._owners.values(), key=lambda entry: entry.count)
        return {entry.name: entry.count for entry in found}

    def push(self, block: int, owner: str, weight: float) -> None:
        """``block`` is now the most recently used one, and belongs to ``owner``."""
        entry = self._owners.get(owner)
        if entry is None:
            entry = self._owners[owner] = _Owner(owner, weight)
            self._weights += weight
        elif entry.weight != weight:
            self._weights += weight - entry.weight
            entry.weight = weight
            entry.heaped = 0
        self._owner_of[block] = entry
        tail = self._tail
        self._prev[block] = tail
        self._next[block] = -1
        if tail >= 0:
            self._next[tail] = block
        else:
            self._head = block
        self._tail = block
        tail = entry.tail
        self._own_prev[block] = tail
        self._own_next[block] = -1
        if tail >= 0:
            self._own_next[tail] = block
        else:
            entry.head = block
        entry.tail = block
        entry.count += 1
        self._count += 1
        if entry.count > entry.heaped and self._share:
            self._heap_up(entry)

    def remove(self, block: int) -> None:
        """``block`` is used again, evicted or purged. Raises ValueError when it is not cached."""
        entry = self._owner_of[block]
        if entry is None:
            raise ValueError(f"block {block} is not cached")
        self._owner_of[block] = None
        before, after = self._prev[block], self._next[block]
        if before >= 0:
            self._next[before] = after
        else:
            self._head = after
        if after >= 0:
            self._prev[after] = before
        else:
            self._tail = before
        before, after = self._own_prev[block], self._own_next[block]
        if before >= 0:
            self._own_next[before] = after
        else:
            entry.head = after
        if after >= 0:
            self._own_prev[after] = before
        else:
            entry.tail = before
        entry.count -= 1
        self._count -= 1
        if not entry.count:
            del self._owners[entry.name]
            # A sum that only ever adds and subtracts floats drifts; nobody left means exactly zero.
            self._weights = self._weights - entry.weight if self._owners else 0.0

    def pick(self, owner: str) -> tuple[int, str]:
        """The block to evict for ``owner`` and why (one of ``REASONS``). Raises IndexError when nothing is cached."""
        oldest = self._head
        if oldest < 0:
            raise IndexError("no cached block to evict")
        if not self._share:
            return oldest, "lru"
        entry = self._owner_of[oldest]
        assert entry is not None
        if len(self._owners) == 1 and entry.name == owner:
            return oldest, "lru"
        if self._over(entry):
            return oldest, "lru"
        own = self._owners.get(owner)
        if own is not None and self._over(own):
            return own.head, "own"
        fattest = self._fattest()
        if self._over(fattest):
            return fattest.head, "over_share"
        if own is not None:
            return own.head, "own"
        return oldest, "pressure"

    def _over(self, entry: _Owner) -> bool:
        return entry.count * self._weights > self._share * self._total * entry.weight

    def _heap_up(self, entry: _Owner) -> None:
        entry.heaped = entry.count
        self._pushes += 1
        heappush(self._heap, (-entry.count / entry.weight, self._pushes, entry))
        if len(self._heap) > 2 * len(self._owners) + 64:
            self._heap.clear()
            for number, other in enumerate(self._owners.values()):
                other.heaped = other.count
                self._heap.append((-other.count / other.weight, number, other))
            self._pushes = len(self._heap)
            heapify(self._heap)

    def _fattest(self) -> _Owner:
        """The owner with most cached blocks per weight. Entries are never too low, so the first true one is the top."""
        heap = self._heap
        while True:
            ratio, _, entry = heap[0]
            if not entry.count or ratio != -entry.heaped / entry.weight:
                heappop(heap)
            elif entry.heaped != entry.count:
                entry.heaped = entry.count
                self._pushes += 1
                heapreplace(heap, (-entry.count / entry.weight, self._pushes, entry))
            else:
                return entry

    def check(self) -> None:
        """Assert that lists, counts and sums agree."""
        seen: list[int] = []
        block, before = self._head, -1
        while block >= 0:
            assert self._prev[block] == before
            seen.append(block)
            before, block = block, self._next[block]
        assert before == self._tail
        assert len(seen) == len(set(seen)) == self._count
        assert {b for b, o in enumerate(self._owner_of) if o is not None} == set(seen)
        rank = {b: i for i, b in enumerate(seen)}
        owned = 0
        for name, entry in self._owners.items():
            assert entry.name == name
            assert entry.count > 0
            own: list[int] = []
            block, before = entry.head, -1
            while block >= 0:
                assert self._own_prev[block] == before
                assert self._owner_of[block] is entry
                own.append(block)
                before, block = block, self._own_next[block]
            assert before == entry.tail
            assert len(own) == entry.count
            assert [rank[b] for b in own] == sorted(rank[b] for b in own)
            owned += entry.count
        assert owned == self._count
        assert abs(self._weights - sum(o.weight for o in self._owners.values())) < 1e-6 * max(1.0, self._weights)
