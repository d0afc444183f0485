"""The thread that writes the ledger: whatever waits goes into one batch, one transaction, one answer to all.

Rules
- The thread is the only one that touches the file. ``put`` may be called from the event loop only.
- A batch that fails fails its reservations. What must not be lost (settlements, ends of leases) is written beyond all
  bounds, or else kept here and tried again before anything else, every ``RETRY_S`` and with every new batch: until
  then no reservation passes, so what is kept is bounded by what was running. Nor does one pass before the ballast is
  there again: the space that it gave up belongs to what was running, not to new work.
- No row is deleted as too old while the calendar is ahead of the time that has passed since the start: the clock was
  wrong then or is now, and what was deleted by mistake is gone.
- A future that is given to ``put`` is resolved once, in its own loop: True when its rows are written, False when they
  are kept to be written later; an exception for a reservation that is not taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from policies.quota._ledger_file import LedgerFile
from policies.spi import PolicyUnavailableError

RETRY_S = 1.0
MAX_BATCH = 2000
FORGET_EVERY_S = 60.0
MAX_LEAP_S = 86_400.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Item:
    """Some rows that are written together, or not."""

    rows: list[str]
    accounts: dict[tuple[str, str, str], str] = field(default_factory=dict)
    """Rows about accounts as these leave them; of several in a batch the last one counts."""
    must: bool = False
    """It is never given up."""
    done: asyncio.Future[bool] | None = None


class Writer:
    """Of one file."""

    def __init__(self, file: LedgerFile, *, wall: Callable[[], float] = time.time) -> None:
        self._file = file
        self._wall = wall
        self._items: SimpleQueue[Item | None] = SimpleQueue()
        self._kept: list[Item] = []
        self._forget_at = 0.0
        self._began = wall() - time.monotonic()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self.healthy = True
        """Whether the last batch was written."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: Item) -> None:
        """Have it written."""
        self._items.put(item)

    def stop(self) -> int:
        """Write what is left, end the thread, close the file; how many items could not be written. Blocks."""
        self._items.put(None)
        self._thread.join()
        self._file.close()
        return len(self._kept)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            batch, stopping = self._next()
            if batch or self._kept:
                self._write(batch)
            if not stopping and not self._kept and time.monotonic() >= self._forget_at:
                self._keep_house()

    def _next(self) -> tuple[list[Item], bool]:
        """What waits, at most ``MAX_BATCH``; empty when it is time to try again, or to keep house."""
        batch: list[Item] = []
        try:
            item = self._items.get(timeout=RETRY_S if self._kept else FORGET_EVERY_S)
            while item is not None:
                batch.append(item)
                if len(batch) >= MAX_BATCH:
                    return batch, False
                item = self._items.get_nowait()
        except Empty:
            return batch, False
        return batch, True

    def _write(self, batch: list[Item]) -> None:
        items = [*self._kept, *batch]
        try:
            if not self.healthy and not self._file.recovered():
                raise sqlite3.OperationalError("no space is left to put by")
            self._file.write(_rows(items))
        except (sqlite3.Error, OSError) as error:
            self._write_what_must_be([item for item in items if item.must], error)
            self._answer(batch, error)
            return
        if not self.healthy:
            _log.warning("the ledger can be written again")
        self.healthy, self._kept = True, []
        self._answer(batch, None)

    def _write_what_must_be(self, items: list[Item], error: Exception) -> None:
        if self.healthy:
            _log.error("the ledger cannot be written (%s): new work is refused", error)
        self.healthy, self._kept = False, items
        if items:
            with contextlib.suppress(sqlite3.Error, OSError):
                self._file.write_at_all_costs(_rows(items))
                self._kept = []

    def _answer(self, batch: list[Item], error: Exception | None) -> None:
        """Resolve the futures, with one call per event loop."""
        answers: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[bool], bool | Exception]]] = {}
        for item in batch:
            if item.done is not None:
                answer: bool | Exception = not self._kept
                if error is not None and not item.must:
                    answer = PolicyUnavailableError("the ledger cannot be written", retry_after_s=5.0)
                answers.setdefault(item.done.get_loop(), []).append((item.done, answer))
        for loop, results in answers.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_resolve, results)

    def _keep_house(self) -> None:
        """A part of the old rows at a time, so that nobody waits long; soon again while there are more."""
        more, wall = False, self._wall()
        if wall - time.monotonic() - self._began <= MAX_LEAP_S:
            with contextlib.suppress(sqlite3.Error):
                more = self._file.forget(wall)
        self._forget_at = time.monotonic() + (1.0 if more else FORGET_EVERY_S)


def _rows(items: list[Item]) -> list[str]:
    accounts: dict[tuple[str, str, str], str] = {}
    for item in items:
        accounts.update(item.accounts)
    return [row for item in items for row in item.rows] + list(accounts.values())


def _resolve(results: list[tuple[asyncio.Future[bool], bool | Exception]]) -> None:
    for future, answer in results:
        if future.done():  # its caller has given up
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
