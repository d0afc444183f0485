"""One request's visit: what is known of it so far, and the answer it is given. Written by the pipeline only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.adapters import Adapter
from gateway.cut import Cut
from gateway.errors import ApiError, Outcome
from gateway.http.openai import Format
from gateway.http.schemas import ChatRequest, CompletionRequest
from gateway.models import ModelHandle
from gateway.replays import Onward, Recording
from gateway.runtime import PolicySet
from gateway.tenants import EffectiveTenant
from gateway.ticket import Ticket
from gateway.timed import unwrap
from gateway.trace import RequestTrace, Span, Station
from policies.spi import QuotaAccounts, QuotaView
from policies.types import Job, LimitState, Principal, QuotaDecision

if TYPE_CHECKING:
    from gateway.intake import Prepared

AnyRequest = ChatRequest | CompletionRequest
encode_json = msgspec.json.Encoder().encode
Head = list[tuple[bytes, bytes]]
"""Headers as ASGI has them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One inference endpoint of the API."""

    route: str
    parse: Callable[[bytes], AnyRequest]
    format: Callable[..., Format]
    """Takes what ``Pipeline._format`` passes."""


@dataclass(frozen=True, slots=True)
class Errand:
    """An endpoint that the gateway answers by itself, without queue or worker. It costs its caller one request."""

    route: str
    parse: Callable[[bytes], Errands]
    answer: Callable[[Any, ModelHandle], bytes]
    """The JSON, from what ``parse`` made. May run in a thread; raises ApiError."""


class Errands(Protocol):
    """What an errand's body has in common."""

    @property
    def model(self) -> str:
        """Whose tokenizer, say."""
        ...

    @property
    def chars(self) -> int:
        """What the answer costs to make, in characters of encoding."""
        ...


def head(headers: Mapping[str, str]) -> Head:
    """Headers as ASGI has them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


_JSON = head({"content-type": "application/json"})


class Reply:
    """The answer: begun once, ended once. ``status`` is what the client was sent, None while nothing was."""

    def __init__(self, send: Send) -> None:
        self.send = send
        """For an answer that somebody else makes; set ``status`` with it."""
        self.status: int | None = None
        self.ended = False
        self.writing = False
        """A write waits for the client to read."""
        self.written_at = 0.0
        """When the last write began (``time.monotonic``)."""

    @property
    def begun(self) -> bool:
        """Whether a status went out: from then on an error can only be told in-band."""
        return self.status is not None

    async def begin(self, status: int, headers: Head) -> None:
        """Send status and headers."""
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send a part of the body; waits while the client reads more slowly than this."""
        await self._send_body(data, more=True)

    async def end(self, data: bytes = b"") -> None:
        """Send the last part."""
        self.ended = True
        await self._send_body(data, more=False)

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        self.written_at = time.monotonic()
        self.writing = True
        try:
            await self.send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self.writing = False

    async def whole(self, status: int, headers: Head, body: bytes) -> None:
        """Send an answer in one piece."""
        await self.begin(status, [*_JSON, (b"content-length", b"%d" % len(body)), *headers])
        await self.end(body)


class Passage:
    """Around a block: a station's span (``Visit.span``)."""

    __slots__ = ("_span", "_station", "_trace")

    def __init__(self, trace: RequestTrace, station: Station) -> None:
        self._trace = trace
        self._station: Station = station

    def __enter__(self) -> Span:
        self._span = self._trace.begin(self._station)
        return self._span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            if isinstance(error, ApiError):
                self._span.fail(error.reason or error.outcome)
            elif isinstance(error, Exception):
                self._span.fail("internal")
        self._span.end()


def _nobody() -> None:
    """Nobody has to be told yet."""


@dataclass(slots=True, eq=False)
class Visit:
    """One request from its headers to its settlement."""

    endpoint: Endpoint | Errand
    scope: Scope
    receive: Receive
    reply: Reply
    policies: PolicySet
    """Those it began with."""
    trace: RequestTrace
    request_id: str
    arrived: float
    created: int = field(default_factory=lambda: int(time.time()))
    principal: Principal | None = None
    tenant: EffectiveTenant | None = None
    request: AnyRequest | None = None
    model: ModelHandle | None = None
    adapter: Adapter | None = None
    """What the model runs with."""
    taken: list[Adapter] = field(default_factory=list)
    """Adapters to give back at the end: its own, and a fallback's."""
    prepared: Prepared | None = None
    errand: Job | None = None
    """The job of a request that needs no worker."""
    recording: Recording | None = None
    """Where its answer is recorded, to be given again (``replays.py``)."""
    onward: Onward | None = None
    """Then: the answer's way to the caller."""
    lingering: asyncio.Task[None] | None = None
    """Waits for somebody to come for the recording, when its caller has gone."""
    decision: QuotaDecision | None = None
    reserved: bool = False
    """A reservation was asked for and not refused: it has to be settled, whatever became of the asking."""
    ticket: Ticket | None = None
    settled: bool = False
    """Nothing is held any more."""
    settlement: asyncio.Task[None] | None = None
    """Where that has to wait for something."""
    format: Format | None = None
    """How the answer is written, once it may begin."""
    cut: Cut = field(default_factory=Cut)
    """Ends its work, wherever that waits."""
    gone: Callable[[], None] = _nobody
    """To be told that its caller is."""
    delivered: bool = False
    """A stream whose last word went out."""
    outcome: Outcome = "error"
    reason: str | None = None

    def span(self, station: Station) -> Passage:
        """A station's span around a block; what ends the block early is its error."""
        return Passage(self.trace, station)

    def headers(self, now: float) -> dict[str, str]:
        """Of any answer to it: rate limits, and what was lessened."""
        headers = rate_headers(self.tenant, self.principal, self.decision, self.policies.quota, now)
        return {**headers, **self.prepared.headers()} if self.prepared is not None else headers

    def end(self, outcome: Outcome, reason: str | None = None) -> None:
        """What came of it."""
        self.outcome = outcome
        self.reason = reason


def rate_headers(
    tenant: EffectiveTenant | None,
    principal: Principal | None,
    decision: QuotaDecision | None,
    quota: object,
    now: float,
) -> dict[str, str]:
    """``x-ratelimit-*`` of a known caller: as its reservation left them, else as they are; nothing where unlimited.

    Of all limits at all levels those with the least left.
    """
    if tenant is None or principal is None:
        return {}
    states: Mapping[str, LimitState] = decision.remaining if decision is not None else {}
    inner = unwrap(quota)
    if not states and isinstance(inner, QuotaAccounts):
        states = inner.tightest(tenant.accounts(principal), now)
    elif not states and isinstance(inner, QuotaView):
        states = {**_full(tenant), **inner.remaining(tenant.id, now)}
    headers = {}
    for name in ("requests", "tokens"):
        state = states.get(name)
        if state is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(state.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, state.remaining))
            headers[f"x-ratelimit-reset-{name}"] = f"{max(0.0, state.reset_s):.3f}s"
    return headers


def _full(tenant: EffectiveTenant) -> dict[str, LimitState]:
    """The limits of a tenant of which the quota policy keeps nothing: it has used nothing lately."""
    limits = {"requests": tenant.limits.requests_per_minute, "tokens": tenant.limits.tokens_per_minute}
    return {name: LimitState(limit, limit, 0.0) for name, limit in limits.items() if limit is not None}
