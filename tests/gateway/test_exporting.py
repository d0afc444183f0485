"""The way to the collector: standard settings reach it, and a dead one costs nothing (security 85)."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.metrics import Metrics
from gateway.telemetry import NO_TRACE, Telemetry, setup
from tests.arch.source import ROOT
from tests.gateway import tracing
from tests.otlp import OtlpReceiver, check_tree, wait_until
from workers import collector as where
from workers.telemetry import SpanSink, exporter, resource


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def telemetry(collector: OtlpReceiver) -> Iterator[Telemetry]:
    made = tracing.build(collector)
    yield made
    made.shutdown(1.0)


def counter(metrics: Metrics, name: str, **labels: str) -> float:
    """A sample's value, 0 when there is none."""
    return metrics.registry.get_sample_value(name, labels) or 0.0


def test_a_full_queue_drops_whole_traces_and_counts_them(
    collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "50")
    collector.delay_s = 0.3
    metrics = Metrics(tracing.settings())
    telemetry = tracing.build(collector, metrics)
    for _ in range(100):
        tracing.ok(tracing.start(telemetry))
    assert telemetry.flush(20)
    telemetry.shutdown()
    taken = counter(metrics, "forebay_spans_exported_total")
    lost = counter(metrics, "forebay_spans_dropped_total", reason="queue_full")
    assert lost > 0
    assert taken + lost == 900
    for spans in collector.traces().values():
        assert len(check_tree(spans).of(check_tree(spans).root)) == 8


def test_the_default_bound_is_8192_spans(collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/telemetry.md: not one more waits, and the one too many is counted."""
    monkeypatch.delenv("OTEL_BSP_MAX_QUEUE_SIZE", raising=False)
    lost: list[tuple[str, int]] = []
    target = where.target(collector.env)
    assert target is not None
    sink = SpanSink(
        exporter(target),
        resource({}, "forebay-gateway", None, {}),
        on_dropped=lambda reason, spans: lost.append((reason, spans)),
    )
    goes_on = threading.Event()

    def held() -> tuple[()]:
        assert goes_on.wait(30)
        return ()

    assert sink.build(held, 8_191)
    assert sink.build(held, 1)
    assert not sink.build(held, 1)
    assert lost == [("queue_full", 1)]
    goes_on.set()
    assert sink.flush(10)
    assert sink.build(held, 8_192), "there is room again"
    sink.shutdown()
    assert lost == [("queue_full", 1)]


@pytest.mark.parametrize("fault", ["refused", "blackholed", "failing", "slow"])
def test_a_dead_collector_costs_nothing_and_is_counted(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """security 85: requests go on, the drop counter rises, the stop is bounded, nothing is lost uncounted."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    metrics = Metrics(tracing.settings())
    with OtlpReceiver() as collector, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if fault == "blackholed":
            silent.listen(1)  # connects, never answers
        collector.refuse = fault == "failing"
        collector.delay_s = 30.0 if fault == "slow" else 0.0
        port = silent.getsockname()[1] if fault in ("refused", "blackholed") else collector.port
        telemetry = setup(tracing.settings(otlp_endpoint=f"http://127.0.0.1:{port}"), metrics, env={})
        for _ in range(100):
            tracing.ok(tracing.start(telemetry))
        assert wait_until(lambda: counter(metrics, "forebay_spans_dropped_total", reason="export_failed") > 0)
        telemetry.shutdown(1.0)
        telemetry.shutdown(1.0)
        tracing.ok(tracing.start(telemetry))
    lost = sum(
        counter(metrics, "forebay_spans_dropped_total", reason=reason) for reason in ("export_failed", "shutdown")
    )
    assert counter(metrics, "forebay_spans_exported_total") == 0
    assert lost >= 900 + 9, "100 requests and the one after the stop"


def test_a_process_with_a_silent_collector_exits(tmp_path: Any) -> None:
    """security 85: exit inside the drain; nothing of the exporter keeps the interpreter alive."""
    program = textwrap.dedent(
        """
        import sys
        from gateway.telemetry import setup
        from tests.gateway import tracing
        telemetry = setup(tracing.settings(otlp_endpoint=sys.argv[1], otlp_protocol=sys.argv[2]), env={})
        for _ in range(600):
            tracing.ok(tracing.start(telemetry))
        telemetry.shutdown(1.0)
        print("stopped")
        """
    )
    for protocol in ("grpc", "http/protobuf"):
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(1)
            endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
            done = subprocess.run(
                [sys.executable, "-c", program, endpoint, protocol],
                cwd=ROOT, capture_output=True, text=True, timeout=15, check=True,
            )  # fmt: skip
        assert done.stdout == "stopped\n"
        assert done.stderr.count("\n") <= 2, "a dead collector must not fill the log"


def test_without_an_endpoint_nothing_is_traced_and_nothing_is_loaded() -> None:
    telemetry = setup(tracing.settings(), env={})
    assert not telemetry.enabled
    trace = tracing.start(telemetry)
    assert trace is NO_TRACE
    sent = tracing.ok(trace)
    assert sent.trace == {}
    assert trace.finish("error", status=500) is False
    program = (
        "import sys; from gateway.settings import Settings; from gateway.telemetry import setup; "
        "setup(Settings.model_validate_json(sys.argv[1]), env={}); print('opentelemetry' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tracing.settings().model_dump_json(by_alias=True)],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"


def test_standard_variables_reach_the_exporter(collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.instance.id=pod-7")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
    env = {**collector.env, "OTEL_SERVICE_NAME": "edge"}
    telemetry = setup(tracing.settings(), env=env, versions={"runtime": "3.11"})
    tracing.ok(tracing.start(telemetry))
    root = tracing.received(telemetry, collector).root
    telemetry.shutdown()
    assert collector.headers[0]["x-team"] == "blue"
    assert root.resource["service.name"] == "edge"
    assert root.resource["service.instance.id"] == "pod-7"
    assert root.resource["deployment.environment.name"] == "test"
    assert root.resource["forebay.version.runtime"] == "3.11"


def test_workers_are_told_where_the_gateway_exports(collector: OtlpReceiver) -> None:
    telemetry = tracing.build(collector)
    told = telemetry.worker_environment()
    assert told["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == collector.endpoint
    assert told["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "grpc"
    assert told["OTEL_SERVICE_NAME"] == "forebay-worker"
    telemetry.shutdown()
    assert setup(tracing.settings(), env={}).worker_environment() == {"OTEL_TRACES_EXPORTER": "none"}
