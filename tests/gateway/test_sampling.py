"""Whose trace a request continues, and which traces are kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, TraceFlags, set_span_in_context
from opentelemetry.trace import SpanContext as OtelContext

from gateway.telemetry import Sampler, Telemetry, sampler
from tests.gateway import tracing
from tests.otlp import OtlpReceiver, check_tree
from workers.spans import SpanContext, new_trace_id


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def telemetry(collector: OtlpReceiver) -> Iterator[Telemetry]:
    made = tracing.build(collector)
    yield made
    made.shutdown(1.0)


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


@pytest.mark.parametrize("flags", ["00", "01"])
def test_inbound_context_is_the_parent(flags: str, telemetry: Telemetry, collector: OtlpReceiver) -> None:
    """gateway F3, F5: same trace id, tracestate kept, sampled flag honoured; the caller's span is not ours to end."""
    headers = (*tracing.inbound(flags), (b"baggage", b"tenant=evil"))
    sent = tracing.ok(tracing.start(telemetry, headers))
    assert sent.trace.keys() == {"traceparent", "tracestate"}
    assert sent.trace["traceparent"].split("-")[1] == tracing.PARENT
    assert sent.trace["traceparent"].endswith(f"-{flags}")
    assert sent.trace["tracestate"] == "vendor=1"
    assert telemetry.flush()
    if flags == "00":
        assert collector.spans() == []
        return
    spans = collector.spans()
    tree = check_tree(spans, remote_parent=tracing.CALLER)
    assert {span.trace_id for span in spans} == {tracing.PARENT}
    assert tracing.CALLER not in {span.span_id for span in spans}
    assert {span.tracestate for span in spans} == {"vendor=1"}
    assert tree.named("chat tiny").span_id == sent.trace["traceparent"].split("-")[2]


@pytest.mark.parametrize(
    "headers",
    [
        ((b"traceparent", b"garbage"),),
        ((b"traceparent", f"00-{'0' * 32}-{tracing.CALLER}-01".encode()),),
        ((b"traceparent", f"00-{tracing.PARENT}-{'0' * 16}-01".encode()),),
        ((b"traceparent", f"ff-{tracing.PARENT}-{tracing.CALLER}-01".encode()),),
        (*tracing.inbound()[:1], *tracing.inbound()[:1]),
        ((b"traceparent", b"\xff\xfe" * 40),),
    ],
)
def test_malformed_inbound_context_starts_a_new_trace(
    headers: tuple[tuple[bytes, bytes], ...], telemetry: Telemetry, collector: OtlpReceiver
) -> None:
    tracing.ok(tracing.start(telemetry, headers))
    assert tracing.received(telemetry, collector).root.trace_id != tracing.PARENT


def test_what_is_kept(collector: OtlpReceiver) -> None:
    nothing = tracing.build(collector, sample_ratio=0.0, slow_s=5.0)
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
    assert ended(nothing, "ok", 200, headers=tracing.inbound("01")), "parent-based"
    everything = tracing.build(collector, sample_ratio=1.0)
    assert ended(everything, "ok", 200)
    assert not ended(everything, "ok", 200, sample_ratio=0.0)
    assert not ended(everything, "ok", 200, headers=tracing.inbound("00"))
    assert ended(everything, "error", 500, headers=tracing.inbound("00")), "a caller must not be able to hide a failure"
    assert nothing.flush()
    assert everything.flush()
    assert len(collector.traces()) == len([s for s in collector.spans() if s.name == tracing.ROOT]) - 1  # PARENT twice
    nothing.shutdown()
    everything.shutdown()


def test_a_stranger_s_wish_to_be_sampled_is_none(collector: OtlpReceiver) -> None:
    """Without a credential anybody could fill the collector, by the flag or by a trace id that every ratio takes."""
    telemetry = tracing.build(collector, sample_ratio=0.1)
    low = (b"traceparent", f"00-{1:032x}-{tracing.CALLER}-01".encode())

    def kept(known: bool) -> int:
        traces = [telemetry.request("POST", tracing.ROUTE, (low,)) for _ in range(400)]
        for trace in traces:
            if known:
                trace.identify(tenant="search")
        return sum(trace.finish("error", status=401) for trace in traces)

    assert kept(known=True) == 400
    assert 5 < kept(known=False) < 100
    strange = telemetry.request("POST", tracing.ROUTE, (low,))
    assert strange.finish("error", status=500), "a failure is kept all the same"
    telemetry.shutdown()


@pytest.mark.parametrize(
    ("outcome", "status", "seconds", "why"),
    [
        ("ok", 200, 0.1, "sampled"),
        ("throttled", 429, 0.1, "sampled"),
        ("error", 401, 0.1, "sampled"),
        ("cancelled", None, 9.0, "slow"),
        ("ok", 200, 2.1, "slow"),
        ("error", 500, 0.1, "failed"),
        ("error", 200, 9.0, "failed"),
        ("timeout", 504, 9.0, "failed"),
        ("shed", 429, 0.1, "shed"),
        ("shed", 429, 9.0, "shed"),
        ("shed", 503, 0.1, "shed"),
    ],
)
def test_a_kept_trace_says_why(
    outcome: Any, status: int | None, seconds: float, why: str, collector: OtlpReceiver
) -> None:
    telemetry = tracing.build(collector, slow_s=5.0)
    assert ended(telemetry, outcome, status, seconds, slow_first_byte_s=2.0)
    assert tracing.received(telemetry, collector).root.attributes["forebay.kept"] == why
    telemetry.shutdown()


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


def test_new_trace_ids_are_valid_and_distinct() -> None:
    made = {new_trace_id() for _ in range(1_000)}
    assert len(made) == 1_000
    assert all(0 < value < 2**128 for value in made)
