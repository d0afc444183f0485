"""What the console, ``/admin/overview`` and the terminal show of a running gateway, as frozen values.

Rules
- Reads the live objects and changes none of them; runs on the event loop without waiting.
- No content, no users, no keys: names, counts and times only.
- Costs nothing while nobody looks; a look costs O(tenants + open requests).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gateway.console_workers import WorkerRow, worker_row
from gateway.history import WINDOW_S, Sample, Standing
from gateway.metrics import OTHER
from gateway.tenants import EffectiveTenant
from gateway.ticket import Ticket, TicketState
from gateway.timed import unwrap
from gateway.worker_handle import WorkerHandle, WorkerState
from policies.quota.limits import BUDGETS, PER_UNIT
from policies.spi import QuotaAccounts, QuotaView
from policies.types import LimitState, Principal, TenantId, kv_blocks

if TYPE_CHECKING:
    from gateway.service import Gateway

OVERVIEW_TENANTS = 12
MAX_TENANT_ROWS = 100
_NOT_SERVED = Standing(0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Status:
    """Whether all is well."""

    ready: bool
    missing: tuple[str, ...]
    stalled: tuple[str, ...]
    """Models whose queue stands still although there is room: a fault of the gateway."""
    workers_ready: int
    workers: int
    generation: int


@dataclass(frozen=True, slots=True)
class LimitRow:
    """One limit of a tenant."""

    name: str
    remaining: int
    limit: int
    reset_s: float | None = None
    """Until it is whole again; None where that depends on running requests."""


@dataclass(frozen=True, slots=True)
class TenantRow:
    """One tenant."""

    id: str
    weight: float
    service_class: str
    listed: bool
    colour: int | None
    """Its place in the palette of the charts."""
    active: bool
    """Served or waiting within the last minute."""
    share: float
    entitled: float
    tokens: int
    """Prompt and output tokens in the last minute."""
    queued: int
    queued_tokens: int
    running: int
    refused: int
    """Shed or throttled since the start."""
    blocks: int
    """KV blocks its running requests fill, computed from their tokens; shared prefixes count for each."""
    cached_blocks: int
    """Blocks that workers keep cached for it and nobody uses, where it is among those that have most."""
    cache_epoch: int
    limits: tuple[LimitRow, ...]


@dataclass(frozen=True, slots=True)
class TenantsView:
    """The page of tenants."""

    rows: tuple[TenantRow, ...]
    total: int
    """How many were found, shown or not."""


@dataclass(slots=True)
class _Load:
    queued: int = 0
    queued_tokens: int = 0
    running: int = 0
    blocks: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Overview:
    """The first page."""

    status: Status
    now: Sample
    window_s: int
    tenants: tuple[TenantRow, ...]
    more_tenants: int
    """Tenants that are not in ``tenants``."""
    workers: tuple[WorkerRow, ...]

    def as_json(self) -> dict[str, Any]:
        """For ``/admin/overview``."""
        return asdict(self)


class ConsoleData:
    """Reads one gateway."""

    def __init__(self, gateway: Gateway, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway = gateway
        self._parts = gateway.parts
        self._clock = clock

    def status(self) -> Status:
        """Whether all is well."""
        handles = [handle for pool in self._parts.pools for handle in pool.handles]
        return Status(
            ready=self._gateway.ready,
            missing=tuple(self._gateway.missing),
            stalled=tuple(name for name, dispatcher in self._parts.dispatchers.items() if dispatcher.stalled()),
            workers_ready=sum(handle.state is WorkerState.READY for handle in handles),
            workers=len(handles),
            generation=self._parts.runtime.current.generation,
        )

    def overview(self) -> Overview:
        """The first page. Rows are few, however many tenants there are."""
        loads, names = self._loads(), self._parts.tenants.names()
        standings = self._parts.history.latest.standings
        busiest = heapq.nlargest(OVERVIEW_TENANTS, standings, key=lambda name: standings[name].tokens)
        wanted = set(list(dict.fromkeys([*busiest, *names]))[:OVERVIEW_TENANTS])
        # In their own order: rows that change places cannot be read.
        rows = [self._tenant(name, loads) for name in names if name in wanted]
        more = len(names) - len(rows)
        if OTHER in wanted and OTHER not in names:
            rows.append(self._others(loads))
        return Overview(
            status=self.status(),
            now=self._parts.history.latest,
            window_s=WINDOW_S,
            tenants=tuple(rows),
            more_tenants=more,
            workers=tuple(self.workers()),
        )

    def tenants(self, query: str = "") -> TenantsView:
        """Listed tenants, and those on ``tenant_defaults`` that are here now, whose name holds ``query``."""
        loads, wanted = self._loads(), query.strip().lower()
        known = self._parts.tenants
        here = sorted(name for name in loads if not known.is_listed(name) and known.knows(name))
        found = [name for name in [*known.names(), *here] if wanted in name.lower()]
        return TenantsView(tuple(self._tenant(name, loads) for name in found[:MAX_TENANT_ROWS]), len(found))

    def workers(self) -> list[WorkerRow]:
        """Every worker, by model and pool."""
        blocks: dict[str, dict[str, int]] = {}
        for ticket, filled in self._running():
            if ticket.worker is not None:
                by_tenant = blocks.setdefault(ticket.worker, {})
                by_tenant[ticket.job.tenant] = by_tenant.get(ticket.job.tenant, 0) + filled
        adapters = list(self._parts.models.adapters)
        return [
            worker_row(handle, described, blocks.get(handle.name, {}), self._cached(handle), adapters)
            for pool in self._parts.pools
            for handle, described in zip(pool.handles, pool.snapshot(), strict=True)
        ]

    def worker(self, name: str) -> WorkerHandle | None:
        """The worker of that name."""
        for pool in self._parts.pools:
            for handle in pool.handles:
                if handle.name == name:
                    return handle
        return None

    def _tenant(self, name: TenantId, loads: Mapping[TenantId, _Load]) -> TenantRow:
        tenant, load = self._parts.tenants.get(name), loads.get(name, _Load())
        label = name if tenant.listed else OTHER
        return self._row(
            name,
            load,
            label,
            shown=tenant.listed,
            weight=tenant.weight,
            service_class=tenant.service_class,
            listed=tenant.listed,
            cache_epoch=tenant.epoch,
            limits=tuple(self._limits(tenant, load.queued + load.running)),
        )

    def _others(self, loads: Mapping[TenantId, _Load]) -> TenantRow:
        """All tenants that are not listed, as one: how metrics count them."""
        total = _Load()
        for name, load in loads.items():
            if not self._parts.tenants.is_listed(name):
                total.queued += load.queued
                total.queued_tokens += load.queued_tokens
                total.running += load.running
                total.blocks += load.blocks
                total.cached += load.cached
        return self._row(
            OTHER, total, OTHER, shown=True, weight=1.0, service_class="", listed=False, cache_epoch=0, limits=()
        )

    def _row(self, name: str, load: _Load, label: str, *, shown: bool, **facts: Any) -> TenantRow:
        """``shown``: the history's figures of ``label`` are this tenant's own."""
        history = self._parts.history
        standing = history.latest.standings.get(label) if shown else None
        figures = standing or _NOT_SERVED
        return TenantRow(
            id=name,
            colour=history.colour(label) if shown else None,
            active=standing is not None,
            share=figures.share,
            entitled=figures.entitled,
            tokens=figures.tokens,
            queued=load.queued,
            queued_tokens=load.queued_tokens,
            running=load.running,
            refused=self._parts.recent.refused(label),
            blocks=load.blocks,
            cached_blocks=load.cached,
            **facts,
        )

    def _limits(self, tenant: EffectiveTenant, concurrent: int) -> list[LimitRow]:
        """Whatever the quota policy can say of it, and the slots it has left."""
        limits = tenant.limits
        states = {
            name: LimitState(limit, limit, 0.0)
            for name, limit in (("requests", limits.requests_per_minute), ("tokens", limits.tokens_per_minute))
            if limit is not None
        }
        quota = unwrap(self._parts.runtime.current.quota)
        if isinstance(quota, QuotaView):
            states |= quota.remaining(tenant.id, self._clock())
        rows = [LimitRow(name, max(0, state.remaining), state.limit, state.reset_s) for name, state in states.items()]
        if limits.concurrent is not None and "concurrent" not in states:
            rows.append(LimitRow("concurrent", max(0, limits.concurrent - concurrent), limits.concurrent))
        return rows + self._budgets(quota, tenant)

    def _budgets(self, quota: object, tenant: EffectiveTenant) -> list[LimitRow]:
        """What is left of this month's budgets, the tenant's own and its organisation's; money in whole units."""
        if not isinstance(quota, QuotaAccounts):
            return []
        rows = []
        for status in quota.status(tenant.accounts(Principal(tenant.id)), self._clock()):
            if status.limit in BUDGETS:
                money = BUDGETS[status.limit] == "currency"
                unit, name = (PER_UNIT, self._gateway.settings.prices.currency) if money else (1, "tokens")
                whose = "" if status.level == "tenant" else f", {status.level}"
                left, whole = status.remaining // unit, status.maximum // unit
                rows.append(LimitRow(f"{name} this month{whose}", left, whole, status.reset_s))
        return rows

    def _loads(self) -> dict[TenantId, _Load]:
        """Queue and work of every tenant that has any. O(open requests)."""
        loads: dict[TenantId, _Load] = {}
        for dispatcher in self._parts.dispatchers.values():
            for tenant, (jobs, tokens) in dispatcher.queue.backlog().items():
                load = loads.setdefault(tenant, _Load())
                load.queued += jobs
                load.queued_tokens += tokens
        for ticket, blocks in self._running():
            load = loads.setdefault(ticket.job.tenant, _Load())
            load.running += 1
            load.blocks += blocks
        for handle in (handle for pool in self._parts.pools for handle in pool.handles):
            for name, cached in self._cached(handle).items():
                if name != OTHER:
                    loads.setdefault(TenantId(name), _Load()).cached += cached
        return loads

    def _cached(self, handle: WorkerHandle) -> dict[str, int]:
        """Cached blocks by tenant, as the worker reported them."""
        found: dict[str, int] = {}
        for key, blocks in handle.stats.cached_by_tenant.items():
            name = self._parts.intake.tenant_keys.tenant(key) or OTHER
            found[name] = found.get(name, 0) + blocks
        return found

    def _running(self) -> Iterator[tuple[Ticket, int]]:
        """Every running request with the KV blocks that its tokens fill."""
        hellos = {handle.name: handle.hello for p in self._parts.pools for handle in p.handles if handle.hello}
        for dispatcher in self._parts.dispatchers.values():
            for ticket in dispatcher.tickets:
                if ticket.state is TicketState.RUNNING and ticket.worker is not None:
                    hello = hellos.get(ticket.worker)
                    size, keeps = (hello.block_size, hello.keeps) if hello else (16, [])
                    yield ticket, kv_blocks(ticket.usage.total, size, keeps)
