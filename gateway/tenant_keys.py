"""The opaque names under which workers count tenants, and back.

Rules
- A key is an HMAC of the tenant's id under the server's secret: a worker learns nothing from it and cannot make one up.
- The way back is remembered for the last ``MOST`` tenants that had a request.
- Used on the event loop only.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict

from policies.types import TenantId

MOST = 4096


class TenantKeys:
    """Keys under one secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._keys: OrderedDict[TenantId, str] = OrderedDict()
        self._tenants: dict[str, TenantId] = {}

    def key(self, tenant: TenantId) -> str:
        """The name that workers are given for ``tenant``."""
        found = self._keys.get(tenant)
        if found is None:
            found = hmac.new(self._secret, b"tenant\0" + tenant.encode(), hashlib.sha256).hexdigest()[:32]
            self._keys[tenant] = found
            self._tenants[found] = tenant
            if len(self._keys) > MOST:
                del self._tenants[self._keys.popitem(last=False)[1]]
        else:
            self._keys.move_to_end(tenant)
        return found

    def tenant(self, key: str) -> TenantId | None:
        """Whose key it is; None for one that was forgotten, and for what is no tenant's (a public prefix)."""
        return self._tenants.get(key)
