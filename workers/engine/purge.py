"""Open purges: a receipt is complete once the last block in use at the purge has been given back and zeroed."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class PurgeTicket:
    """One purge. Complete when nobody is left in ``users``."""

    blocks: int
    """Blocks zeroed so far, or waiting to be (``BlockPool.take_dirty``)."""
    pending: int
    """Blocks that were in use at the purge; zeroed when they are released."""
    users: set[Sequence] = field(default_factory=set)
    """Sequences of the purged scopes that held blocks and still run."""


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
