"""``GET /v1/usage``: a caller's own figures. ``GET /admin/usage``: everybody's, for the operator.

A caller sees what it used itself (its user's part; its tenant's where the credential names no user), and what is left
of every limit that concerns it, also of those that it shares.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway import usage
from gateway.errors import bad_request
from gateway.timed import unwrap
from gateway.visit import rate_headers
from policies.quota.limits import money
from policies.spi import UsageReports
from policies.types import LimitStatus, Principal, UsageQuery

if TYPE_CHECKING:
    from gateway.service import Gateway

_PARAMETERS = frozenset({"group_by", "from", "to", "format", *usage.GROUPS})


class UsageApi:
    """Both endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._parts = gateway.parts

    async def own(self, request: Request) -> Response:
        """For whoever calls."""
        parts, now = self._parts, time.monotonic()
        policies = parts.runtime.current
        principal = await parts.gatekeeper.authenticate(request.scope, policies)
        tenant = parts.tenants.get(principal.tenant)
        quota = unwrap(policies.quota)
        limits = await parts.gatekeeper.limits(tenant.accounts(principal), policies)
        body = {
            "object": "usage",
            "tenant": tenant.id,
            "user": principal.user,
            "currency": self._gateway.settings.prices.currency,
            "month": await self._month(quota, principal),
            "limits": [_limit(status) for status in limits],
        }
        return JSONResponse(body, headers=rate_headers(tenant, principal, None, policies.quota, now))

    async def all(self, request: Request) -> Response:
        """For the operator: ``?group_by=tenant,model&from=2026-11-01&to=2026-11-30&tenant=search&format=csv``."""
        given = request.query_params
        for name in given:
            if name not in _PARAMETERS:
                known = ", ".join(sorted(_PARAMETERS))
                raise bad_request(f"Unknown parameter {name[:64]!r} (known: {known}).", param=name[:64])
        form = given.get("format", "json")
        if form not in ("json", "csv"):
            raise bad_request(f"format: {form[:32]!r} is neither json nor csv.", param="format")
        groups = [name.strip() for name in given.get("group_by", "tenant").split(",") if name.strip()]
        only = {name: given[name] for name in usage.GROUPS if name in given}
        wanted = usage.query(groups, given.get("from"), given.get("to"), only)
        quota = unwrap(self._parts.runtime.current.quota)
        body = (await usage.report(quota, wanted, self._gateway.settings.prices)).as_json()
        if form == "csv":
            name = f"usage-{wanted.first}-{wanted.last}.csv"
            headers = {"content-disposition": f'attachment; filename="{name}"'}
            return Response(usage.as_csv(body), media_type="text/csv", headers=headers)
        return JSONResponse(body)

    async def _month(self, quota: object, principal: Principal) -> dict[str, Any] | None:
        """What it used this month; None where nobody remembers."""
        if not isinstance(quota, UsageReports):
            return None
        only = {"tenant": str(principal.tenant)}
        if principal.user is not None:
            only["user"] = principal.user
        today = usage.today()
        wanted = UsageQuery(today.replace(day=1).isoformat(), today.isoformat(), (), only)
        found = await usage.report(quota, wanted, self._gateway.settings.prices)
        return {"from": wanted.first, "to": wanted.last, **usage.figures(usage.total(found.rows))}


def _limit(status: LimitStatus) -> dict[str, Any]:
    """One limit; sums of money as decimal text."""
    shown: Any = money if status.limit.startswith("currency") else int
    return {
        "level": status.level,
        "limit": status.limit,
        "maximum": shown(status.maximum),
        "remaining": shown(status.remaining),
        "reset_seconds": None if status.reset_s is None else round(status.reset_s, 3),
    }
