"""How spans leave the process: who exports, and the SDK's OTLP exporters. The worker's only OpenTelemetry import.

The gateway uses the same (through ``gateway/telemetry.py``), so that both processes export by the same rules; spans
wait, and become batches, in ``span_sink.py``.

Rules
- The SDK's exporters do the sending: endpoint and protocol come from ``Target``, headers, certificates, timeout and
  compression from the standard ``OTEL_*`` variables, which they read themselves. They are handed bytes
  (``otlp.py``) where they expect spans: our releases pin theirs, and tests hold both protocols.
- No tracer, no provider, no span of the SDK is ever made, and nothing global is set.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExportResult

from workers.collector import Target
from workers.span_sink import CAPACITY, DropReason, Exporter, SpanSink
from workers.spans import Value

__all__ = ["CAPACITY", "DropReason", "Exporter", "SpanSink", "exporter", "resource"]

_NOISY = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.common.http",
)


def resource(env: Mapping[str, str], service: str, instance: str | None, versions: Mapping[str, str]) -> dict[str, Any]:
    """Who exports. ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` win over our defaults."""
    given = Resource.create()  # reads both variables
    named = env.get("OTEL_SERVICE_NAME") or "service.name=" in env.get("OTEL_RESOURCE_ATTRIBUTES", "")
    ours: dict[str, Value] = {f"forebay.version.{name}": value for name, value in versions.items()}
    if not named:
        ours["service.name"] = service
    if instance is not None or "service.instance.id" not in given.attributes:
        ours["service.instance.id"] = instance or str(uuid.uuid4())
    return {**given.attributes, **ours}


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


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the gRPC exporter takes for a sequence of spans: it counts them, and asks to have them translated."""

    payload: bytes
    spans: int

    def __len__(self) -> int:
        return self.spans


def exporter(where: Target) -> Exporter:
    """The SDK's OTLP exporter for the target; it reads the remaining ``OTEL_EXPORTER_OTLP_*`` variables itself."""
    quiet = _Seldom()
    for name in _NOISY:
        logging.getLogger(name).addFilter(quiet)
    return _OverGrpc(where.endpoint) if where.protocol == "grpc" else _OverHttp(where.endpoint)


class _OverGrpc:
    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        class Sender(OTLPSpanExporter):
            def _translate_data(self, data: Any) -> ExportTraceServiceRequest:
                request = ExportTraceServiceRequest()
                request.ParseFromString(data.payload)
                return request

        self._sender = Sender(endpoint=endpoint)

    def export(self, payload: bytes, spans: int) -> bool:
        batch: Any = _Batch(payload, spans)
        return self._sender.export(batch) is SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._sender.shutdown()


class _OverHttp:
    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._sender = OTLPSpanExporter(endpoint=endpoint)

    def export(self, payload: bytes, spans: int) -> bool:
        return self._sender._client.export(payload).success

    def shutdown(self) -> None:
        self._sender.shutdown()  # type: ignore[no-untyped-call]
