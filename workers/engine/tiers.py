"""Which blocks lie below the device: slots in host memory, and files on a disk. Keys and integers; no bytes, no I/O.

Rules
- Both tiers are ``BlockPool``s: the same index, the same eviction order by tenant, the same purge as the device's own.
- Down: a cached block that leaves the device goes to the host, one that leaves the host goes to the disk. Nothing is
  written that is below already. Up: a file goes to a host slot before it is needed, a slot to a fresh block of the
  device in the plan that admits its sequence. What came up stays below as well.
- A slot that the open plan fills or reads is in use until its commit: nobody gets it meanwhile. It is published at the
  commit, when its bytes are there; a plan that failed leaves nothing.
- A preempted sequence's blocks that have no key (its last, half full one; all of them without a prefix cache) are
  swapped: saved into slots that only this sequence has. What has a key is found under it.
- A waiting sequence whose files are being read is overtaken, for no longer than computing its blocks would take.
- What requests in the gateway's queue will want is read ahead while the disk has nothing else to read, a request at a
  time; nobody waits for it. A hint that is older than four others is forgotten.
- What the engine's thread must have done outside a plan is in ``orders``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from workers.engine.block_hash import BlockKey
from workers.engine.block_pool import PUBLIC_OWNER, BlockPool, Holding
from workers.engine.scoring import reusable
from workers.engine.sequence import Fetch, Sequence, Swap
from workers.engine.tier_files import File, Files, Orders, TierPurge
from workers.engine.tier_rates import DISK, HOST, Rates
from workers.protocol import TierStats

LOOK_AHEAD = 16
"""So many waiting sequences are looked up on the disk before it is their turn."""
MIN_WRITE_BYTES, MAX_WRITE_BYTES = 64 * 2**20, 2**30
"""Between these half of the host's bytes may wait to be written: one long prompt evicts as much at once. What is
evicted beyond is lost, which costs a recompute and nothing else."""
EXPECTED = 4
"""Requests in the gateway's queue whose keys are remembered."""
MIN_WAIT_NS = 250_000_000
MAX_WAIT_NS = 10_000_000_000
"""Between these a sequence waits for its files as long as computing them would take."""


class Tiers:
    """Host memory of ``slots`` blocks and a disk of ``files`` blocks (0: none), of blocks of ``size`` tokens.

    ``block_bytes``: for figures and bounds.
    """

    def __init__(
        self, slots: int, files: int, size: int, *, rates: Rates, block_bytes: int = 0, share: float = 1.0
    ) -> None:
        self.orders = Orders()
        self.rates = rates
        self.host = BlockPool(slots, share=share)
        self.host.on_evict = self._leave_host
        queue = min(max(MIN_WRITE_BYTES, slots * block_bytes // 2), MAX_WRITE_BYTES)
        most = max(4, queue // max(1, block_bytes))
        self.disk = Files(files, self.orders, most_writes=most, share=share) if files else None
        self.swaps = 0
        """Sequences whose blocks were swapped out."""
        self._size = size
        self._bytes = block_bytes
        self._hits = {HOST: 0, DISK: 0}
        self._restored = {HOST: 0, DISK: 0}
        self._saved = 0
        self._saves: list[tuple[int, int]] = []
        self._restores: list[tuple[int, int]] = []
        self._filled: list[tuple[int, BlockKey]] = []
        """Slots that the open plan fills for everybody to hit, and their keys."""
        self._pinned: list[int] = []
        """Slots that the open plan reads."""
        self._swapped: list[Sequence] = []
        """Who was swapped out in the open plan."""
        self._from_disk: set[int] = set()
        """Slots whose content came from the disk and was not hit yet."""
        self._readers: dict[BlockKey, list[Sequence]] = {}
        self._expected: deque[list[BlockKey]] = deque(maxlen=EXPECTED)
        self._early = Fetch([], set())
        """What is being read for a request that is not here yet."""
        self._early_blocks = 0
        self._parked: list[Sequence] = []
        """Who waits for the disk, or did until just now."""
        self._now = 0

    # Down: what the device evicts, and what it takes from a preempted sequence.

    def save(self, key: BlockKey, block: int, holding: Holding) -> None:
        """A cached block of the device is about to be overwritten: keep it, if there is a slot and it is not here."""
        host = self.host
        known = host.lookup((key,))
        if known:
            host.touch(known)
        elif host.available and self.rates.pays(HOST, 1):
            slot = self._take(holding)
            self._saves.append((block, slot))
            self._filled.append((slot, key))

    def swap_out(self, sequence: Sequence, copies: Iterable[tuple[int, int]] = ()) -> bool:
        """Save what a preempted sequence has computed and nobody could hit. False: it will be computed again.

        ``copies``: of the open plan; a copy's target holds nothing yet, its source does.
        """
        host, size = self.host, self._size
        first = sequence.published if sequence.chain is not None else 0
        last = -(-sequence.computed // size)
        count = last - first
        if count <= 0 or sequence.purged or sequence.search is not None or host.available < count:
            return False
        if not self.rates.pays(HOST, 2 * count, tokens=sequence.computed - first * size):
            return False
        origin = {target: source for source, target in copies}
        holding = Holding(sequence.scope, sequence.tenant_key, sequence.weight, sequence.labels)
        slots = [self._take(holding) for _ in range(count)]
        blocks = (origin.get(block, block) for block in sequence.blocks[first:last])
        self._saves.extend(zip(blocks, slots, strict=True))
        sequence.swap = Swap(first, sequence.computed, slots)
        self._swapped.append(sequence)
        self.swaps += 1
        return True

    def drop_swap(self, sequence: Sequence) -> None:
        """Its saved blocks are of no use any more."""
        if sequence.swap is not None:
            self.host.release(sequence.swap.slots)
            sequence.swap = None

    def _take(self, holding: Holding) -> int:
        slot = self.host.take(holding.scope, holding.owner, holding.weight)
        self.host.mark((slot,), holding.labels)
        self._from_disk.discard(slot)
        return slot

    def _leave_host(self, slot: int, key: BlockKey) -> None:
        if self.disk is not None and self.rates.pays(DISK, 1):
            self.disk.add(slot, key, self.host.holding(slot), self._now)

    # Up: what a sequence that is admitted finds.

    def lookup(self, keys: Iterable[BlockKey]) -> list[int]:
        """Host slots of the longest beginning of ``keys`` that is worth bringing back. Changes nothing."""
        found = self.host.lookup(keys)
        return found if found and self.rates.pays(HOST, len(found)) else []

    def hold(self, slots: list[int]) -> None:
        """The open plan reads these: nobody gets them before its commit."""
        self.host.acquire(slots)
        self._pinned.extend(slots)

    def restore(self, sequence: Sequence, slots: list[int], blocks: list[int], at: int) -> int:
        """Bring held ``slots`` into the first of ``blocks``, which are the sequence's own from block ``at``, and behind
        them what was swapped out. Returns how many tokens are then computed."""
        size = self._size
        self._restores.extend(zip(slots, blocks, strict=False))
        fetched = sum(slot in self._from_disk for slot in slots)
        for tier, count in ((DISK, fetched), (HOST, len(slots) - fetched)):
            self._restored[tier] += count
            self._hits[tier] += count * size
        self._from_disk.difference_update(slots)
        reached = at + len(slots)
        swap = sequence.swap
        if swap is None or swap.first != reached:
            self.drop_swap(sequence)
            return reached * size
        self.hold(swap.slots)
        self._restores.extend(zip(swap.slots, blocks[len(slots) :], strict=False))
        self._restored[HOST] += len(swap.slots)
        self.drop_swap(sequence)
        return swap.computed

    # The open plan.

    def take_moves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(saves, restores) of the open plan."""
        moves = self._saves, self._restores
        self._saves, self._restores = [], []
        return moves

    def settle(self, ran: bool) -> None:
        """The open plan ran, or it failed: then nothing that it saved is there."""
        host = self.host
        for slot, key in self._filled:
            if ran:
                host.publish(slot, key, public=host.holding(slot).owner == PUBLIC_OWNER)
                self._saved += 1
            host.release((slot,))
        if not ran:
            for sequence in self._swapped:
                self.drop_swap(sequence)
        host.release(self._pinned)
        self._filled, self._pinned, self._swapped = [], [], []

    # From the disk, before it is needed.

    def look_ahead(self, device: BlockPool, waiting: Iterable[Sequence], now: int) -> None:
        """Have the files read that the next sequences in line will want; they wait for them. ``now`` in ns."""
        self._now = now
        disk = self.disk
        if disk is None:
            return
        disk.expire(now)
        if self._parked:
            self._parked = [sequence for sequence in self._parked if _waits(sequence, now)]
        if not disk.pool.cached:
            return
        for sequence, _ in zip(waiting, range(LOOK_AHEAD), strict=False):
            if sequence.fetch is None and sequence.chain is not None:
                most = reusable(sequence, self._size)
                sequence.chain.extend(sequence.keys, sequence.tokens, most)
                sequence.fetch = self._fetch(disk, self._beyond(device, disk, sequence.keys[:most]), now)
                if sequence.fetch.missing:
                    self._parked.append(sequence)
                    for key in sequence.fetch.keys:
                        self._readers[key].append(sequence)
        while self._expected and not disk.busy:
            self._early = self._fetch(disk, self._beyond(device, disk, self._expected.popleft()), now)

    def expect(self, keys: list[bytes]) -> None:
        """A request that begins so may come: what of it lies on the disk is read when that has nothing else to do."""
        if self.disk is not None:
            self._expected.append([BlockKey(key) for key in keys])

    def _beyond(self, device: BlockPool, disk: Files, keys: list[BlockKey]) -> list[BlockKey]:
        """The first keys that neither device nor host have, as far as the disk has them."""
        rest = keys[len(device.lookup(keys)) :]
        rest = rest[len(self.host.lookup(rest)) :]
        return rest[: next((index for index, key in enumerate(rest) if key not in disk), len(rest))]

    def _fetch(self, disk: Files, keys: list[BlockKey], now: int) -> Fetch:
        keys = keys[: max(0, self.host.total // 2 - disk.busy)]  # the host must keep them until they are used
        fresh = [key for key in keys if key not in self._readers]
        if not keys or not self.rates.pays(DISK, len(keys), queued=disk.busy):
            return Fetch([], set())
        for key in fresh:
            disk.fetch(key)
            self._readers[key] = []
        wait = min(max(MIN_WAIT_NS, int(self.rates.recompute_ns(len(keys)))), MAX_WAIT_NS)
        return Fetch(keys, set(keys), now + wait)

    def arrived(self, key: BlockKey, ok: bool) -> int | None:
        """A file was read; the slot that takes its bytes now, or None. Not ``ok``: it was not what it should be."""
        assert self.disk is not None
        host = self.host
        holding = self.disk.read(key, ok)
        slot = None
        if holding is not None and key not in host and host.available:
            slot = self._take(holding)
            host.publish(slot, key, public=holding.owner == PUBLIC_OWNER)
            host.release((slot,))
            self._from_disk.add(slot)
        self._early_blocks += slot is not None and key in self._early.missing
        for fetch in (*(sequence.fetch for sequence in self._readers.pop(key)), self._early):
            if fetch is None or key not in fetch.missing:
                continue
            fetch.missing.discard(key)
            if key not in host:
                fetch.missing.clear()  # nothing behind it can be used
            if not fetch.missing:
                host.touch(host.lookup(fetch.keys))  # so that its end is evicted first
        return slot

    def wrote(self, key: BlockKey, ok: bool) -> None:
        """A file was written, or could not be."""
        assert self.disk is not None
        self.disk.wrote(key, ok, self._now)

    def disk_fails(self) -> None:
        """It cannot even be looked at: nothing is written for a while."""
        assert self.disk is not None
        self.disk.fails(self._now)

    def found(self, files: list[File], last: bool) -> None:
        """What a scan came upon on the disk, longest unused first."""
        assert self.disk is not None
        self.disk.found(files, last)

    # Purges and figures.

    def purge(self, scopes: Collection[bytes], labels: Collection[bytes], keys: Collection[bytes]) -> TierPurge:
        """As ``BlockPool.purge``, in both tiers, between plans and after the swaps of those concerned were dropped."""
        found = TierPurge()
        found.slots, pending = self.host.purge(scopes, labels, keys)
        assert not pending, "a slot is in use between plans"
        self.orders.zero.extend(self.host.take_dirty())
        if self.disk is not None:
            self.disk.purge(scopes, labels, keys, found)
        return found

    def stats(self) -> Mapping[str, TierStats]:
        """The live view, by tier."""
        told = {HOST: self._stats(HOST, self.host, self._saved)}
        disk = self.disk
        if disk is not None:
            up = self._now >= disk.off_until_ns
            told[DISK] = self._stats(DISK, disk.pool, disk.written, disk.errors, up, self._early_blocks)
        return told

    def _stats(
        self, tier: str, pool: BlockPool, saved: int, errors: int = 0, up: bool = True, early: int = 0
    ) -> TierStats:
        held = (pool.total - pool.free) * self._bytes
        return TierStats(held, self._hits[tier], self._restored[tier], saved, errors, up, early)

    def check(self) -> None:
        """Assert what holds between plans. O(everything)."""
        self.host.check()
        assert not self._saves
        assert not self._restores
        assert not self._filled
        assert not self._pinned
        if self.disk is not None:
            self.disk.check()
            assert self.disk.busy == len(self._readers)


def _waits(sequence: Sequence, now: int) -> bool:
    """Whether it still waits for the disk. Who waited long enough does not."""
    fetch = sequence.fetch
    if fetch is None or sequence.finish is not None:
        return False
    if now >= fetch.until_ns:
        fetch.missing.clear()
    return bool(fetch.missing)
