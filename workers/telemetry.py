"""Where spans leave the process: plain ``SpanData`` in, OTLP out. The worker's only OpenTelemetry import.

The gateway uses the same sink (through ``gateway/telemetry.py``), so that both processes export by the same rules.

Rules
- Nobody who works on a request waits here: ``submit`` and ``build`` only append to a queue. A thread of the sink makes
  OpenTelemetry spans of them, the SDK's batch thread sends them.
- Bounded: at most ``capacity`` spans between submit and the collector's answer. What does not fit is dropped whole, one
  trace at a time (no orphans), and counted. A collector that is down, slow or silent costs a request nothing.
- ``shutdown`` ends within its time, whatever the collector does; what is left is counted as dropped.
- Providers are objects of this module; OpenTelemetry's global ones are never set.
- Endpoint, protocol and so on come from ``Target``; headers, certificates, timeout, compression, batch sizes and
  resource attributes from the standard ``OTEL_*`` variables, which the SDK reads itself.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanKind, Status, StatusCode, TraceFlags, TraceState

from workers.collector import Target
from workers.spans import SpanContext, SpanData

CAPACITY = 8_192
_BATCH = 128  # small, so that serialising one batch stays far below a millisecond
_DELAY_MS = 1_000
_HOPELESS_S = 0.2
_NOISY = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
    "opentelemetry.sdk._shared_internal",
)
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_log = logging.getLogger(__name__)
DropReason = Literal["queue_full", "export_failed", "build_failed", "shutdown"]


def resource(env: Mapping[str, str], service: str, instance: str | None, versions: Mapping[str, str]) -> Resource:
    """Who exports. ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` win over our defaults."""
    given = Resource.create()  # reads both variables
    named = env.get("OTEL_SERVICE_NAME") or "service.name=" in env.get("OTEL_RESOURCE_ATTRIBUTES", "")
    ours: dict[str, str] = {f"forebay.version.{name}": value for name, value in versions.items()}
    if not named:
        ours["service.name"] = service
    if instance is not None or "service.instance.id" not in given.attributes:
        ours["service.instance.id"] = instance or str(uuid.uuid4())
    return given.merge(Resource(ours))


class _PresetIds(IdGenerator):
    """Hands the SDK the ids that a span was recorded with; used by the sink's one feeding thread only."""

    def __init__(self) -> None:
        self.context = SpanContext(1, 1)

    def generate_trace_id(self) -> int:
        return self.context.trace_id

    def generate_span_id(self) -> int:
        return self.context.span_id


class _Counting(SpanExporter):
    """Tells the sink what became of every batch; turns an exporter's exception into a failure."""

    def __init__(self, inner: SpanExporter, done: Callable[[int, bool], None]) -> None:
        self._inner = inner
        self._done = done

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        except Exception as error:  # the batch thread must live on; gRPC raises odd types when it is closed under way
            _log.debug("the exporter raised %s", type(error).__name__)
        finally:
            self._done(len(spans), result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _Seldom(logging.Filter):
    """At most one record per ``every_s`` from the exporters: a dead collector must not fill the log."""

    def __init__(self, every_s: float = 60.0) -> None:
        super().__init__()
        self._every_s = every_s
        self._next = 0.0
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        with self._lock:
            if now < self._next:
                return False
            self._next = now + self._every_s
        return True


class SpanSink:
    """One process's way to the collector. Thread-safe."""

    def __init__(
        self,
        exporter: SpanExporter,
        who: Resource,
        *,
        capacity: int | None = None,
        on_exported: Callable[[int], None] = lambda spans: None,
        on_dropped: Callable[[DropReason, int], None] = lambda reason, spans: None,
    ) -> None:
        """``capacity`` in spans; None: ``OTEL_BSP_MAX_QUEUE_SIZE``, else 8,192. Callbacks come from our threads."""
        self._capacity = capacity or _env_int("OTEL_BSP_MAX_QUEUE_SIZE", CAPACITY)
        self._on_exported = on_exported
        self._on_dropped = on_dropped
        self._lock = threading.Lock()
        self._pending = 0
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._answers = True
        """Whether the collector took the last batch."""
        self._inbox: queue.SimpleQueue[tuple[Callable[[], Sequence[SpanData]], int] | None] = queue.SimpleQueue()
        self._exporter = exporter
        self._ids = _PresetIds()
        self._processor = BatchSpanProcessor(
            _Counting(exporter, self._done),
            # What is pending is bounded here, whole traces at a time; the SDK's own bound must never cut one apart.
            max_queue_size=self._capacity + _BATCH,
            schedule_delay_millis=_env_int("OTEL_BSP_SCHEDULE_DELAY", _DELAY_MS),
            max_export_batch_size=min(_env_int("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH), self._capacity),
        )
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=who, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("forebay")
        self._quiet = _Seldom()
        for name in _NOISY:
            logging.getLogger(name).addFilter(self._quiet)
        self._feeder = threading.Thread(target=self._feed, name="forebay-spans", daemon=True)
        self._feeder.start()

    def submit(self, spans: Sequence[SpanData]) -> bool:
        """Export one trace's closed spans, parents first. False when it was dropped."""
        return self.build(lambda: spans, len(spans))

    def build(self, make: Callable[[], Sequence[SpanData]], size: int) -> bool:
        """Like ``submit`` for spans that ``make`` builds on the sink's thread; ``size`` is about how many."""
        with self._lock:
            reason: DropReason | None = "shutdown" if self._closed else None
            if reason is None and self._pending + size > self._capacity:
                reason = "queue_full"
            if reason is None:
                self._pending += size
        if reason is not None:
            self._on_dropped(reason, size)
            return False
        self._inbox.put((make, size))
        return True

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything submitted so far was taken or dropped; never called for a request."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                if not self._pending:
                    return True
            # force_flush has no usable time limit in the SDK: it runs on a thread of its own that we do not wait for.
            flusher = threading.Thread(target=self._processor.force_flush, daemon=True)
            flusher.start()
            flusher.join(max(0.0, deadline - time.monotonic()))
            with self._idle:
                self._idle.wait_for(lambda: not self._pending, timeout=min(0.05, max(0.0, deadline - time.monotonic())))
        return not self._pending

    def shutdown(self, timeout_s: float = 0.75) -> None:
        """Send what is pending for at most ``timeout_s``, then give up; the rest counts as dropped. Idempotent.

        A collector that did not take the last batch is hardly waited for.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if not self._answers:
            timeout_s = min(timeout_s, _HOPELESS_S)
        deadline = time.monotonic() + timeout_s
        self._inbox.put(None)
        self._feeder.join(timeout_s / 2)
        closer = threading.Thread(target=self._processor.shutdown, name="forebay-spans-close", daemon=True)
        closer.start()
        closer.join(max(0.0, deadline - time.monotonic()))
        if closer.is_alive():  # the collector hangs: interrupt the exporter; its threads are daemons
            threading.Thread(target=self._exporter.shutdown, daemon=True).start()
        with self._lock:
            left, self._pending = self._pending, 0
        if left:
            self._on_dropped("shutdown", left)

    def _done(self, spans: int, taken: bool) -> None:
        self._answers = taken
        with self._idle:
            if self._closed and not self._pending:
                return  # already counted as dropped by shutdown
            self._pending = max(0, self._pending - spans)
            self._idle.notify_all()
        if taken:
            self._on_exported(spans)
        else:
            self._on_dropped("export_failed", spans)

    def _feed(self) -> None:
        while (item := self._inbox.get()) is not None:
            make, size = item
            try:
                spans = make()
            except Exception as error:  # a malformed record loses its own trace, not the thread
                _log.error("spans could not be built", exc_info=error)
                spans = ()
                self._on_dropped("build_failed", size)
            with self._idle:
                self._pending += len(spans) - size
                self._idle.notify_all()
            for span in spans:
                self._emit(span)

    def _emit(self, data: SpanData) -> None:
        self._ids.context = data.context
        parent = Context()
        if data.parent is not None:
            parent = otel.set_span_in_context(NonRecordingSpan(_context(data.parent)), parent)
        span = self._tracer.start_span(
            data.name,
            context=parent,
            kind=_KINDS[data.kind],
            attributes=data.attributes,
            links=[otel.Link(_context(link.context), dict(link.attributes)) for link in data.links],
            start_time=data.start_ns,
        )
        for name, at, attributes in data.events:
            span.add_event(name, dict(attributes), timestamp=at)
        if data.error:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=data.end_ns)


def exporter(where: Target) -> SpanExporter:
    """The SDK's OTLP exporter for the target; it reads the remaining ``OTEL_EXPORTER_OTLP_*`` variables itself."""
    if where.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=where.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=where.endpoint)


def _context(context: SpanContext) -> otel.SpanContext:
    return otel.SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=context.remote,
        trace_flags=TraceFlags(int(context.sampled)),
        trace_state=TraceState.from_header([context.tracestate]) if context.tracestate else None,
    )


def _env_int(name: str, default: int) -> int:
    """A positive integer of the environment; anything else is the default, as the SDK has it."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() and int(value) > 0 else default
