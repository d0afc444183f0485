"""The public routes. Everything else is 404 in the API's shape; only the health checks and the API's description need
no credential.

Rules
- Routes match exactly: no trailing slash, no other spelling, no method but those listed (405 with ``Allow``).
- Every answer goes through ``guard``: request id, limits before parsing, errors without details.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError
from gateway.gatekeeper import peer_of
from gateway.http.admin import admin_app
from gateway.http.embeddings import EmbeddingsFormat, parse_embeddings
from gateway.http.middleware import error_response, exception_handlers, guard
from gateway.http.openai import ChatFormat, CompletionFormat
from gateway.http.openapi import document
from gateway.http.responses import ResponsesFormat, parse_responses
from gateway.http.schemas import parse_chat, parse_completion
from gateway.http.tokenize import detokenize, parse_detokenize, parse_tokenize, tokenize
from gateway.http.usage import UsageApi
from gateway.service import Gateway
from gateway.strangers import Strangers
from gateway.tenants import EffectiveTenant
from gateway.version import version
from gateway.visit import Endpoint, Errand, rate_headers

__all__ = ["ENDPOINTS", "admin_app", "public_app"]

ENDPOINTS: tuple[Endpoint | Errand, ...] = (
    Endpoint("/v1/chat/completions", parse_chat, ChatFormat),
    Endpoint("/v1/completions", parse_completion, CompletionFormat),
    Endpoint("/v1/responses", parse_responses, ResponsesFormat),
    Endpoint("/v1/embeddings", parse_embeddings, EmbeddingsFormat),
    Errand("/tokenize", parse_tokenize, tokenize),
    Errand("/detokenize", parse_detokenize, detokenize),
)
"""Everything that is POSTed and goes through the pipeline."""

OPEN = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""What needs no credential."""

Answer = Callable[[Request, EffectiveTenant], Response]


def public_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application of the public listener."""
    posted = {endpoint.route: _Posted(gateway, endpoint) for endpoint in ENDPOINTS}
    routes = [
        *(Route(route, endpoint, methods=["POST"]) for route, endpoint in posted.items()),
        Route("/v1/models", _for_tenant(gateway, _models(gateway)), methods=["GET"]),
        Route("/v1/models/{model:path}", _for_tenant(gateway, _model(gateway)), methods=["GET"]),
        Route("/openapi.json", _described(), methods=["GET"]),
        Route("/v1/usage", UsageApi(gateway).own, methods=["GET"]),
        Route("/healthz", _health, methods=["GET"]),
        Route("/readyz", _readiness(gateway), methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers=exception_handlers())
    app.router.redirect_slashes = False
    served = _Posts(posted, app, gateway.parts.gatekeeper.strangers)
    return guard(served, max_body_bytes=gateway.settings.listen.max_body_bytes)


class _Posted:
    """One endpoint, as plain ASGI: the pipeline answers by itself."""

    def __init__(self, gateway: Gateway, endpoint: Endpoint | Errand) -> None:
        self._gateway = gateway
        self._endpoint = endpoint

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._gateway.parts.pipeline.run(self._endpoint, scope, receive, send)


class _Posts:
    """What is POSTed goes straight to its endpoint, all else through the routes (405 for its other methods, too).

    Most requests are such; a router and its exception handlers cost about what the queue costs. From addresses that
    never bring a good credential they wait first, before anything is done for them (``strangers.py``).
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp], routes: ASGIApp, strangers: Strangers) -> None:
        self._endpoints = endpoints
        self._routes = routes
        self._strangers = strangers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._strangers and scope["path"] not in OPEN:
            await self._strangers.let_in(peer_of(scope))
        posted = scope["type"] == "http" and scope["method"] == "POST"
        app = self._endpoints.get(scope["path"], self._routes) if posted else self._routes
        await app(scope, receive, send)


def _for_tenant(gateway: Gateway, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint for verified tenants, with their rate limits in the headers, also of a refusal."""
    parts = gateway.parts

    async def endpoint(request: Request) -> Response:
        policies = parts.runtime.current
        principal = await parts.gatekeeper.authenticate(request.scope, policies)
        tenant = parts.tenants.of(principal)
        headers = rate_headers(tenant, principal, None, policies.quota, time.monotonic())
        try:
            response = answer(request, tenant)
        except ApiError as error:
            return error_response(error, headers)
        response.headers.update(headers)
        return response

    return endpoint


def _models(gateway: Gateway) -> Answer:
    def answer(_: Request, tenant: EffectiveTenant) -> Response:
        return JSONResponse({"object": "list", "data": gateway.parts.models.described(tenant)})

    return answer


def _model(gateway: Gateway) -> Answer:
    def answer(request: Request, tenant: EffectiveTenant) -> Response:
        models, name = gateway.parts.models, request.path_params["model"]
        adapter = models.adapters.find(name)
        if adapter is None or adapter.name not in {entry["id"] for entry in models.described(tenant)}:
            return JSONResponse(models.get(name, tenant).describe())
        return JSONResponse(adapter.describe(models.handle(adapter.model).max_context))

    return answer


def _described() -> Callable[[Request], Awaitable[Response]]:
    """The API's own description, for everybody: it says nothing of this deployment."""
    body = document(version())

    async def endpoint(_: Request) -> Response:
        return Response(body, media_type="application/json")

    return endpoint


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _readiness(gateway: Gateway) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        if gateway.ready:
            return JSONResponse({"status": "ready"})
        # What is missing names models: the operator's admin API says it, not this open endpoint.
        status = "draining" if gateway.draining else "starting"
        return JSONResponse({"status": status}, 503, {"retry-after": "2"})

    return endpoint
