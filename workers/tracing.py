"""Keeps what the engine recorded until the gateway says whether a trace is kept; then has spans built, elsewhere.

Rules
- ``record`` and ``step`` run on the engine thread, ``keep`` and ``transferred`` on the stream's: each only files
  numbers under a lock, in bounded time. Spans are made on the sink's thread.
- A finished request's records are held at most ``HOLD_S`` (``HOLD_PREFILL_S`` where others go on with it); without a
  verdict by then they are dropped. At most ``MOST_HELD`` requests are held, the oldest goes first.
- Records of a request's choices and the gateway's verdict come in any order; spans are built when all are there, or,
  once kept, from what is there when the time is up.
- Only steps worth showing are held (slow ones, and one in ``EVERY``), until their requests are decided or the time is
  up; links point only at spans that are exported.
- A transfer is known long before its request ends. It is held until that is decided; of more than ``MOST_HELD`` the
  oldest is forgotten, and its request has no span of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from workers import collector
from workers.engine.record import SequenceRecord, StepRecord, TransferRecord
from workers.metrics import WorkerMetrics
from workers.request_spans import MOST, request_spans, step_context, step_span
from workers.spans import SpanContext, child_of, parse_traceparent

if TYPE_CHECKING:
    from workers.telemetry import SpanSink

SERVICE = "forebay-worker"
SHUTDOWN_S = 0.7
HOLD_S = 30.0
HOLD_PREFILL_S = 660.0
"""A prefill worker's part is over long before its request, whose ``timeouts.total_s`` is 600 unless configured."""
MOST_HELD = 4_096
MOST_STEPS = 256
EVERY = 1_000
SLOW_FLOOR_NS = 50_000_000
SLOW_FACTOR = 4.0
"""A step is slow above the floor and above this many times the running mean."""


@dataclass(slots=True)
class _Held:
    since: float
    records: list[SequenceRecord] = field(default_factory=list)
    keep: bool | None = None

    @property
    def complete(self) -> bool:
        return bool(self.records) and len(self.records) >= self.records[0].n


@dataclass(slots=True)
class _HeldStep:
    since: float
    record: StepRecord
    context: SpanContext
    slow: bool
    undecided: set[str]
    links: list[SpanContext] = field(default_factory=list)


def setup(
    *,
    model: str,
    worker: str,
    metrics: WorkerMetrics | None = None,
    versions: Mapping[str, str] | None = None,
    env: Mapping[str, str] = os.environ,
    hold_s: float = HOLD_S,
) -> WorkerTelemetry:
    """Tracing as the ``OTEL_*`` variables say (the gateway's launcher sets them); without an endpoint it does nothing.

    ``worker`` becomes ``service.instance.id``. Raises ValueError naming the variable that is wrong.
    """
    where = collector.target(env)
    if where is None:
        return WorkerTelemetry(None, model=model, worker=worker)
    from workers import telemetry  # OpenTelemetry is heavy: loaded only where it is used

    sink = telemetry.SpanSink(
        telemetry.exporter(where),
        telemetry.resource(env, SERVICE, worker, versions or {}),
        on_exported=metrics.spans_exported if metrics else lambda spans: None,
        on_dropped=metrics.spans_dropped if metrics else lambda reason, spans: None,
    )
    return WorkerTelemetry(sink, model=model, worker=worker, hold_s=hold_s)


class WorkerTelemetry:
    """One worker's request and step traces. With ``sink=None`` every method returns at once."""

    def __init__(
        self,
        sink: SpanSink | None,
        *,
        model: str,
        worker: str,
        clock: Callable[[], float] = time.monotonic,
        hold_s: float = HOLD_S,
        every: int = EVERY,
    ) -> None:
        """``every``: one in so many steps is shown although it is not slow."""
        self._sink = sink
        self._model = model
        self._worker = worker
        self._clock = clock
        self._hold_s = hold_s
        self._every = every
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._transfers: OrderedDict[str, TransferRecord] = OrderedDict()
        """By the ``traceparent`` of the attempt."""
        self._steps: OrderedDict[int, _HeldStep] = OrderedDict()
        self._shown: OrderedDict[int, SpanContext] = OrderedDict()
        self._mean_ns = 0.0
        self._slow_next = 0.0

    def record(self, record: SequenceRecord) -> None:
        """A choice ended. Engine thread."""
        if self._sink is None or not record.trace:
            return
        now = self._clock()
        with self._lock:
            held = self._hold(record.id, now)
            held.records.append(record)
            if held.keep is not None and held.complete:
                self._decide(record.id, held)
            self._sweep(now)

    def transferred(self, record: TransferRecord) -> None:
        """A wait for a prompt's blocks ended. The stream's thread."""
        parent = record.trace.get("traceparent")
        if self._sink is None or parent is None:
            return
        with self._lock:
            self._transfers[parent] = record
            if len(self._transfers) > MOST_HELD:
                self._transfers.popitem(last=False)

    def keep(self, request: str, keep: bool) -> None:
        """The gateway's verdict. The stream's thread."""
        if self._sink is None:
            return
        now = self._clock()
        with self._lock:
            self._sweep(now)
            held = self._hold(request, now)
            held.keep = keep
            if held.complete:
                self._decide(request, held)

    def step(self, record: StepRecord) -> None:
        """A step ended. Engine thread."""
        if self._sink is None:
            return
        took = record.end_ns - record.start_ns
        mean, self._mean_ns = self._mean_ns, self._mean_ns + 0.05 * (took - self._mean_ns)
        now = self._clock()
        slow = took > SLOW_FLOOR_NS and took > SLOW_FACTOR * mean > 0 and now >= self._slow_next
        if not slow and record.step % self._every:
            return
        if slow:  # at most one a second: a slow minute must not fill the collector
            self._slow_next = now + 1.0
        with self._lock:
            ids = set(list(dict.fromkeys(record.ids))[:MOST])
            context = step_context()
            self._steps[record.step] = _HeldStep(now, record, context, slow, ids)
            self._shown[record.step] = context
            if len(self._steps) > MOST_STEPS:
                self._show(next(iter(self._steps)))
            if len(self._shown) > 4 * MOST_STEPS:
                self._shown.popitem(last=False)
            self._sweep(now)

    def sweep(self) -> None:
        """Let go of what is due; call it about once a second, so that an idle worker holds nothing."""
        if self._sink is not None:
            with self._lock:
                self._sweep(self._clock())

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Export what was kept, for at most ``timeout_s``; drop the rest."""
        self.settle()
        if self._sink is not None:
            self._sink.shutdown(timeout_s)

    def settle(self) -> None:
        """Build what was kept and forget the rest, now."""
        with self._lock:
            for request in list(self._held):
                self._decide(request, self._held[request])
            for step in list(self._steps):
                self._show(step)

    @property
    def held(self) -> int:
        """Requests, steps and transfers held now."""
        with self._lock:
            return len(self._held) + len(self._steps) + len(self._transfers)

    def _hold(self, request: str, now: float) -> _Held:
        held = self._held.get(request)
        if held is None:
            held = self._held[request] = _Held(now)
            if len(self._held) > MOST_HELD:
                oldest = next(iter(self._held))
                self._decide(oldest, self._held[oldest])
        return held

    def _sweep(self, now: float) -> None:
        due = now - self._hold_s
        while self._held and next(iter(self._held.values())).since <= due:
            request, held = next(iter(self._held.items()))
            if held.keep is None and held.records and not held.complete:  # its other choices still run
                held.since = now
                self._held.move_to_end(request)
            else:
                self._decide(request, held)
        while self._steps and next(iter(self._steps.values())).since <= due:
            self._show(next(iter(self._steps)))

    def _decide(self, request: str, held: _Held) -> None:
        """Forget a request; if it is kept, have its spans built."""
        del self._held[request]
        records = held.records
        inference: SpanContext | None = None
        transfers = {
            parent: transfer
            for parent in {record.trace.get("traceparent", "") for record in records}
            if (transfer := self._transfers.pop(parent, None)) is not None
        }
        if held.keep and records and self._sink is not None:
            inference = self._build(self._sink, records, transfers)
        for step in [number for number, held_step in self._steps.items() if request in held_step.undecided]:
            waiting = self._steps[step]
            waiting.undecided.discard(request)
            if inference is not None:
                waiting.links.append(inference)
            if not waiting.undecided:
                self._show(step)

    def _build(
        self, sink: SpanSink, records: list[SequenceRecord], transfers: Mapping[str, TransferRecord]
    ) -> SpanContext | None:
        """Hand over the records, one tree per attempt (a retry has its own chat span); the last inference span."""
        attempts: dict[str, list[SequenceRecord]] = {}
        for record in records:
            attempts.setdefault(record.trace.get("traceparent", ""), []).append(record)
        inference: SpanContext | None = None
        for carrier, attempt in attempts.items():
            parent = parse_traceparent(attempt[0].trace)
            if parent is None:
                continue
            context = child_of(parent)
            numbers = {chunk.step for record in attempt for chunk in record.chunks}
            steps = {number: self._shown[number] for number in numbers if number in self._shown}
            make = partial(
                request_spans,
                attempt,
                parent,
                context,
                model=self._model,
                worker=self._worker,
                steps=steps,
                transfer=transfers.get(carrier),
            )
            size = 1 + (carrier in transfers) + sum(1 + len(record.phases) + len(record.chunks) for record in attempt)
            if sink.build(make, size):
                inference = context
        return inference

    def _show(self, step: int) -> None:
        held = self._steps.pop(step)
        if self._sink is not None:
            self._sink.submit([step_span(held.record, held.context, self._worker, held.slow, held.links)])
