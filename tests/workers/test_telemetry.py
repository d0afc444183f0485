"""The worker's spans: children of the gateway's chat span, built from the engine's records once a trace is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.telemetry import Telemetry, setup
from gateway.trace import wall_clock
from tests.gateway import tracing
from tests.otlp import OtlpReceiver, ReceivedSpan, check_tree
from workers import collector as where
from workers.config import EngineConfig
from workers.engine.loop import Engine
from workers.engine.record import SequenceRecord, StepRecord, TransferRecord
from workers.engine.testing import FakeRunner
from workers.metrics import Sources, WorkerMetrics
from workers.protocol import Generate, SamplingParams, WorkerStats
from workers.spans import parse_traceparent
from workers.telemetry import SpanSink, exporter, resource
from workers.tracing import HOLD_PREFILL_S, HOLD_S, MOST_HELD, WorkerTelemetry
from workers.tracing import setup as worker_setup

MS = 1_000_000
HEADERS = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def gateway(collector: OtlpReceiver) -> Iterator[Telemetry]:
    made = setup(tracing.settings(otlp_endpoint=collector.endpoint), env={})
    yield made
    made.shutdown(1.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sink(collector: OtlpReceiver) -> Iterator[SpanSink]:
    target = where.target(collector.env)
    assert target is not None
    made = SpanSink(exporter(target), resource({}, "forebay-worker", "local-0", {}))
    yield made
    made.shutdown(1.0)


@pytest.fixture
def worker(sink: SpanSink, clock: Clock) -> WorkerTelemetry:
    return WorkerTelemetry(sink, model="tiny", worker="local-0", clock=clock, every=1_000)


def records(n: int = 1, request: str = "job-1", **options: Any) -> list[SequenceRecord]:
    """A finished request's records."""
    sent = Generate(id=request, tokens=[1, 2, 3], max_tokens=8, n=n, trace=HEADERS)
    return tracing.records(sent, 10**18, **options)


def spans(sink: SpanSink, collector: OtlpReceiver) -> list[ReceivedSpan]:
    """Everything exported so far."""
    assert sink.flush()
    return collector.spans()


def test_guesses_are_told_of_the_request(worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver) -> None:
    """Of all choices together: how many, and which part of them was right; nothing where none was made."""
    for name, guesses in (("with", ((3, 1), (0, 2))), ("without", ())):
        made = records(2, name)
        for record, (accepted, rejected) in zip(made, guesses, strict=False):
            record.guessed(accepted, rejected)
        for record in made:
            worker.record(record)
        worker.keep(name, True)
    told = [
        {key: value for key, value in span.attributes.items() if "speculation" in key}
        for span in spans(sink, collector)
        if span.name == "inference tiny"
    ]
    prefix = "forebay.speculation"
    assert {f"{prefix}.drafts": 6, f"{prefix}.accepted": 3, f"{prefix}.acceptance": 0.5} in told
    assert {} in told


def test_one_tree_across_both_processes(
    gateway: Telemetry, worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver
) -> None:
    trace = tracing.start(gateway)
    tracing.authenticate(trace)
    tracing.admit(trace)
    sent, chat = tracing.dispatch(trace, tracing.generate())
    clock_ns = wall_clock()
    base = clock_ns()
    while clock_ns() < base + 10 * MS:  # the records below last 9 ms
        pass
    chat.end()
    worker.record(tracing.records(sent, base)[0])
    assert trace.finish("ok", status=200)
    worker.keep(sent.id, trace.keep)
    assert gateway.flush()
    tree = check_tree(spans(sink, collector), clock_slack_ns=1 * MS)
    chat_span = tree.named("chat tiny")
    (inference,) = tree.of(chat_span)
    assert (inference.name, inference.kind, inference.service) == ("inference tiny", "SERVER", "forebay-worker")
    assert inference.resource["service.instance.id"] == "local-0"
    assert [span.name for span in tree.of(inference)] == ["wait for slot", "prefill", "decode"]
    wait, prefill, decode = tree.of(inference)
    assert (wait.start_ns, wait.end_ns) == (base, base + 1 * MS)
    assert wait.attributes == {"forebay.kv.free_blocks": 40}
    assert prefill.attributes == {
        "forebay.tokens": 1, "forebay.cached_tokens": 2, "forebay.chunks": 1, "forebay.recompute": False,
    }  # fmt: skip
    (chunk,) = tree.of(prefill)
    assert chunk.name == "prefill chunk"
    assert chunk.attributes == {"forebay.chunk.index": 0, "forebay.tokens": 1, "forebay.step.id": 7}
    assert [name for name, _, _ in decode.events] == ["first_token"]
    assert decode.attributes["forebay.itl_p50_ms"] == pytest.approx(1.0, rel=0.07)
    assert decode.attributes["forebay.itl_max_ms"] == 1.0
    assert inference.attributes["forebay.finish"] == ["stop"]


def test_the_engines_own_records_make_sound_trees(sink: SpanSink, collector: OtlpReceiver) -> None:
    """Twelve requests through the real engine, in a pool so tight that it preempts; every tree is sound."""
    worker = WorkerTelemetry(sink, model="tiny", worker="local-0", every=1)
    metrics = WorkerMetrics(Sources(WorkerStats))

    def on_step(record: StepRecord) -> None:
        worker.step(record)
        metrics.step(record)

    config = EngineConfig(block_size=4, max_step_tokens=16, max_running=8)
    engine = Engine(
        config, FakeRunner(24, 4, vocab=900, budget=config.step_rows),
        blocks=24, max_context=90, revision="r", eos_ids=(),
        on_outputs=lambda outputs: None, on_step=on_step, on_record=worker.record,
    )  # fmt: skip
    sent = 12
    for number in range(sent):
        trace = {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}
        params = SamplingParams(seed=0, ignore_eos=True)
        tokens = [100 * number + i for i in range(20)]
        engine.submit(Generate(f"job-{number}", tokens, 24, params, n=1 + (number % 3 == 0), scope=b"s", trace=trace))
    while engine.step():
        pass
    for number in range(sent):
        worker.keep(f"job-{number}", True)
    worker.settle()
    assert sink.flush()
    traces = collector.traces()
    preemptions = 0
    for number in range(sent):
        found = traces.pop(f"{number + 1:032x}")
        parallel = ("inference tiny",) if number % 3 == 0 else ()
        tree = check_tree(found, remote_parent=f"{number + 1:016x}", parallel=parallel)
        preemptions += tree.root.attributes["forebay.preemptions"]
        decoded = sum(span.attributes["forebay.tokens"] for span in found if span.name == "decode")
        assert decoded == tree.root.attributes["forebay.tokens"] == 24 * (1 + (number % 3 == 0))
        recomputed = [span for span in found if span.attributes.get("forebay.recompute")]
        assert len([span for span in found if span.name == "preempted"]) == len(recomputed)
    assert preemptions > 0
    steps = [spans[0] for spans in traces.values()]
    assert {span.name for span in steps} == {"engine step"}
    contexts = {span.span_id for span in steps}
    linked = {link[1] for span in collector.spans() if span.name == "prefill chunk" for link in span.links}
    assert linked
    assert linked <= contexts, "no link to a step that was not exported"
    assert metrics.registry.get_sample_value("forebay_engine_batch_size_count") == len(steps)


def test_a_preempted_request_shows_each_stretch(
    worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver
) -> None:
    worker.record(records(preempted=True)[0])
    worker.keep("job-1", True)
    tree = check_tree(spans(sink, collector), remote_parent="00f067aa0ba902b7")
    row = tree.of(tree.root)
    assert [span.name for span in row] == ["wait for slot", "prefill", "decode", "preempted", "prefill", "decode"]
    assert row[3].attributes == {"forebay.preempt.reason": "kv_pressure", "forebay.preempt.blocks_freed": 3}
    assert [span.attributes["forebay.recompute"] for span in row if span.name == "prefill"] == [False, True]
    assert [len(tree.of(span)) for span in row] == [0, 1, 0, 0, 1, 0]
    assert [name for name, _, _ in row[2].events] == ["first_token"]
    assert [(name, attributes) for name, _, attributes in row[5].events] == [("stall", {"forebay.gap_ms": 392.0})]
    assert "forebay.itl_max_ms" not in row[2].attributes
    assert row[5].attributes["forebay.itl_max_ms"] == 392.0


def test_choices_share_one_inference_span(worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver) -> None:
    first, second, third = records(n=3)
    worker.record(third)
    worker.keep("job-1", True)
    worker.record(first)
    assert spans(sink, collector) == [], "built only when all choices are there"
    worker.record(second)
    tree = check_tree(spans(sink, collector), remote_parent="00f067aa0ba902b7", parallel=("inference tiny",))
    assert tree.root.attributes["forebay.choices"] == 3
    assert tree.root.attributes["forebay.tokens"] == 12
    assert [s.attributes["forebay.choice"] for s in tree.of(tree.root) if s.name == "decode"] == [0, 1, 2]
    assert len([s for s in tree.of(tree.root) if s.name == "wait for slot"]) == 1


def test_a_request_that_never_ran(worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver) -> None:
    record = SequenceRecord("job-1", 0, 1, "key", 3, trace=HEADERS, received_ns=10**18)
    record.finish, record.error = "error", "prompt_too_long"
    record.ended(10**18)
    worker.record(record)
    worker.keep("job-1", True)
    tree = check_tree(spans(sink, collector), remote_parent="00f067aa0ba902b7")
    assert tree.root.error
    assert tree.root.attributes["error.type"] == "prompt_too_long"
    assert [span.name for span in tree.of(tree.root)] == ["wait for slot"]


def test_everything_is_capped_at_16(worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver) -> None:
    made = []
    for record in records(n=20):
        record.phases.clear()
        record.chunks.clear()
        record.admitted(10**18 + MS, 0, 9)
        for number in range(40):
            record.chunk(number, 10**18 + (number + 1) * MS, 10**18 + (number + 2) * MS, 1)
        record.produced(10**18 + 50 * MS, 1)
        record.stalls = [(10**18 + 60 * MS, 5)] * 40
        record.ended(10**18 + 100 * MS)
        made.append(record)
    for record in made:
        worker.record(record)
    worker.keep("job-1", True)
    found = spans(sink, collector)
    tree = check_tree(found, remote_parent="00f067aa0ba902b7", parallel=("inference tiny",))
    assert len([span for span in found if span.name == "prefill chunk"]) == 16
    assert sum(s.attributes["forebay.tokens"] for s in found if s.name == "prefill chunk") == 40
    assert len([span for span in found if span.name == "decode"]) == 16
    assert {len([e for e in span.events if e[0] == "stall"]) for span in found if span.name == "decode"} == {16}
    assert len(tree.root.attributes["forebay.finish"]) == 16


@pytest.mark.parametrize("verdict_first", [True, False])
def test_a_dropped_trace_leaves_nothing(
    verdict_first: bool, worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver
) -> None:
    if verdict_first:
        worker.keep("job-1", False)
    worker.record(records()[0])
    if not verdict_first:
        worker.keep("job-1", False)
    assert worker.held == 0
    assert spans(sink, collector) == []


def test_timings_are_held_for_30_s_at_most(
    worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver, clock: Clock
) -> None:
    worker.record(records(request="early")[0])
    clock.now += HOLD_S - 1
    worker.record(records(request="late")[0])
    clock.now += 1
    worker.sweep()
    assert worker.held == 1
    worker.keep("early", True)
    worker.keep("late", True)
    assert [span.name for span in spans(sink, collector)].count("inference tiny") == 1
    clock.now += HOLD_S
    worker.sweep()
    assert worker.held == 0, "the verdict that came too late is forgotten as well"


def transfer(result: str = "ok", tokens: int = 3, headers: dict[str, str] = HEADERS) -> TransferRecord:
    """A wait of 5 ms that ends when the engine has the request, as ``records`` has it."""
    return TransferRecord(headers, "127.0.0.1:7", 10**18 - 5 * MS, 10**18, result, tokens)


@pytest.mark.parametrize("result", ["ok", "late", "stopped"])
def test_the_wait_for_another_workers_blocks_is_a_span(
    result: str, worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver, clock: Clock
) -> None:
    """However long its request runs; it comes first, and is an error when something went wrong."""
    worker.transferred(transfer(result, 3 if result == "ok" else 0))
    clock.now += 10 * HOLD_S
    worker.sweep()
    for record in records(2):
        worker.record(record)
    worker.keep("job-1", True)
    found = spans(sink, collector)
    [inference] = [span for span in found if span.name == "inference tiny"]
    [moved] = [span for span in found if span.name == "kv transfer"]
    assert (moved.parent, moved.start_ns, moved.end_ns) == (inference.span_id, inference.start_ns, 10**18)
    assert inference.start_ns == 10**18 - 5 * MS
    assert moved.attributes["forebay.transfer.result"] == result
    assert moved.attributes["forebay.transfer.tokens"] == (3 if result == "ok" else 0)
    assert moved.attributes["forebay.transfer.source"] == "127.0.0.1:7"
    assert (moved.error, moved.attributes.get("error.type")) == ((True, "late") if result == "late" else (False, None))
    [waited] = [span for span in found if span.name == "wait for slot"]
    assert waited.start_ns >= moved.end_ns + 2_000
    assert worker.held == 0


def test_transfers_of_dropped_traces_and_of_strangers_are_forgotten(worker: WorkerTelemetry) -> None:
    worker.transferred(transfer())
    worker.record(records()[0])
    worker.keep("job-1", False)
    worker.transferred(transfer(headers={}))
    assert worker.held == 0
    for number in range(MOST_HELD + 7):
        worker.transferred(transfer(headers={"traceparent": f"00-{number + 1:032x}-{1:016x}-01"}))
    assert worker.held == MOST_HELD
    WorkerTelemetry(None, model="tiny", worker="w").transferred(transfer())


def test_a_retrys_transfer_is_shown_with_its_own_attempt(
    gateway: Telemetry, worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver
) -> None:
    trace = tracing.start(gateway)
    first, chat = tracing.dispatch(trace, tracing.generate())
    worker.transferred(transfer("broken", 0, first.trace))
    chat.fail("worker_error")
    chat.end()
    second, _ = tracing.attempt(trace, tracing.generate())
    worker.transferred(transfer("ok", 3, second.trace))
    for sent in (first, second):
        worker.record(tracing.records(sent, 10**18)[0])
    worker.keep("job-1", trace.finish("ok", status=200))
    assert gateway.flush()
    found = {span.span_id: span for span in spans(sink, collector)}
    moved = [span for span in found.values() if span.name == "kv transfer"]
    attempts = {span.attributes["forebay.transfer.result"]: found[span.parent].parent for span in moved}
    assert attempts == {"broken": first.trace["traceparent"][36:52], "ok": second.trace["traceparent"][36:52]}


def test_a_prefill_workers_part_is_held_while_others_go_on_with_it(
    collector: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = worker_setup(model="tiny", worker="p", env=collector.env, hold_s=HOLD_PREFILL_S)
    clock = Clock()
    monkeypatch.setattr(made, "_clock", clock)
    made.record(records()[0])
    clock.now += HOLD_PREFILL_S - 1
    made.sweep()
    made.keep("job-1", True)
    made.shutdown(5.0)
    assert "inference tiny" in [span.name for span in collector.spans()]


def test_what_came_back_from_a_lower_tier_is_told(
    worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver
) -> None:
    made = records()[0]
    made.preempted(10**18 + 20 * MS, "kv_pressure", 3)
    made.admitted(10**18 + 30 * MS, 48, 12, 32)
    made.ended(10**18 + 40 * MS)
    worker.record(made)
    worker.keep("job-1", True)
    told = [span.attributes.get("forebay.restored_tokens") for span in spans(sink, collector) if span.name == "prefill"]
    assert sorted(told, key=str) == [32, None]


def test_a_choice_that_runs_on_keeps_its_siblings(
    worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver, clock: Clock
) -> None:
    first, second = records(n=2)
    worker.record(first)
    for _ in range(3):
        clock.now += HOLD_S
        worker.sweep()
    worker.record(second)
    worker.keep("job-1", True)
    assert [span.name for span in spans(sink, collector)].count("decode") == 2


def test_what_is_held_is_bounded(worker: WorkerTelemetry) -> None:
    for number in range(MOST_HELD + 500):
        worker.record(records(request=f"job-{number}")[0])
    assert worker.held == MOST_HELD


def test_a_retry_on_the_same_worker_is_a_second_tree(
    gateway: Telemetry, worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver
) -> None:
    trace = tracing.start(gateway)
    first, chat = tracing.dispatch(trace, tracing.generate())
    chat.fail("worker_error")
    chat.end()
    second, _ = tracing.attempt(trace, tracing.generate())
    worker.record(tracing.records(first, 10**18)[0])
    worker.record(tracing.records(second, 10**18)[0])
    worker.keep("job-1", trace.finish("ok", status=200))
    assert gateway.flush()
    found = spans(sink, collector)
    chats = [span.span_id for span in found if span.name == "chat tiny"]
    assert sorted(span.parent for span in found if span.name == "inference tiny") == sorted(chats)


def test_steps_and_requests_are_linked_both_ways(
    worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver, clock: Clock
) -> None:
    base = 10**18
    for number in range(1, 7):
        worker.step(tracing.step(number, base, ["job-1"]))
    worker.step(tracing.step(7, base, ["job-1", "job-1", "job-2"], took_ns=400 * MS))  # slow
    worker.step(tracing.step(8, base, ["job-1"], took_ns=400 * MS))  # slow, but within the same second
    worker.step(tracing.step(1_000, base, ["job-3"]))
    worker.record(records()[0])
    worker.keep("job-1", True)
    worker.keep("job-2", False)
    worker.record(records(request="job-2")[0])
    clock.now += HOLD_S
    worker.sweep()
    found = spans(sink, collector)
    steps = {span.attributes["forebay.step.id"]: span for span in found if span.name == "engine step"}
    assert sorted(steps) == [7, 1_000]
    (inference,) = [span for span in found if span.name == "inference tiny"]
    (chunk,) = [span for span in found if span.name == "prefill chunk"]
    assert chunk.links == [(steps[7].trace_id, steps[7].span_id, {"forebay.link": "engine_step"})]
    assert steps[7].links == [(inference.trace_id, inference.span_id, {"forebay.link": "request"})]
    assert steps[7].parent == ""
    assert steps[7].trace_id != inference.trace_id
    assert steps[7].attributes["forebay.step.slow"] is True
    assert steps[1_000].attributes["forebay.step.slow"] is False
    assert steps[1_000].links == []


def test_held_steps_are_bounded(sink: SpanSink, clock: Clock) -> None:
    worker = WorkerTelemetry(sink, model="tiny", worker="local-0", clock=clock, every=1)
    for number in range(1, 2_000):
        worker.step(tracing.step(number, 10**18, ["job-1"]))
    assert worker.held == 256


def test_a_broken_record_loses_only_its_own_trace(
    worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver
) -> None:
    broken = records(request="broken")[0]
    broken.received_ns = "yesterday"  # type: ignore[assignment]
    worker.record(broken)
    worker.keep("broken", True)
    worker.record(records()[0])
    worker.keep("job-1", True)
    assert [span.name for span in spans(sink, collector)].count("inference tiny") == 1


def test_without_a_collector_nothing_is_kept() -> None:
    worker = worker_setup(model="tiny", worker="local-0", env={})
    worker.record(records()[0])
    worker.step(tracing.step(1_000, 10**18, ["job-1"]))
    worker.keep("job-1", True)
    worker.sweep()
    assert worker.held == 0
    worker.shutdown()


def test_a_worker_exports_by_its_environment(collector: OtlpReceiver) -> None:
    """What the gateway tells a worker suffices, and a stop exports what was kept."""
    target = where.target({}, collector.endpoint, "grpc")
    metrics = WorkerMetrics(Sources(WorkerStats))
    env = {"OTEL_SERVICE_NAME": "edge", **where.worker_environment(target)}
    worker = worker_setup(model="tiny", worker="local-3", metrics=metrics, versions={"device": "cpu"}, env=env)
    worker.record(records()[0])
    worker.keep("job-1", True)
    worker.shutdown()
    root = check_tree(collector.spans(), remote_parent="00f067aa0ba902b7").root
    assert root.resource["service.instance.id"] == "local-3"
    assert root.resource["forebay.version.device"] == "cpu"
    assert metrics.registry.get_sample_value("forebay_spans_exported_total") == 5


@pytest.mark.parametrize(
    "header",
    ["", "00-x", f"00-{'z' * 32}-{'1' * 16}-01", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01"],
)
def test_a_malformed_context_builds_nothing(
    header: str, worker: WorkerTelemetry, sink: SpanSink, collector: OtlpReceiver
) -> None:
    assert parse_traceparent({"traceparent": header}) is None
    record = records()[0]
    record.trace = {"traceparent": header}
    worker.record(record)
    worker.keep("job-1", True)
    assert spans(sink, collector) == []
