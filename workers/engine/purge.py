"""Open purges: a receipt is complete once the last block in use at the purge has been given back and zeroed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from workers.engine.sequence import Sequence
from workers.engine.tier_files import TierPurge
from workers.protocol import Purged


@dataclass(slots=True, eq=False)
class PurgeTicket:
    """One purge. Complete when nobody is left in ``users``."""

    blocks: int
    """Blocks zeroed so far, or waiting to be (``BlockPool.take_dirty``)."""
    pending: int
    """Blocks that were in use at the purge; zeroed when they are released."""
    users: set[Sequence] = field(default_factory=set)
    """Sequences of the purged scopes that held blocks and still run."""
    below: TierPurge | None = None
    """What it found in the tiers below the device."""

    @property
    def complete(self) -> bool:
        """Whether nothing is left to zero or unlink."""
        return not self.users and (self.below is None or not (self.below.files or self.below.scanning))

    def receipt(self, name: str) -> Purged:
        """As it stands. ``pending`` is at least 1 while more may be found."""
        below, pending = self.below, self.pending if self.users else 0
        if below is None:
            return Purged(name, self.blocks, pending)
        left = len(below.files) + below.scanning
        return Purged(name, self.blocks, pending + left, tiers={"host": below.slots, "disk": below.unlinked})


class PurgeLedger:
    """Counts for every open purge what its sequences give back."""

    def __init__(self) -> None:
        self._open: list[PurgeTicket] = []

    def open(self, ticket: PurgeTicket) -> None:
        """Follow a purge to its end."""
        self._open.append(ticket)

    def dirtied(self, sequence: Sequence, blocks: int) -> None:
        """A purged sequence gave back ``blocks`` that nobody else uses."""
        for ticket in self._open:
            if sequence in ticket.users:
                ticket.blocks += blocks

    def ended(self, sequence: Sequence) -> None:
        """A sequence is finished and holds nothing any more."""
        if not self._open:
            return
        for ticket in self._open:
            ticket.users.discard(sequence)
        self._open = [ticket for ticket in self._open if ticket.users]


UNLINK_NS = 2_000_000_000
"""A first answer waits so long for files to be unlinked, so that it mostly is the last one too."""


@dataclass(slots=True)
class _Open:
    name: str
    ticket: PurgeTicket
    at_ns: int
    answered: bool = False


class Receipts:
    """Answers every purge: once at the start, and once more when what was left then is done."""

    def __init__(self, tell: Callable[[Purged], None] | None) -> None:
        self._tell = tell
        self._open: list[_Open] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, name: str, ticket: PurgeTicket, now_ns: int) -> None:
        """A purge was made."""
        self._open.append(_Open(name, ticket, now_ns))
        self.settle(now_ns)

    def settle(self, now_ns: int) -> None:
        """Tell what has come to its end, or is due."""
        for one in self._open:
            due = one.ticket.users or now_ns - one.at_ns >= UNLINK_NS
            if one.ticket.complete or (due and not one.answered):
                one.answered = True
                if self._tell is not None:
                    self._tell(one.ticket.receipt(one.name))
        self._open = [one for one in self._open if not one.ticket.complete]
