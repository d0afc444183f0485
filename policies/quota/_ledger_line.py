"""A gateway's connection to the one that keeps the ledger: made again when it ends, mistrusted when nothing comes.

Rules
- ``up`` is true while answers come. A question that is not answered in time makes it false until any word comes: then
  nobody else waits for a keeper that is frozen. Meanwhile it is asked for a sign of life.
- What is owed (settlements) is kept until it is acknowledged, and said again whenever the keeper is there again: saying
  it twice does no harm. It is bounded by what was running.
- Device time adds up, so it is told under a number, and again under the same one until it is acknowledged; meanwhile
  there is nothing newer on its way.
- Idempotency keys that were claimed are claimed again with every connection: a keeper that began anew hears of them.
- A question whose connection ends fails with ConnectionError; nobody knows whether it was heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from policies.quota import _ledger_wire as wire
from policies.spi import PolicyUnavailableError
from policies.types import JobId, TokenPrice, Usage

RETRY_S = 0.2
"""How soon a keeper that is not there is looked for again, and one that is frozen asked again."""
FAREWELL_S = 2.0
"""How long a gateway that ends waits for its last settlements to be acknowledged."""
_log = logging.getLogger(__name__)


class Line:
    """Of one process to one ledger. On the event loop only."""

    def __init__(self, ledger: Path) -> None:
        self.ledger = ledger
        self.open: dict[JobId, TokenPrice | None] = {}
        """Reserved from here, or asked for, and not settled: at what price."""
        self.owed: dict[JobId, tuple[Usage, int, float]] = {}
        """Settlements that were not acknowledged: what ran, what it cost, when it ended."""
        self.claims: dict[str, tuple[str, float | None]] = {}
        """Keys of requests that run here or were answered: the body, and with an answer until when it is kept."""
        self._client = secrets.token_hex(8)
        self._batch = 0
        self._unheard: tuple[Any, ...] | None = None
        """What was told of devices and not acknowledged, with its number."""
        self._writer: asyncio.StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._trusted = False
        self._news = asyncio.Event()
        self._told = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._run: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether answers come."""
        return self._writer is not None and self._trusted

    async def start(self, wait_s: float) -> None:
        """Begin to connect; wait a moment for the keeper. One that comes later is taken up then."""
        if self._run is not None:
            return
        self._run = asyncio.create_task(self._keep_up(), name="ledger line")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._until(lambda: self.up)

    async def close(self) -> int:
        """Hang up; how many settlements were not acknowledged."""
        if self.up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._until(lambda: not (self.owed and self.up))
        tasks = [*self._tasks, *([self._run] if self._run is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._run = None
        return len(self.owed)

    async def ask(self, kind: str, *question: Any, timeout_s: float) -> Any:
        """What the keeper answers. Raises TimeoutError, ConnectionError, PolicyUnavailableError as it says."""
        if self._writer is None:
            raise ConnectionError("the keeper of the ledger is not there")
        self._number = number = self._number + 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            self._writer.write(wire.line(kind, number, *question))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            self._mistrust()
            raise
        finally:
            self._asked.pop(number, None)

    def tell(self, *message: Any) -> None:
        """Say what needs no answer; nothing where nobody listens."""
        if self._writer is not None:
            self._writer.write(wire.line(*message))

    async def settle(self, job_id: JobId, timeout_s: float) -> dict[str, Any]:
        """Say what is owed for a job. As ``ask``; it stays owed where that fails."""
        usage, cost, now = self.owed[job_id]
        told = wire.usage_out(usage)
        figures: dict[str, Any] = await self.ask("settle", job_id, told, cost, now, timeout_s=timeout_s)
        self.owed.pop(job_id, None)
        self._news.set()
        return figures

    async def devices(self, jobs: dict[JobId, list[int]], use: list[list[Any]], timeout_s: float) -> bool:
        """Tell what workers did. False: it has to be told again; true also where that is done from here."""
        if self._unheard is not None:
            if not await self._tell_devices(timeout_s):
                return False
            self._unheard = None
        if not self.up:
            return False
        self._batch += 1
        self._unheard = (self._batch, jobs, use)
        written = await self._tell_devices(timeout_s)
        if written is not None:
            self._unheard = None
        return written is not False

    async def _tell_devices(self, timeout_s: float) -> bool | None:
        """Whether the keeper has written it; None where it says nothing, so that nobody knows."""
        if self._unheard is None or not self.up:
            return None
        try:
            return bool(await self.ask("devices", *self._unheard, timeout_s=timeout_s))
        except (TimeoutError, ConnectionError):
            return None
        except PolicyUnavailableError:
            return False

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    def _mistrust(self) -> None:
        if self._trusted:
            self._trusted = False
            _log.error("the keeper of %s does not answer: new work is refused", self.ledger)
            self._later(self._call_again())

    async def _call_again(self) -> None:
        while self._writer is not None and not self._trusted:
            self._writer.write(wire.line("ping"))
            await asyncio.sleep(RETRY_S)

    async def _keep_up(self) -> None:
        while True:
            try:
                await self._converse()
            except (OSError, ValueError, TypeError, LookupError) as error:
                if not self._told:
                    self._told = True
                    why = f"{error}" if isinstance(error, OSError) else "what it says is no message"
                    _log.error("no connection to the keeper of %s (%s): new work is refused", self.ledger, why)
            await asyncio.sleep(RETRY_S)

    async def _converse(self) -> None:
        """One connection, to its end. Raises OSError, ValueError, TypeError, LookupError."""
        path = str(wire.socket_of(self.ledger))
        reader, writer = await asyncio.open_unix_connection(path, limit=wire.MAX_LINE)
        try:
            writer.write(wire.line("hello", wire.VERSION, self._client))
            kind, rest = wire.parsed(await reader.readline() or b"[]")
            if kind != "hello":
                raise ConnectionError(str(rest[0]) if kind == "refused" else "it does not greet")
            self._writer, self._told = writer, False
            self._claim_again(writer)
            self._trust()
            while data := await reader.readline():
                self._trust()
                self._take(*wire.parsed(data))
        finally:
            self._writer, self._trusted = None, False
            self._news.set()
            writer.close()
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(ConnectionError("the connection to the keeper of the ledger ended"))
        raise ConnectionError("it hung up")

    def _claim_again(self, writer: asyncio.StreamWriter) -> None:
        now = time.monotonic()
        for name, (body, until) in self.claims.items():
            writer.write(wire.line("claim", 0, name, body, now))  # nobody waits for the answer
            if until is not None:
                writer.write(wire.line("keep", name, until))

    def _trust(self) -> None:
        if not self._trusted:
            self._trusted = True
            self._news.set()
            _log.info("the keeper of %s answers", self.ledger)
            for job_id in list(self.owed):
                self._later(self._repay(job_id))

    async def _repay(self, job_id: JobId) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError, PolicyUnavailableError, KeyError):
            await self.settle(job_id, FAREWELL_S)

    def _take(self, kind: str, rest: list[Any]) -> None:
        if kind not in ("done", "failed"):
            return
        answer = self._asked.get(rest[0])
        if answer is None or answer.done():
            return
        if kind == "done":
            answer.set_result(rest[1])
        else:
            answer.set_exception(PolicyUnavailableError(str(rest[1]), float(rest[2])))

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
