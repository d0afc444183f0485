"""Request traces as a collector receives them: one sound tree each, however the request ends."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from gateway import trace_attributes as attributes
from gateway.telemetry import Telemetry
from gateway.trace import STATIONS
from policies.types import AdmissionDecision, QuotaDecision, Usage
from tests.gateway import tracing
from tests.otlp import OtlpReceiver, check_tree


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def telemetry(collector: OtlpReceiver) -> Iterator[Telemetry]:
    made = tracing.build(collector)
    yield made
    made.shutdown(1.0)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_request_is_one_tree(protocol: Any) -> None:
    with OtlpReceiver(protocol) as collector:
        telemetry = tracing.build(collector)
        tracing.ok(tracing.start(telemetry))
        tree = tracing.received(telemetry, collector)
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
    assert tracing.received(telemetry, collector).named("queue").attributes == {
        "forebay.tenant": "search",
        "forebay.class": "interactive",
        "forebay.queue.policy": "vtc",
        "forebay.queue.depth": 4,
        "forebay.queue.depth_tenant": 2,
        "forebay.queue.position": 2,
        "forebay.queue.weight": 4.0,
        "forebay.queue.wait_ms": 30.0,
        "forebay.queue.virtual_start": 12.5,
        "forebay.queue.picked_by": "vtc",
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
    tree = tracing.received(telemetry, collector)
    assert tree.root.attributes["forebay.outcome"] == "cancelled"
    assert [name for name, _, _ in tree.root.events] == ["first_byte", "client_disconnected"]
    assert not [span.name for span in [tree.root, *tree.of(tree.root)] if span.error]


def test_a_throttled_request_is_one_tree(telemetry: Telemetry, collector: OtlpReceiver) -> None:
    trace = tracing.start(telemetry)
    tracing.authenticate(trace)
    span = trace.begin("quota reserve")
    verdict = QuotaDecision(False, limit="tokens_per_minute", cost=11, retry_after_s=1.5, remaining=tracing.REMAINING)
    span.set(attributes.quota, verdict)
    span.fail("tokens_per_minute")
    span.end()
    trace.finish("throttled", status=429, reason="tokens_per_minute")
    tree = tracing.received(telemetry, collector)
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
    tracing.queued(span)
    span.set(attributes.left_queue, 20.0)
    span.fail("max_wait")
    span.end()
    tracing.settle(trace, Usage())
    trace.finish("shed", status=429, reason="max_wait")
    tree = tracing.received(telemetry, collector)
    queue = tree.named("queue")
    assert queue.error
    assert queue.attributes["error.type"] == "max_wait"
    assert queue.attributes["forebay.queue.wait_ms"] == 20_000.0
    assert tree.root.attributes["forebay.shed.reason"] == "max_wait"
    assert [span.name for span in tree.of(tree.root)][-2:] == ["queue", "quota settle"]


def test_admission_that_refuses(telemetry: Telemetry, collector: OtlpReceiver) -> None:
    trace = tracing.start(telemetry)
    span = trace.begin("admission")
    span.set(attributes.admission, AdmissionDecision(False, "queue_full", 1.0, 61.0))
    span.fail("queue_full")
    span.end()
    trace.finish("shed", status=429, reason="queue_full")
    tree = tracing.received(telemetry, collector)
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
    tree = tracing.received(telemetry, collector)
    chats = [span for span in tree.of(tree.root) if span.name == "chat tiny"]
    assert [span.error for span in chats] == [True, False]
    assert chats[1].links == [(chats[0].trace_id, chats[0].span_id, {"forebay.link": "retry_of"})]
    assert [message.trace["traceparent"].split("-")[2] for message in (first, second)] == [s.span_id for s in chats]


def test_an_error_after_the_first_byte_is_an_error(telemetry: Telemetry, collector: OtlpReceiver) -> None:
    trace = tracing.start(telemetry)
    tracing.dispatch(trace, tracing.generate())
    trace.event("first_byte")
    trace.finish("error", status=200, error_type="worker_lost")
    tree = tracing.received(telemetry, collector)
    assert tree.root.error
    assert tree.named("chat tiny").error, "what is open when a request fails has failed"
    assert tree.named("chat tiny").attributes["error.type"] == "worker_lost"


def test_random_lifecycles_end_every_span_once(collector: OtlpReceiver) -> None:
    """No orphan, no double end, no overlap, whatever is called in whatever order (gateway F3)."""
    telemetry = tracing.build(collector)
    rng = random.Random(7)
    outcomes = ("ok", "cancelled", "throttled", "shed", "timeout", "error")
    traces = 0
    for number in range(1_000):
        trace = tracing.start(telemetry, tracing.inbound() if number % 50 == 0 else ())
        open_spans: list[Any] = []
        for _ in range(rng.randrange(12)):
            act = rng.randrange(7)
            if act <= 2:
                open_spans.append(trace.begin(rng.choice(STATIONS)))
            elif act == 3:
                open_spans.append(trace.begin_chat("tiny", dict, {"gen_ai.operation.name": "chat"}))
            elif act == 4 and open_spans:
                span = rng.choice(open_spans)
                span.end()
                span.end()
                span.fail("late")
            elif act == 5:
                trace.event(rng.choice(("first_byte", "last_byte", "client_disconnected")))
            elif open_spans:
                rng.choice(open_spans).set(attributes.tokenized, 1)
        trace.finish(rng.choice(outcomes), status=rng.choice((None, 200, 429, 500)))  # type: ignore[arg-type]
        for span in open_spans:
            span.end()
        assert trace.begin("auth").end() is None
        trace.finish("ok", status=200)
        traces += 1
    assert telemetry.flush(20)
    telemetry.shutdown()
    received_traces = collector.traces()
    shared = received_traces.pop(tracing.PARENT)
    assert len([span for span in shared if span.name == tracing.ROOT]) == 20
    assert len({span.span_id for span in shared}) == len(shared)
    assert len(received_traces) == traces - 20
    for spans in received_traces.values():
        tree = check_tree(spans)
        assert tree.root.name == tracing.ROOT
        assert not [span for span in spans if span.attributes.get("error.type") == "late"], "changed after its end"


@pytest.mark.parametrize("capture", [False, True])
def test_content_is_exported_only_when_asked_for(capture: bool, collector: OtlpReceiver) -> None:
    canary = "CANARY-7f3a"
    telemetry = tracing.build(collector, capture_content=capture)
    trace = tracing.start(telemetry, ((b"authorization", canary.encode()), (b"user-agent", canary.encode())))
    assert trace.captures_content is capture
    tracing.authenticate(trace)
    _, chat = tracing.dispatch(trace, tracing.generate())
    trace.content(input_messages=f'[{{"content": "{canary}"}}]')
    chat.end()
    trace.finish("ok", status=200)
    tree = tracing.received(telemetry, collector)
    telemetry.shutdown()
    with_canary = [span.name for span in collector.spans() if canary in repr(span) + repr(span.resource)]
    assert with_canary == (["chat tiny"] if capture else [])
    if capture:
        assert canary in tree.named("chat tiny").attributes["gen_ai.input.messages"]
