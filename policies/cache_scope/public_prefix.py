"""``public_prefix``: as another scope, but prefixes that the operator registered as public are shared between tenants.

Only blocks that lie wholly inside a registered prefix are shared; behind its end every chain is its own scope's. Which
prefixes are public is the gateway's to know (``/admin/public-prefixes``), never a caller's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field

from policies.spi import CacheScopePolicy, PolicyConfig, PolicyConfigError, PolicyContext, PolicySpec
from policies.types import CacheScope, Principal


class Within(PolicyConfig):
    """The scope behind the public part."""

    use: str = "tenant"
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")


class PublicPrefixConfig(PolicyConfig):
    """Which scope is private."""

    within: Within = Within()


class PublicPrefixScope:
    """Another policy's scope, marked as one that shares public prefixes."""

    def __init__(self, within: CacheScopePolicy) -> None:
        self._within = within

    def scope(self, principal: Principal, epoch: int) -> CacheScope:
        """As the policy within, plus O(1)."""
        return replace(self._within.scope(principal, epoch), public=True)


def _make(config: PublicPrefixConfig, ctx: PolicyContext) -> PublicPrefixScope:
    if config.within.use == "public_prefix":
        raise PolicyConfigError("'public_prefix' cannot be within itself; name the private scope", "within.use")
    if ctx.build is None:
        raise PolicyConfigError("can only be made by a registry, which builds the scope within", "within")
    try:
        within = ctx.build("cache_scope", config.within.use, config.within.with_)
    except PolicyConfigError as error:
        mistakes = [(f"within.{path}" if path else "within", message) for path, message in error.mistakes]
        raise PolicyConfigError(str(error), mistakes[0][0], mistakes) from error
    return PublicPrefixScope(within)


SPEC = PolicySpec(
    "cache_scope",
    "public_prefix",
    PublicPrefixConfig,
    _make,
    "As the scope within; prefixes the operator registered are shared by all tenants.",
)
