"""What Prometheus reads when it asks: the live figures of queues, workers and quotas. Cheap, no waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.dispatch import Dispatcher
from gateway.gauges import Gauges, QuotaGauge, Source, TenantGauge, WorkerGauge
from gateway.pool import Pool
from gateway.runtime import Runtime
from gateway.tenants import Tenants
from gateway.timed import unwrap
from gateway.worker_handle import WorkerHandle, WorkerState
from policies.spi import Durable, QuotaView


def model_gauges(dispatcher: Dispatcher) -> Source:
    """Queue figures of one model, and whether it stands still without a reason."""

    def read() -> Gauges:
        model, lags, shares = dispatcher.model.name, dispatcher.lags(), dispatcher.shares()
        backlog = dispatcher.queue.backlog()
        tenants = [
            TenantGauge(tenant, *backlog.get(tenant, (0, 0)), lags.get(tenant), shares.get(tenant, 0.0), model)
            for tenant in {**backlog, **shares}
        ]
        return Gauges(tenants=tenants, stalled={model: dispatcher.stalled()})

    return read


def _up(handle: WorkerHandle) -> bool | None:
    """A worker that drains answers. One that starts for the first time has not gone: only a restart says that."""
    if handle.state is WorkerState.LOADING and handle.incarnation == 1:
        return None
    return handle.state in (WorkerState.READY, WorkerState.DRAINING)


def worker_gauges(pools: Sequence[Pool]) -> Source:
    """The workers' last reports."""

    def read() -> Gauges:
        return Gauges(
            workers=[
                WorkerGauge(
                    handle.name,
                    up=_up(handle),
                    running=handle.stats.running,
                    waiting=handle.stats.waiting,
                    blocks={
                        "free": handle.stats.free_blocks,
                        "cached": handle.stats.cached_blocks,
                        "used": handle.stats.used_blocks,
                    },
                )
                for pool in pools
                for handle in pool.handles
            ]
        )

    return read


def quota_gauges(runtime: Runtime, tenants: Tenants, clock: Callable[[], float]) -> Source:
    """What the listed tenants have left, where the live quota policy can say so."""

    def read() -> Gauges:
        quota = unwrap(runtime.current.quota)
        writable = quota.writable() if isinstance(quota, Durable) else None
        if not isinstance(quota, QuotaView):
            return Gauges(ledger_writable=writable)
        now = clock()
        return Gauges(
            ledger_writable=writable,
            quotas=[
                QuotaGauge(tenant.id, limit, state.remaining)
                for tenant in tenants.listed()
                for limit, state in quota.remaining(tenant.id, now).items()
            ],
        )

    return read
