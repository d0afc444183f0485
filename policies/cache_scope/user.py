"""``user``: every user has a prefix cache of its own, also inside a tenant."""

from __future__ import annotations

from policies.cache_scope._key import scope, server_secret
from policies.spi import NoConfig, PolicyContext, PolicySpec
from policies.types import CacheScope, Principal


class UserScope:
    """One namespace per tenant, user and epoch; the tenant's callers without a user share one of their own."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def scope(self, principal: Principal, epoch: int) -> CacheScope:
        """O(1)."""
        return scope(self._secret, principal.tenant, "user", principal.user, epoch)


def _make(config: NoConfig, ctx: PolicyContext) -> UserScope:
    return UserScope(server_secret(ctx))


SPEC = PolicySpec("cache_scope", "user", NoConfig, _make, "Every user of a tenant has a prefix cache of its own.")
