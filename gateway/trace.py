"""One request's trace: explicit calls from the pipeline and the dispatcher, spans made only at the end.

How to use it
    trace = telemetry.request("POST", "/v1/chat/completions", headers, …)    # RequestTrace (does nothing) or a recorder
    span = trace.begin("auth")                       # one of STATIONS; the previous station ends, if it is still open
    try:
        …; span.set(attributes.auth, principal)      # gateway.trace_attributes makes every attribute, at the export
    except ApiError as error:
        span.fail(error.code or "error"); raise
    finally:
        span.end()
    trace.identify(tenant=…, sample_ratio=…, slow_first_byte_s=…)          # as soon as the tenant is known
    span = trace.begin_chat(job.model, attributes.chat_request, …)         # a second one: a retry, linked to the first
    generate = msgspec.structs.replace(generate, trace=trace.inject())     # the worker's parent is this chat span
    trace.event("first_byte")                        # on the root: EVENTS
    keep = trace.finish("ok", status=200)            # exactly once, last; then send the worker Keep(id, keep)

Rules
- Everything is called on the event loop; nothing here does I/O, waits or raises for what a request holds.
- A span ends once: a second ``end`` and everything after it is ignored. ``finish`` ends what is still open.
- Stations are siblings in sequence: each ends at least 2 µs before the next begins (else Jaeger's critical path falls
  on the root). No span per token or chunk.
- Attributes are made where a trace is exported, by the function and from the values that were given here: most traces
  are dropped, and it happens on another thread. So values never change afterwards, and hold no prompt.
- No prompt text, token, key or credential is an attribute. ``content`` is dropped unless capture_content is on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol

from gateway.errors import Outcome
from workers.spans import (
    GAP_NS,
    Attributes,
    Kind,
    Link,
    SpanContext,
    SpanData,
    Value,
    child_of,
    clean,
    format_traceparent,
    new_span_id,
)

Station = Literal["admission", "auth", "tokenize", "quota reserve", "queue", "route", "quota settle"]
STATIONS: tuple[Station, ...] = ("admission", "auth", "tokenize", "quota reserve", "queue", "route", "quota settle")
EventName = Literal["first_byte", "last_byte", "client_disconnected"]
EVENTS: tuple[EventName, ...] = ("first_byte", "last_byte", "client_disconnected")
P = ParamSpec("P")
Said = tuple[Callable[..., Attributes], tuple[Any, ...], dict[str, Any]]
"""What makes some attributes, and of what."""
Kept = Literal["failed", "shed", "slow", "sampled"]
"""Why a trace is exported, the first that holds: ``forebay.kept`` on the root, for collectors that sample again."""


class Sampled(Protocol):
    """The head decision."""

    def __call__(
        self, context: SpanContext, parent: SpanContext | None, tenant_ratio: float | None, *, known: bool
    ) -> bool:
        """Whether the trace is kept. ``known``: a tenant was verified, so that its caller's wish counts."""
        ...


class Span:
    """One station's span. This base class does nothing: it is what a request without tracing gets."""

    __slots__ = ()

    def set(self, make: Callable[P, Attributes], *args: P.args, **kwargs: P.kwargs) -> None:
        """Add the attributes that ``make`` will make; None values are left out."""

    def fail(self, error_type: str) -> None:
        """Status ERROR and ``error.type``: a code of ours (``queue_full``, ``worker_lost``), never a message."""

    def end(self) -> None:
        """Idempotent; belongs into ``finally``."""


class RequestTrace:
    """One request's trace. This base class does nothing at almost no cost: it is used when nothing is exported."""

    __slots__ = ()
    trace_id: str = ""
    """32 hex digits, for the log line and exemplars; empty when off."""
    keep: bool = False
    """After ``finish``: whether this trace is exported, thus what ``Keep`` tells the worker."""
    captures_content: bool = False
    """Build content attributes only when this is true."""

    @property
    def sampled_id(self) -> str:
        """``trace_id`` where the head decision keeps the trace, whatever becomes of it; else empty."""
        return ""

    def identify(
        self,
        *,
        tenant: str,
        service_class: str | None = None,
        sample_ratio: float | None = None,
        slow_first_byte_s: float | None = None,
    ) -> None:
        """Tag the verified tenant; its own sampling ratio and its class's TTFT objective decide about keeping."""

    def tag(self, make: Callable[P, Attributes], *args: P.args, **kwargs: P.kwargs) -> None:
        """Set root attributes (``trace_attributes.root``)."""

    def begin(self, station: Station) -> Span:
        """Start a station's span now."""
        return _NO_SPAN

    def begin_chat(self, model: str, make: Callable[P, Attributes], *args: P.args, **kwargs: P.kwargs) -> Span:
        """Start the CLIENT span around one attempt on a worker."""
        return _NO_SPAN

    def content(self, *, input_messages: str | None = None, output_messages: str | None = None) -> None:
        """JSON of the messages for the current chat span; dropped unless capture_content is on."""

    def event(self, name: EventName) -> None:
        """Mark a moment on the root; the first of each name counts."""

    def inject(self) -> dict[str, str]:
        """W3C headers of the current chat span (before one: of the root) for ``Generate.trace``; empty when off."""
        return {}

    def finish(
        self,
        outcome: Outcome,
        *,
        status: int | None = None,
        error_type: str | None = None,
        reason: str | None = None,
    ) -> bool:
        """End the root, decide, export or drop. Returns ``keep``. Later calls change nothing.

        ``status``: what the client was sent, None when nothing was. ``error_type``: a code, default ``reason`` or the
        outcome. ``reason`` becomes ``forebay.shed.reason`` when the outcome is shed.
        """
        return False


_NO_SPAN = Span()
NO_TRACE = RequestTrace()


class _Record(Span):
    """A span as the request path keeps it: what is dropped in the end never becomes more than this."""

    __slots__ = ("_clock", "end_ns", "error", "kind", "name", "retry_of", "said", "span_id", "start_ns")

    def __init__(self, name: str, kind: Kind, start_ns: int, clock: Callable[[], int]) -> None:
        self.name = name
        self.kind: Kind = kind
        self.span_id = 0  # drawn when it is told, or exported
        self.start_ns = start_ns
        self.end_ns = 0
        self.said: list[Said] = []
        self.error: str | None = None
        """Its ``error.type``."""
        self.retry_of: int | None = None
        """The span of the first attempt."""
        self._clock = clock

    def set(self, make: Callable[P, Attributes], *args: P.args, **kwargs: P.kwargs) -> None:
        if not self.end_ns:
            self.said.append((make, args, kwargs))

    def fail(self, error_type: str) -> None:
        if not self.end_ns:
            self.error = error_type

    def end(self) -> None:
        if not self.end_ns:
            now, least = self._clock(), self.start_ns + 1
            self.end_ns = now if now > least else least

    def data(self, root: SpanContext) -> SpanData:
        """As a child of ``root``, to be exported."""
        links = []
        if self.retry_of is not None:
            links.append(Link(child_of(root, span_id=self.retry_of), {"forebay.link": "retry_of"}))
        attributes = _made(self.said)
        self.span_id = self.span_id or new_span_id()
        if self.error is not None:
            attributes["error.type"] = self.error
        return SpanData(
            self.name,
            child_of(root, span_id=self.span_id),
            root,
            self.kind,
            self.start_ns,
            self.end_ns,
            attributes,
            links=links,
            error=self.error is not None,
        )


def _made(said: list[Said]) -> dict[str, Value]:
    """All attributes; of a name that comes twice the last one."""
    made: dict[str, Value] = {}
    for make, args, kwargs in said:
        made.update(clean(make(*args, **kwargs)))
    return made


def wall_clock() -> Callable[[], int]:
    """A clock in Unix nanoseconds that never steps back: the wall clock once, then the monotonic one."""
    offset = time.time_ns() - time.perf_counter_ns()
    return lambda: time.perf_counter_ns() + offset


class Recorder(RequestTrace):
    """Keeps a request's spans as plain figures until ``finish`` exports or drops them."""

    __slots__ = (
        "_chats", "_children", "_clock", "_export", "_head", "_known", "_ratio", "_root", "_said", "_slow_first_byte_s",
        "_slow_s", "captures_content", "keep", "trace_id",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        said: Said,
        *,
        export: Callable[[Callable[[], list[SpanData]], int], object],
        sampled: Sampled,
        slow_s: float,
        captures_content: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> None:
        """``said`` makes the root's first attributes; ``sampled`` is the head decision, asked when needed.

        ``export`` gets what makes the spans, to call it elsewhere, and how many these are.
        """
        self._clock = clock or wall_clock()
        self._export = export
        self._head = sampled
        self._ratio: float | None = None
        self._known = False
        self._slow_s = slow_s
        self._slow_first_byte_s: float | None = None
        self._children: list[_Record] = []
        self._chats: list[_Record] = []
        self._root = SpanData(name, context, parent, kind="server", start_ns=self._clock())
        self._said = [said]
        self.trace_id = f"{context.trace_id:032x}"
        self.keep = False
        self.captures_content = captures_content

    @property
    def sampled_id(self) -> str:
        return self.trace_id if self._sampled() else ""

    def identify(
        self,
        *,
        tenant: str,
        service_class: str | None = None,
        sample_ratio: float | None = None,
        slow_first_byte_s: float | None = None,
    ) -> None:
        self.tag(_identified, tenant, service_class)
        self._ratio = sample_ratio
        self._known = True
        self._slow_first_byte_s = slow_first_byte_s

    def tag(self, make: Callable[P, Attributes], *args: P.args, **kwargs: P.kwargs) -> None:
        if not self._root.end_ns:
            self._said.append((make, args, kwargs))

    def begin(self, station: Station) -> Span:
        if self._root.end_ns:
            return _NO_SPAN
        return self._child(station, "internal")

    def begin_chat(self, model: str, make: Callable[P, Attributes], *args: P.args, **kwargs: P.kwargs) -> Span:
        if self._root.end_ns:
            return _NO_SPAN
        span = self._child(f"chat {model}", "client")
        span.span_id = new_span_id()
        span.said.append((make, args, kwargs))
        if self._chats:
            span.retry_of = self._chats[0].span_id
        self._chats.append(span)
        return span

    def content(self, *, input_messages: str | None = None, output_messages: str | None = None) -> None:
        if self.captures_content and self._chats and not self._root.end_ns:
            self._chats[-1].said.append((_content, (input_messages, output_messages), {}))

    def event(self, name: EventName) -> None:
        if not self._root.end_ns and all(event[0] != name for event in self._root.events):
            self._root.events.append((name, self._clock(), {}))

    def inject(self) -> dict[str, str]:
        root = self._root.context
        span_id = self._chats[-1].span_id if self._chats else root.span_id
        return format_traceparent(SpanContext(root.trace_id, span_id, self._sampled(), root.tracestate))

    def finish(
        self,
        outcome: Outcome,
        *,
        status: int | None = None,
        error_type: str | None = None,
        reason: str | None = None,
    ) -> bool:
        root = self._root
        if root.end_ns:
            return self.keep
        failed = outcome not in ("ok", "cancelled")
        cause = error_type or reason or outcome
        self.tag(_ended, outcome, reason if outcome == "shed" else None, status, cause if failed else None)
        self._close_open(cause if failed else None)
        # A SERVER span stays unset for 4xx (HTTP conventions); an in-band error after a 200 is an error.
        root.error = failed and not (status is not None and 400 <= status < 500)
        last = self._children[-1].end_ns + GAP_NS if self._children else 0
        root.end_ns = max(self._clock(), root.start_ns + 1, last, *(at for _, at, _ in root.events))
        why = self._why_kept(outcome)
        self.keep = why is not None
        if why is not None:
            self._said.append((_kept, (why,), {}))
            self._export(self._spans, 1 + len(self._children))
        return self.keep

    def _spans(self) -> list[SpanData]:
        """Parents first. Nothing changes any more by now."""
        self._root.attributes.update(_made(self._said))
        return [self._root, *(record.data(self._root.context) for record in self._children)]

    def _why_kept(self, outcome: Outcome) -> Kept | None:
        """None: it is dropped. Shed goes first: a draining gateway's 503 is a refusal, and callers decide how many."""
        if outcome == "shed":
            return "shed"
        if self._root.error or outcome == "timeout":
            return "failed"
        if self._is_slow():
            return "slow"
        return "sampled" if self._sampled() else None

    def _sampled(self) -> bool:
        return self._head(self._root.context, self._root.parent, self._ratio, known=self._known)

    def _is_slow(self) -> bool:
        root = self._root
        if root.end_ns - root.start_ns >= self._slow_s * 1e9:
            return True
        first = next((at for name, at, _ in root.events if name == "first_byte"), None)
        limit = self._slow_first_byte_s
        return first is not None and limit is not None and first - root.start_ns > limit * 1e9

    def _child(self, name: str, kind: Kind) -> _Record:
        start = self._clock()
        if self._children:
            last = self._children[-1]  # only the last one can be open
            if not last.end_ns:
                last.end()
            start = start if start >= last.end_ns + GAP_NS else last.end_ns + GAP_NS
        record = _Record(name, kind, start, self._clock)
        self._children.append(record)
        return record

    def _close_open(self, error_type: str | None) -> None:
        """End the last child if it is open: only the last one can be."""
        if self._children and not self._children[-1].end_ns:
            record = self._children[-1]
            if error_type is not None and record.error is None:
                record.fail(error_type)
            record.end()


def _identified(tenant: str, service_class: str | None) -> Attributes:
    return {"forebay.tenant": tenant, "forebay.class": service_class}


def _content(asked: str | None, said: str | None) -> Attributes:
    return {"gen_ai.input.messages": asked, "gen_ai.output.messages": said}


def _ended(outcome: Outcome, shed: str | None, status: int | None, error_type: str | None) -> Attributes:
    return {
        "forebay.outcome": outcome,
        "forebay.shed.reason": shed,
        "http.response.status_code": status,
        "error.type": error_type,
    }


def _kept(why: Kept) -> Attributes:
    return {"forebay.kept": why}
