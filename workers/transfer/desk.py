"""One worker's part in transfers, by its role: a lender, a fetcher, or nothing. Event loop, but for ``on_offer``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from workers.config import EngineConfig
from workers.engine.handover import Transferred
from workers.engine.leases import BlockMover, Offer
from workers.engine.record import TransferRecord
from workers.protocol import Cancel, Down, Drain, Generate, Purge
from workers.rpc.tls import TlsFiles
from workers.transfer.connector import Connector, Part, TransferError, Wanted
from workers.transfer.fetch import Fetcher
from workers.transfer.lend import Lender
from workers.transfer.stream import GrpcConnector


class TransferDesk:
    """Of one station. Whatever comes in passes by here before it goes to the engine."""

    def __init__(self, config: EngineConfig, tls: TlsFiles | None, connector: Connector | None = None) -> None:
        """``connector``: how blocks come here; gRPC if not said."""
        self._config = config
        self._connector = connector or GrpcConnector(tls)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lender: Lender | None = None
        self._fetcher: Fetcher | None = None

    def open(
        self,
        mover: BlockMover | None,
        layout: str,
        revision: str,
        submit: Callable[[Transferred], None],
        on_end: Callable[[TransferRecord], None],
    ) -> None:
        """The model is loaded. ``on_end``: of the reader's desk, for telemetry."""
        self._loop = asyncio.get_running_loop()
        config = self._config
        if mover is None:
            return
        if config.role == "prefill":
            self._lender = Lender(submit, layout, mover.block_bytes)
        elif config.role == "decode":
            self._fetcher = Fetcher(
                self._connector,
                submit,
                layout=layout,
                revision=revision,
                block_size=config.block_size,
                block_bytes=mover.block_bytes,
                timeout_s=config.transfer.timeout_s,
                on_end=on_end,
            )

    def takes(self, message: Down) -> bool:
        """Whether the message is a request that first waits here for its blocks."""
        if self._fetcher is None or not isinstance(message, Generate) or message.source is None:
            return False
        self._fetcher.take(message)
        return True

    def before(self, message: Down) -> None:
        """The message goes to the engine next: what must be there before it goes now."""
        fetcher, lender = self._fetcher, self._lender
        if lender is not None and isinstance(message, Generate) and message.lend:
            lender.expect(message.lend)
        if fetcher is None:
            return
        if isinstance(message, Cancel):
            fetcher.let_go(message.id)
        elif isinstance(message, Purge):
            fetcher.purge(message)
        elif isinstance(message, Drain):
            fetcher.let_all_go()

    def on_offer(self, ticket: str, offer: Offer | None) -> None:
        """The engine's word about a ticket, on its thread."""
        lender = self._lender
        if lender is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(lender.offered, ticket, offer)

    async def parts(self, wanted: Wanted) -> AsyncGenerator[Part, None]:
        """The blocks under a ticket. Raises TransferError."""
        if self._lender is None:
            raise TransferError("gone", "this worker has not begun")
        async with aclosing(self._lender.parts(wanted)) as parts:
            async for part in parts:
                yield part

    async def close(self) -> None:
        """End every transfer."""
        if self._fetcher is not None:
            await self._fetcher.close()
