"""An OTLP receiver for tests: real gRPC and HTTP servers that decode what a process exports, and checks on span trees.

with OtlpReceiver() as collector:                 # grpc; OtlpReceiver("http/protobuf") for HTTP
    …                                             # OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint
    spans = collector.wait_for_trace(trace_id, names={"POST /v1/chat/completions", "inference tiny"})
    tree = check_tree(spans)                      # one root, no orphan, order, kinds
"""

from __future__ import annotations

import gzip
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

SEQUENCE_GAP_NS = 2_000


@dataclass(frozen=True)
class ReceivedSpan:
    """One decoded span. Ids are lower-case hex; ``parent`` is empty for a root."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    links: list[tuple[str, str, dict[str, Any]]]
    """Trace id, span id, attributes."""
    error: bool
    tracestate: str
    resource: dict[str, Any] = field(repr=False)

    @property
    def service(self) -> str:
        """``forebay-gateway`` or ``forebay-worker``."""
        return str(self.resource["service.name"])


class OtlpReceiver:
    """Collects spans on a free loopback port. ``delay_s`` makes it slow, ``refuse`` makes it fail; both may change."""

    def __init__(self, protocol: Literal["grpc", "http/protobuf"] = "grpc") -> None:
        self.protocol = protocol
        self.delay_s = 0.0
        self.refuse = False
        self.headers: list[dict[str, str]] = []
        """Of each request: HTTP headers or gRPC metadata."""
        self.requests = 0
        self._spans: list[ReceivedSpan] = []
        self._news = threading.Condition()
        self._released = threading.Event()
        self._stop: Callable[[], None] = self._serve_grpc() if protocol == "grpc" else self._serve_http()

    def __enter__(self) -> OtlpReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; requests that are being delayed end."""
        self._released.set()
        self._stop()

    @property
    def env(self) -> dict[str, str]:
        """``OTEL_*`` variables that make a process export here."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol}

    @property
    def endpoint(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    def spans(self, trace_id: str | None = None) -> list[ReceivedSpan]:
        """What arrived so far, of one trace or of all."""
        with self._news:
            return [span for span in self._spans if trace_id is None or span.trace_id == trace_id]

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """Spans by trace id."""
        found: dict[str, list[ReceivedSpan]] = {}
        for span in self.spans():
            found.setdefault(span.trace_id, []).append(span)
        return found

    def wait(self, ready: Callable[[list[ReceivedSpan]], bool], timeout_s: float = 30.0) -> list[ReceivedSpan]:
        """All spans once ``ready(spans)``; raises AssertionError with the names seen when the time is up."""
        with self._news:
            if not self._news.wait_for(lambda: ready(self._spans), timeout_s):
                raise AssertionError(f"no such spans within {timeout_s} s; got {[s.name for s in self._spans]}")
            return list(self._spans)

    def wait_for_trace(self, trace_id: str, names: Iterable[str], timeout_s: float = 30.0) -> list[ReceivedSpan]:
        """One trace's spans once it holds a span of each of ``names``."""
        wanted = set(names)
        self.wait(lambda spans: wanted <= {s.name for s in spans if s.trace_id == trace_id}, timeout_s)
        return self.spans(trace_id)

    def take(self, body: trace_service_pb2.ExportTraceServiceRequest) -> bool:
        """Decode one request as it came in; false when it is to be refused."""
        if self.delay_s:
            self._released.wait(self.delay_s)
        if self.refuse:
            return False
        decoded = [
            _decode(span, {item.key: _value(item.value) for item in group.resource.attributes})
            for group in body.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._news:
            self._spans += decoded
            self._news.notify_all()
        return True

    def note(self, headers: dict[str, str]) -> None:
        """Remember a request's headers."""
        self.requests += 1
        self.headers.append(headers)

    def _serve_grpc(self) -> Callable[[], None]:
        receiver = self

        class Service(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's name
                receiver.note(dict(context.invocation_metadata()))
                if not receiver.take(request):
                    context.abort(grpc.StatusCode.INTERNAL, "refused by the test")
                return trace_service_pb2.ExportTraceServiceResponse()

        server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
        self.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return lambda: server.stop(0).wait(30) and None

    def _serve_http(self) -> Callable[[], None]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.note({key.lower(): value for key, value in self.headers.items()})
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                good = self.path == "/v1/traces" and receiver.take(
                    trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                )
                self.send_response(200 if good else 400)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Silence."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join(30)

        return stop


@dataclass(frozen=True)
class Tree:
    """One trace."""

    root: ReceivedSpan
    children: dict[str, list[ReceivedSpan]]
    """By the parent's span id, in order of their start."""

    def of(self, span: ReceivedSpan) -> list[ReceivedSpan]:
        """A span's children."""
        return self.children.get(span.span_id, [])

    def named(self, name: str) -> ReceivedSpan:
        """The one span of that name."""
        (found,) = [s for s in [self.root, *(c for row in self.children.values() for c in row)] if s.name == name]
        return found


def check_tree(
    spans: list[ReceivedSpan], *, remote_parent: str = "", parallel: tuple[str, ...] = (), clock_slack_ns: int = 0
) -> Tree:
    """Assert that these spans are one sound trace; returns it.

    One trace id, unique span ids, one root (whose parent is ``remote_parent``), no orphan, every span closed and within
    its parent (across processes by ``clock_slack_ns``; what the gateway cancels ends at the worker only after the step
    under way, thus later than its parent), events within their span, siblings in sequence at least 2 µs apart unless
    their parent's name is in ``parallel``.
    """
    assert len({span.trace_id for span in spans}) == 1, sorted({span.trace_id for span in spans})
    ids = {span.span_id: span for span in spans}
    assert len(ids) == len(spans), "a span was exported twice"
    roots = [span for span in spans if span.parent not in ids]
    assert [span.parent for span in roots] == [remote_parent], [(s.name, s.parent) for s in roots]
    children: dict[str, list[ReceivedSpan]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        assert 0 < span.start_ns < span.end_ns, span
        for name, at, _ in span.events:
            assert span.start_ns <= at <= span.end_ns, (span.name, name)
        if span.parent in ids:
            children.setdefault(span.parent, []).append(span)
            parent = ids[span.parent]
            slack = clock_slack_ns if parent.service != span.service else 0
            assert parent.start_ns - slack <= span.start_ns, (parent.name, span.name)
            if "cancelled" not in span.attributes.get("forebay.finish", ()):
                assert span.end_ns <= parent.end_ns + slack, (parent.name, span.name)
    for parent_id, row in children.items():
        if ids[parent_id].name not in parallel:
            for before, after in itertools.pairwise(row):
                assert after.start_ns - before.end_ns >= SEQUENCE_GAP_NS, (before.name, after.name)
    return Tree(roots[0], children)


def wait_until(ready: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Poll until true; false when the time is up."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _decode(span: ProtoSpan, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        kind=ProtoSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={item.key: _value(item.value) for item in span.attributes},
        events=[
            (event.name, event.time_unix_nano, {item.key: _value(item.value) for item in event.attributes})
            for event in span.events
        ],
        links=[
            (link.trace_id.hex(), link.span_id.hex(), {item.key: _value(item.value) for item in link.attributes})
            for link in span.links
        ],
        error=span.status.code == Status.STATUS_CODE_ERROR,
        tracestate=span.trace_state,
        resource=resource,
    )


def _value(value: AnyValue) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_value(item) for item in value.array_value.values]
    return None if which is None else getattr(value, which)
