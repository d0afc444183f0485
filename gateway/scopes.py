"""Which cache scopes each tenant's requests used, so that a purge can name them to the workers; and what was purged.

Rules
- Bounded, whoever comes: at most ``per_tenant`` scopes of one tenant, the oldest go first, and ``total`` of all
  tenants; past that the tenant goes whose last request is longest ago.
- What was forgotten is never taken for swept: ``complete`` says whether every scope of a tenant is still known. Once a
  whole tenant went, a tenant that is not in the table may be that one, so nobody outside it is known completely.
- A scope is in the table until it was swept everywhere (``swept``), or used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from policies.types import TenantId

PER_TENANT = 4096
TOTAL = 65_536
PURGED_LABELS = 65_536


@dataclass(slots=True)
class _Used:
    scopes: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """With the epoch that each belongs to."""
    complete: bool = True


class ScopesInUse:
    """The scopes by tenant. All operations are O(1) amortised, but for those that return scopes: O(of the tenant)."""

    def __init__(self, per_tenant: int = PER_TENANT, total: int = TOTAL) -> None:
        self._per_tenant = per_tenant
        self._total = total
        self._tenants: OrderedDict[TenantId, _Used] = OrderedDict()
        self._count = 0
        self._tenants_forgotten = False

    def __len__(self) -> int:
        return self._count

    def note(self, tenant: TenantId, scope: bytes, epoch: int = 0) -> None:
        """A request of ``tenant`` runs in ``scope``, which ``epoch`` made."""
        used = self._tenants.get(tenant)
        if used is None:
            # It may be one that went before: then this is not all that it used.
            used = self._tenants[tenant] = _Used(complete=not self._tenants_forgotten)
        self._tenants.move_to_end(tenant)
        if scope in used.scopes:
            used.scopes.move_to_end(scope)
            return
        used.scopes[scope] = epoch
        self._count += 1
        if len(used.scopes) > self._per_tenant:
            used.scopes.popitem(last=False)
            used.complete = False
            self._count -= 1
        while self._count > self._total and len(self._tenants) > 1:
            _, gone = self._tenants.popitem(last=False)
            self._count -= len(gone.scopes)
            self._tenants_forgotten = True

    def tenants(self) -> list[TenantId]:
        """Who is in the table."""
        return list(self._tenants)

    def of(self, tenant: TenantId) -> list[bytes]:
        """The known scopes of ``tenant``, longest unused first."""
        used = self._tenants.get(tenant)
        return list(used.scopes) if used is not None else []

    def outdated(self, tenant: TenantId, epoch: int) -> list[bytes]:
        """Those of another epoch than ``epoch``: nothing in them can be hit any more."""
        used = self._tenants.get(tenant)
        return [scope for scope, made in used.scopes.items() if made != epoch] if used is not None else []

    def swept(self, tenant: TenantId, scopes: Iterable[bytes]) -> None:
        """No worker holds anything of these any more."""
        used = self._tenants.get(tenant)
        for scope in scopes:
            if used is not None and used.scopes.pop(scope, None) is not None:
                self._count -= 1

    def complete(self, tenant: TenantId) -> bool:
        """Whether ``of(tenant)`` is every scope that its requests ever used here and that may still hold something."""
        used = self._tenants.get(tenant)
        return used.complete if used is not None else not self._tenants_forgotten


class PurgedLabels:
    """When which label was purged, so that a request that began before it can be swept up behind. Bounded."""

    def __init__(self, most: int = PURGED_LABELS) -> None:
        self._most = most
        self._at: OrderedDict[bytes, float] = OrderedDict()

    def note(self, labels: Iterable[bytes], now: float) -> None:
        """They are purged now."""
        for label in labels:
            self._at[label] = now
            self._at.move_to_end(label)
            if len(self._at) > self._most:
                self._at.popitem(last=False)

    def since(self, labels: Iterable[bytes], arrived: float) -> list[bytes]:
        """Those of ``labels`` that were purged after a request with them had arrived."""
        if not self._at:
            return []
        return [label for label in labels if self._at.get(label, float("-inf")) >= arrived]
