"""Who may use the console: sessions, CSRF, and headers that keep a browser from doing anything else.

Rules
- With an admin token: a login form exchanges it for a session, a random id in an HttpOnly, SameSite=Strict cookie.
  Sessions live in memory, end after ``SESSION_S``, and their number is bounded. Wrong tokens are slowed down per host.
- Without one: loopback peers and loopback ``Host`` only, like the rest of the admin API (DNS rebinding).
- Cookies do not tell ports apart, and another program on this host is "same site". So every request but GET and HEAD
  must carry an ``Origin`` that is this very listener and a token made from the cookie with a key of this process, and
  a read by script from elsewhere is refused by its ``Sec-Fetch-Site``.
- No inline script or style runs (CSP), nothing may frame the console, nothing of it is cached.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import ApiError, forbidden, throttled
from gateway.http.operators import Operators
from policies.locality import host_name, is_loopback

COOKIE = "forebay_console"
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 256
MAX_FAILURES = 10
FAILURE_WINDOW_S = 60.0
_MAX_HOSTS = 1024

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not no-referrer: a form would then be sent with "Origin: null".
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Visitor:
    """Whoever sent a request."""

    id: str
    """The cookie's value: a session's id, or a random one that only ties forms to a browser."""
    signed_in: bool
    """May see pages and act."""
    new: bool
    """The cookie has to be set."""


class Access:
    """Decides about each request. One per console."""

    def __init__(self, operators: Operators, clock: Callable[[], float] = time.monotonic) -> None:
        """``operators``: who may sign in; none: whoever is on this machine, without signing in."""
        self._operators = operators
        self._key = secrets.token_bytes(32)
        self._clock = clock
        self._sessions: OrderedDict[str, tuple[float, str]] = OrderedDict()  # id → end and name, oldest first
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    @property
    def wants_token(self) -> bool:
        """Whether a person has to sign in."""
        return bool(self._operators)

    def admit(self, request: Request) -> Visitor:
        """Look at everything but the form. Raises ApiError 403 for what comes from another place."""
        if not self._operators:
            self._local(request)
        self._same_origin(request)
        given = request.cookies.get(COOKIE, "")
        known = 16 <= len(given) <= 128 and given.isascii()
        visitor_id = given if known else secrets.token_urlsafe(32)
        return Visitor(visitor_id, not self._operators or self.has_session(visitor_id), new=not known)

    def csrf(self, visitor: Visitor) -> str:
        """The token for this browser's forms."""
        return hmac.new(self._key, visitor.id.encode(), hashlib.sha256).hexdigest()

    def check_csrf(self, visitor: Visitor, given: str) -> None:
        """Raises ApiError 403."""
        if not hmac.compare_digest(given.encode(), self.csrf(visitor).encode()):
            raise forbidden("This form is out of date. Reload the page and try again.", code="csrf")

    def sign_in(self, given: str, host: str) -> str:
        """A new session's id. Raises ApiError 401 for a wrong token, 429 after too many of them from one host."""
        now = self._clock()
        failures = [at for at in self._failures.get(host, []) if at > now - FAILURE_WINDOW_S]
        if len(failures) >= MAX_FAILURES:
            wait = failures[0] + FAILURE_WINDOW_S - now
            raise throttled("Too many wrong tokens. Wait a minute.", "too_many_failures", wait)
        name = self._operators.name_of(given)
        if name is None:
            self._failures[host] = [*failures, now]
            self._failures.move_to_end(host)
            if len(self._failures) > _MAX_HOSTS:
                self._failures.popitem(last=False)
            raise ApiError(401, "That is not the admin token.", type="authentication_error", code="invalid_token")
        session = secrets.token_urlsafe(32)
        self._sessions[session] = (now + SESSION_S, name)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def sign_out(self, visitor: Visitor) -> None:
        """End the visitor's session."""
        self._sessions.pop(visitor.id, None)

    def has_session(self, session: str) -> bool:
        """Whether a session lasts."""
        end, _ = self._sessions.get(session, (0.0, ""))
        if end > self._clock():
            return True
        self._sessions.pop(session, None)
        return False

    def name_of(self, visitor: Visitor) -> str:
        """Who a signed-in visitor is."""
        return self._sessions[visitor.id][1] if self._operators else "local"

    def remember(self, response: Response, visitor_id: str, request: Request) -> None:
        """Set the cookie."""
        response.set_cookie(
            COOKIE,
            visitor_id,
            path="/console",
            httponly=True,
            samesite="strict",
            secure=request.scope["scheme"] == "https",  # ``request.url`` is made with the caller's Host
        )

    @staticmethod
    def _local(request: Request) -> None:
        if request.client is None or not is_loopback(request.client.host):
            raise forbidden("Without an admin token only this machine may ask.", code="not_local")
        if not is_loopback(host_name(request.headers.get("host", ""))):
            raise forbidden(
                "Without an admin token the console has the name of this machine only.", code="foreign_host"
            )

    @staticmethod
    def _same_origin(request: Request) -> None:
        headers = request.headers
        reads = request.method in ("GET", "HEAD")
        origin = headers.get("origin")
        if origin is None:
            if not reads:
                raise forbidden("A form of the console is sent by its own pages only.", code="foreign_origin")
        elif _netloc(origin) != headers.get("host", ""):
            raise forbidden("Requests from other web pages are refused.", code="foreign_origin")
        site = headers.get("sec-fetch-site", "same-origin")
        followed_link = reads and headers.get("sec-fetch-mode") == "navigate"
        if site not in ("same-origin", "none") and not followed_link:
            raise forbidden("Requests from other web pages are refused.", code="foreign_origin")


def _netloc(origin: str) -> str | None:
    """Host and port of an ``Origin``; None for what is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:  # http://[
        return None
