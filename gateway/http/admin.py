"""The admin API, on its own listener: metrics, tenants, policies, queue, workers, cache purges.

Rules
- With a token (``admin.token_env``): ``Authorization: Bearer`` on every route but ``/healthz``, compared in constant
  time, and the listener may be anywhere. Without one: loopback peers only, and a request with an ``Origin`` or a
  foreign ``Host`` is refused, so that a web page in the operator's browser cannot reach it (DNS rebinding included).
- Nothing here shows content, credentials, or a policy's secrets.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.console_data import ConsoleData
from gateway.errors import ApiError, forbidden
from gateway.http.adapters import AdaptersApi
from gateway.http.cache import CacheApi
from gateway.http.console.app import ROOT as CONSOLE
from gateway.http.console.app import console_app
from gateway.http.identity import IdentityApi
from gateway.http.middleware import error_response, exception_handlers, guard
from gateway.http.operators import Operators
from gateway.http.policies import PoliciesApi
from gateway.http.trail import identify
from gateway.http.usage import UsageApi
from gateway.timed import unwrap
from policies.locality import host_name, is_loopback
from policies.spi import QuotaView

if TYPE_CHECKING:
    from gateway.service import Gateway

MAX_BODY_BYTES = 256 * 1024

Handler = Callable[[Request], Awaitable[Response]]


def admin_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application of the admin listener."""
    app = Starlette(routes=admin_routes(gateway), exception_handlers=exception_handlers())
    app.router.redirect_slashes = False
    operators = Operators.of(gateway.settings.admin, gateway.env)
    routed = _Console(console_app(gateway, operators), _Gate(app, operators))
    return guard(routed, max_body_bytes=MAX_BODY_BYTES)


def admin_routes(gateway: Gateway) -> list[Route]:
    """All but the console's."""
    api, policies, identity = _Api(gateway), PoliciesApi(gateway), IdentityApi(gateway)
    return [
        Route("/healthz", api.health, methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
        Route("/admin/tenants", api.tenants, methods=["GET"]),
        *CacheApi(gateway).routes(),
        Route("/admin/policies", policies.show, methods=["GET"]),
        Route("/admin/policies", policies.change, methods=["POST"]),
        Route("/admin/queue", api.queue, methods=["GET"]),
        Route("/admin/workers", api.workers, methods=["GET"]),
        *AdaptersApi(gateway).routes(),
        Route("/admin/usage", UsageApi(gateway).all, methods=["GET"]),
        Route("/admin/overview", api.overview, methods=["GET"]),
        *identity.routes(),
    ]


class _Console:
    """Passes what is below ``/console`` to the console, which has its own rules for browsers."""

    def __init__(self, console: ASGIApp, app: ASGIApp) -> None:
        self._console = console
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        inside = path == CONSOLE or path.startswith(f"{CONSOLE}/")
        await (self._console if inside else self._app)(scope, receive, send)


class _Gate:
    """Lets in who holds the token; without a token, only this machine, and no browser."""

    def __init__(self, app: ASGIApp, operators: Operators) -> None:
        self._app = app
        self._operators = operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            refusal = self._with_token(request) if self._operators else self._local(request)
            if refusal is not None:
                await error_response(refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _with_token(self, request: Request) -> ApiError | None:
        if request.scope["path"] == "/healthz":  # what is routed by; ``request.url`` is made with the caller's Host
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        name = self._operators.name_of(given) if scheme.lower() == "bearer" else None
        if name is not None:
            identify(request.scope, name)
            return None
        return ApiError(
            401, "Send the admin token as 'Authorization: Bearer …'.", type="authentication_error", code="invalid_token"
        )

    @staticmethod
    def _local(request: Request) -> ApiError | None:
        if request.client is None or not is_loopback(request.client.host):
            return forbidden("Without an admin token only this machine may ask.", code="not_local")
        if "origin" in request.headers or not is_loopback(host_name(request.headers.get("host", ""))):
            return forbidden("Without an admin token requests from web pages are refused.", code="foreign_origin")
        return None


class _Api:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._parts = gateway.parts

    async def health(self, _: Request) -> Response:
        missing = self._gateway.missing
        return JSONResponse({"status": "ok", "ready": not missing, "missing": missing})

    async def metrics(self, request: Request) -> Response:
        body, content_type = self._parts.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def tenants(self, _: Request) -> Response:
        quota = unwrap(self._parts.runtime.current.quota)
        now = time.monotonic()
        return JSONResponse(
            {
                "tenants": [
                    {
                        "id": tenant.id,
                        "weight": tenant.weight,
                        "class": tenant.service_class,
                        "models": list(tenant.models),
                        "requires": dict(tenant.requires),
                        "cache_epoch": tenant.epoch,
                        "limits": {name: getattr(tenant.limits, name) for name in tenant.limits.__dataclass_fields__},
                        "remaining": {name: state.remaining for name, state in quota.remaining(tenant.id, now).items()}
                        if isinstance(quota, QuotaView)
                        else {},
                    }
                    for tenant in self._parts.tenants.listed()
                ],
                "unlisted": "tenant_defaults" if self._gateway.settings.tenant_defaults else "refused",
            }
        )

    async def queue(self, _: Request) -> Response:
        return JSONResponse({"models": [dispatcher.snapshot() for dispatcher in self._parts.dispatchers.values()]})

    async def overview(self, _: Request) -> Response:
        return JSONResponse(ConsoleData(self._gateway).overview().as_json())

    async def workers(self, _: Request) -> Response:
        return JSONResponse({"workers": self._gateway.workers()})
