"""A ledger that is open in this process: its file's writer, its books, and whether other gateways may ask.

Rules
- One per file. The policy instances that name it share it: the first opens it, the last closes it.
- The one that was started last decides whether others are served. When it goes (a reload that was rolled back), the one
  before it does again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from policies.quota._account import Account
from policies.quota._book import Book
from policies.quota._key_claims import KeyClaims
from policies.quota._ledger_file import LedgerFile, Options
from policies.quota._ledger_server import Keeper, LedgerServer
from policies.quota._ledger_wire import socket_of
from policies.quota._ledger_writer import Item, Writer
from policies.types import JobId


class OpenLedger:
    """A file and its books; shared by all policy instances that name it."""

    def __init__(self, path: Path, wall: Callable[[], float]) -> None:
        self.path = path
        self.wall = wall
        self.book = Book(0.0, keep_spent=True)
        self.pending: dict[JobId, asyncio.Future[bool]] = {}
        """Reservations whose rows are on their way."""
        self.claims = KeyClaims()
        """Whose idempotency keys are: of this gateway and of those that count here."""
        self.writer: Writer | None = None
        self._keepers: dict[Keeper, tuple[bool, float]] = {}
        """Who was started and not closed, in that order: whether it serves others, and the lease it gives."""
        self._server: LedgerServer | None = None
        self._serving = False
        self._turn = asyncio.Lock()

    async def join(self, keeper: Keeper, *, serve: bool, lease_s: float) -> None:
        """``keeper`` was started; ``serve``: others may ask it. Raises LedgerError, and has changed nothing then."""
        self._keepers[keeper] = serve, lease_s
        try:
            await self._serve()
        except BaseException:
            await self.leave(keeper)
            raise

    async def leave(self, keeper: Keeper) -> None:
        """It is over. Raises LedgerError where the one before it cannot be served again."""
        self._keepers.pop(keeper, None)
        await self._serve()

    async def _serve(self) -> None:
        """Let others ask the last one that was started, if that serves."""
        async with self._turn:
            keeper, (serves, lease_s) = next(reversed(self._keepers.items()), (None, (False, self.book.lease_s)))
            self.book.lease_s = lease_s
            if keeper is None or not serves:
                if self._server is not None and self._serving:
                    self._serving = False
                    await self._server.close()
                return
            if self._server is None:
                self._server = LedgerServer(socket_of(self.path), keeper, self.claims)
            self._server.keeper = keeper
            if not self._serving:
                await self._server.start()
                self._serving = True

    async def open(self, options: Options) -> None:
        """Once. Raises LedgerError."""
        if self.writer is None:
            file, accounts = await asyncio.to_thread(self._opened, options, time.monotonic())
            for account in accounts:
                self.book.restore(account)
            self.writer = Writer(file, wall=self.wall)
            self.writer.start()

    async def close(self) -> None:
        """Write what is left and let go of the file. Raises RuntimeError when something could not be written."""
        if self.writer is not None:
            writer, self.writer = self.writer, None
            lost = await asyncio.to_thread(writer.stop)
            if lost:
                raise RuntimeError(f"{self.path}: {lost} rows could not be written before the end")

    def put(self, item: Item) -> None:
        """Have it written. Raises RuntimeError for a policy that was not started."""
        if self.writer is None:
            raise RuntimeError("the ledger is not open: call start() first")
        self.writer.put(item)

    def _opened(self, options: Options, now: float) -> tuple[LedgerFile, list[Account]]:
        file = LedgerFile(self.path, options, self.wall())
        return file, file.accounts(now, self.wall())
