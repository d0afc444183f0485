"""What the console, ``/admin/overview`` and the terminal show of a running gateway, as frozen values.

Rules
- Reads the live objects and changes none of them; runs on the event loop without waiting.
- No content, no users, no keys: names, counts and times only.
- Costs nothing while nobody looks; a look costs O(tenants + open requests).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gateway.history import WINDOW_S, Sample, Standing
from gateway.metrics import OTHER
from gateway.tenants import EffectiveTenant
from gateway.ticket import Ticket, TicketState
from gateway.timed import unwrap
from gateway.worker_handle import WorkerHandle, WorkerState
from policies.spi import QuotaView
from policies.types import LimitState, TenantId

if TYPE_CHECKING:
    from gateway.service import Gateway

OVERVIEW_TENANTS = 12
MAX_TENANT_ROWS = 200
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
    cache_epoch: int
    limits: tuple[LimitRow, ...]


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker."""

    name: str
    model: str
    pool: str
    state: str
    set_aside: bool
    stale: bool
    device: str
    dtype: str
    labels: Mapping[str, str]
    starts: int
    inflight: int
    """Sequences that it was sent and that have not ended."""
    running: int
    max_running: int
    waiting: int
    preemptions: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    hit_rate: float | None
    """Prompt tokens found in the prefix cache over those looked up, since its start; None before the first."""
    step_ms: float
    tenants: tuple[tuple[str, int], ...]
    """KV blocks by tenant, computed from the running requests' tokens; most first."""
    last_loss: str | None

    @property
    def can_drain(self) -> bool:
        """Whether draining it means anything."""
        return self.state == WorkerState.READY


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
        """The first page."""
        rows = self.tenants()
        busiest = {row.id for row in heapq.nlargest(OVERVIEW_TENANTS, rows, key=lambda row: (row.tokens, row.active))}
        shown = [row for row in rows if row.id in busiest]  # in their own order: rows that change places cannot be read
        return Overview(
            status=self.status(),
            now=self._parts.history.latest,
            window_s=WINDOW_S,
            tenants=tuple(shown),
            more_tenants=len(rows) - len(shown),
            workers=tuple(self.workers()),
        )

    def tenants(self, query: str = "") -> list[TenantRow]:
        """Every listed tenant, and those on ``tenant_defaults`` that are here now, whose name holds ``query``."""
        queues: dict[TenantId, list[Mapping[str, Any]]] = {}
        for dispatcher in self._parts.dispatchers.values():
            for tenant, figures in dispatcher.snapshot(limit=0)["tenants"].items():
                queues.setdefault(tenant, []).append(figures)
        blocks: dict[str, int] = {}
        for by_tenant in self._blocks().values():
            for name, count in by_tenant.items():
                blocks[name] = blocks.get(name, 0) + count
        listed = self._parts.tenants.listed()
        known = {tenant.id for tenant in listed}
        others = [self._parts.tenants.get(tenant) for tenant in queues if tenant not in known and self._known(tenant)]
        wanted = query.strip().lower()
        return [
            self._tenant(tenant, queues.get(tenant.id, []), blocks.get(tenant.id, 0))
            for tenant in [*listed, *sorted(others, key=lambda tenant: tenant.id)]
            if wanted in tenant.id.lower()
        ]

    def workers(self) -> list[WorkerRow]:
        """Every worker, by model and pool."""
        blocks = self._blocks()
        return [
            _worker(handle, described, blocks.get(handle.name, {}))
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

    def _known(self, tenant: TenantId) -> bool:
        return self._parts.tenants.knows(tenant)

    def _tenant(self, tenant: EffectiveTenant, queues: list[Mapping[str, Any]], blocks: int) -> TenantRow:
        history = self._parts.history
        standing = history.latest.standings.get(tenant.id) if tenant.listed else None
        queued, running = sum(q["queued"] for q in queues), sum(q["running"] for q in queues)
        label = tenant.id if tenant.listed else OTHER
        return TenantRow(
            id=tenant.id,
            weight=tenant.weight,
            service_class=tenant.service_class,
            listed=tenant.listed,
            colour=history.colour(tenant.id) if tenant.listed else None,
            active=standing is not None,
            share=(standing or _NOT_SERVED).share,
            entitled=(standing or _NOT_SERVED).entitled,
            tokens=(standing or _NOT_SERVED).tokens,
            queued=queued,
            queued_tokens=sum(q["queued_tokens"] for q in queues),
            running=running,
            refused=self._parts.recent.refused(label),
            blocks=blocks,
            cache_epoch=tenant.epoch,
            limits=tuple(self._limits(tenant, queued + running)),
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
        return rows

    def _blocks(self) -> dict[str, dict[str, int]]:
        """KV blocks that running requests fill, by worker and tenant."""
        sizes = {
            handle.name: handle.hello.block_size for p in self._parts.pools for handle in p.handles if handle.hello
        }
        blocks: dict[str, dict[str, int]] = {}
        for dispatcher in self._parts.dispatchers.values():
            for ticket in dispatcher.tickets:
                if ticket.state is TicketState.RUNNING and ticket.worker in sizes:
                    by_tenant = blocks.setdefault(ticket.worker, {})
                    filled = _filled(ticket, sizes[ticket.worker])
                    by_tenant[ticket.job.tenant] = by_tenant.get(ticket.job.tenant, 0) + filled
        return blocks


def _filled(ticket: Ticket, block_size: int) -> int:
    return -(-ticket.usage.total // block_size)


def _worker(handle: WorkerHandle, described: Mapping[str, Any], tenants: Mapping[str, int]) -> WorkerRow:
    stats, hello = handle.stats, handle.hello
    loss = described.get("last_loss")
    return WorkerRow(
        name=handle.name,
        model=handle.model,
        pool=handle.pool,
        state=str(handle.state),
        set_aside=described["set_aside"],
        stale=described["stale"],
        device=hello.device if hello else "",
        dtype=hello.dtype if hello else "",
        labels=dict(handle.labels),
        starts=handle.incarnation,
        inflight=handle.inflight,
        running=stats.running,
        max_running=stats.max_running or (hello.max_running if hello else 0),
        waiting=stats.waiting,
        preemptions=stats.preemptions,
        free_blocks=stats.free_blocks,
        cached_blocks=stats.cached_blocks,
        used_blocks=stats.used_blocks,
        hit_rate=stats.hit_tokens / stats.query_tokens if stats.query_tokens else None,
        step_ms=stats.step_ms,
        tenants=tuple(sorted(tenants.items(), key=lambda item: (-item[1], item[0]))),
        last_loss=None if loss is None else f"{loss['kind']}: {loss['detail']}".removesuffix(": "),
    )
