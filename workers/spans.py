"""Spans as plain data: recorded with numbers while work runs, turned into OpenTelemetry spans afterwards, elsewhere.

No OpenTelemetry here, so that the gateway's event loop and the engine thread never pay for it. ``workers/telemetry.py``
exports what is described here; the gateway's ``trace.py`` and the worker's ``request_spans.py`` describe it.

Rules
- Times are Unix nanoseconds. ``end_ns == 0`` means open; a span is exported only when it is closed.
- Attribute values are str, bool, int, float or a sequence of one of them; None is left out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Value = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, Value | None]
Kind = Literal["internal", "server", "client"]
GAP_NS = 2_000
"""Least distance between two siblings in sequence, else Jaeger's critical path falls on their parent."""


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Where a span is in its trace: what W3C ``traceparent`` and ``tracestate`` carry."""

    trace_id: int
    span_id: int
    sampled: bool = True
    tracestate: str = ""
    remote: bool = False
    """It came from another process."""


@dataclass(frozen=True, slots=True)
class Link:
    """A pointer to a span of this or another trace."""

    context: SpanContext
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SpanData:
    """One span."""

    name: str
    context: SpanContext
    parent: SpanContext | None = None
    kind: Kind = "internal"
    start_ns: int = 0
    end_ns: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[tuple[str, int, Mapping[str, Value]]] = field(default_factory=list)
    """Name, time, attributes."""
    links: list[Link] = field(default_factory=list)
    error: bool = False
    """Status ERROR; ``error.type`` is an attribute."""


def clean(attributes: Attributes) -> dict[str, Value]:
    """The attributes that have a value."""
    return {key: value for key, value in attributes.items() if value is not None}


def new_trace_id() -> int:
    """128 random bits, never 0: an identifier, not a secret."""
    return random.getrandbits(128) or 1


def new_span_id() -> int:
    """64 random bits, never 0."""
    return random.getrandbits(64) or 1


def child_of(parent: SpanContext, *, span_id: int | None = None) -> SpanContext:
    """A fresh context in the same trace."""
    return SpanContext(parent.trace_id, span_id or new_span_id(), parent.sampled, parent.tracestate)


def parse_traceparent(carrier: Mapping[str, str]) -> SpanContext | None:
    """The context of our own gateway's ``Generate.trace``; None when there is none or it is malformed."""
    parts = carrier.get("traceparent", "").split("-")
    if len(parts) != 4 or len(parts[1]) != 32 or len(parts[2]) != 16:
        return None
    try:
        trace_id, span_id, flags = int(parts[1], 16), int(parts[2], 16), int(parts[3], 16)
    except ValueError:
        return None
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, bool(flags & 1), carrier.get("tracestate", ""), remote=True)


def format_traceparent(context: SpanContext) -> dict[str, str]:
    """W3C headers of a context."""
    carrier = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.sampled):02x}"}
    if context.tracestate:
        carrier["tracestate"] = context.tracestate
    return carrier
