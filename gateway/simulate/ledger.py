"""Who was served how much, and when: written while a run goes on, read by ``figures.py`` afterwards.

Rules
- Service is ``input_cost`` · prompt tokens computed + ``cached_cost`` · cached ones + ``output_cost`` · output tokens,
  of work that ran, when the worker reports it. Recomputed tokens are nobody's.
- A tenant is backlogged while a job of it is queued. A row of the series holds every tenant's service at a moment and
  who is backlogged from then on; rows are written whenever one of them may have changed.
- With more than ``MANY`` tenants rows are at least a thousandth of the run apart, to bound the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.simulate.scenario import Scenario
from policies.types import Charge, TenantId

MANY = 64
_ROWS = 1000


@dataclass(slots=True)
class Account:
    """One tenant's figures."""

    arrived: int = 0
    finished: int = 0
    failed: int = 0
    shed: dict[str, int] = field(default_factory=dict)
    """Refused or expired, by reason."""
    waits: array[float] = field(default_factory=lambda: array("d"))
    """Seconds in the queue, of dispatched requests, in order of dispatch."""
    ttfts: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from arrival to the first token, in order of first token."""
    first_tokens: array[float] = field(default_factory=lambda: array("d"))
    """When those came."""
    finishes: array[float] = field(default_factory=lambda: array("d"))
    latencies: array[float] = field(default_factory=lambda: array("d"))
    """Seconds from arrival to the last token."""
    prompt: int = 0
    cached: int = 0
    output: int = 0


class Ledger:
    """Of one run. Times are seconds of the run's clock."""

    def __init__(self, scenario: Scenario) -> None:
        self.tenants: Sequence[str] = [tenant.id for tenant in scenario.tenants]
        self.weights: Sequence[float] = [tenant.weight for tenant in scenario.tenants]
        self.accounts = [Account() for _ in scenario.tenants]
        self.times = array("d")
        self.series = array("d")
        """Row after row, one number per tenant."""
        self.backlogged: list[int] = []
        """Per row: bit ``i`` is set while tenant ``i`` is backlogged."""
        self._index: Mapping[TenantId, int] = {TenantId(tenant.id): i for i, tenant in enumerate(scenario.tenants)}
        self._costs = scenario.costs
        self._service = [0.0] * len(self.tenants)
        self._queued = [0] * len(self.tenants)
        self._mask = 0
        self._dirty = True
        self._spacing = scenario.duration_s / _ROWS if len(self.tenants) > MANY else 0.0

    def index(self, tenant: TenantId) -> int:
        """Position of a tenant."""
        return self._index[tenant]

    def refused(self, tenant: int, reason: str) -> None:
        """Not let in, or out of the queue before it ran."""
        shed = self.accounts[tenant].shed
        shed[reason] = shed.get(reason, 0) + 1

    def waits(self, tenant: int) -> bool:
        """Whether a job of it waits."""
        return self._queued[tenant] > 0

    def queued(self, tenant: int) -> None:
        """One more job of it waits."""
        if not self._queued[tenant]:
            self._mask |= 1 << tenant
            self._dirty = True
        self._queued[tenant] += 1

    def left(self, tenant: int) -> None:
        """One fewer."""
        self._queued[tenant] -= 1
        if not self._queued[tenant]:
            self._mask &= ~(1 << tenant)
            self._dirty = True

    def served(self, tenant: int, charge: Charge) -> None:
        """Work ran."""
        account, costs = self.accounts[tenant], self._costs
        account.output += charge.output
        service = charge.output * costs.output_cost
        if charge.prompt or charge.cached:
            account.prompt += charge.prompt
            account.cached += charge.cached
            service += charge.prompt * costs.input_cost + charge.cached * costs.cached_cost
        self._service[tenant] += service
        self._dirty = True

    def mark(self, now: float) -> None:
        """Write a row if anything changed since the last."""
        if self._dirty and (not self._spacing or not self.times or now - self.times[-1] >= self._spacing):
            self.close(now)

    def close(self, now: float) -> None:
        """Write a row."""
        self.times.append(now)
        self.series.extend(self._service)
        self.backlogged.append(self._mask)
        self._dirty = False
