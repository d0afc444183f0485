"""Every block of the KV cache: who uses it, what it holds, and whether it can be hit again. Integers only.

Rules
- A block is in exactly one state: *free* (nothing in it can be hit), *cached* (nobody uses it, its content can be hit),
  *in use* (``ref`` > 0), or *dirty* (purged, waits to be zeroed). free + cached + in use + dirty = total, always.
- ``available`` = free + cached: both can take new work.
- Only full blocks are published, and only after the forward pass that filled them; a published block is never written.
- One block per key. Who computes a content that is cached already keeps a private copy, which is freed at release.
- A sequence's blocks are released tail first, so its last block is evicted before its first: chains break at the end.
- After ``purge`` no block of the scope can be hit; nothing of it is handed out again before it was zeroed.
- The empty scope cannot be purged: it marks blocks of public prefixes, and of callers without a namespace.
- A block bears the labels of everybody who computed or hit it, so that a purge by label finds each copy of a content.
  Blocks of public prefixes bear none: they are nobody's. One with more than ``MAX_LABELS`` bears every label from then
  on: any purge by label takes it, which costs a recompute, and nothing grows with the number of users.

Free blocks are a stack (nothing ever leaves its middle); cached ones are intrusive lists (``eviction.py``). Every
operation is O(1) per block, O(log tenants) when tenants compete for room. Paged blocks and sharing by reference count:
Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, §4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from workers.engine.block_hash import BlockKey
from workers.engine.eviction import REASONS, EvictionOrder
from workers.engine.tables import KEY_BYTES

PUBLIC_OWNER = "\0public"
"""Owns the cached blocks of public prefixes: no tenant's flood counts against another's share of them."""
HOT_PREFIXES = 64
MAX_LABELS = 4096
_NONE: frozenset[bytes] = frozenset()
_EVERY = frozenset((b"",))
"""Stands for every label; nobody's own is empty."""


class Holding(NamedTuple):
    """Whose content a block has, under which names a purge finds it."""

    scope: bytes
    owner: str
    weight: float
    labels: frozenset[bytes]


class BlockPool:
    """``total`` blocks, all free. ``share`` as in ``EvictionOrder``. Raises ValueError for fewer than one block."""

    def __init__(self, total: int, *, share: float = 1.0) -> None:
        if total < 1:
            raise ValueError(f"blocks: {total} is too few; the cache needs at least 1 block")
        self.total = total
        self.ref = [0] * total
        """Users of each block. Read-only outside."""
        self.available = total
        """Free + cached."""
        self._free = list(range(total - 1, -1, -1))
        self._cached = EvictionOrder(total, share)
        self._index: dict[BlockKey, int] = {}
        self._key: list[BlockKey | None] = [None] * total
        self._scope = [b""] * total
        self._owner = [""] * total
        self._weight = [1.0] * total
        self._labels = [_NONE] * total
        self._purged = bytearray(total)
        self._dirty: list[int] = []
        self._hot: OrderedDict[BlockKey, None] = OrderedDict()
        self.query_tokens = 0
        self.hit_tokens = 0
        self.evictions = dict.fromkeys((*REASONS, "purge"), 0)
        self.on_evict: Callable[[int, BlockKey], None] | None = None
        """Told of a cached block that is about to be given to somebody else, while all is known of it."""

    def __contains__(self, key: BlockKey) -> bool:
        """Whether a block is published under ``key``."""
        return key in self._index

    def holding(self, block: int) -> Holding:
        """What is known of a block's content."""
        return Holding(self._scope[block], self._owner[block], self._weight[block], self._labels[block])

    @property
    def free(self) -> int:
        """Blocks that hold nothing of use."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody uses and that can be hit."""
        return len(self._cached)

    def cached_by_owner(self, most: int) -> dict[str, int]:
        """Blocks that nobody uses and that can be hit, of the ``most`` owners that have most. O(owners)."""
        return self._cached.largest(most)

    @property
    def dirty(self) -> int:
        """Purged blocks that wait to be zeroed."""
        return len(self._dirty)

    @property
    def used(self) -> int:
        """Blocks in use, and dirty ones: neither can take new work."""
        return self.total - self.available

    @property
    def spared(self) -> int:
        """Blocks that sharing saves now: every user of a block beyond its first. O(blocks): for tools and tests."""
        return sum(users - 1 for users in self.ref if users > 1)

    def take(self, scope: bytes, owner: str, weight: float, purged: bool = False) -> int:
        """One block for ``owner`` (ref 1), evicting a cached one if no free one is left.

        ``purged``: zero it at release. Raises IndexError when neither is left.
        """
        if self._free:
            block = self._free.pop()
        else:
            block, reason = self._cached.pick(owner)
            if self.on_evict is not None:
                key = self._key[block]
                assert key is not None  # a cached block can be hit
                self.on_evict(block, key)
            self._cached.remove(block)
            self._forget(block)
            self.evictions[reason] += 1
        self.available -= 1
        self.ref[block] = 1
        self._scope[block] = scope
        self._owner[block] = owner
        self._weight[block] = weight
        self._purged[block] = purged
        self._labels[block] = _NONE
        return block

    def mark(self, blocks: Iterable[int], labels: frozenset[bytes]) -> None:
        """``blocks`` hold what somebody with these labels asked about. O(blocks), once per request and hit."""
        if not labels:
            return
        old = union = _NONE
        for block in blocks:
            present = self._labels[block]
            if present is labels or present is _EVERY or self._owner[block] == PUBLIC_OWNER:
                continue
            if present is not old or not union:  # neighbours mostly bear the same
                old, union = present, labels if present <= labels else present | labels
                if len(union) > MAX_LABELS:
                    union = _EVERY
            self._labels[block] = union

    def lookup(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks of the longest published beginning of ``keys``. Changes nothing."""
        index = self._index
        found: list[int] = []
        for key in keys:
            block = index.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, key: BlockKey) -> int | None:
        """The block that is published under ``key``."""
        return self._index.get(key)

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody uses: what acquiring them takes from ``available``."""
        ref = self.ref
        return sum(not ref[block] for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more user for each block, which must be cached or in use."""
        ref = self.ref
        for block in blocks:
            if not ref[block]:
                self._cached.remove(block)
                self.available -= 1
            ref[block] += 1

    def release(self, blocks: Sequence[int]) -> int:
        """One user less for each; ``blocks`` in the sequence's order. Returns how many have no user any more.

        Raises ValueError for a block that nobody uses.
        """
        ref = self.ref
        freed = 0
        for block in reversed(blocks):
            count = ref[block] - 1
            if count < 0:
                raise ValueError(f"block {block} is released more often than it was taken")
            ref[block] = count
            if count:
                continue
            freed += 1
            if self._purged[block]:
                self._forget(block)
                self._dirty.append(block)
                continue
            self.available += 1
            if self._key[block] is None:
                self._free.append(block)
            else:
                self._cached.push(block, self._owner[block], self._weight[block])
        return freed

    def publish(self, block: int, key: BlockKey, *, public: bool = False) -> bool:
        """Make a full block hittable under ``key``. False when the key has a block already, or the block was purged."""
        if key in self._index or self._purged[block]:
            return False
        self._index[key] = block
        self._key[block] = key
        if public:
            self._scope[block] = b""
            self._labels[block] = _NONE
            self._owner[block] = PUBLIC_OWNER
            self._weight[block] = 1.0
        return True

    def touch(self, blocks: Sequence[int]) -> None:
        """``blocks``, in a sequence's order, are the most recently used ones; the last of them goes first."""
        self.acquire(blocks)
        self.release(blocks)

    def withdraw(self, block: int) -> None:
        """A block in use that was published turned out to be bad: nobody hits it any more."""
        self._forget(block)

    def count_query(self, tokens: int, hit: int, deepest: BlockKey | None) -> None:
        """Account one prefix query: ``hit`` of ``tokens`` were cached; ``deepest`` is the last key that hit."""
        self.query_tokens += tokens
        self.hit_tokens += hit
        if deepest is not None:
            self._hot[deepest] = None
            self._hot.move_to_end(deepest)
            if len(self._hot) > HOT_PREFIXES:
                self._hot.popitem(last=False)

    def hot_prefixes(self) -> list[bytes]:
        """Keys of the most recently hit prefixes that are still there, newest first."""
        return [key for key in reversed(self._hot) if key in self._index]

    def purge(
        self, scopes: Collection[bytes], labels: Collection[bytes] = (), keys: Collection[bytes] = ()
    ) -> tuple[int, set[int]]:
        """Make everything of ``scopes``, with one of ``labels`` or under one of ``keys`` unreachable.

        Returns how many blocks wait to be zeroed, and those still in use. Free blocks that still hold bytes of these
        scopes and labels are zeroed too. O(total blocks).
        """
        of_these = concerned(frozenset(scopes) - {b""}, frozenset(labels))
        named = frozenset(keys)
        zero: list[int] = []
        pending: set[int] = set()
        for block, key in enumerate(self._key):
            if not (
                (named and key is not None and key[:KEY_BYTES] in named)
                or of_these(self._scope[block], self._labels[block])
            ):
                continue
            if self.ref[block]:
                self._forget(block)
                self._purged[block] = 1
                pending.add(block)
            elif key is not None:
                self._cached.remove(block)
                self._forget(block)
                self.evictions["purge"] += 1
                zero.append(block)
        stale = {b for b in self._free if of_these(self._scope[b], self._labels[b])}
        if stale:
            self._free = [b for b in self._free if b not in stale]
            zero.extend(stale)
        self.available -= len(zero)
        self._dirty.extend(zero)
        return len(zero), pending

    def take_dirty(self) -> list[int]:
        """Purged blocks; the caller zeroes them before the next forward pass. They are free from now on."""
        dirty, self._dirty = self._dirty, []
        for block in dirty:
            self._purged[block] = 0
            self._scope[block] = b""
            self._labels[block] = _NONE
        self._free.extend(dirty)
        self.available += len(dirty)
        return dirty

    def vacate(self, count: int, owner: str) -> None:
        """Evict until ``count`` blocks are free or nothing is cached. What is evicted is kept nowhere: between two
        plans there is none that could save it (``arrivals.py``)."""
        while len(self._free) < count and len(self._cached):
            block, reason = self._cached.pick(owner)
            self._cached.remove(block)
            self._forget(block)
            self._free.append(block)
            self.evictions[reason] += 1

    def flush(self) -> int:
        """Drop the whole cache (not what is in use); returns how many blocks were freed."""
        count = 0
        while len(self._cached):
            block, _ = self._cached.pick("")
            self._cached.remove(block)
            self._forget(block)
            self._free.append(block)
            count += 1
        return count

    def _forget(self, block: int) -> None:
        """Take a block out of the prefix index."""
        key = self._key[block]
        if key is not None:
            del self._index[key]
            self._key[block] = None

    def check(self) -> None:
        """Assert every invariant of this file. O(total)."""
        self._cached.check()
        free, dirty = set(self._free), set(self._dirty)
        used = {block for block, count in enumerate(self.ref) if count}
        assert all(count >= 0 for count in self.ref)
        assert len(free) == len(self._free)
        assert len(dirty) == len(self._dirty)
        assert len(free | dirty | used) == len(free) + len(dirty) + len(used)
        cached = set(range(self.total)) - free - dirty - used
        assert len(cached) == len(self._cached)
        assert self.available == len(free) + len(cached)
        assert len(free) + len(cached) + len(used) + len(dirty) == self.total
        assert {block for block, key in enumerate(self._key) if key is not None} == set(self._index.values())
        assert all(self._key[block] == key for key, block in self._index.items())
        assert all(self._key[block] is not None for block in cached)
        assert all(self._key[block] is None for block in free | dirty)


def concerned(scopes: frozenset[bytes], labels: frozenset[bytes]) -> Callable[[bytes, frozenset[bytes]], bool]:
    """Whether a block of a scope, with labels, is of one of ``scopes`` or bears one of ``labels``."""
    if not labels:
        return lambda scope, _: scope in scopes
    named = labels | _EVERY
    return lambda scope, borne: scope in scopes or not named.isdisjoint(borne)
