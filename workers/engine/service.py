"""How much service each tenant got from this worker: picks whose sequence gives way when blocks run out.

Rules
- Service is tokens computed for the first time plus tokens produced. Cached and recomputed ones are not service.
- A tenant that comes back from idleness is lifted to the least service ÷ weight among those present: having been away
  is no credit (the counter lift of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, §4.1).
- Bounded: only ``MAX_IDLE`` absent tenants are remembered, longest absent forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from workers.engine.sequence import Sequence

MAX_IDLE = 4096


class _Tenant:
    __slots__ = ("live", "service", "weight")

    def __init__(self) -> None:
        self.service = 0.0
        self.weight = 1.0
        self.live = 0


class ServiceCounters:
    """Service ÷ weight per tenant key."""

    def __init__(self) -> None:
        self._present: dict[str, _Tenant] = {}
        self._absent: OrderedDict[str, _Tenant] = OrderedDict()

    def enter(self, key: str, weight: float) -> None:
        """One more unfinished sequence of this tenant. The latest weight counts."""
        tenant = self._present.get(key)
        if tenant is None:
            tenant = self._absent.pop(key, None) or _Tenant()
            tenant.weight = weight
            if self._present:
                floor = min(other.service / other.weight for other in self._present.values())
                tenant.service = max(tenant.service, floor * weight)
            self._present[key] = tenant
        tenant.weight = weight
        tenant.live += 1

    def leave(self, key: str) -> None:
        """One of its sequences is finished."""
        tenant = self._present[key]
        tenant.live -= 1
        if not tenant.live:
            self._absent[key] = self._present.pop(key)
            if len(self._absent) > MAX_IDLE:
                self._absent.popitem(last=False)

    def add(self, key: str, tokens: int) -> None:
        """Work ran for a tenant that is present."""
        self._present[key].service += tokens

    def ratio(self, key: str) -> float:
        """Service ÷ weight; 0 for an unknown tenant."""
        tenant = self._present.get(key) or self._absent.get(key)
        return tenant.service / tenant.weight if tenant else 0.0

    def victim(self, candidates: Iterable[Sequence]) -> Sequence | None:
        """Of ``candidates``, youngest first: the youngest of the tenant with most service ÷ weight."""
        best: Sequence | None = None
        most = -1.0
        for sequence in candidates:
            ratio = self.ratio(sequence.tenant_key)
            if ratio > most:
                best, most = sequence, ratio
        return best
