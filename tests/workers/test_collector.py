"""Where the collector is (the YAML wins where it names a value, ``OTEL_*`` fill the rest), and the way to it."""

from __future__ import annotations

import pytest

from tests.otlp import OtlpReceiver
from workers import collector as where
from workers.spans import SpanContext, SpanData, format_traceparent, parse_traceparent
from workers.telemetry import SpanSink, exporter, resource


@pytest.mark.parametrize(
    ("env", "endpoint", "protocol", "expected"),
    [
        ({}, None, None, None),
        ({}, "http://c:4317", None, ("http://c:4317", "grpc")),
        ({}, "c:4317", "grpc", ("http://c:4317", "grpc")),
        ({}, "https://c:4318", "http/protobuf", ("https://c:4318/v1/traces", "http/protobuf")),
        ({}, "http://c:4318/base/", "http/protobuf", ("http://c:4318/base/v1/traces", "http/protobuf")),
        ({}, "http://c:4318/v1/traces", "http/protobuf", ("http://c:4318/v1/traces", "http/protobuf")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4317"}, None, None, ("http://e:4317", "grpc")),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4317"}, "http://c:4317", None, ("http://c:4317", "grpc")),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            None, None, ("http://e/v1/traces", "http/protobuf"),
        ),
        (
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://e/in", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://f"},
            None, "http/protobuf", ("http://e/in", "http/protobuf"),
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e", "OTEL_SDK_DISABLED": "true"}, None, None, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e", "OTEL_TRACES_EXPORTER": "none"}, None, None, None),
        ({"OTEL_TRACES_EXPORTER": "none"}, "http://c:4317", None, ("http://c:4317", "grpc")),
    ],
)  # fmt: skip
def test_where_to_export(
    env: dict[str, str], endpoint: str | None, protocol: str | None, expected: tuple[str, str] | None
) -> None:
    """The YAML wins where it names a value, ``OTEL_*`` fill the rest."""
    found = where.target(env, endpoint, protocol)
    assert (found and (found.endpoint, found.protocol)) == expected


@pytest.mark.parametrize(
    ("env", "endpoint", "protocol", "message"),
    [
        ({}, "http://c", "http/json", "telemetry.otlp_protocol: 'http/json'"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "http://c", None, "OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json'"),
        ({}, "ftp://c", None, "'ftp://c' is no http"),
        ({}, "not a url", None, "'not a url' is no http"),
        ({}, "http://", None, "'http://' is no http"),
        ({}, "http://c:99999", None, "'http://c:99999' is no http"),
        ({}, "http://[::1", None, "is no http"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "c d"}, None, None, "'c d' is no http"),
    ],
)
def test_a_wrong_target_is_named(env: dict[str, str], endpoint: str | None, protocol: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        where.target(env, endpoint, protocol)


def test_context_round_trips() -> None:
    context = SpanContext(2**127, 3, sampled=False, tracestate="a=1", remote=True)
    assert parse_traceparent(format_traceparent(context)) == context


def test_a_sink_sheds_when_full_and_after_its_end() -> None:
    collector = OtlpReceiver()
    target = where.target(collector.env)
    assert target is not None
    dropped: list[tuple[str, int]] = []
    sink = SpanSink(
        exporter(target),
        resource({}, "x", None, {}),
        capacity=4,
        on_dropped=lambda reason, n: dropped.append((reason, n)),
    )
    five = [SpanData(f"s{n}", SpanContext(1, n + 1), start_ns=1, end_ns=2) for n in range(5)]
    assert not sink.submit(five)
    assert sink.submit(five[:4])
    sink.shutdown()
    assert not sink.submit(five[:1])
    assert dropped == [("queue_full", 5), ("shutdown", 1)]
    assert len(collector.spans()) == 4
    collector.close()
