"""The console's routes as one ASGI application, mounted at ``/console`` on the admin listener.

Rules
- Every request goes through ``Access`` first; pages and actions are for signed-in visitors, the login page and the
  static files for anybody whom the listener lets in at all.
- An action is a POST with a CSRF token. To htmx it answers with a fragment, to a plain form with a page.
- Errors are pages too, with the status and without details.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import log
from gateway.console_data import ConsoleData
from gateway.errors import ApiError, bad_request
from gateway.http.console import live
from gateway.http.console.access import HEADERS, Access, Visitor
from gateway.http.console.actions import Actions, Result
from gateway.http.console.pages import PAGES, Page
from gateway.http.console.render import Renderer
from gateway.http.operators import Operators
from gateway.http.trail import actor, identify

if TYPE_CHECKING:
    from gateway.service import Gateway

_log = log.get("console")

ROOT = "/console"
LOGIN = f"{ROOT}/login"
MAX_FIELDS = 16


def console_app(gateway: Gateway, operators: Operators) -> ASGIApp:
    """The application. ``operators``: who may sign in; none: whoever is on this machine."""
    return _Console(gateway, operators)


class _Console:
    def __init__(self, gateway: Gateway, operators: Operators) -> None:
        self._gateway = gateway
        self._access = Access(operators)
        self._data = ConsoleData(gateway)
        self._actions = Actions(gateway, self._data)
        self._renderer = Renderer()
        self._streams = live.Streams(lambda: gateway.draining and not gateway.parts.pipeline.active)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        send = _with_headers(send)
        htmx = request.headers.get("hx-request") == "true"
        visitor: Visitor | None = None
        try:
            visitor = self._access.admit(request)
            answer = await self._answer(request, visitor, receive, send)
        except ApiError as error:
            answer = self._refusal(error, visitor, htmx=htmx)
        if answer is not None:
            await answer(scope, receive, send)

    async def _answer(self, request: Request, visitor: Visitor, receive: Receive, send: Send) -> Response | None:
        """The response; None where it was streamed."""
        path = request.scope["path"]
        kind, _, name = path.removeprefix(ROOT).strip("/").partition("/")
        if path == LOGIN or path == f"{ROOT}/logout":
            return await self._session(request, visitor)
        if kind == "static" and request.method in ("GET", "HEAD"):
            return self._static(name, request)
        if not visitor.signed_in:
            return self._to_login(request)
        if kind == "actions" and request.method == "POST":
            return await self._act(name, request, visitor)
        if request.method not in ("GET", "HEAD"):
            raise _error(405, "This page does not take that method.", "method_not_allowed")
        if kind == "live" and name in PAGES:
            await self._streams.serve(receive, send, self._frames(PAGES[name], request, visitor))
            return None
        page = PAGES.get(kind or "overview")
        if page is None or path != page.path:
            raise _error(404, "There is no such page.", "unknown_page")
        response = self._page("page.html", visitor, self._of_page(page, request, visitor))
        if visitor.new:
            self._access.remember(response, visitor.id, request)
        return response

    # -- pages ----------------------------------------------------------------------------------------------------

    def _of_page(self, page: Page, request: Request, visitor: Visitor) -> dict[str, Any]:
        query = urlencode({name: value for name, value in request.query_params.items() if name in ("q", "kind")})
        return {
            "page": page,
            "live_url": f"{ROOT}/live/{page.name}" + (f"?{query}" if query else ""),
            **self._live_values(page, request, visitor),
            **page.still(self._gateway, request.query_params),
        }

    def _live_values(self, page: Page, request: Request, visitor: Visitor) -> dict[str, Any]:
        return {
            "status": self._data.status(),
            "csrf": self._access.csrf(visitor),
            **page.live(self._gateway, self._data, request.query_params),
        }

    def _frames(self, page: Page, request: Request, visitor: Visitor) -> Any:
        def html() -> str:
            return self._renderer.html(f"_{page.name}.html", self._live_values(page, request, visitor))

        def signed_in() -> bool:
            return not self._access.wants_token or self._access.has_session(visitor.id)

        return live.frames(html, signed_in, self._gateway.parts.history if page.charts else None)

    def _page(self, template: str, visitor: Visitor | None, values: Mapping[str, Any], status: int = 200) -> Response:
        shared = {
            "pages": PAGES.values(),
            "signed_in": visitor is not None and visitor.signed_in,
            "wants_token": self._access.wants_token,
            "csrf": self._access.csrf(visitor) if visitor is not None else "",
            "page": None,
        }
        return HTMLResponse(self._renderer.html(template, {**shared, **values}), status)

    def _static(self, name: str, request: Request) -> Response:
        file = self._renderer.files.get(name)
        if file is None:
            raise _error(404, "There is no such file.", "unknown_file")
        headers = {"cache-control": "public, max-age=31536000, immutable", "etag": f'"{file.digest}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(None, 304, headers)
        return Response(file.content, 200, {**headers, "content-type": file.media_type})

    # -- sessions -------------------------------------------------------------------------------------------------

    async def _session(self, request: Request, visitor: Visitor) -> Response:
        access = self._access
        if not access.wants_token:
            return RedirectResponse(ROOT, 303)
        if request.method == "GET" and request.scope["path"] == LOGIN:
            if visitor.signed_in:
                return RedirectResponse(ROOT, 303)
            response = self._page("login.html", visitor, {"wrong": None})
            if visitor.new:
                access.remember(response, visitor.id, request)
            return response
        if request.method != "POST":
            raise _error(405, "This page does not take that method.", "method_not_allowed")
        fields = await _fields(request)
        access.check_csrf(visitor, fields.get("csrf", ""))
        if request.scope["path"] != LOGIN:
            access.sign_out(visitor)
            return RedirectResponse(LOGIN, 303)
        host = request.client.host if request.client is not None else ""
        try:
            session = access.sign_in(fields.get("token", ""), host)
        except ApiError as error:
            _log.warning("console_sign_in_failed", host=host, why=error.code)
            response = self._page("login.html", visitor, {"wrong": error.message}, error.status)
            response.headers.update(error.headers())
            return response
        _log.info("console_sign_in", host=host)
        response = RedirectResponse(ROOT, 303)
        access.remember(response, session, request)
        return response

    def _to_login(self, request: Request) -> Response:
        if request.headers.get("hx-request") == "true":
            return Response(None, 401, {"hx-redirect": LOGIN})
        if request.method in ("GET", "HEAD"):
            return RedirectResponse(LOGIN, 303)
        raise _error(401, "Sign in first.", "not_signed_in")

    # -- actions --------------------------------------------------------------------------------------------------

    async def _act(self, name: str, request: Request, visitor: Visitor) -> Response:
        fields = await _fields(request)
        self._access.check_csrf(visitor, fields.get("csrf", ""))
        identify(request.scope, self._access.name_of(visitor))
        result = await self._actions.run(name, fields, actor(request, "console"))
        if request.headers.get("hx-request") == "true":
            return HTMLResponse(self._renderer.html("_result.html", {"result": result}), result.status)
        back = fields.get("back", "")
        values = {"result": result, "back": back if back in {page.path for page in PAGES.values()} else ROOT}
        return self._page("result.html", visitor, values, result.status)

    def _refusal(self, error: ApiError, visitor: Visitor | None, *, htmx: bool) -> Response:
        result = Result(error.message, ok=False, status=error.status)
        if htmx:
            response: Response = HTMLResponse(self._renderer.html("_result.html", {"result": result}), error.status)
        else:
            response = self._page("result.html", visitor, {"result": result, "back": ROOT}, error.status)
        response.headers.update(error.headers())
        return response


async def _fields(request: Request) -> dict[str, str]:
    """The fields of a form. Raises ApiError 400, 415."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/x-www-form-urlencoded":
        raise _error(415, "Send a form.", "unsupported_media_type")
    try:
        pairs = parse_qsl(
            (await request.body()).decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict"
        )
    except ValueError:
        raise bad_request("The form cannot be read.") from None
    return dict(pairs)


def _error(status: int, message: str, code: str) -> ApiError:
    return ApiError(status, message, type="invalid_request_error", code=code)


def _with_headers(send: Send) -> Send:
    """Add the security headers to whatever is sent; a static file keeps its own ``cache-control``."""

    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message.get("headers", [])}
            extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in present]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await send(message)

    return wrapped
