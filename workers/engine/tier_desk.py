"""Between the index of the tiers and whoever holds their bytes: orders down, reports up. Engine thread only.

Rules
- Orders are carried out before the engine does anything else: what they copy or zero is then what the index says.
- Every write, read and unlink is reported exactly once, some time later, as a message in the engine's mailbox.
- A purge is complete when its last file is reported as unlinked; one that cannot be unlinked stays pending.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from workers.config import EngineConfig
from workers.engine.block_hash import BlockKey
from workers.engine.plan import StepPlan
from workers.engine.tier_files import File, TierPurge
from workers.engine.tier_rates import DISK, HOST, Rates
from workers.engine.tiers import Tiers
from workers.protocol import Prefetch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wrote:
    """A file is there; ``error``: why not."""

    key: BlockKey
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """A file's bytes, or None: it was not there, damaged, or another block's. ``ns``: how long reading took."""

    key: BlockKey
    data: bytes | memoryview | None
    ns: int = 0


@dataclass(frozen=True, slots=True)
class Unlinked:
    """A file is gone; ``error``: why not."""

    key: BlockKey
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Some of the files that the scan at the start came upon, longest unused first."""

    files: list[File]
    last: bool = False
    error: str | None = None
    """With ``last``: why the disk cannot be used."""


TierReport = Wrote | Read | Unlinked | Found


class TierStore(Protocol):
    """Holds the bytes. The engine thread calls it; nothing here waits for a disk."""

    slots: int
    """Blocks that fit into host memory."""
    files: int
    """Blocks that fit on the disk; 0: there is none."""
    block_bytes: int

    def begin(self, report: Callable[[TierReport], None]) -> None:
        """Start; ``report`` may be called from any thread."""
        ...

    def write(self, slot: int, file: File) -> None:
        """Copy a slot's bytes, and write them to the disk later."""
        ...

    def unlink(self, key: BlockKey) -> None:
        """Remove a file later, after what was ordered before."""
        ...

    def read(self, key: BlockKey) -> None:
        """Read a file later, before waiting writes."""
        ...

    def place(self, slot: int | None, report: Read) -> None:
        """Take over a report's bytes into a slot, or drop them."""
        ...

    def zero(self, slots: list[int]) -> None:
        """Overwrite slots with zeros, at once."""
        ...

    def moved(self) -> tuple[int, int]:
        """(blocks, ns): saves and restores since the last call."""
        ...

    def close(self) -> None:
        """Finish writing what is queued, for a bounded time, and end. Idempotent."""
        ...


def new_tiers(config: EngineConfig, store: TierStore) -> Tiers:
    """The index of what ``store`` holds, empty."""
    return Tiers(
        store.slots,
        store.files,
        config.block_size,
        rates=Rates(config.block_size),
        block_bytes=store.block_bytes,
        share=config.cache_share,
    )


class TierDesk:
    """Of one engine."""

    def __init__(self, tiers: Tiers, store: TierStore, report: Callable[[TierReport], None]) -> None:
        """``report``: puts a message into the engine's mailbox; from any thread."""
        self._tiers = tiers
        self._store = store
        self._report = report
        self._begun = False
        self._purges: list[TierPurge] = []
        self._complained = False

    def carry_out(self) -> None:
        """What the index ordered."""
        orders, store = self._tiers.orders, self._store
        if not self._begun:
            self._begun = True
            store.begin(self._report)
        if orders.unlinks:
            for key in orders.unlinks:
                store.unlink(key)
            orders.unlinks.clear()
        if orders.writes:
            for slot, file in orders.writes:
                store.write(slot, file)
            orders.writes.clear()
        if orders.zero:
            store.zero(orders.zero)
            orders.zero.clear()
        if orders.reads:
            for key in orders.reads:
                store.read(key)
            orders.reads.clear()

    def ran(self, plan: StepPlan, ns: int) -> int:
        """A plan ran for ``ns``: learn what computing and moving cost. Returns the time of moving."""
        rates = self._tiers.rates
        blocks, moving = self._store.moved()
        rates.moved(HOST, blocks, moving)
        decodes = sum(chunk.is_decode for chunk in plan.chunks)
        if plan.tokens > 4 * decodes:
            rates.computed(plan.tokens, ns - moving)
        return moving

    def purged(self, found: TierPurge) -> None:
        """Follow a purge to its end."""
        if found.files or found.scanning:
            self._purges.append(found)

    def handle(self, report: TierReport | Prefetch) -> None:
        """Book what came of an order, or what will be wanted."""
        tiers = self._tiers
        if isinstance(report, Prefetch):
            tiers.expect(report.keys)
        elif isinstance(report, Read):
            if report.data is not None:
                tiers.rates.moved(DISK, 1, report.ns)
            slot = tiers.arrived(report.key, report.data is not None)
            self.carry_out()  # who had the slot may be on its way to the disk
            self._store.place(slot, report)
        elif isinstance(report, Wrote):
            self._note("written", report.error)
            tiers.wrote(report.key, report.error is None)
        elif isinstance(report, Unlinked):
            self._note("unlinked", report.error)
            if report.error is None:
                for purge in self._purges:
                    purge.unlinked += report.key in purge.files
                    purge.files.discard(report.key)
        else:
            tiers.found(report.files, report.last)
            if report.error is not None:
                self._note("looked at", report.error)
                tiers.disk_fails()
        self._purges = [purge for purge in self._purges if purge.files or purge.scanning]
        self.carry_out()

    def close(self) -> None:
        """End the store."""
        self._store.close()

    def _note(self, what: str, error: str | None) -> None:
        """Say once that the disk fails, and once that it works again."""
        if error is not None and not self._complained:
            _log.error("engine.tiers: a file on the disk could not be %s (%s); requests go on without it", what, error)
        elif error is None and self._complained:
            _log.warning("engine.tiers: the disk works again")
        self._complained = error is not None
