"""The worker's part of a request's trace, and engine steps, built afterwards from the engine's records (plain numbers).

    inference {model}  SERVER, child of the gateway's chat span; all choices of a request share it
      kv transfer      a decode worker's wait for the prompt's blocks from a prefill worker, which has a span of its own
      wait for slot    received → first admission
      prefill          one per stretch of prompt computation; children: at most 16 prefill chunks, linked to their steps
      decode           events first_token and stall (at most 16); gap figures on the last one
      preempted        then prefill (recompute) → decode again

Rules
- A span lies within its parent, and a choice's stretches end at least 2 µs before the next begin; where the engine's
  clock says otherwise (equal stamps), spans are moved by these 2 µs, never dropped.
- Everything is bounded: 16 choices described, 16 chunks and 16 stalls per request, 16 links per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from workers.engine.record import Phase, SequenceRecord, StepRecord, TransferRecord
from workers.spans import (
    GAP_NS,
    Attributes,
    Link,
    SpanContext,
    SpanData,
    child_of,
    clean,
    new_span_id,
    new_trace_id,
)

MOST = 16
"""Chunk spans, stall events and described choices of a request; links of a step."""


def request_spans(
    records: Sequence[SequenceRecord],
    parent: SpanContext,
    context: SpanContext,
    *,
    model: str,
    worker: str,
    steps: Mapping[int, SpanContext],
    transfer: TransferRecord | None = None,
) -> list[SpanData]:
    """One attempt's spans, parent first.

    ``parent`` is the gateway's chat span, ``context`` the inference span's own; ``steps`` the exported steps' contexts.
    """
    records = sorted(records, key=lambda record: record.index)
    start = min(record.received_ns for record in records)
    if transfer is not None:
        start = min(start, transfer.start_ns)
    root = SpanData(f"inference {model}", context, parent, kind="server", start_ns=start)
    root.attributes = clean(
        {
            "forebay.model": model,
            "forebay.worker": worker,
            "forebay.choices": records[0].n,
            "forebay.prompt.tokens": records[0].prompt_tokens,
            "forebay.tokens": sum(record.output_tokens for record in records),
            "forebay.cached_tokens": sum(record.prompt_cached for record in records),
            "forebay.recomputed_tokens": sum(record.recomputed for record in records),
            "forebay.preemptions": sum(record.preemptions for record in records),
            **_speculation(records),
            "forebay.finish": [record.finish or "unknown" for record in records[:MOST]],
        }
    )
    failed = next((record for record in records if record.finish == "error"), None)
    if failed is not None:
        root.error = True
        root.attributes["error.type"] = failed.error or "internal"
    spans = [root]
    if transfer is not None:
        spans.append(_transfer(transfer, context))
    began = spans[-1].end_ns + GAP_NS if transfer is not None else 0
    room = MOST
    for record in records[:MOST]:
        made, used = _choice(record, context, room, steps, began)
        spans += made
        room -= used
    last = max((span.end_ns for span in spans[1:]), default=start)
    root.end_ns = max(start + 1, last, *(record.finished_ns for record in records))
    return spans


def _speculation(records: Sequence[SequenceRecord]) -> Attributes:
    """Guesses and which part of them was right; nothing where none was made."""
    accepted = sum(record.drafts_accepted for record in records)
    made = accepted + sum(record.drafts_rejected for record in records)
    if not made:
        return {}
    return {
        "forebay.speculation.drafts": made,
        "forebay.speculation.accepted": accepted,
        "forebay.speculation.acceptance": round(accepted / made, 4),
    }


def _transfer(transfer: TransferRecord, parent: SpanContext) -> SpanData:
    span = SpanData("kv transfer", child_of(parent), parent, start_ns=transfer.start_ns)
    span.end_ns = max(transfer.end_ns, transfer.start_ns + 1)
    span.attributes = {
        "forebay.transfer.source": transfer.source,
        "forebay.transfer.result": transfer.result,
        "forebay.transfer.tokens": transfer.tokens,
    }
    if transfer.result not in ("ok", "stopped"):  # stopped: the request itself was, or its blocks were purged
        span.error = True
        span.attributes["error.type"] = transfer.result
    return span


def _choice(
    record: SequenceRecord, parent: SpanContext, room: int, steps: Mapping[int, SpanContext], began: int
) -> tuple[list[SpanData], int]:
    """Spans of one choice, none before ``began``, and how many chunk spans are among them (at most ``room``)."""
    spans: list[SpanData] = []
    cursor = began
    choice: Attributes = {"forebay.choice": record.index if record.n > 1 else None}

    def stretch(name: str, start: int, end: int, attributes: Attributes) -> SpanData:
        nonlocal cursor
        span = SpanData(name, child_of(parent), parent, attributes=clean({**attributes, **choice}))
        span.start_ns = max(start, cursor)
        span.end_ns = max(end, span.start_ns + 1)
        cursor = span.end_ns + GAP_NS
        spans.append(span)
        return span

    if record.index == 0:  # the other choices fork from the first when its prompt is computed: they never wait
        waited_until = record.scheduled_ns or record.finished_ns
        stretch("wait for slot", record.received_ns, waited_until, {"forebay.kv.free_blocks": record.free_blocks})
    used = 0
    last_decode = max((i for i, phase in enumerate(record.phases) if phase.kind == "decode"), default=-1)
    for i, phase in enumerate(record.phases):
        end = phase.end_ns or record.finished_ns
        span = stretch(phase.kind, phase.start_ns, end, _phase_attributes(phase))
        if phase.kind == "prefill":
            chunks = _chunks(record, phase, span, room - used, steps)
            used += len(chunks)
            spans += chunks
        elif phase.kind == "decode":
            _decode_events(record, span, phase, i == last_decode)
    _first_token(record, spans)
    return spans, used


def _phase_attributes(phase: Phase) -> Attributes:
    if phase.kind == "prefill":
        return {
            "forebay.tokens": phase.tokens,
            "forebay.cached_tokens": phase.cached,
            "forebay.restored_tokens": phase.restored or None,
            "forebay.chunks": phase.chunks,
            "forebay.recompute": phase.recompute,
        }
    if phase.kind == "decode":
        return {"forebay.tokens": phase.tokens}
    return {"forebay.preempt.reason": phase.reason, "forebay.preempt.blocks_freed": phase.blocks_freed}


def _chunks(
    record: SequenceRecord, phase: Phase, parent: SpanData, room: int, steps: Mapping[int, SpanContext]
) -> list[SpanData]:
    spans: list[SpanData] = []
    phase_end = phase.end_ns or record.finished_ns
    cursor = parent.start_ns
    for index, chunk in enumerate(record.chunks):
        if len(spans) >= room or not phase.start_ns <= chunk.start_ns < max(phase_end, phase.start_ns + 1):
            continue
        start = max(chunk.start_ns, cursor)
        if start >= parent.end_ns:
            break
        span = SpanData("prefill chunk", child_of(parent.context), parent.context, start_ns=start)
        span.end_ns = min(max(chunk.end_ns, start + 1), parent.end_ns)
        span.attributes = {"forebay.chunk.index": index, "forebay.tokens": chunk.tokens, "forebay.step.id": chunk.step}
        step = steps.get(chunk.step)
        if step is not None:
            span.links.append(Link(step, {"forebay.link": "engine_step"}))
        cursor = span.end_ns + GAP_NS
        spans.append(span)
    return spans


def _decode_events(record: SequenceRecord, span: SpanData, phase: Phase, last: bool) -> None:
    for at, gap in record.stalls[:MOST]:
        if phase.start_ns <= at <= (phase.end_ns or record.finished_ns):
            span.events.append(("stall", _within(at, span), {"forebay.gap_ms": _ms(gap)}))
    if last and record.gaps.count:
        span.attributes["forebay.itl_p50_ms"] = _ms(record.gaps.quantile(0.5))
        span.attributes["forebay.itl_p99_ms"] = _ms(record.gaps.quantile(0.99))
        span.attributes["forebay.itl_max_ms"] = _ms(record.gaps.maximum)


def _first_token(record: SequenceRecord, spans: Iterable[SpanData]) -> None:
    """On the first decode span; on the last stretch when the first token was also the last one."""
    stretches = [span for span in spans if span.name in ("prefill", "decode")]
    if record.first_token_ns and stretches:
        span = next((span for span in stretches if span.name == "decode"), stretches[-1])
        span.events.insert(0, ("first_token", _within(record.first_token_ns, span), {}))


def step_context() -> SpanContext:
    """A trace of its own for a step worth showing."""
    return SpanContext(new_trace_id(), new_span_id())


def step_span(
    record: StepRecord, context: SpanContext, worker: str, slow: bool, requests: Sequence[SpanContext]
) -> SpanData:
    """``engine step``; ``requests`` are the inference spans of exported requests that took part."""
    return SpanData(
        "engine step",
        context,
        start_ns=record.start_ns,
        end_ns=max(record.end_ns, record.start_ns + 1),
        attributes={
            "forebay.worker": worker,
            "forebay.step.id": record.step,
            "forebay.step.batch_size": record.batch,
            "forebay.step.prefill_tokens": record.prefill_tokens,
            "forebay.step.decode_tokens": record.decode_tokens,
            "forebay.step.kv_used_ratio": round(record.kv_used, 4),
            "forebay.step.run_ms": _ms(record.run_ns),
            "forebay.step.slow": slow,
        },
        links=[Link(request, {"forebay.link": "request"}) for request in requests[:MOST]],
    )


def _within(at: int, span: SpanData) -> int:
    return min(max(at, span.start_ns), span.end_ns)


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)
