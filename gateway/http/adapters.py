"""The admin API of LoRA adapters: what is loaded where, loading and dropping while everything runs.

    GET    /admin/adapters                                every adapter, with its content and its workers
    POST   /admin/adapters   {model, name, source}        load, or give a name another content
    DELETE /admin/adapters/{name}                         drop

A refusal has changed nothing. A drop answers 202 while requests still use the adapter: no new one finds it, and it goes
with the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.adapters import Adapter, AdapterRefusedError
from gateway.errors import ApiError
from gateway.http.bodies import checked, json_object
from gateway.http.trail import note
from workers.adapters import AdapterSource

if TYPE_CHECKING:
    from gateway.service import Gateway

_CODES = {400: "adapter_invalid", 404: "adapter_not_found", 409: "adapter_conflict", 503: "no_worker"}
_EXAMPLE = '{"model": "smollm2", "name": "sql", "source": "adapters/sql"}'


class _Wanted(AdapterSource):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, max_length=256)


class AdaptersApi:
    """The endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._adapters = gateway.parts.models.adapters

    def routes(self) -> list[Route]:
        """For the admin application."""
        return [
            Route("/admin/adapters", self.show, methods=["GET"]),
            Route("/admin/adapters", self.load, methods=["POST"]),
            Route("/admin/adapters/{name}", self.drop, methods=["DELETE"]),
        ]

    async def show(self, _: Request) -> Response:
        return JSONResponse({"adapters": [self._shown(adapter) for adapter in self._adapters]})

    async def load(self, request: Request) -> Response:
        wanted = checked(_Wanted, await json_object(request, _EXAMPLE))
        before = self._adapters.find(wanted.name)
        try:
            made = await self._adapters.load(wanted.model, wanted.name, wanted.source)
        except AdapterRefusedError as error:
            raise _refusal(error) from None
        shown = self._shown(made)
        was = {"digest": before.digest, "source": before.source} if before is not None else None
        await note(self._gateway, request, "adapter.load", f"adapter:{made.qualified}", before=was, after=shown)
        return JSONResponse(shown, 201 if before is None else 200)

    async def drop(self, request: Request) -> Response:
        try:
            gone, freed = await self._adapters.drop(request.path_params["name"])
        except AdapterRefusedError as error:
            raise _refusal(error) from None
        answer = {"name": gone.name, "model": gone.model, "freed": freed, "requests": self._adapters.requests(gone)}
        was = {"digest": gone.digest, "source": gone.source}
        await note(self._gateway, request, "adapter.drop", f"adapter:{gone.qualified}", before=was)
        return JSONResponse(answer, 200 if freed else 202)

    def _shown(self, adapter: Adapter) -> dict[str, Any]:
        return {
            "name": adapter.name,
            "model": adapter.model,
            "source": adapter.source,
            "digest": adapter.digest,
            "rank": adapter.rank,
            "bytes": adapter.bytes,
            "live": adapter.live,
            "requests": self._adapters.requests(adapter),
            "workers": self._adapters.workers(adapter),
        }


def _refusal(error: AdapterRefusedError) -> ApiError:
    return ApiError(
        error.status,
        f"{error.message}.",
        type="service_unavailable" if error.status == 503 else "invalid_request_error",
        code=_CODES[error.status],
        param=error.param,
        retry_after_s=5.0 if error.status == 503 else None,
    )
