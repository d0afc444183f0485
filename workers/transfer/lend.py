"""The source's desk: who shows a ticket gets the blocks under it. Event loop only; the engine holds the blocks.

Rules
- A ticket is known from its request on. A reader that is earlier than the request waits ``UNKNOWN_S`` for it.
- The first reader takes the ticket, whatever comes of it: a second one is told that there is nothing. When the reader
  is done or gone, the lease is given back.
- Blocks are read out of the cache a part at a time, when the reader has taken the part before: a slow reader costs the
  engine nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from workers.engine.leases import GiveBack, Offer, ReadBlocks
from workers.transfer.connector import Part, TransferError, Wanted

T = TypeVar("T")

UNKNOWN_S = 2.0
PART_BYTES = 4 * 2**20


class Lender:
    """Of one prefill worker."""

    def __init__(self, submit: Callable[[ReadBlocks | GiveBack], None], layout: str, block_bytes: int) -> None:
        """``submit``: into the engine's mailbox. ``layout``: of this worker's cache."""
        self._submit = submit
        self._layout = layout
        self._per_part = max(1, PART_BYTES // block_bytes)
        self._loop = asyncio.get_running_loop()
        self._offers: dict[str, asyncio.Future[Offer | None]] = {}
        """By ticket that nobody has taken yet."""
        self._unseen: dict[str, asyncio.Event] = {}
        """Tickets that a reader has shown before their request was here."""

    def expect(self, ticket: str) -> None:
        """A request with this ticket is on its way to the engine."""
        self._offers.setdefault(ticket, self._loop.create_future())
        if (early := self._unseen.get(ticket)) is not None:
            early.set()

    def offered(self, ticket: str, offer: Offer | None) -> None:
        """What the engine says of a ticket (``Leases``)."""
        future = self._offers.get(ticket)
        if offer is None:  # nothing came of it, or its time was over
            if future is not None:
                del self._offers[ticket]
                if not future.done():
                    future.set_result(None)
        elif future is None:
            self._submit(GiveBack(ticket))  # its reader has left
        else:
            future.set_result(offer)

    async def parts(self, wanted: Wanted) -> AsyncGenerator[Part, None]:
        """The blocks under a ticket, when they are computed. Raises TransferError."""
        if wanted.layout != self._layout:
            raise TransferError("layout", "this worker keeps keys and values in another form")
        ticket = wanted.ticket
        future = self._offers.get(ticket) or await self._shown_early(ticket)
        try:
            offer = await asyncio.shield(future)
            if offer is None or self._offers.get(ticket) is not future:
                raise TransferError("gone", "nothing is held under this ticket")
        finally:
            if self._offers.get(ticket) is future:
                del self._offers[ticket]
        try:
            for first in range(0, len(offer.keys), self._per_part):
                keys = offer.keys[first : first + self._per_part]
                data = await self._read(ticket, first, len(keys))
                if data is None:
                    raise TransferError("gone", "the lease has ended")
                yield Part(list(keys), data, offer.computed)
        finally:
            self._submit(GiveBack(ticket))

    async def _shown_early(self, ticket: str) -> asyncio.Future[Offer | None]:
        if ticket in self._unseen:
            raise TransferError("gone", "another reader waits with this ticket")
        seen = self._unseen[ticket] = asyncio.Event()
        try:
            async with asyncio.timeout(UNKNOWN_S):
                await seen.wait()
        except TimeoutError:
            raise TransferError("gone", "no request came with this ticket") from None
        finally:
            del self._unseen[ticket]
        future = self._offers.get(ticket)
        if future is None:
            raise TransferError("gone", "nothing is held under this ticket")
        return future

    async def _read(self, ticket: str, first: int, count: int) -> bytes | None:
        reply: asyncio.Future[bytes | None] = self._loop.create_future()
        self._submit(ReadBlocks(ticket, first, count, lambda data: self._answer(reply, data)))
        return await reply

    def _answer(self, reply: asyncio.Future[bytes | None], data: bytes | None) -> None:
        """On the engine thread."""
        settle(self._loop, reply, data)


def settle(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], value: T) -> None:
    """Give ``future`` its result from another thread, if anybody still waits for it and the loop still runs."""

    def act() -> None:
        if not future.done():
            future.set_result(value)

    try:
        loop.call_soon_threadsafe(act)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return
