"""Requests as the pipeline and the dispatcher trace them, for the telemetry tests: one function per way to end."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway import trace_attributes as attributes
from gateway.metrics import Metrics
from gateway.settings import Settings
from gateway.telemetry import RequestTrace, Telemetry, setup
from gateway.trace import Span
from policies.types import (
    AdmissionDecision,
    LimitState,
    Pick,
    Principal,
    QuotaDecision,
    RouteDecision,
    TenantId,
    Usage,
)
from tests.otlp import OtlpReceiver, Tree, check_tree
from workers.engine.record import SequenceRecord, StepRecord
from workers.protocol import Generate, SamplingParams

ROUTE = "/v1/chat/completions"
ROOT = f"POST {ROUTE}"
MODEL = "tiny"
PARENT = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
REMAINING = {"requests": LimitState(600, 599, 0.1), "tokens": LimitState(200_000, 199_000, 0.3)}


def settings(**telemetry: Any) -> Settings:
    """Two tenants, one model."""
    return Settings.model_validate(
        {
            "policies": {"auth": {"use": "none"}},
            "tenants": [{"id": "search", "weight": 4}, {"id": "batch", "weight": 1}],
            "models": [{"name": MODEL, "source": "x", "pools": [{"name": "local"}]}],
            "telemetry": telemetry,
        }
    )


def generate(request: str = "job-1", n: int = 1) -> Generate:
    """With every parameter that becomes an attribute."""
    params = SamplingParams(temperature=0.5, top_k=5, seed=7, presence_penalty=0.1, frequency_penalty=0.2)
    return Generate(id=request, tokens=[1, 2, 3], max_tokens=8, params=params, n=n)


def queued(span: Span, requeued: str | None = None) -> None:
    """What a queue span says at its beginning."""
    span.set(
        attributes.queued,
        "vtc",
        tenant=TenantId("search"),
        service_class="interactive",
        weight=4.0,
        depth=4,
        depth_tenant=2,
        position=2,
        requeued=requeued,
    )


def start(telemetry: Telemetry, headers: tuple[tuple[bytes, bytes], ...] = ()) -> RequestTrace:
    """A request that arrived."""
    return telemetry.request("POST", ROUTE, headers, request_id="req-1", server=("127.0.0.1", 8080), http_version="1.1")


def authenticate(trace: RequestTrace, **identity: Any) -> None:
    """Auth and tokenize."""
    span = trace.begin("auth")
    span.set(attributes.auth, Principal(TenantId("search"), method="jwt", key_id="k1"))
    span.end()
    trace.identify(tenant="search", service_class="interactive", **identity)
    trace.tag(attributes.root, job_id="job-1", model=MODEL, adapter="sql", policy_generation=1, stream=True)
    span = trace.begin("tokenize")
    span.set(attributes.tokenized, 3)
    span.end()


def admit(trace: RequestTrace) -> None:
    """Admission and quota reserve, both passed."""
    span = trace.begin("admission")
    span.set(attributes.admission, AdmissionDecision(True, predicted_wait_s=0.25))
    span.end()
    span = trace.begin("quota reserve")
    span.set(attributes.quota, QuotaDecision(True, cost=11, remaining=REMAINING))
    span.end()


def dispatch(trace: RequestTrace, message: Generate) -> tuple[Generate, Span]:
    """Queue, route, chat begun; returns what goes to the worker, and the chat span."""
    span = trace.begin("queue")
    queued(span)
    served = [("batch", 100), ("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5)]
    span.set(attributes.picked, Pick("least_service", 12.5), 0.03, served, policy="vtc")
    span.end()
    return attempt(trace, message)


def attempt(trace: RequestTrace, message: Generate) -> tuple[Generate, Span]:
    """Route and chat begun."""
    span = trace.begin("route")
    span.set(attributes.routed, RouteDecision("local-0", "prefix", 16), candidates=2)
    span.end()
    chat = trace.begin_chat(
        MODEL, attributes.chat_request, message.params, MODEL, max_tokens=message.max_tokens, n=message.n, stream=True
    )
    return msgspec.structs.replace(message, trace=trace.inject()), chat


def settle(trace: RequestTrace, usage: Usage) -> None:
    """Quota settle."""
    span = trace.begin("quota settle")
    span.set(attributes.settled, usage, 4)
    span.end()


def ok(trace: RequestTrace, message: Generate | None = None, **identity: Any) -> Generate:
    """A streamed request that goes well; returns what the worker got."""
    authenticate(trace, **identity)
    admit(trace)
    sent, chat = dispatch(trace, message or generate())
    trace.event("first_byte")
    usage = Usage(prompt=1, cached=2, output=4)
    answered(chat, usage)
    chat.end()
    trace.event("last_byte")
    settle(trace, usage)
    trace.tag(attributes.root, worker="local-0", preemptions=1)
    trace.finish("ok", status=200)
    return sent


def answered(chat: Span, usage: Usage) -> None:
    """What the chat span says at its end."""
    chat.set(
        attributes.chat_response,
        usage,
        model=MODEL,
        response_id="chatcmpl-1",
        finish_reasons=["stop"],
        first_chunk_s=0.02,
    )


def records(sent: Generate, base_ns: int, *, preempted: bool = False) -> list[SequenceRecord]:
    """What an engine would have recorded of that message, from ``base_ns`` on, in steps of 1 ms."""
    ms = 1_000_000
    made = []
    for index in range(sent.n):
        record = SequenceRecord(sent.id, index, sent.n, "key", 3, trace=sent.trace, received_ns=base_ns)
        record.admitted(base_ns + ms, 2, 40)
        record.chunk(7, base_ns + ms, base_ns + 2 * ms, 1)
        for step in range(2, 6):
            record.produced(base_ns + step * ms, 1)
        if preempted:
            record.preemptions += 1
            record.preempted(base_ns + 6 * ms, "kv_pressure", 3)
            record.admitted(base_ns + 7 * ms, 0, 12)
            record.chunk(9, base_ns + 7 * ms, base_ns + 8 * ms, 5)
            record.produced(base_ns + 8 * ms, 1)
            record.produced(base_ns + 400 * ms, 1)
        record.finish = "stop"
        record.output_tokens = 4 + 2 * preempted
        record.ended(base_ns + (400 if preempted else 9) * ms)
        made.append(record)
    return made


def step(number: int, base_ns: int, ids: list[str], took_ns: int = 1_000_000) -> StepRecord:
    """An engine step."""
    return StepRecord(number, base_ns, base_ns + took_ns, took_ns // 2, len(ids), 1, 3, 0.25, ids)


def inbound(flags: str = "01", state: bytes = b"vendor=1") -> tuple[tuple[bytes, bytes], ...]:
    """Headers of a caller that traces."""
    return (b"traceparent", f"00-{PARENT}-{CALLER}-{flags}".encode()), (b"tracestate", state)


def build(collector: OtlpReceiver, metrics: Metrics | None = None, **options: Any) -> Telemetry:
    """A gateway's telemetry that exports to ``collector``."""
    endpoint = {"otlp_endpoint": collector.endpoint, "otlp_protocol": collector.protocol}
    return setup(settings(**endpoint, **options), metrics, env={}, instance="gw-1")


def received(telemetry: Telemetry, collector: OtlpReceiver, **checks: Any) -> Tree:
    """The one trace that was exported."""
    assert telemetry.flush()
    (spans,) = collector.traces().values()
    return check_tree(spans, **checks)
