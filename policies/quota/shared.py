"""``shared``: the limits and budgets of another gateway on this machine, which keeps a ``ledger`` and serves it.

Rules
- There is one set of books, its keeper's. Reservations are asked for there, settlements brought there: several gateways
  together let pass what one alone would.
- A keeper that does not answer within ``timeout_s`` costs one request so much time; then every new one gets 503 at
  once, until it answers again. What runs ends well, and its settlement is brought when the keeper is back.
- A gateway that dies holds nothing for longer than the keeper's grace (5 s). A keeper that died and came back knows
  nothing of what others had running: that holds no slots any more, and is in the reports when it is settled (budgets
  count it from the keeper's next start on).
- An idempotency key belongs to one of them: the keeper has the list (``_key_claims.py``).
- Instances of one process share one connection (``PolicyContext.shared``): a reload lets go of nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from policies.quota import _ledger_reports as reports
from policies.quota import _ledger_wire as wire
from policies.quota._ledger_line import Line
from policies.quota.ledger import ledger_path
from policies.spi import Json, KeyClaim, PolicyConfig, PolicyContext, PolicySpec, PolicyUnavailableError, Shared
from policies.types import (
    DeviceTime,
    DeviceUse,
    Job,
    JobId,
    LimitStatus,
    QuotaAccount,
    QuotaDecision,
    Usage,
    UsageQuery,
    UsageRow,
)

_START_WAIT_S = 3.0


class SharedConfig(PolicyConfig):
    """Limits themselves belong to organisations, tenants, users and keys; every gateway is given the same."""

    path: str | None = None
    """The keeper's ledger file, relative to the YAML; null: ``ledger.db`` in ``state.path``, which is then the keeper's
    folder too."""
    timeout_s: float = Field(0.25, gt=0, allow_inf_nan=False)
    """How long the keeper may take to answer."""


class SharedQuota:
    """See the module's rules."""

    def __init__(self, ledger: Path, timeout_s: float = 0.25, *, shared: Shared | None = None) -> None:
        self._line = Line(ledger)
        self._timeout_s = timeout_s
        self._shared = shared or Shared()
        self._key = ("shared", str(ledger))
        self._started = False

    async def start(self) -> None:
        """Connect, or join whoever is connected in this process. A keeper that is not there is waited for later."""
        self._line = self._shared.take(self._key, lambda: self._line)
        self._started = True
        await self._line.start(_START_WAIT_S)

    async def close(self) -> None:
        """Hang up. Raises RuntimeError when a settlement was not acknowledged."""
        if self._started:
            self._started = False
            if self._shared.give_back(self._key) and (lost := await self._line.close()):
                raise RuntimeError(f"{lost} settlements could not be brought to the keeper of {self._line.ledger}")

    async def reserve(self, job: Job, now: float) -> QuotaDecision:
        """What the keeper says. Raises PolicyUnavailableError while it does not answer."""
        line = self._line
        if not line.up:
            raise self._away()
        line.open[job.id] = job.price
        try:
            answer = await line.ask("reserve", wire.job_out(job), now, timeout_s=self._timeout_s)
        except (TimeoutError, ConnectionError):
            await self.settle(job.id, Usage(), now)  # it may have been heard
            raise self._away() from None
        except PolicyUnavailableError:
            line.open.pop(job.id, None)
            raise
        decision = wire.decision_in(answer)
        if not decision.admitted:
            line.open.pop(job.id, None)
        return decision

    async def settle(self, job_id: JobId, usage: Usage, now: float) -> Mapping[str, Any]:
        """As the ledger's. ``stored`` is false when it is brought to the keeper later."""
        line = self._line
        if job_id not in line.open and (job_id in line.owed or not line.up):
            return {"refunded": 0}
        price = line.open.pop(job_id, None)
        line.owed[job_id] = (usage, price.cost(usage) if price is not None else 0, now)
        if not line.up:
            return {"refunded": 0, "stored": False}
        try:
            figures = await line.settle(job_id, self._timeout_s)
        except (TimeoutError, ConnectionError, PolicyUnavailableError):
            return {"refunded": 0, "stored": False}
        if "remaining" in figures:
            figures["remaining"] = wire.states_in(figures["remaining"])
        return figures

    def started(self, job_id: JobId) -> None:
        """The job left the queue."""
        self._line.tell("started", job_id)

    async def look_up(self, accounts: tuple[QuotaAccount, ...], now: float) -> list[LimitStatus]:
        """What the keeper says of these accounts. Raises PolicyUnavailableError while it does not answer."""
        try:
            answer = await self._line.ask("status", wire.accounts_out(accounts), now, timeout_s=self._timeout_s)
        except (TimeoutError, ConnectionError):
            raise self._away() from None
        return wire.status_in(answer)

    async def claim(self, name: str, body: str, now: float) -> KeyClaim:
        """As the ledger's. Raises PolicyUnavailableError while the keeper does not answer."""
        line = self._line
        if not line.up:
            raise self._away()
        line.claims[name] = (body, None)
        try:
            found: KeyClaim = await line.ask("claim", name, body, now, timeout_s=self._timeout_s)
        except BaseException as error:  # it may have been heard, also where nobody waits any more
            self.release(name)
            if isinstance(error, TimeoutError | ConnectionError):
                raise self._away() from None
            raise
        if found != "ours":
            line.claims.pop(name, None)
        return found

    def keep(self, name: str, until: float) -> None:
        """As the ledger's."""
        line = self._line
        if name in line.claims:
            line.claims[name] = (line.claims[name][0], until)
            line.tell("keep", name, until)

    def release(self, name: str) -> None:
        """As the ledger's."""
        if self._line.claims.pop(name, None) is not None:
            self._line.tell("release", name)

    def writable(self) -> bool:
        """Whether the keeper answers."""
        return self._line.up

    async def devices_ran(self, jobs: Mapping[JobId, DeviceTime], use: Sequence[DeviceUse]) -> bool:
        """Bring it to the keeper; false when it has to be told again."""
        spent = {name: [time.computed_ns, time.recompute_ns, time.retry_ns] for name, time in jobs.items()}
        rows = [[item.day, item.model, item.worker, item.kind, item.ns] for item in use]
        return await self._line.devices(spent, rows, max(1.0, self._timeout_s))

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Sums of what was settled, by all gateways. Raises LedgerError."""
        return await asyncio.to_thread(reports.usage, self._line.ledger, query)

    async def device_use(self, first: str, last: str) -> list[DeviceUse]:
        """What workers did on these days, of all gateways. Raises LedgerError."""
        return await asyncio.to_thread(reports.devices, self._line.ledger, first, last)

    def dump(self) -> Json:
        """Nothing: the state is the keeper's."""
        return {}

    def load(self, state: Json) -> None:
        """Nothing is taken over: what another policy counted here concerned this gateway alone."""

    def _away(self) -> PolicyUnavailableError:
        return PolicyUnavailableError("the gateway that keeps the ledger does not answer")


def _make(config: SharedConfig, ctx: PolicyContext) -> SharedQuota:
    return SharedQuota(ledger_path(config.path, ctx), config.timeout_s, shared=ctx.shared)


SPEC = PolicySpec("quota", "shared", SharedConfig, _make, "Counts in the ledger of another gateway on this machine.")
