"""``group``: the members of one group inside a tenant share a prefix cache.

Which group, when a caller is in several: the first of ``prefer`` that it is in, else the alphabetically first. A caller
without a group gets its user's own scope, which is narrower.
"""

from __future__ import annotations

from policies.cache_scope._key import scope, server_secret
from policies.spi import PolicyConfig, PolicyContext, PolicySpec
from policies.types import CacheScope, Principal


class GroupConfig(PolicyConfig):
    """Which groups come first."""

    prefer: tuple[str, ...] = ()


class GroupScope:
    """One namespace per tenant, chosen group and epoch."""

    def __init__(self, secret: bytes, prefer: tuple[str, ...] = ()) -> None:
        self._secret = secret
        self._prefer = prefer

    def scope(self, principal: Principal, epoch: int) -> CacheScope:
        """O(groups of the caller + preferred groups)."""
        groups = principal.groups
        if not groups:
            return scope(self._secret, principal.tenant, "user", principal.user, epoch)
        preferred = [group for group in self._prefer if group in groups]
        chosen = preferred[0] if preferred else min(groups)
        return scope(self._secret, principal.tenant, "group", chosen, epoch)


def _make(config: GroupConfig, ctx: PolicyContext) -> GroupScope:
    return GroupScope(server_secret(ctx), config.prefer)


SPEC = PolicySpec("cache_scope", "group", GroupConfig, _make, "The members of one group of a tenant share prefixes.")
