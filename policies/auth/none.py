"""``none``: everybody is one tenant, without a credential. For development; refuses to start off loopback."""

from __future__ import annotations

from pydantic import Field

from policies.locality import is_loopback
from policies.spi import PolicyConfig, PolicyConfigError, PolicyContext, PolicySpec
from policies.types import AuthRequest, Principal, TenantId


class NoneConfig(PolicyConfig):
    """Who everybody is."""

    tenant: str = Field(min_length=1, max_length=128)


class NoneAuth:
    """Never refuses."""

    def __init__(self, tenant: str) -> None:
        self._principal = Principal(TenantId(tenant), method="none")

    async def authenticate(self, request: AuthRequest) -> Principal:
        """Always the configured tenant."""
        return self._principal


def _make(config: NoneConfig, ctx: PolicyContext) -> NoneAuth:
    if not is_loopback(ctx.listen_host):
        raise PolicyConfigError(
            f"without authentication the gateway listens on loopback only, not on {ctx.listen_host!r}; "
            "set listen.host to 127.0.0.1, or use jwt or api_key"
        )
    return NoneAuth(config.tenant)


SPEC = PolicySpec("auth", "none", NoneConfig, _make, "No authentication: one tenant for all, on loopback only.")
