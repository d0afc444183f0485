"""Request traces as a collector receives them: shape, names, keeping, and what a dead collector may cost (nothing)."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, TraceFlags, set_span_in_context
from opentelemetry.trace import SpanContext as OtelContext

from gateway import trace_attributes as attributes
from gateway.metrics import Metrics
from gateway.telemetry import NO_TRACE, Sampler, Telemetry, sampler, setup
from gateway.trace import STATIONS
from policies.types import AdmissionDecision, QuotaDecision, Usage
from tests.arch.source import ROOT
from tests.gateway import tracing
from tests.otlp import OtlpReceiver, Tree, check_tree, wait_until
from workers.spans import SpanContext, new_trace_id

PARENT = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"


def inbound(flags: str = "01", state: bytes = b"vendor=1") -> tuple[tuple[bytes, bytes], ...]:
    """Headers of a caller that traces."""
    return (b"traceparent", f"00-{PARENT}-{CALLER}-{flags}".encode()), (b"tracestate", state)


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def telemetry(collector: OtlpReceiver) -> Iterator[Telemetry]:
    made = build(collector)
    yield made
    made.shutdown(1.0)


def build(collector: OtlpReceiver, metrics: Metrics | None = None, **options: Any) -> Telemetry:
    """A gateway's telemetry that exports to ``collector``."""
    endpoint = {"otlp_endpoint": collector.endpoint, "otlp_protocol": collector.protocol}
    return setup(tracing.settings(**endpoint, **options), metrics, env={}, instance="gw-1")


def received(telemetry: Telemetry, collector: OtlpReceiver, **checks: Any) -> Tree:
    """The one trace that was exported."""
    assert telemetry.flush()
    (spans,) = collector.traces().values()
    return check_tree(spans, **checks)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_request_is_one_tree(protocol: Any) -> None:
    with OtlpReceiver(protocol) as collector:
        telemetry = build(collector)
        tracing.ok(tracing.start(telemetry))
        tree = received(telemetry, collector)
        telemetry.shutdown()
    root = tree.root
    assert (root.name, root.kind, root.error) == (tracing.ROOT, "SERVER", False)
    assert root.resource["service.name"] == "forebay-gateway"
    assert root.resource["service.instance.id"] == "gw-1"
    assert [span.name for span in tree.of(root)] == [
        "auth", "tokenize", "admission", "quota reserve", "queue", "route", "chat tiny", "quota settle",
    ]  # fmt: skip
    assert [span.kind for span in tree.of(root)] == ["INTERNAL"] * 6 + ["CLIENT", "INTERNAL"]
    assert [name for name, _, _ in root.events] == ["first_byte", "last_byte"]
    decisive = {
        "forebay.request.id": "req-1", "forebay.tenant": "search", "forebay.model": "tiny", "forebay.outcome": "ok",
        "forebay.worker": "local-0", "forebay.preemptions": 1, "forebay.policy.generation": 1,
        "http.response.status_code": 200, "http.request.method": "POST", "http.route": tracing.ROUTE,
        "url.path": tracing.ROUTE, "url.scheme": "http", "server.address": "127.0.0.1", "server.port": 8080,
    }  # fmt: skip
    assert decisive.items() <= root.attributes.items()
    assert "error.type" not in root.attributes
    chat = tree.named("chat tiny").attributes
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "forebay", "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 8, "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2, "gen_ai.response.finish_reasons": ["stop"],
    }  # fmt: skip
    assert expected.items() <= chat.items()
    others = [span for span in [root, *tree.of(root)] if span.name != "chat tiny"]
    assert not [key for span in others for key in span.attributes if key.startswith("gen_ai.")]


def test_the_queue_span_says_why_it_waited(telemetry: Telemetry, collector: OtlpReceiver) -> None:
    """gateway F9"""
    tracing.ok(tracing.start(telemetry))
    assert received(telemetry, collector).named("queue").attributes == {
        "forebay.tenant": "search",
        "forebay.class": "interactive",
        "forebay.queue.policy": "vtc",
        "forebay.queue.depth": 4,
        "forebay.queue.depth_tenant": 2,
        "forebay.queue.position": 2,
        "forebay.queue.weight": 4.0,
        "forebay.queue.wait_ms": 30.0,
        "forebay.queue.virtual_start": 12.5,
        "forebay.queue.picked_because": "least_service",
        "forebay.queue.waited_behind": ["batch=100", "e=5", "d=4", "c=3", "b=2"],
    }


def test_a_cancelled_request_is_one_tree(telemetry: Telemetry, collector: OtlpReceiver) -> None:
    """gateway C1: the client leaves while the worker decodes."""
    trace = tracing.start(telemetry)
    tracing.authenticate(trace)
    tracing.admit(trace)
    tracing.dispatch(trace, tracing.generate())
    trace.event("first_byte")
    trace.event("client_disconnected")
    tracing.settle(trace, Usage(prompt=3))
    trace.finish("cancelled", status=200)
    tree = received(telemetry, collector)
    assert tree.root.attributes["forebay.outcome"] == "cancelled"
    assert [name for name, _, _ in tree.root.events] == ["first_byte", "client_disconnected"]
    assert not [span.name for span in [tree.root, *tree.of(tree.root)] if span.error]


def test_a_throttled_request_is_one_tree(telemetry: Telemetry, collector: OtlpReceiver) -> None:
    trace = tracing.start(telemetry)
    tracing.authenticate(trace)
    span = trace.begin("quota reserve")
    verdict = QuotaDecision(False, limit="tokens_per_minute", cost=11, retry_after_s=1.5, remaining=tracing.REMAINING)
    span.set(attributes.quota(verdict))
    span.fail("tokens_per_minute")
    span.end()
    trace.finish("throttled", status=429, reason="tokens_per_minute")
    tree = received(telemetry, collector)
    assert tree.named("quota reserve").error
    assert tree.named("quota reserve").attributes == {
        "forebay.quota.decision": "throttle",
        "forebay.quota.limit": "tokens_per_minute",
        "forebay.quota.cost": 11,
        "forebay.quota.remaining": 199_000,
        "forebay.quota.retry_after_ms": 1500.0,
        "error.type": "tokens_per_minute",
    }
    assert tree.root.attributes["error.type"] == "tokens_per_minute"
    assert not tree.root.error, "HTTP conventions: a SERVER span with 4xx keeps an unset status"
    assert "forebay.shed.reason" not in tree.root.attributes


def test_a_shed_request_is_one_tree_that_ends_in_the_queue(telemetry: Telemetry, collector: OtlpReceiver) -> None:
    trace = tracing.start(telemetry)
    tracing.authenticate(trace)
    tracing.admit(trace)
    span = trace.begin("queue")
    span.set(attributes.queued(tracing.job(), "vtc", depth=4, depth_tenant=2, position=2))
    span.set(attributes.left_queue(20.0))
    span.fail("max_wait")
    span.end()
    tracing.settle(trace, Usage())
    trace.finish("shed", status=429, reason="max_wait")
    tree = received(telemetry, collector)
    queue = tree.named("queue")
    assert queue.error
    assert queue.attributes["error.type"] == "max_wait"
    assert queue.attributes["forebay.queue.wait_ms"] == 20_000.0
    assert tree.root.attributes["forebay.shed.reason"] == "max_wait"
    assert [span.name for span in tree.of(tree.root)][-2:] == ["queue", "quota settle"]


def test_admission_that_refuses(telemetry: Telemetry, collector: OtlpReceiver) -> None:
    trace = tracing.start(telemetry)
    span = trace.begin("admission")
    span.set(attributes.admission(AdmissionDecision(False, "queue_full", 1.0, 61.0)))
    span.fail("queue_full")
    span.end()
    trace.finish("shed", status=429, reason="queue_full")
    tree = received(telemetry, collector)
    assert tree.named("admission").attributes["forebay.admission.decision"] == "queue_full"
    assert tree.named("admission").attributes["forebay.admission.predicted_wait_ms"] == 61_000.0


def test_a_retry_is_a_sibling_linked_to_the_first(telemetry: Telemetry, collector: OtlpReceiver) -> None:
    trace = tracing.start(telemetry)
    tracing.authenticate(trace)
    first, chat = tracing.dispatch(trace, tracing.generate())
    chat.fail("worker_lost")
    chat.end()
    trace.begin("queue").end()
    second, chat = tracing.attempt(trace, tracing.generate())
    chat.end()
    trace.finish("ok", status=200)
    tree = received(telemetry, collector)
    chats = [span for span in tree.of(tree.root) if span.name == "chat tiny"]
    assert [span.error for span in chats] == [True, False]
    assert chats[1].links == [(chats[0].trace_id, chats[0].span_id, {"forebay.link": "retry_of"})]
    assert [message.trace["traceparent"].split("-")[2] for message in (first, second)] == [s.span_id for s in chats]


def test_an_error_after_the_first_byte_is_an_error(telemetry: Telemetry, collector: OtlpReceiver) -> None:
    trace = tracing.start(telemetry)
    tracing.dispatch(trace, tracing.generate())
    trace.event("first_byte")
    trace.finish("error", status=200, error_type="worker_lost")
    tree = received(telemetry, collector)
    assert tree.root.error
    assert tree.named("chat tiny").error, "what is open when a request fails has failed"
    assert tree.named("chat tiny").attributes["error.type"] == "worker_lost"


@pytest.mark.parametrize("flags", ["00", "01"])
def test_inbound_context_is_the_parent(flags: str, telemetry: Telemetry, collector: OtlpReceiver) -> None:
    """gateway F3, F5: same trace id, tracestate kept, sampled flag honoured; the caller's span is not ours to end."""
    headers = (*inbound(flags), (b"baggage", b"tenant=evil"))
    sent = tracing.ok(tracing.start(telemetry, headers))
    assert sent.trace.keys() == {"traceparent", "tracestate"}
    assert sent.trace["traceparent"].split("-")[1] == PARENT
    assert sent.trace["traceparent"].endswith(f"-{flags}")
    assert sent.trace["tracestate"] == "vendor=1"
    assert telemetry.flush()
    if flags == "00":
        assert collector.spans() == []
        return
    spans = collector.spans()
    tree = check_tree(spans, remote_parent=CALLER)
    assert {span.trace_id for span in spans} == {PARENT}
    assert CALLER not in {span.span_id for span in spans}
    assert {span.tracestate for span in spans} == {"vendor=1"}
    assert tree.named("chat tiny").span_id == sent.trace["traceparent"].split("-")[2]


@pytest.mark.parametrize(
    "headers",
    [
        ((b"traceparent", b"garbage"),),
        ((b"traceparent", f"00-{'0' * 32}-{CALLER}-01".encode()),),
        ((b"traceparent", f"00-{PARENT}-{'0' * 16}-01".encode()),),
        ((b"traceparent", f"ff-{PARENT}-{CALLER}-01".encode()),),
        (*inbound()[:1], *inbound()[:1]),
        ((b"traceparent", b"\xff\xfe" * 40),),
    ],
)
def test_malformed_inbound_context_starts_a_new_trace(
    headers: tuple[tuple[bytes, bytes], ...], telemetry: Telemetry, collector: OtlpReceiver
) -> None:
    tracing.ok(tracing.start(telemetry, headers))
    assert received(telemetry, collector).root.trace_id != PARENT


def ended(telemetry: Telemetry, outcome: Any, status: int | None, seconds: float = 0.1, **identity: Any) -> bool:
    """Whether a request with this end, taking so long, is kept."""
    now = 10**18
    trace = telemetry.request("POST", tracing.ROUTE, identity.pop("headers", ()), clock=lambda: now)
    trace.identify(tenant="search", **identity)
    now += int(seconds * 1e9)
    trace.event("first_byte")
    kept = trace.finish(outcome, status=status)
    assert trace.keep is kept
    assert trace.finish("error", status=500) is kept, "the first verdict stands"
    return kept


def test_what_is_kept(collector: OtlpReceiver) -> None:
    nothing = build(collector, sample_ratio=0.0, slow_s=5.0)
    assert not ended(nothing, "ok", 200)
    assert not ended(nothing, "cancelled", None)
    assert not ended(nothing, "throttled", 429)
    assert not ended(nothing, "error", 400)
    assert ended(nothing, "error", 500)
    assert ended(nothing, "error", 200)
    assert ended(nothing, "timeout", 504)
    assert ended(nothing, "shed", 429)
    assert ended(nothing, "ok", 200, seconds=5.0)
    assert ended(nothing, "ok", 200, seconds=2.1, slow_first_byte_s=2.0)
    assert not ended(nothing, "ok", 200, seconds=2.0, slow_first_byte_s=2.0)
    assert ended(nothing, "ok", 200, sample_ratio=1.0), "the tenant's own ratio goes first"
    assert ended(nothing, "ok", 200, headers=inbound("01")), "parent-based"
    everything = build(collector, sample_ratio=1.0)
    assert ended(everything, "ok", 200)
    assert not ended(everything, "ok", 200, sample_ratio=0.0)
    assert not ended(everything, "ok", 200, headers=inbound("00"))
    assert ended(everything, "error", 500, headers=inbound("00")), "a caller must not be able to hide a failure"
    assert nothing.flush()
    assert everything.flush()
    assert len(collector.traces()) == len([s for s in collector.spans() if s.name == tracing.ROOT]) - 1  # PARENT twice
    nothing.shutdown()
    everything.shutdown()


def test_the_head_decision_is_the_sdks() -> None:
    reference, ours = ParentBased(TraceIdRatioBased(0.3)), Sampler(0.3)
    rng = random.Random(1)
    verdicts = []
    for _ in range(1_000):
        trace_id, flag = rng.getrandbits(128) or 1, rng.choice([None, 0, 1])
        parent = None if flag is None else SpanContext(trace_id, 7, bool(flag), remote=True)
        context = None
        if flag is not None:
            remote = OtelContext(trace_id, 7, is_remote=True, trace_flags=TraceFlags(flag))
            context = set_span_in_context(NonRecordingSpan(remote))
        verdict = ours(SpanContext(trace_id, 1), parent, None)
        assert verdict == reference.should_sample(context, trace_id, "x").decision.is_sampled()
        verdicts.append(verdict)
    assert 0.3 < sum(verdicts) / 1_000 < 0.55


def test_sampler_settings() -> None:
    assert sampler({"OTEL_TRACES_SAMPLER_ARG": "0.2"}, None) == Sampler(0.2)
    assert sampler({"OTEL_TRACES_SAMPLER_ARG": "0.2"}, 0.7) == Sampler(0.7), "the YAML wins"
    assert sampler({"OTEL_TRACES_SAMPLER": "always_off"}, None) == Sampler(0.0, parent_based=False)
    assert sampler({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, None) == Sampler(1.0)
    assert sampler({}, None) == Sampler(1.0)
    with pytest.raises(ValueError, match=r"OTEL_TRACES_SAMPLER: 'jaeger_remote'"):
        sampler({"OTEL_TRACES_SAMPLER": "jaeger_remote"}, None)
    for wrong in ("nan", "2", "x"):
        with pytest.raises(ValueError, match="OTEL_TRACES_SAMPLER_ARG"):
            sampler({"OTEL_TRACES_SAMPLER_ARG": wrong}, None)


def test_random_lifecycles_end_every_span_once(collector: OtlpReceiver) -> None:
    """No orphan, no double end, no overlap, whatever is called in whatever order (gateway F3)."""
    telemetry = build(collector)
    rng = random.Random(7)
    outcomes = ("ok", "cancelled", "throttled", "shed", "timeout", "error")
    traces = 0
    for number in range(1_000):
        trace = tracing.start(telemetry, inbound() if number % 50 == 0 else ())
        open_spans: list[Any] = []
        for _ in range(rng.randrange(12)):
            act = rng.randrange(7)
            if act <= 2:
                open_spans.append(trace.begin(rng.choice(STATIONS)))
            elif act == 3:
                open_spans.append(trace.begin_chat("tiny", {"gen_ai.operation.name": "chat"}))
            elif act == 4 and open_spans:
                span = rng.choice(open_spans)
                span.end()
                span.end()
                span.fail("late")
            elif act == 5:
                trace.event(rng.choice(("first_byte", "last_byte", "client_disconnected")))
            elif open_spans:
                rng.choice(open_spans).set({"forebay.prompt.tokens": 1})
        trace.finish(rng.choice(outcomes), status=rng.choice((None, 200, 429, 500)))  # type: ignore[arg-type]
        for span in open_spans:
            span.end()
        assert trace.begin("auth").end() is None
        trace.finish("ok", status=200)
        traces += 1
    assert telemetry.flush(20)
    telemetry.shutdown()
    received_traces = collector.traces()
    shared = received_traces.pop(PARENT)
    assert len([span for span in shared if span.name == tracing.ROOT]) == 20
    assert len({span.span_id for span in shared}) == len(shared)
    assert len(received_traces) == traces - 20
    for spans in received_traces.values():
        tree = check_tree(spans)
        assert tree.root.name == tracing.ROOT
        assert not [span for span in spans if span.attributes.get("error.type") == "late" and not span.error]


def test_a_full_queue_drops_whole_traces_and_counts_them(
    collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "50")
    collector.delay_s = 0.3
    metrics = Metrics(tracing.settings())
    telemetry = build(collector, metrics)
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


def counter(metrics: Metrics, name: str, **labels: str) -> float:
    """A sample's value, 0 when there is none."""
    return metrics.registry.get_sample_value(name, labels) or 0.0


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
    program = "import sys; from gateway.telemetry import setup; from tests.gateway import tracing; "
    program += "setup(tracing.settings(), env={}); print('opentelemetry' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "False\n"


def test_standard_variables_reach_the_exporter(collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.instance.id=pod-7")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
    env = {**collector.env, "OTEL_SERVICE_NAME": "edge"}
    telemetry = setup(tracing.settings(), env=env, versions={"runtime": "3.11"})
    tracing.ok(tracing.start(telemetry))
    root = received(telemetry, collector).root
    telemetry.shutdown()
    assert collector.headers[0]["x-team"] == "blue"
    assert root.resource["service.name"] == "edge"
    assert root.resource["service.instance.id"] == "pod-7"
    assert root.resource["deployment.environment.name"] == "test"
    assert root.resource["forebay.version.runtime"] == "3.11"


def test_workers_are_told_where_the_gateway_exports(collector: OtlpReceiver) -> None:
    telemetry = build(collector)
    told = telemetry.worker_environment()
    assert told["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == collector.endpoint
    assert told["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "grpc"
    assert told["OTEL_SERVICE_NAME"] == "forebay-worker"
    telemetry.shutdown()
    assert setup(tracing.settings(), env={}).worker_environment() == {"OTEL_TRACES_EXPORTER": "none"}


@pytest.mark.parametrize("capture", [False, True])
def test_content_is_exported_only_when_asked_for(capture: bool, collector: OtlpReceiver) -> None:
    canary = "CANARY-7f3a"
    telemetry = build(collector, capture_content=capture)
    trace = tracing.start(telemetry, ((b"authorization", canary.encode()), (b"user-agent", canary.encode())))
    assert trace.captures_content is capture
    tracing.authenticate(trace)
    _, chat = tracing.dispatch(trace, tracing.generate())
    trace.content(input_messages=f'[{{"content": "{canary}"}}]')
    chat.end()
    trace.finish("ok", status=200)
    tree = received(telemetry, collector)
    telemetry.shutdown()
    with_canary = [span.name for span in collector.spans() if canary in repr(span) + repr(span.resource)]
    assert with_canary == (["chat tiny"] if capture else [])
    if capture:
        assert canary in tree.named("chat tiny").attributes["gen_ai.input.messages"]


def test_new_trace_ids_are_valid_and_distinct() -> None:
    made = {new_trace_id() for _ in range(1_000)}
    assert len(made) == 1_000
    assert all(0 < value < 2**128 for value in made)
