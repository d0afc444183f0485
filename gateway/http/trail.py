"""Who is at the admin listener, and the audit log's entries of what they did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Scope

from gateway.state.audit import Actor, Event

if TYPE_CHECKING:
    from gateway.service import Gateway

_NAME = "forebay.operator"


def identify(scope: Scope, name: str) -> None:
    """The listener's gate knows who it is: ``admin``, an operator's name, or ``local``."""
    scope[_NAME] = name


def actor(request: Request, via: str = "api") -> Actor:
    """Whoever sent the request."""
    peer = request.client.host if request.client is not None else None
    return Actor(str(request.scope.get(_NAME, "local")), via, peer)


async def note(
    gateway: Gateway,
    request: Request,
    action: str,
    subject: str,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Enter what was done into the audit log, where there is one. ``before`` and ``after``: no content, no secrets."""
    await gateway.parts.registrar.record(Event(actor(request), action, subject, before, after))
