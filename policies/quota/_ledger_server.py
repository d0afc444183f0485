"""The keeper of a ledger answers other gateways of this machine, so that all count in the same books.

Rules
- A UNIX socket beside the file, for its user alone. Whoever owns the ledger's lock may replace a socket that is left
  over: nobody else answers at it.
- What a gateway asks for is done in the order in which it asked; only the writing is waited for side by side.
- A gateway whose connection ends has ``GRACE_S`` to come back under its name. Then what it holds is freed like leases
  that ran out: it is settled late, if at all. A settlement counts whoever brings it.
- A line that is no message ends its connection, and nothing else.
- One that does not read is not read either: what waits for it is bounded, and the end waits ``FAREWELL_S`` for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from policies.quota import _ledger_wire as wire
from policies.quota._key_claims import KeyClaims
from policies.quota._ledger_file import LedgerError
from policies.spi import PolicyUnavailableError
from policies.types import DeviceTime, DeviceUse, Job, JobId, LimitStatus, QuotaAccount, QuotaDecision, Usage

GRACE_S = 5.0
FAREWELL_S = 2.0
"""How long the end waits for clients to take their last answers."""
MAX_CLIENTS = 1000
"""Of which it is remembered what they told last, also after they have gone."""
_log = logging.getLogger(__name__)


class Keeper(Protocol):
    """What is needed of ``LedgerQuota``."""

    async def reserve(self, job: Job, now: float) -> QuotaDecision:
        """As of ``QuotaPolicy``."""
        ...

    async def bring(self, job_id: JobId, usage: Usage, cost: int, now: float) -> Mapping[str, Any]:
        """``settle`` of ``QuotaPolicy``, also for what an earlier process had admitted, at this cost."""
        ...

    def started(self, job_id: JobId) -> None:
        """As of ``QueueAware``."""
        ...

    async def devices_ran(self, jobs: Mapping[JobId, DeviceTime], use: Sequence[DeviceUse]) -> bool:
        """As of ``UsageReports``."""
        ...

    def status(self, accounts: tuple[QuotaAccount, ...], now: float) -> list[LimitStatus]:
        """As of ``QuotaAccounts``."""
        ...

    def end_leases(self, jobs: Iterable[JobId], now: float) -> None:
        """Free what these hold, as if their time were over."""
        ...


class LedgerServer:
    """Of one ledger. ``keeper`` may be replaced at any time. May listen again after its end: it knows who held what."""

    def __init__(self, path: Path, keeper: Keeper, claims: KeyClaims) -> None:
        self.path = path
        self.keeper = keeper
        self._claims = claims
        self._server: asyncio.Server | None = None
        self._held: dict[str, dict[JobId, None]] = {}
        """By client: what it has reserved and not settled."""
        self._here: dict[str, int] = {}
        """By client: its connections."""
        self._batches: dict[str, tuple[int, asyncio.Future[bool]]] = {}
        """By client: what it told of devices last, and whether that is written."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: set[asyncio.TimerHandle] = set()

    async def start(self) -> None:
        """Listen. Raises LedgerError."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            self.path.unlink(missing_ok=True)
            listening.bind(str(self.path))
            os.chmod(self.path, 0o600)  # before anybody can connect
            self._server = await asyncio.start_unix_server(self._connected, sock=listening, limit=wire.MAX_LINE)
        except OSError as error:
            listening.close()
            raise LedgerError(
                f"{self.path}: cannot listen there ({error}); the path of a socket has at most 107 bytes"
            ) from None
        for client in {*self._held, *self._here}:
            self._miss(client)

    async def close(self) -> None:
        """Hang up; what is being written is finished first."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        writers = list(self._writers)
        for writer in writers:
            writer.close()
        for timer in self._timers:
            timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FAREWELL_S)
        for writer in writers:
            writer.transport.abort()  # one that is frozen would never take what is left
        if self._tasks:
            await asyncio.wait(self._tasks)
        with contextlib.suppress(OSError):
            self.path.unlink()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        client = ""
        try:
            client = await self._greeted(reader, writer)
            self._here[client] = self._here.get(client, 0) + 1
            while data := await reader.readline():
                self._take(client, *wire.parsed(data), writer)
                await writer.drain()
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            _log.error("a gateway that asks for quota said what is no message (%s)", type(error).__name__)
        except OSError:
            pass  # it is gone
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()
            if client:
                self._left(client)

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The name of the client. Raises ValueError for another version."""
        kind, (version, client) = wire.parsed(await reader.readline() or b"[]")
        if kind != "hello" or version != wire.VERSION or not isinstance(client, str) or not client:
            writer.write(wire.line("refused", f"this ledger speaks version {wire.VERSION}: run the same release"))
            raise ValueError("no greeting of this version")
        writer.write(wire.line("hello", wire.VERSION))
        return client

    def _left(self, client: str) -> None:
        self._here[client] -= 1
        if self._server is not None:
            self._miss(client)

    def _miss(self, client: str) -> None:
        """It has a while to come."""
        loop = asyncio.get_running_loop()
        self._timers = {timer for timer in self._timers if timer.when() > loop.time()}
        self._timers.add(loop.call_later(GRACE_S, self._gone, client))

    def _gone(self, client: str) -> None:
        if not self._here.get(client):
            self._here.pop(client, None)
            self._claims.gone(client)
            held = self._held.pop(client, {})
            if held:
                _log.warning("a gateway left %d reservations behind: they are freed", len(held))
                self.keeper.end_leases(held, time.monotonic())

    def _take(self, client: str, kind: str, rest: list[Any], writer: asyncio.StreamWriter) -> None:
        if kind == "reserve":
            number, job, now = rest
            self._do(number, self._reserve(client, wire.job_in(job), float(now)), writer)
        elif kind == "settle":
            number, job_id, usage, cost, now = rest
            self._do(number, self._settle(JobId(str(job_id)), Usage(*map(int, usage)), int(cost), float(now)), writer)
        elif kind == "devices":
            number, batch, jobs, use = rest
            self._do(number, self._devices(client, int(batch), *wire.devices_in(jobs, use)), writer)
        elif kind == "claim":
            number, name, body, now = rest
            claim = self._claims.claim(client, str(name), str(body), float(now))
            writer.write(wire.line("done", number, claim))
        elif kind == "status":
            number, accounts, now = rest
            status = self.keeper.status(wire.accounts_in(accounts), float(now))
            writer.write(wire.line("done", number, wire.status_out(status)))
        else:
            self._hear(client, kind, rest, writer)

    def _hear(self, client: str, kind: str, rest: list[Any], writer: asyncio.StreamWriter) -> None:
        """What needs no answer, or only a sign of life."""
        if kind == "started":
            self.keeper.started(JobId(str(rest[0])))
        elif kind == "keep":
            self._claims.keep(client, str(rest[0]), float(rest[1]))
        elif kind == "release":
            self._claims.release(client, str(rest[0]))
        elif kind == "ping":
            writer.write(wire.line("pong"))
        else:
            raise ValueError(kind)

    def _do(self, number: int, work: Coroutine[Any, Any, Any], writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._answer(number, work, writer), name="quota asked for")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, work: Coroutine[Any, Any, Any], writer: asyncio.StreamWriter) -> None:
        try:
            told = wire.line("done", number, await work)
        except PolicyUnavailableError as error:
            told = wire.line("failed", number, str(error), error.retry_after_s)
        except Exception as error:
            _log.error("a question about quota failed (%s)", type(error).__name__)
            told = wire.line("failed", number, "the ledger failed", 1.0)
        with contextlib.suppress(OSError):
            writer.write(told)
            await writer.drain()

    async def _reserve(self, client: str, job: Job, now: float) -> dict[str, Any]:
        held = self._held.setdefault(client, {})
        held[job.id] = None  # before it is waited for: a client that leaves meanwhile holds it
        admitted = False
        try:
            decision = await self.keeper.reserve(job, now)
            admitted = decision.admitted
        finally:
            if not admitted:
                held.pop(job.id, None)
        return wire.decision_out(decision)

    async def _devices(
        self, client: str, batch: int, jobs: Mapping[JobId, DeviceTime], use: Sequence[DeviceUse]
    ) -> bool:
        """Write it, once: one whose answer was late is told again, and may come over two connections in any order."""
        last = self._batches.get(client)
        if last is not None and batch < last[0]:
            return True
        if last is None or batch > last[0] or _failed(last[1]):
            last = batch, asyncio.ensure_future(self.keeper.devices_ran(jobs, use))
            self._batches.pop(client, None)
            self._batches[client] = last
            while len(self._batches) > MAX_CLIENTS:
                del self._batches[next(iter(self._batches))]
        return await asyncio.shield(last[1])

    async def _settle(self, job_id: JobId, usage: Usage, cost: int, now: float) -> dict[str, Any]:
        for held in self._held.values():
            held.pop(job_id, None)
        figures = dict(await self.keeper.bring(job_id, usage, cost, now))
        if "remaining" in figures:
            figures["remaining"] = wire.states_out(figures["remaining"])
        return figures


def _failed(writing: asyncio.Future[bool]) -> bool:
    return writing.done() and (writing.cancelled() or writing.exception() is not None or not writing.result())
