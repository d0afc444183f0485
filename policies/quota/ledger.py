"""``ledger``: the limits of ``token_bucket``, and every reservation and settlement in a SQLite file that outlives all.

Rules
- The books in memory (``_book.py``) decide; the file is their memory. A reservation is admitted when its row is there,
  a settlement is over when its row is. So a process that dies at any moment loses nothing that was settled.
- One process owns a file. What it left open when it died is closed at the next start: its holdings are free, budgets
  are given back, rates keep what was taken, since nobody knows what ran.
- The file cannot be written (a full disk): reservations are refused with 503, settlements are kept and written before
  anything else. When there is space again it goes on by itself.
- Instances of one file share its books (``PolicyContext.shared``): a reload changes no figure.
- Rows say who, which model, how much and what it cost; never content, never a credential.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from policies.quota import _ledger_reports as reports
from policies.quota._account import Instant
from policies.quota._book import Reservation, Settlement
from policies.quota._key_claims import OWN
from policies.quota._ledger_file import Options
from policies.quota._ledger_open import OpenLedger
from policies.quota._ledger_writer import Item
from policies.spi import Json, KeyClaim, PolicyConfig, PolicyConfigError, PolicyContext, PolicySpec, Shared
from policies.types import (
    DeviceTime,
    DeviceUse,
    Job,
    JobId,
    LimitState,
    LimitStatus,
    QuotaAccount,
    QuotaDecision,
    TenantId,
    Usage,
    UsageQuery,
    UsageRow,
)

FILE = "ledger.db"
MIN_BYTES = 1 << 20


class LedgerConfig(PolicyConfig):
    """Limits themselves belong to organisations, tenants, users and keys."""

    path: str | None = None
    """The file, relative to the YAML; null: ``ledger.db`` in ``state.path``."""
    lease_s: float = Field(900.0, gt=0, allow_inf_nan=False)
    """Longest time a reservation holds its slot without being settled; above ``timeouts.total_s``."""
    synchronous: Literal["normal", "full"] = "normal"
    """``normal``: nothing is lost when the process dies; ``full``: nor when the machine does (an fsync per batch)."""
    max_bytes: int | None = Field(None, ge=MIN_BYTES)
    """Largest size of the file; beyond it new work gets 503, as on a full disk."""
    keep_days: int = Field(400, ge=1)
    """After so long rows of single requests are deleted; sums per day stay. The last three change at a restart."""
    serve: bool = False
    """Other gateways on this machine count here too (``quota: {use: shared}``), by a socket beside the file."""


class LedgerQuota:
    """See the module's rules. Deciding takes one event-loop turn; writing is the writer's thread's."""

    def __init__(
        self,
        path: Path,
        config: LedgerConfig | None = None,
        *,
        shared: Shared | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """``wall`` is the calendar that budgets and rows run by (Unix time)."""
        self._config = config or LedgerConfig()
        self._shared = shared or Shared()
        self._key = ("ledger", str(path))
        self._open = OpenLedger(path, wall)
        self._started = False

    async def start(self) -> None:
        """Open the file, or join who has it open in this process. Raises LedgerError."""
        ledger = self._shared.take(self._key, lambda: self._open)
        try:
            config = self._config
            await ledger.open(Options(config.synchronous, config.max_bytes, config.keep_days))
        except BaseException:
            self._shared.give_back(self._key)
            raise
        before, self._open = self._open, ledger
        try:
            await ledger.join(self, serve=config.serve, lease_s=config.lease_s)
        except BaseException:
            self._open = before
            if self._shared.give_back(self._key):
                await ledger.close()
            raise
        self._started = True

    async def close(self) -> None:
        """Let go; the last one closes the file."""
        if self._started:
            self._started = False
            try:
                await self._open.leave(self)
            finally:
                if self._shared.give_back(self._key):
                    await self._open.close()

    async def reserve(self, job: Job, now: float) -> QuotaDecision:
        """Take the most that ``job`` may cost from every account and write it down, or nothing.

        Raises PolicyUnavailableError when it cannot be written.
        """
        ledger = self._open
        self._expire(now)
        decision, reservation = ledger.book.reserve(job, self._at(now))
        if reservation is None:
            if decision.admitted and (pending := ledger.pending.get(job.id)) is not None:
                await asyncio.wait({pending})
                pending.result()
            return decision
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        ledger.pending[job.id] = done
        try:
            ledger.put(Item([self._reserved(reservation)], self._accounts(reservation), done=done))
            await asyncio.wait({done})
            done.result()
        except asyncio.CancelledError:
            done.cancel()  # nobody waits for its row any more; whoever gave up settles the reservation
            raise
        except Exception:
            ledger.book.undo(job.id, self._at(now))
            raise
        finally:
            del ledger.pending[job.id]
        return decision

    async def settle(self, job_id: JobId, usage: Usage, now: float) -> Mapping[str, Any]:
        """Replace the reservation by what ran, and write it down.

        Returns ``refunded`` tokens, ``cost`` in billionths and ``stored``: false when it will be written later.
        """
        ledger = self._open
        self._expire(now)
        at = self._at(now)
        settled = ledger.book.settle(job_id, usage, at)
        if settled is None:
            return {"refunded": 0}
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        row = _settled(settled, usage, at.wall)
        ledger.put(Item([row], self._accounts(settled.reservation), must=True, done=done))
        stored = await done
        return {"refunded": settled.tokens, "remaining": settled.remaining, "cost": settled.cost, "stored": stored}

    async def devices_ran(self, jobs: Mapping[JobId, DeviceTime], use: Sequence[DeviceUse]) -> bool:
        """Add what workers did, for jobs and in all; false when it is not written and has to be told again."""
        if not self.writable():
            return False
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        rows = [
            json.dumps(["ran_for", name, spent.computed_ns, spent.recompute_ns, spent.retry_ns])
            for name, spent in jobs.items()
        ]
        rows += [json.dumps(["device", item.day, item.model, item.worker, item.kind, item.ns]) for item in use]
        self._open.put(Item(rows, done=done))
        try:
            return await done
        except Exception:
            return False

    def started(self, job_id: JobId) -> None:
        """The job left the queue."""
        self._open.book.started(job_id)

    async def bring(self, job_id: JobId, usage: Usage, cost: int, now: float) -> Mapping[str, Any]:
        """``settle``, also of what an earlier process had admitted: its row is in the file, its holdings are gone.

        ``cost``: in billionths, for that case.
        """
        figures = await self.settle(job_id, usage, now)
        if "stored" in figures or not usage.total:
            return figures
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        what = [usage.prompt, usage.cached, usage.output, cost]
        row = json.dumps(["settled", job_id, self._open.wall(), "ran", *what])  # nothing for one that is settled
        self._open.put(Item([row], must=True, done=done))
        return {"refunded": 0, "stored": await done}

    async def claim(self, name: str, body: str, now: float) -> KeyClaim:
        """Whose an idempotency key is (``_key_claims.py``)."""
        return self._open.claims.claim(OWN, name, body, now)

    def keep(self, name: str, until: float) -> None:
        """It was answered here."""
        self._open.claims.keep(OWN, name, until)

    def release(self, name: str) -> None:
        """Let go of it."""
        self._open.claims.release(OWN, name)

    def end_leases(self, jobs: Iterable[JobId], now: float) -> None:
        """Free what these hold, as if their time were over; they may be settled later all the same."""
        for job_id in jobs:
            self._open.book.hasten(job_id, now)
        self._expire(now)

    def writable(self) -> bool:
        """Whether the last batch could be written."""
        writer = self._open.writer
        return writer is not None and writer.healthy

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Sums of what was settled. Raises LedgerError."""
        return await asyncio.to_thread(reports.usage, self._open.path, query)

    async def device_use(self, first: str, last: str) -> list[DeviceUse]:
        """What workers did on these days. Raises LedgerError."""
        return await asyncio.to_thread(reports.devices, self._open.path, first, last)

    def dump(self) -> Json:
        """Accounts and open reservations."""
        return {**self._open.book.dump(), "ledger": id(self._open)}

    def load(self, state: Json) -> None:
        """Take over another policy's books; those of the same file are these. Raises ValueError for another shape."""
        if state.get("ledger") == id(self._open):
            return
        book = self._open.book
        book.absorb(state)
        for reservation in book.open():
            self._open.put(Item([self._reserved(reservation)], self._accounts(reservation), must=True))

    def remaining(self, tenant: TenantId, now: float) -> Mapping[str, LimitState]:
        """What the tenant has left, for admin views: the very figures that decide. Empty when nothing is kept."""
        return self._open.book.remaining(tenant, self._at(now))

    def tightest(self, accounts: tuple[QuotaAccount, ...], now: float) -> Mapping[str, LimitState]:
        """What is left of the tightest limit of these accounts, for headers."""
        return self._open.book.tightest(accounts, self._at(now))

    def status(self, accounts: tuple[QuotaAccount, ...], now: float) -> list[LimitStatus]:
        """Every limit of these accounts, with what is left."""
        self._expire(now)
        return self._open.book.status(accounts, self._at(now))

    def concurrent(self, tenant: TenantId) -> int:
        """Slots taken."""
        return self._open.book.held(("tenant", tenant, tenant), "concurrent")

    def __len__(self) -> int:
        """Accounts kept in memory."""
        return len(self._open.book)

    def _at(self, now: float) -> Instant:
        return Instant.at(now, self._open.wall())

    def _expire(self, now: float) -> None:
        wall = self._open.wall()
        for reservation in self._open.book.expire(now):
            row = json.dumps(["expired", reservation.entry.id, wall])
            self._open.put(Item([row], self._accounts(reservation), must=True))

    def _accounts(self, reservation: Reservation) -> dict[tuple[str, str, str], str]:
        wall = self._open.wall()
        return {
            account.key: json.dumps(
                [
                    "account",
                    *account.key,
                    wall,
                    {name: [bucket.limit, bucket.level] for name, bucket in account.buckets.items()},
                ]
            )
            for account in self._open.book.touched(reservation)
        }

    def _reserved(self, reservation: Reservation) -> str:
        entry, wall = reservation.entry, self._open.wall()
        return json.dumps(
            [
                "reserved",
                entry.id,
                wall,
                wall + self._config.lease_s,
                entry.organisation or "",
                entry.tenant,
                entry.user or "",
                entry.key or "",
                entry.model,
                entry.service_class,
                entry.cost_centre or "",
                entry.prompt_tokens,
                entry.max_tokens,
                reservation.taken["currency"],
            ]
        )


def _settled(settled: Settlement, usage: Usage, wall: float) -> str:
    outcome = "ran" if usage.total else "nothing"
    name = settled.reservation.entry.id
    return json.dumps(["settled", name, wall, outcome, usage.prompt, usage.cached, usage.output, settled.cost])


def _make(config: LedgerConfig, ctx: PolicyContext) -> LedgerQuota:
    return LedgerQuota(ledger_path(config.path, ctx), config, shared=ctx.shared)


def ledger_path(given: str | None, ctx: PolicyContext) -> Path:
    """The file that a configuration means. Raises PolicyConfigError where it names none."""
    if given is not None:
        return Path(ctx.base_dir) / Path(given).expanduser()
    if ctx.state_dir is None:
        raise PolicyConfigError("the ledger needs a file: set state.path (a folder), or path here", "path")
    return Path(ctx.state_dir) / FILE


SPEC = PolicySpec("quota", "ledger", LedgerConfig, _make, "As token_bucket, and every settlement durable in SQLite.")
