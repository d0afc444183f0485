"""``tenant``: all callers of a tenant share its prefix cache, nobody else does. The default."""

from __future__ import annotations

from policies.cache_scope._key import scope, server_secret
from policies.spi import NoConfig, PolicyContext, PolicySpec
from policies.types import CacheScope, Principal


class TenantScope:
    """One namespace per tenant and epoch."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def scope(self, principal: Principal, epoch: int) -> CacheScope:
        """O(1)."""
        return scope(self._secret, principal.tenant, "tenant", None, epoch)


def _make(config: NoConfig, ctx: PolicyContext) -> TenantScope:
    return TenantScope(server_secret(ctx))


SPEC = PolicySpec("cache_scope", "tenant", NoConfig, _make, "Prefixes are shared within a tenant and nowhere else.")
