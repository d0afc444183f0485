"""The gateway's tracing: settings and ``OTEL_*`` to one ``RequestTrace`` per request. Its only OpenTelemetry import.

OpenTelemetry is loaded only when there is a collector: without one, ``request`` hands out the trace that does nothing.

Sampling: the head decision is parent-based with a ratio (a tenant's own goes first); slow, failed and shed requests are
kept whatever it says, also against an inbound ``traceparent`` without the sampled flag: a caller must not be able to
hide a failure from the operator. Nor may somebody whom no tenant vouches for fill the collector: until the tenant is
known, neither that flag nor the trace id decides (both are the caller's choice), but chance. Spans are held until the
end and exported only then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.metrics import Metrics
from gateway.settings import Settings
from gateway.trace import NO_TRACE, Recorder, RequestTrace
from workers import collector
from workers.spans import Attributes, SpanContext, new_span_id, new_trace_id

if TYPE_CHECKING:
    from workers.telemetry import SpanSink

SERVICE = "forebay-gateway"
SHUTDOWN_S = 0.7
"""The workers take as long before it, side by side: a silent collector delays a stop by two seconds at most."""
_RATIO_IDS = 1 << 64  # like the SDK's TraceIdRatioBased: the id's low 64 bits, so that both agree about a trace

__all__ = ["NO_TRACE", "RequestTrace", "Sampler", "Telemetry", "setup"]


@dataclass(frozen=True, slots=True)
class Sampler:
    """The head decision."""

    ratio: float = 1.0
    parent_based: bool = True

    def __call__(
        self, context: SpanContext, parent: SpanContext | None, tenant_ratio: float | None, *, known: bool = True
    ) -> bool:
        """Whether a trace would be kept, going by its parent's flag, else by its id.

        ``known``: a tenant was verified, so that what its caller chose counts.
        """
        if parent is not None and self.parent_based and known:
            return parent.sampled
        ratio = self.ratio if tenant_ratio is None else tenant_ratio
        drawn = context.trace_id if known or parent is None else context.span_id
        return drawn % _RATIO_IDS < round(ratio * _RATIO_IDS)


def sampler(env: Mapping[str, str], ratio: float | None) -> Sampler:
    """``telemetry.sample_ratio`` wins; else ``OTEL_TRACES_SAMPLER`` with its ``_ARG``; else everything.

    Raises ValueError naming the variable for an unknown sampler or a ratio outside 0 to 1.
    """
    if ratio is not None:
        return Sampler(ratio)
    name = env.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_traceidratio"
    kind = name.removeprefix("parentbased_")
    if kind not in ("always_on", "always_off", "traceidratio"):
        raise ValueError(
            f"OTEL_TRACES_SAMPLER: {name!r} is not supported; use always_on, always_off or traceidratio, "
            "each also with the prefix parentbased_"
        )
    fixed = {"always_on": 1.0, "always_off": 0.0}
    return Sampler(fixed[kind] if kind in fixed else _ratio(env), parent_based=name.startswith("parentbased_"))


def _ratio(env: Mapping[str, str]) -> float:
    text = env.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ValueError(f"OTEL_TRACES_SAMPLER_ARG: {text!r} is no ratio; write a number from 0 to 1")
    return ratio


class Telemetry:
    """The gateway's traces. Without a collector every method is a no-op."""

    def __init__(
        self,
        *,
        where: collector.Target | None = None,
        sink: SpanSink | None = None,
        extract: Callable[[Iterable[tuple[bytes, bytes]]], SpanContext | None] | None = None,
        head: Sampler | None = None,
        slow_s: float = 10.0,
        captures_content: bool = False,
    ) -> None:
        """Made by ``setup``; ``sink`` and ``extract`` come together."""
        self.where = where
        self._sink = sink
        self._extract = extract
        self._head = head or Sampler()
        self._slow_s = slow_s
        self._captures_content = captures_content

    @property
    def enabled(self) -> bool:
        """Whether anything is exported; when false, workers need no ``Keep``."""
        return self._sink is not None

    def request(
        self,
        method: str,
        route: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        *,
        request_id: str | None = None,
        scheme: str = "http",
        server: tuple[str, int | None] | None = None,
        http_version: str | None = None,
        clock: Callable[[], int] | None = None,
    ) -> RequestTrace:
        """Start a request's trace, as early as possible. ``headers`` are ASGI's (lower-case names); ``route`` is ours.

        A valid inbound ``traceparent`` becomes the parent, with its ``tracestate`` and sampled flag. Never raises.
        """
        if self._sink is None or self._extract is None:
            return NO_TRACE
        parent = self._extract(headers)
        context = SpanContext(
            parent.trace_id if parent else new_trace_id(),
            new_span_id(),
            tracestate=parent.tracestate if parent else "",
        )
        return Recorder(
            f"{method} {route}",
            context,
            parent,
            (_arrived, (method, route, scheme, server, http_version, request_id), {}),
            export=self._sink.build,
            sampled=self._head,
            slow_s=self._slow_s,
            captures_content=self._captures_content,
            clock=clock,
        )

    def worker_environment(self) -> dict[str, str]:
        """What a launcher adds to a local worker's environment, so that it exports where the gateway does."""
        return collector.worker_environment(self.where)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until the collector has everything (blocking; tests and stops only)."""
        return self._sink is None or self._sink.flush(timeout_s)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Send what is left, for at most ``timeout_s`` (blocking: call it in a thread or after the loop)."""
        if self._sink is not None:
            self._sink.shutdown(timeout_s)


def _arrived(
    method: str,
    route: str,
    scheme: str,
    server: tuple[str, int | None] | None,
    http_version: str | None,
    request_id: str | None,
) -> Attributes:
    """What is known of a request when it comes."""
    address, port = server or (None, None)
    return {
        "http.request.method": method,
        "http.route": route,
        "url.path": route,
        "url.scheme": scheme,
        "server.address": address,
        "server.port": port,
        "network.protocol.name": "http" if http_version else None,
        "network.protocol.version": http_version,
        "forebay.request.id": request_id,
    }


def setup(
    settings: Settings,
    metrics: Metrics | None = None,
    *,
    env: Mapping[str, str] = os.environ,
    versions: Mapping[str, str] | None = None,
    instance: str | None = None,
) -> Telemetry:
    """Tracing as the YAML and ``OTEL_*`` say; ``metrics`` counts what is exported and dropped.

    Exporter details (headers, certificates, timeout …) are read by the SDK from the process environment.
    Raises ValueError naming the setting or variable that is wrong.
    """
    chosen = settings.telemetry
    where = collector.target(env, chosen.otlp_endpoint, chosen.otlp_protocol)
    head = sampler(env, chosen.sample_ratio)
    if where is None:
        return Telemetry()
    from workers import telemetry  # OpenTelemetry is heavy: loaded only where it is used

    sink = telemetry.SpanSink(
        telemetry.exporter(where),
        telemetry.resource(env, SERVICE, instance, versions or {}),
        on_exported=metrics.spans_exported if metrics else lambda spans: None,
        on_dropped=metrics.spans_dropped if metrics else lambda reason, spans: None,
    )
    return Telemetry(
        where=where,
        sink=sink,
        extract=extractor(),
        head=head,
        slow_s=chosen.slow_s,
        captures_content=chosen.capture_content,
    )


def extractor() -> Callable[[Iterable[tuple[bytes, bytes]]], SpanContext | None]:
    """Reads W3C trace context from ASGI headers, by OpenTelemetry's own propagator; baggage is not read."""
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()

    def extract(headers: Iterable[tuple[bytes, bytes]]) -> SpanContext | None:
        parents: list[str] = []
        states: list[str] = []
        for name, value in headers:
            if name == b"traceparent":
                parents.append(value.decode("latin-1").strip())
            elif name == b"tracestate":
                states.append(value.decode("latin-1").strip())
        if len(parents) != 1:  # W3C Trace Context §3.2: several are none
            return None
        carrier = {"traceparent": parents, "tracestate": [",".join(states)] if states else []}
        found = trace.get_current_span(propagator.extract(carrier, Context())).get_span_context()
        if not found.is_valid:
            return None
        return SpanContext(
            found.trace_id, found.span_id, found.trace_flags.sampled, found.trace_state.to_header(), remote=True
        )

    return extract
