"""Which cache scopes each tenant's requests used, so that a purge can name them to the workers.

Rules
- Bounded, whoever comes: at most ``per_tenant`` scopes of one tenant, the oldest go first, and ``total`` of all
  tenants; past that the tenant goes whose last request is longest ago.
- What was forgotten is never taken for swept: ``complete`` says whether every scope of a tenant is still known. Once a
  whole tenant went, a tenant that is not in the table may be that one, so nobody outside it is known completely.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from policies.types import TenantId

PER_TENANT = 4096
TOTAL = 65_536


@dataclass(slots=True)
class _Used:
    scopes: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    complete: bool = True


class ScopesInUse:
    """The scopes by tenant. All operations are O(1) amortised, ``of`` O(scopes of the tenant)."""

    def __init__(self, per_tenant: int = PER_TENANT, total: int = TOTAL) -> None:
        self._per_tenant = per_tenant
        self._total = total
        self._tenants: OrderedDict[TenantId, _Used] = OrderedDict()
        self._count = 0
        self._tenants_forgotten = False

    def __len__(self) -> int:
        return self._count

    def note(self, tenant: TenantId, scope: bytes) -> None:
        """A request of ``tenant`` runs in ``scope``."""
        used = self._tenants.get(tenant)
        if used is None:
            # It may be one that went before: then this is not all that it used.
            used = self._tenants[tenant] = _Used(complete=not self._tenants_forgotten)
        self._tenants.move_to_end(tenant)
        if scope in used.scopes:
            used.scopes.move_to_end(scope)
            return
        used.scopes[scope] = None
        self._count += 1
        if len(used.scopes) > self._per_tenant:
            used.scopes.popitem(last=False)
            used.complete = False
            self._count -= 1
        while self._count > self._total and len(self._tenants) > 1:
            _, gone = self._tenants.popitem(last=False)
            self._count -= len(gone.scopes)
            self._tenants_forgotten = True

    def of(self, tenant: TenantId) -> list[bytes]:
        """The known scopes of ``tenant``, longest unused first."""
        used = self._tenants.get(tenant)
        return list(used.scopes) if used is not None else []

    def complete(self, tenant: TenantId) -> bool:
        """Whether ``of(tenant)`` is every scope that its requests ever used here."""
        used = self._tenants.get(tenant)
        return used.complete if used is not None else not self._tenants_forgotten
