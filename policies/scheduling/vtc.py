"""``vtc``: weighted fair sharing of tokens by virtual counters.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): algorithm 2, and its weighted variant.

Rules
- A tenant's counter is its service ÷ weight; the head of the tenant with the smallest counter runs next.
- The prompt is charged at dispatch by its length and corrected by what is reported; output is charged as it is made.
- A tenant that comes back from idle is lifted to the smallest counter of those waiting, or to that of the tenant that
  left the queue last when nobody waits: idling earns no credit. Nobody is ever lowered.
- The service ÷ weight of two tenants that stay backlogged differs by at most 2·max(input_cost·L, output_cost·M) ÷
  weight over any interval, where L is the longest prompt and M the most tokens in one batch (theorem 4.4 there).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from policies.scheduling._lines import Lines, Ranking
from policies.scheduling._tariff import Prepaid, Tariff, TariffConfig
from policies.spi import Fits, Json, PolicyContext, PolicySpec
from policies.types import Charge, Job, JobId, Pick, RequeueReason, TenantId

_IDLE_KEPT = 4096
"""Counters of idle tenants that are kept before those that carry no debt are swept."""


class VtcScheduler:
    """O(log tenants) per operation; charging is O(1) unless it gives back."""

    def __init__(self, tariff: Tariff) -> None:
        self._lines = Lines()
        self._prepaid = Prepaid(tariff)
        self._counters: dict[TenantId, float] = {}
        self._waiting: Ranking[TenantId] = Ranking()
        self._last_left: TenantId | None = None
        self._resumed: set[TenantId] = set()
        self._sweep_at = _IDLE_KEPT
        self._pick: tuple[JobId, float, int] | None = None

    def push(self, job: Job, now: float) -> None:
        """O(log tenants)."""
        if self._lines.push(job):
            self._enter(job.tenant)

    def pop(self, now: float, fits: Fits) -> Job | None:
        """O(log tenants) and one ``fits`` per head that does not fit."""
        tenant = self._waiting.first(lambda tenant: fits(self._lines.head(tenant)))
        if tenant is None:
            return None
        job = self._lines.pop(tenant)
        self._pick = (job.id, self._counters[tenant], len(self._waiting))
        self._add(tenant, self._prepaid.take(job) / job.weight)
        self._leave_if_empty(tenant)
        return job

    def requeue(self, job: Job, now: float, reason: RequeueReason) -> None:
        """O(log tenants). Its prompt stays paid and is not charged again at the next dispatch."""
        if self._lines.push_front(job):
            self._enter(job.tenant)

    def discard(self, job_id: JobId) -> bool:
        """O(log tenants)."""
        job = self._lines.discard(job_id)
        if job is None:
            return False
        self._add(job.tenant, -self._prepaid.refund(job_id) / job.weight)
        self._leave_if_empty(job.tenant)
        return True

    def charge(self, job: Job, charge: Charge, now: float, final: bool) -> None:
        """O(1), or O(log tenants) when something is given back."""
        self._add(job.tenant, self._prepaid.settle(job, charge, final) / job.weight)

    def drain(self) -> list[Job]:
        """In order of arrival."""
        self._resumed = set(self._waiting)
        self._waiting.clear()
        return self._lines.drain()

    def dump(self) -> Json:
        """Counters, prepaid prompts, who waits and who left last."""
        return {
            "service": {str(tenant): counter for tenant, counter in self._counters.items()},
            "prepaid": self._prepaid.dump(),
            "waiting": [str(tenant) for tenant in self._waiting],
            "last_left": self._last_left,
        }

    def load(self, state: Json) -> None:
        """Replace the counters. Raises ValueError when a shared key does not have its shape."""
        service = _counters(state.get("service", {}))
        waiting, last = state.get("waiting", []), state.get("last_left")
        if not isinstance(waiting, list) or not (last is None or isinstance(last, str)):
            raise ValueError("'waiting' must be a list of tenants and 'last_left' a tenant or null")
        self._prepaid.load(state.get("prepaid", {}))
        self._counters = service
        self._last_left = TenantId(last) if last in service else None
        # Who waited there is not coming back from idle when its jobs are pushed here: no lift for it.
        self._resumed = {tenant for tenant in waiting if tenant in service}
        for tenant in list(self._waiting):
            self._resumed.discard(tenant)
            self._waiting.set(tenant, self._counters.setdefault(tenant, 0.0))

    def explain(self, job: Job) -> Pick:
        """Its counter, and among how many it was the smallest."""
        if self._pick is None or self._pick[0] != job.id:
            return Pick("not picked last")
        _, counter, tenants = self._pick
        return Pick(f"least service/weight ({counter:.0f}) of {tenants} waiting tenants that fit", counter)

    def counters(self) -> Mapping[TenantId, float]:
        """Service ÷ weight per tenant, lifts included."""
        return dict(self._counters)

    def __len__(self) -> int:
        return len(self._lines)

    def _enter(self, tenant: TenantId) -> None:
        counter = self._counters.get(tenant, 0.0)
        if tenant in self._resumed:
            self._resumed.discard(tenant)
        else:
            counter = max(counter, self._floor())
        self._counters[tenant] = counter
        self._waiting.set(tenant, counter)
        if len(self._counters) > self._sweep_at:
            self._sweep()

    def _floor(self) -> float:
        """The counter to which a tenant that comes back is lifted."""
        if len(self._waiting):
            return float(self._waiting.min())
        return self._counters.get(self._last_left, 0.0) if self._last_left is not None else 0.0

    def _leave_if_empty(self, tenant: TenantId) -> None:
        if not self._lines.has(tenant):
            self._waiting.remove(tenant)
            self._last_left = tenant

    def _add(self, tenant: TenantId, service: float) -> None:
        if service == 0.0:
            return
        # A tenant unknown here (its job began before a swap, or it was swept) counts as if it came back now.
        counter = self._counters.get(tenant)
        self._counters[tenant] = counter = (self._floor() if counter is None else counter) + service
        if tenant in self._waiting:
            self._waiting.set(tenant, counter)

    def _sweep(self) -> None:
        """Forget idle tenants without debt: on return they would be lifted to the floor anyway. Amortised O(1)."""
        floor = self._floor()
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if counter > floor or tenant in self._waiting or tenant == self._last_left
        }
        self._sweep_at = max(_IDLE_KEPT, 2 * len(self._counters))


def _counters(state: Any) -> dict[TenantId, float]:
    if not isinstance(state, Mapping):
        raise ValueError("'service' must map tenants to numbers")
    for tenant, counter in state.items():
        if isinstance(counter, bool) or not isinstance(counter, int | float) or not math.isfinite(counter):
            raise ValueError(f"'service' of tenant {tenant!r} must be a finite number, got {counter!r}")
    return {TenantId(str(tenant)): float(counter) for tenant, counter in state.items()}


def _make(config: TariffConfig, ctx: PolicyContext) -> VtcScheduler:
    return VtcScheduler(config.tariff())


SPEC = PolicySpec(
    "scheduling",
    "vtc",
    TariffConfig,
    _make,
    "Weighted fair shares of tokens; idle tenants earn no credit (VTC, OSDI'24).",
)
