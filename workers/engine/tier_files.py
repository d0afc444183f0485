"""Which blocks lie on the disk: keys and integers; no bytes, no I/O. ``tiers.py`` says how it is used.

Rules
- A ``BlockPool`` whose blocks are files: the same index, eviction order and purge as the device's.
- A file is in use while it is written or read, and can be hit once it was written.
- What must be done about files is in ``orders``; what came of it is told by ``wrote``, ``read``, ``found``.
- A purge reaches everything: what is there, what is being written or read, and what a scan that has not ended finds.
- A file whose scope has an end is unlinked then, also by a process that never saw its gateway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from workers.engine.block_hash import BlockKey
from workers.engine.block_pool import PUBLIC_OWNER, BlockPool, Holding, concerned

MAX_SCOPES = 65_536
"""Scopes whose end is remembered."""
RETRY_NS = 60_000_000_000
"""A disk that could not be written is tried again so much later."""


@dataclass(frozen=True, slots=True)
class File:
    """What is told about a block that goes to the disk, and what is found of one there."""

    key: BlockKey
    holding: Holding
    expires: float = 0.0
    """Unix time after which nobody may read it; 0: none."""


@dataclass(slots=True)
class Orders:
    """What is to be done at once, on the engine thread, in this order."""

    unlinks: list[BlockKey] = field(default_factory=list)
    """First: a file that had to go may be written anew in the same turn, never the other way round (one that is being
    written stays until it is there)."""
    writes: list[tuple[int, File]] = field(default_factory=list)
    """Host slot → file. They copy what the orders behind them overwrite."""
    zero: list[int] = field(default_factory=list)
    """Host slots."""
    reads: list[BlockKey] = field(default_factory=list)


@dataclass(slots=True)
class TierPurge:
    """What a purge found below the device."""

    slots: int = 0
    files: set[BlockKey] = field(default_factory=set)
    """To be unlinked."""
    unlinked: int = 0
    scanning: bool = False
    """More may be found: the disk's files are not all known yet."""


@dataclass(frozen=True, slots=True)
class _Purge:
    concerns: Callable[[bytes, frozenset[bytes]], bool]
    keys: frozenset[bytes]
    found: TierPurge


class Files:
    """The files of a disk that takes ``total`` of them. ``most_writes``: how many may wait to be written."""

    def __init__(self, total: int, orders: Orders, *, most_writes: int, share: float = 1.0) -> None:
        self.pool = BlockPool(total, share=share)
        self.pool.on_evict = self._gone
        self.written = 0
        self.errors = 0
        self.off_until_ns = 0
        """Nothing is written before."""
        self._orders = orders
        self._most_writes = most_writes
        self._number: dict[BlockKey, int] = {}
        """Of every file: being written, there, being read."""
        self._key: dict[int, BlockKey] = {}
        self._writing: set[BlockKey] = set()
        self._reading: set[BlockKey] = set()
        self._ends: OrderedDict[bytes, float] = OrderedDict()
        self._ending: list[tuple[float, BlockKey, int]] = []
        """A heap of the files that have an end, some of them gone."""
        self.scanning = True
        """The files of a process before are not all known yet."""
        self._purges: list[_Purge] = []
        """Made while the disk was being scanned."""

    def __contains__(self, key: BlockKey) -> bool:
        """Whether it can be read."""
        return key in self.pool

    def keep_until(self, scope: bytes, end: float) -> None:
        """Nothing of ``scope`` may be here after this Unix time."""
        self._ends[scope] = end
        self._ends.move_to_end(scope)
        if len(self._ends) > MAX_SCOPES:
            self._ends.popitem(last=False)

    def add(self, slot: int, key: BlockKey, holding: Holding, now_ns: int) -> None:
        """A block leaves a host slot: have it written, if there is a place and it is not here."""
        if key in self._number or not self.pool.available:
            return
        if len(self._writing) >= self._most_writes or now_ns < self.off_until_ns:
            return
        file = File(key, holding, self._ends.get(holding.scope, 0.0))
        self._place(file)
        self._writing.add(key)
        self._orders.writes.append((slot, file))

    def wrote(self, key: BlockKey, ok: bool, now_ns: int) -> None:
        """A file is there, or could not be written: then the disk is left alone for a while."""
        self._writing.discard(key)
        number = self._number[key]
        if ok:
            holding = self.pool.holding(number)
            self._publish(key, number, self._ends.get(holding.scope, 0.0))
            self.written += 1
        else:
            self.fails(now_ns)
        self._give_back(key)

    def fails(self, now_ns: int) -> None:
        """The disk cannot be written."""
        self.errors += 1
        self.off_until_ns = now_ns + RETRY_NS

    def fetch(self, key: BlockKey) -> None:
        """Have a file read that is here."""
        self.pool.acquire((self._number[key],))
        self._reading.add(key)
        self._orders.reads.append(key)

    def read(self, key: BlockKey, ok: bool) -> Holding | None:
        """A file was read. Whose content it is, or None: it was purged meanwhile, or (not ``ok``) is no good."""
        number = self._number[key]
        holding = self.pool.holding(number) if ok and key in self.pool else None
        if not ok:
            self.errors += 1
            self.pool.withdraw(number)
        self._reading.discard(key)
        self._give_back(key)
        return holding

    def found(self, files: Sequence[File], last: bool) -> None:
        """What the scan at the start came upon, longest unused first."""
        for file in files:
            if file.key in self._number:
                continue
            purge = next((one for one in self._purges if _concerns(one, file)), None)
            if purge is not None:
                purge.found.files.add(file.key)
            if purge is not None or not self.pool.free:
                self._orders.unlinks.append(file.key)
                continue
            number = self._place(file)
            self._publish(file.key, number, file.expires)
            self.pool.release((number,))
        if last:
            self.scanning = False
            for purge in self._purges:
                purge.found.scanning = False
            self._purges = []

    def expire(self, now_ns: int) -> None:
        """Unlink what has come to its end."""
        while self._ending and self._ending[0][0] * 1e9 <= now_ns:
            _, key, number = heappop(self._ending)
            if self._number.get(key) == number and key in self.pool:
                self.pool.acquire((number,))
                self.pool.withdraw(number)  # whoever reads it just now gets a miss
                self._give_back(key)

    def purge(
        self, scopes: Collection[bytes], labels: Collection[bytes], keys: Collection[bytes], found: TierPurge
    ) -> None:
        """As ``BlockPool.purge``; what is to be unlinked goes into ``found``, now or when the scan has ended."""
        _, pending = self.pool.purge(scopes, labels, keys)
        found.files.update(self._key[number] for number in pending)
        before = len(self._orders.unlinks)
        self._sweep()
        found.files.update(self._orders.unlinks[before:])
        if self.scanning:
            found.scanning = True
            concerns = concerned(frozenset(scopes) - {b""}, frozenset(labels))
            self._purges.append(_Purge(concerns, frozenset(keys), found))

    @property
    def busy(self) -> int:
        """Files that are being read."""
        return len(self._reading)

    @property
    def writing(self) -> int:
        """Files that are being written."""
        return len(self._writing)

    def _place(self, file: File) -> int:
        """A file's number, in use."""
        holding = file.holding
        number = self.pool.take(holding.scope, holding.owner, holding.weight)
        self.pool.mark((number,), holding.labels)
        self._number[file.key] = number
        self._key[number] = file.key
        return number

    def _publish(self, key: BlockKey, number: int, end: float) -> None:
        self.pool.publish(number, key, public=self.pool.holding(number).owner == PUBLIC_OWNER)
        if end:
            heappush(self._ending, (end, key, number))
            if len(self._ending) > 2 * len(self._number) + 64:  # most are of files that had to go before their time
                self._ending = [one for one in self._ending if self._number.get(one[1]) == one[2]]
                heapify(self._ending)

    def _give_back(self, key: BlockKey) -> None:
        """It is neither written nor read any more; what was purged meanwhile, or is no good, goes."""
        number = self._number[key]
        self.pool.release((number,))
        if self.pool.dirty:
            self._sweep()
        elif key not in self.pool and not self.pool.ref[number]:
            self._gone(number, key)

    def _sweep(self) -> None:
        for number in self.pool.take_dirty():
            key = self._key.get(number)
            if key is not None:
                self._gone(number, key)

    def _gone(self, number: int, key: BlockKey) -> None:
        del self._number[key], self._key[number]
        self._orders.unlinks.append(key)

    def check(self) -> None:
        """Assert what holds between plans. O(everything)."""
        self.pool.check()
        assert {number: key for key, number in self._number.items()} == self._key
        busy = {self._number[key] for key in self._writing | self._reading}
        assert {number for number, users in enumerate(self.pool.ref) if users} == busy
        assert all(key in self.pool for key, number in self._number.items() if number not in busy)


def _concerns(purge: _Purge, file: File) -> bool:
    return file.key in purge.keys or purge.concerns(file.holding.scope, file.holding.labels)
