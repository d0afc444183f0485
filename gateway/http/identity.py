"""``/admin/keys``, ``/admin/tenants/{id}`` and ``/admin/audit``: keys, tenants, and who changed what.

Rules
- A change is live, durable and audited when it is answered (``state/registrar.py``); a refusal has changed nothing.
- A key's secret is in the answer that made it, and nowhere else.
- What the configuration file sets of a tenant is changed there: 409 names the keys.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AwareDatetime, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.config_checks import problems
from gateway.errors import ApiError, bad_request
from gateway.http.bodies import checked, json_object
from gateway.http.trail import actor
from gateway.settings import Tenant
from gateway.state.overlay import alone, effective, fixed, leaves, patched
from gateway.state.records import KeyRecord
from gateway.state.registrar import MAX_OVERLAP_S, NewKey, state_required
from policies.strict import StrictScalars
from policies.types import TenantId

if TYPE_CHECKING:
    from gateway.service import Gateway

NO_STORE = {"cache-control": "no-store"}
MAX_EVENTS = 1000


Label = Annotated[
    str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*$")
]
"""Shown in terminals and pages: no control characters."""


class _Body(StrictScalars):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _NewKey(_Body):
    tenant: str = Field(min_length=1, max_length=128)
    user: Label | None = None
    groups: tuple[Label, ...] = Field((), max_length=256)
    roles: tuple[Label, ...] = Field((), max_length=256)
    name: Label | None = None
    expires_at: AwareDatetime | None = None
    expires_in_s: float | None = Field(None, gt=0, le=100 * 366 * 86_400)

    @model_validator(mode="after")
    def _one_end(self) -> _NewKey:
        if self.expires_at is not None and self.expires_in_s is not None:
            raise ValueError("give expires_at or expires_in_s, not both")
        return self


class _Rotation(_Body):
    overlap_s: float = Field(3600.0, ge=0, le=MAX_OVERLAP_S)


class IdentityApi:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._registrar = gateway.parts.registrar

    def routes(self) -> list[Route]:
        """For the admin application."""
        return [
            Route("/admin/keys", self.keys, methods=["GET"]),
            Route("/admin/keys", self.create_key, methods=["POST"]),
            Route("/admin/keys/{key}", self.key, methods=["GET"]),
            Route("/admin/keys/{key}", self.revoke_key, methods=["DELETE"]),
            Route("/admin/keys/{key}/rotate", self.rotate_key, methods=["POST"]),
            Route("/admin/tenants", self.create_tenant, methods=["POST"]),
            Route("/admin/tenants/{tenant}", self.tenant, methods=["GET"]),
            Route("/admin/tenants/{tenant}", self.change_tenant, methods=["PATCH"]),
            Route("/admin/tenants/{tenant}", self.delete_tenant, methods=["DELETE"]),
            Route("/admin/audit", self.events, methods=["GET"]),
        ]

    # -- keys -----------------------------------------------------------------------------------------------------

    async def keys(self, request: Request) -> Response:
        """All keys, or one tenant's (``?tenant=``); revoked ones too."""
        if not self._registrar.kept:
            raise state_required()
        tenant, now = request.query_params.get("tenant"), time.time()
        keys = [key for key in self._registrar.keys.values() if tenant is None or key.tenant == tenant]
        return JSONResponse({"keys": [key.as_json(now) for key in keys]})

    async def key(self, request: Request) -> Response:
        """One key."""
        if not self._registrar.kept:
            raise state_required()
        key = self._registrar.keys.get(request.path_params["key"])
        if key is None:
            raise _missing("There is no such key.", "unknown_key", "key")
        return JSONResponse(key.as_json(time.time()))

    async def create_key(self, request: Request) -> Response:
        """A new key: 201 with its secret."""
        body = checked(
            _NewKey, await json_object(request, '{"tenant": "search", "user": "ann", "expires_in_s": 86400}')
        )
        now = time.time()
        expires = body.expires_at.timestamp() if body.expires_at is not None else None
        if body.expires_in_s is not None:
            expires = now + body.expires_in_s
        if expires is not None and expires <= now:
            raise bad_request("expires_at is in the past.", param="expires_at")
        if self._registrar.kept and not self._gateway.parts.tenants.knows(TenantId(body.tenant)):
            raise bad_request("tenant: there is no such tenant; make it first.", param="tenant", code="unknown_tenant")
        new = NewKey(body.tenant, body.user, body.groups, body.roles, body.name, expires)
        return self._with_secret(*await self._registrar.create_key(actor(request), new), 201)

    async def rotate_key(self, request: Request) -> Response:
        """Another secret for a key; the old one passes for ``overlap_s`` more."""
        body = checked(_Rotation, await json_object(request, '{"overlap_s": 3600}'))
        made = await self._registrar.rotate_key(actor(request), request.path_params["key"], body.overlap_s)
        return self._with_secret(*made, 200)

    async def revoke_key(self, request: Request) -> Response:
        """End a key."""
        key = await self._registrar.revoke_key(actor(request), request.path_params["key"])
        return JSONResponse(key.as_json(time.time()))

    def _with_secret(self, key: KeyRecord, secret: str, status: int) -> Response:
        body: dict[str, Any] = {**key.as_json(time.time()), "secret": secret}
        auth = self._gateway.parts.runtime.current.uses["auth"]
        if not _uses_keys({"use": auth.use, "with": auth.with_}):
            body["warning"] = f"policies.auth is {auth.use!r}, which takes no API keys: add api_key, e.g. in a chain."
        return JSONResponse(body, status, NO_STORE)

    # -- tenants --------------------------------------------------------------------------------------------------

    async def tenant(self, request: Request) -> Response:
        """One tenant: what is in force, and which keys the file has fixed."""
        return JSONResponse(self._shown(request.path_params["tenant"]))

    async def create_tenant(self, request: Request) -> Response:
        """A new tenant, in the shape of ``tenants[]``: 201, or 409 for one that is there already."""
        body = await json_object(request, '{"id": "search", "weight": 4}')
        name = body.pop("id", None)
        if not isinstance(name, str):
            raise bad_request("id is missing: the tenant's name, as in its credentials.", param="id")

        def work(old: Mapping[str, Any] | None) -> Mapping[str, Any]:
            if old is not None or self._named(name) is not None:
                raise ApiError(
                    409,
                    "This tenant is there already; change it with PATCH.",
                    type="invalid_request_error",
                    code="tenant_exists",
                    param="id",
                )
            return self._accepted(name, patched({}, body))

        await self._registrar.change_tenant(actor(request), "tenant.create", name, work)
        return JSONResponse(self._shown(name), 201)

    async def change_tenant(self, request: Request) -> Response:
        """A JSON merge patch: null takes back what was set here."""
        name = request.path_params["tenant"]
        patch = await json_object(request, '{"weight": 4, "limits": {"concurrent": 8}}')
        if "id" in patch:
            raise bad_request("id: a tenant keeps its name; make another one.", param="id")

        def work(old: Mapping[str, Any] | None) -> Mapping[str, Any]:
            named = self._named(name)
            if old is None and named is None:
                raise _missing("There is no such tenant; POST /admin/tenants makes one.", "unknown_tenant", "tenant")
            if found := fixed(named, patch):
                raise ApiError(
                    409,
                    f"The configuration file sets {', '.join(found)} of this tenant; change it there and reload.",
                    type="invalid_request_error",
                    code="set_in_file",
                    param=found[0],
                )
            return self._accepted(name, patched(old or {}, patch))

        await self._registrar.change_tenant(actor(request), "tenant.update", name, work)
        return JSONResponse(self._shown(name))

    async def delete_tenant(self, request: Request) -> Response:
        """Forget what was set here; with nothing left of the tenant its keys end too."""
        name = request.path_params["tenant"]
        named = self._named(name)

        def work(old: Mapping[str, Any] | None) -> None:
            if old is None and named is not None:
                raise ApiError(
                    409,
                    "The configuration file names this tenant; remove it there and reload.",
                    type="invalid_request_error",
                    code="set_in_file",
                    param="tenant",
                )
            if old is None:
                raise _missing("There is no such tenant.", "unknown_tenant", "tenant")

        await self._registrar.change_tenant(actor(request), "tenant.delete", name, work, revoke_keys=named is None)
        return JSONResponse({"id": name, "deleted": True, "in_file": named is not None})

    def _named(self, name: str) -> Tenant | None:
        return next((tenant for tenant in self._gateway.settings.tenants if tenant.id == name), None)

    def _accepted(self, name: str, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """``stored``, once it makes a tenant that can work. Raises ApiError 400."""
        settings = self._gateway.settings
        tenant = effective(name, self._named(name), stored, settings)
        for mistake in problems(alone(tenant, settings), self._gateway.parts.registry):
            if mistake.path[:2] == ("tenants", 0):
                where = ".".join(map(str, mistake.path[2:]))
                raise bad_request(f"{where}: {mistake.message}.", param=where)
        return stored

    def _shown(self, name: str) -> dict[str, Any]:
        named, stored = self._named(name), self._registrar.tenants.get(name)
        if named is None and stored is None:
            raise _missing("There is no such tenant.", "unknown_tenant", "tenant")
        tenant = effective(name, named, stored or {}, self._gateway.settings)
        return {
            **tenant.model_dump(mode="json", by_alias=True),
            "set_in_file": sorted(".".join(path) for path, _ in leaves(named)) if named is not None else [],
            "in_file": named is not None,
        }

    # -- audit ----------------------------------------------------------------------------------------------------

    async def events(self, request: Request) -> Response:
        """The newest entries of the audit log (``?limit=``), newest first."""
        text = request.query_params.get("limit", "100")
        if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_EVENTS:
            raise bad_request(f"limit must be a number from 1 to {MAX_EVENTS}.", param="limit")
        return JSONResponse({"entries": await self._registrar.last_events(int(text))})


def _uses_keys(use: Any) -> bool:
    """Whether an auth policy is ``api_key``, or a composite of one."""
    if isinstance(use, Mapping):
        return use.get("use") == "api_key" or any(_uses_keys(inner) for inner in use.values())
    return isinstance(use, list | tuple) and any(map(_uses_keys, use))


def _missing(message: str, code: str, param: str) -> ApiError:
    return ApiError(404, message, type="invalid_request_error", code=code, param=param)
