"""docs/telemetry.md names exactly what the processes emit: every span, attribute, event, metric and label."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator

import opentelemetry.semconv
import pytest
from prometheus_client import CollectorRegistry

from gateway import trace_attributes as attributes
from gateway.gauges import Gauges, QuotaGauge, TenantGauge, WorkerGauge
from gateway.log import RequestSummary
from gateway.metrics import Metrics
from gateway.settings import ServiceClass, Slo
from gateway.telemetry import setup
from policies.types import AdmissionDecision, Charge, QuotaDecision, Usage
from tests.arch.source import ROOT
from tests.gateway import tracing
from tests.otlp import OtlpReceiver, ReceivedSpan
from workers import collector as where
from workers.engine.record import TransferRecord
from workers.metrics import Sources, WorkerMetrics
from workers.protocol import TierStats, WorkerStats
from workers.request_spans import request_spans, step_context, step_span
from workers.spans import SpanContext, parse_traceparent
from workers.telemetry import SpanSink, exporter, resource


def tables() -> list[list[list[str]]]:
    """Every table of the page: rows of cells, headings first."""
    found: list[list[list[str]]] = []
    previous = ""
    for line in (ROOT / "docs" / "telemetry.md").read_text().splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            if not previous.startswith("|"):
                found.append([])
            found[-1].append([cell.strip() for cell in line.strip().strip("|").split("|")])
        previous = line
    return found


def names(cell: str) -> set[str]:
    """The names in a cell."""
    return set(re.findall(r"`([^`]+)`", cell))


_COST, SPANS, EVENTS, GATEWAY, WORKER = tables()


@pytest.fixture(scope="module")
def spans() -> list[ReceivedSpan]:
    """Everything both processes can say of requests, as a collector gets it."""
    with OtlpReceiver() as receiver:
        telemetry = setup(tracing.settings(otlp_endpoint=receiver.endpoint, capture_content=True), env={})
        trace = tracing.start(telemetry)
        tracing.ok(trace, tracing.generate(n=2))
        trace = tracing.start(telemetry)
        trace.begin("admission").set(attributes.admission, AdmissionDecision(False, "queue_full", 1.0, 61.0))
        trace.begin("quota reserve").set(attributes.quota, QuotaDecision(False, "tokens_per_minute", 1, 2.0))
        tracing.queued(trace.begin("queue"), requeued="worker_lost")
        sent, chat = tracing.dispatch(trace, tracing.generate(n=2))
        trace.content(input_messages="[]", output_messages="[]")
        tracing.answered(chat, Usage(1, 2, 3))
        trace.event("client_disconnected")
        trace.finish("shed", status=429, reason="queue_full")
        parent = parse_traceparent(sent.trace)
        assert parent is not None
        target = where.target(receiver.env)
        assert target is not None
        sink = SpanSink(exporter(target), resource({}, "forebay-worker", "w", {}))
        records = tracing.records(sent, 10**18, preempted=True)
        records[0].guessed(3, 1)
        records[0].phases[0].restored = 1
        moved = TransferRecord(sent.trace, "127.0.0.1:7", 10**18 - 9, 10**18, "ok", 2)
        inference = SpanContext(parent.trace_id, 5)
        sink.submit(request_spans(records, parent, inference, model="tiny", worker="w", steps={}, transfer=moved))
        sink.submit([step_span(tracing.step(1, 10**18, ["a"]), step_context(), "w", True, [])])
        assert telemetry.flush()
        assert sink.flush()
        telemetry.shutdown()
        sink.shutdown()
        return receiver.spans()


def test_spans_and_attributes(spans: list[ReceivedSpan]) -> None:
    documented = {names(row[0]).pop().replace("{model}", "tiny"): row for row in SPANS[1:]}
    assert {span.name for span in spans} == set(documented)
    by_id = {span.span_id: span for span in spans}
    for name, (_, kind, service, parent, cell) in documented.items():
        here = [span for span in spans if span.name == name]
        emitted = {key for span in here for key in span.attributes} - ({"error.type"} - names(cell))
        assert emitted == names(cell), name
        assert {span.kind for span in here} == {kind}
        assert {span.service for span in here} == {f"forebay-{service}"}
        parents = {by_id[span.parent].name if span.parent in by_id else "" for span in here}
        above = {"root": tracing.ROOT, "caller": "", "a trace of its own": ""}
        assert parents == {above.get(parent, parent.strip("`").replace("{model}", "tiny"))}, name


def test_events(spans: list[ReceivedSpan]) -> None:
    documented = {
        (names(row[0]).pop(), row[1].strip("`").replace("root", tracing.ROOT), *sorted(names(row[2])))
        for row in EVENTS[1:]
    }
    emitted = {(name, span.name, *sorted(found)) for span in spans for name, _, found in span.events}
    assert emitted == documented


def semantic_conventions() -> set[str]:
    """Every attribute name of the pinned opentelemetry-semantic-conventions."""
    found: set[str] = set()
    for package in ("opentelemetry.semconv.attributes", "opentelemetry.semconv._incubating.attributes"):
        module = importlib.import_module(package)
        for info in pkgutil.iter_modules(module.__path__):
            members = vars(importlib.import_module(f"{package}.{info.name}"))
            found |= {value for key, value in members.items() if key.isupper() and isinstance(value, str)}
    return found


def test_foreign_names_are_those_of_the_pinned_conventions() -> None:
    assert opentelemetry.semconv.__name__
    known = semantic_conventions()
    assert "http.request.method" in known
    foreign = {name for row in SPANS[1:] for name in names(row[4]) if not name.startswith("forebay.")}
    assert foreign - known == set()
    assert {row[0] for row in SPANS[1:] if "gen_ai." in row[4]} == {"`chat {model}`"}


def emitted_metrics(registry: CollectorRegistry) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Name as documented, type, labels without the format's own."""
    for family in registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if family.type == "info":
            labels = set()
        yield f"{family.name}{suffix}", family.type, frozenset(labels)


def documented_metrics(table: Iterable[list[str]]) -> set[tuple[str, str, frozenset[str]]]:
    """The same from the page."""
    return {(names(row[0]).pop(), row[1], frozenset(names(row[2]))) for row in list(table)[1:]}


def test_gateway_metrics() -> None:
    settings = tracing.settings()
    promised = ServiceClass(slo=Slo(ttft_p95_ms=2_000))
    metrics = Metrics(settings.model_copy(update={"classes": {"interactive": promised}}), versions={"runtime": "3.11"})
    fields = {"request_id": "r", "route": "/", "duration_s": 1.0, "queue_wait_s": 1.0, "first_token_s": 1.0}
    metrics.request_finished(RequestSummary(outcome="shed", reason="queue_full", **fields))  # type: ignore[arg-type]
    metrics.charged("search", "interactive", Charge(1, 1, 1))
    metrics.quota_decided("search", "interactive", "admit")
    metrics.routed("w", "load")
    metrics.inter_token("tiny", "interactive")(0.1)
    metrics.policy_timer("auth/jwt")(0.1)
    metrics.spans_dropped("queue_full", 1)
    metrics.fault("routing")
    metrics.stale_dispatch("w")
    gauges = Gauges(
        [TenantGauge("search", 1, 1, 1.0, 0.5, "tiny")],
        [WorkerGauge("w", True, 1, 1, {"free": 1})],
        [QuotaGauge("search", "tokens", 1.0)],
        {"tiny": False},
        ledger_writable=True,
    )
    metrics.add_source(lambda: gauges)
    assert set(emitted_metrics(metrics.registry)) == documented_metrics(GATEWAY)


def test_worker_metrics() -> None:
    stats = WorkerStats(tiers={"host": TierStats()})
    metrics = WorkerMetrics(Sources(lambda: stats, lambda: {"lru": 1}, lambda: {"kv": 1}), versions={"device": "cpu"})
    metrics.step(tracing.step(1, 10**18, ["a"]))
    metrics.spans_dropped("queue_full", 1)
    metrics.transferred("ok", 0.5)
    assert set(emitted_metrics(metrics.registry)) == documented_metrics(WORKER)
