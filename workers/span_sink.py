"""Where spans wait for the collector: plain ``SpanData`` in, OTLP batches out. Imports no OpenTelemetry.

Both processes export through it; ``workers/telemetry.py`` has what takes its batches away.

Rules
- Nobody who works on a request waits here: ``submit`` and ``build`` only append. One thread of the sink builds, encodes
  and sends; it wakes for a full batch or after a delay, not for every trace, and lets others in between two traces.
- Bounded: at most ``capacity`` spans between submit and the collector's answer. What does not fit is dropped whole, one
  trace at a time (no orphans), and counted. A collector that is down, slow or silent costs a request nothing.
- A trace is in one batch, so that a batch which is lost leaves no orphans either.
- ``shutdown`` ends within its time, whatever the collector does; what is left is counted as dropped.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from workers.otlp import Encoder
from workers.spans import Attributes, SpanData

CAPACITY = 8_192
_BATCH = 512
_BATCH_BYTES = 1 << 20
"""A batch is sent when it reaches this: collectors take 4 MiB by default, and captured content is long."""
_DELAY_MS = 1_000
_HOPELESS_S = 0.2
_log = logging.getLogger(__name__)
DropReason = Literal["queue_full", "export_failed", "build_failed", "shutdown"]


class Exporter(Protocol):
    """Takes batches to the collector."""

    def export(self, payload: bytes, spans: int) -> bool:
        """Send an ``ExportTraceServiceRequest`` of so many spans; blocks. Whether the collector took it."""
        ...

    def shutdown(self) -> None:
        """Send no more; an ``export`` under way ends soon. May block."""
        ...


class SpanSink:
    """One process's way to the collector. Thread-safe."""

    def __init__(
        self,
        exporter: Exporter,
        who: Attributes,
        *,
        capacity: int | None = None,
        on_exported: Callable[[int], None] = lambda spans: None,
        on_dropped: Callable[[DropReason, int], None] = lambda reason, spans: None,
    ) -> None:
        """``who``: the resource's attributes. ``capacity`` in spans; None: ``OTEL_BSP_MAX_QUEUE_SIZE``, else 8,192.

        Callbacks come from our thread or the caller's.
        """
        self._capacity = capacity or _env_int("OTEL_BSP_MAX_QUEUE_SIZE", CAPACITY)
        self._batch = min(_env_int("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH), self._capacity)
        self._delay_s = _env_int("OTEL_BSP_SCHEDULE_DELAY", _DELAY_MS) / 1e3
        self._on_exported = on_exported
        self._on_dropped = on_dropped
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._wake = threading.Event()
        self._inbox: deque[tuple[Callable[[], Sequence[SpanData]], int]] = deque()
        self._pending = 0
        """Spans that were submitted and neither taken nor dropped."""
        self._waiting = 0
        """Those of them in the inbox."""
        self._closed = False
        self._given_up = threading.Event()
        """``shutdown`` waits no longer, and has counted what is left."""
        self._answers = True
        """Whether the collector took the last batch."""
        self._exporter = exporter
        limit = os.environ.get("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "")
        limit = limit or os.environ.get("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "")
        self._encoder = Encoder(who, longest=int(limit) if limit.isdigit() else None)
        self._thread = threading.Thread(target=self._run, name="forebay-spans", daemon=True)
        self._thread.start()

    def submit(self, spans: Sequence[SpanData]) -> bool:
        """Export one trace's closed spans, parents first. False when it was dropped."""
        return self.build(lambda: spans, len(spans))

    def build(self, make: Callable[[], Sequence[SpanData]], size: int) -> bool:
        """Like ``submit`` for spans that ``make`` builds on the sink's thread; ``size`` is about how many."""
        with self._lock:
            reason: DropReason | None = "shutdown" if self._closed else None
            if reason is None and self._pending + size > self._capacity:
                reason = "queue_full"
            if reason is None:
                self._pending += size
                self._waiting += size
                self._inbox.append((make, size))
                if self._waiting >= self._batch:
                    self._wake.set()
        if reason is not None:
            self._on_dropped(reason, size)
        return reason is None

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything submitted so far was taken or dropped; never called for a request."""
        self._wake.set()
        with self._idle:
            return self._idle.wait_for(lambda: not self._pending, timeout=timeout_s)

    def shutdown(self, timeout_s: float = 0.75) -> None:
        """Send what is pending for at most ``timeout_s``, then give up; the rest counts as dropped. Idempotent.

        A collector that did not take the last batch is hardly waited for.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._wake.set()
        deadline = time.monotonic() + (timeout_s if self._answers else min(timeout_s, _HOPELESS_S))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._given_up.set()
            left, self._pending = self._pending, 0
            self._idle.notify_all()
        # Interrupts a collector that hangs. The SDK's may block themselves: their threads are daemons.
        closer = threading.Thread(target=self._exporter.shutdown, name="forebay-spans-close", daemon=True)
        closer.start()
        closer.join(max(0.0, deadline - time.monotonic()))
        if left:
            self._on_dropped("shutdown", left)

    # -- the sink's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        """Send what is in the inbox, in as many batches as it takes."""
        batch: list[bytes] = []
        size = 0
        while (spans := self._take()) is not None:
            batch += spans
            size += sum(map(len, spans))
            if len(batch) >= self._batch or size >= _BATCH_BYTES:
                self._send(batch)
                batch, size = [], 0
            time.sleep(0)  # whoever works on requests goes first
        if batch:
            self._send(batch)

    def _take(self) -> list[bytes] | None:
        """The next trace's spans, encoded; None when there is none, or nobody waits for it any more."""
        with self._lock:
            if self._given_up.is_set() or not self._inbox:
                return None
            make, size = self._inbox.popleft()
            self._waiting -= size
        try:
            spans = [self._encoder.span(data) for data in make()]
        except Exception as error:  # a malformed record loses its own trace, not the thread
            _log.error("spans could not be built", exc_info=error)
            spans = []
            self._on_dropped("build_failed", size)
        with self._lock:
            if self._given_up.is_set():
                return None
            self._pending += len(spans) - size
            self._idle.notify_all()
        return spans

    def _send(self, batch: list[bytes]) -> None:
        taken = False
        try:
            taken = self._exporter.export(self._encoder.request(batch), len(batch))
        except Exception as error:  # the thread must live on; gRPC raises odd types when it is closed under way
            _log.debug("the exporter raised %s", type(error).__name__)
        with self._lock:
            if self._given_up.is_set():
                return  # counted as dropped by shutdown
            self._answers = taken
            self._pending -= len(batch)
            self._idle.notify_all()
        if taken:
            self._on_exported(len(batch))
        else:
            self._on_dropped("export_failed", len(batch))


def _env_int(name: str, default: int) -> int:
    """A positive integer of the environment; anything else is the default, as the SDK has it."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() and int(value) > 0 else default
