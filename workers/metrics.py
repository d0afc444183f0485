"""The worker's Prometheus metrics (docs/telemetry.md), on a port of their own.

Rules
- One registry per worker, nothing global. ``step`` runs on the engine thread and only adds to histograms; everything
  else is read when Prometheus asks, from the callables given at the start.
- No tenant is named here: the worker knows none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.engine.record import StepRecord
from workers.protocol import TierStats, WorkerStats

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
_COUNTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
BUSY_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a scrape reads. All are called on the scrape's thread and must not wait for the engine."""

    stats: Callable[[], WorkerStats]
    evictions: Callable[[], Mapping[str, int]] = dict
    """Cumulative, by reason."""
    memory: Callable[[], Mapping[str, int]] = dict
    """Bytes by kind: ``weights``, ``kv``, ``activations``, ``free``."""
    kv_bytes_per_token: int = 0
    adapters: Callable[[], tuple[int, int] | None] = lambda: None
    """How many are loaded, and their bytes; None where the engine takes none."""
    ranks: Callable[[], int] = lambda: 1
    """Processes that compute, this one among them."""
    compiled: Callable[[], int] = lambda: 0
    """Kernels compiled since the worker was ready."""


class _Reader(Collector):
    def __init__(self, sources: Sources, busy: Callable[[], float]) -> None:
        self._sources = sources
        self._busy = busy

    def describe(self) -> Iterable[Metric]:
        return self._families(WorkerStats(), {}, {}, 0.0, 0, (0, 0), 1, 0)

    def collect(self) -> Iterable[Metric]:
        sources = self._sources
        return self._families(
            sources.stats(),
            sources.evictions(),
            sources.memory(),
            self._busy(),
            sources.kv_bytes_per_token,
            sources.adapters(),
            sources.ranks(),
            sources.compiled(),
        )

    @staticmethod
    def _families(
        stats: WorkerStats,
        evictions: Mapping[str, int],
        memory: Mapping[str, int],
        busy: float,
        per_token: int,
        adapters: tuple[int, int] | None,
        ranks: int,
        compiled: int,
    ) -> list[Metric]:
        blocks = GaugeMetricFamily("forebay_engine_kv_blocks", "KV blocks.", labels=["state"])
        for state, count in (
            ("free", stats.free_blocks),
            ("cached", stats.cached_blocks),
            ("used", stats.used_blocks),
        ):
            blocks.add_metric([state], count)
        windows = GaugeMetricFamily(
            "forebay_engine_kv_window_blocks", "KV blocks of running sequences.", labels=["window", "state"]
        )
        for window, (kept, outside) in (stats.windows or {"all": (stats.used_blocks, 0)}).items():
            windows.add_metric([window, "held"], kept)
            windows.add_metric([window, "outside"], outside)
        evicted = CounterMetricFamily("forebay_evictions", "Cached blocks evicted.", labels=["reason"])
        for reason, count in evictions.items():
            evicted.add_metric([reason], count)
        guesses = CounterMetricFamily(
            "forebay_speculation_tokens", "Tokens guessed by speculative decoding.", labels=["result"]
        )
        guesses.add_metric(["accepted"], stats.drafts_accepted)
        guesses.add_metric(["rejected"], stats.drafts_rejected)
        held = GaugeMetricFamily("forebay_device_memory_bytes", "Memory by what it holds.", labels=["kind"])
        for kind, size in memory.items():
            held.add_metric([kind], size)
        loaded = GaugeMetricFamily("forebay_adapters", "LoRA adapters that are loaded.")
        if adapters is not None:
            loaded.add_metric([], adapters[0])
            held.add_metric(["adapters"], adapters[1])
        return [
            loaded,
            *_tiers(stats.tiers),
            GaugeMetricFamily("forebay_engine_running", "Sequences that run.", value=stats.running),
            GaugeMetricFamily("forebay_engine_waiting", "Sequences that wait for a slot.", value=stats.waiting),
            blocks,
            windows,
            GaugeMetricFamily(
                "forebay_engine_kv_bytes_per_token", "Bytes of a token's keys and values.", value=per_token
            ),
            CounterMetricFamily("forebay_engine_preemptions", "Sequences that lost their blocks.", stats.preemptions),
            CounterMetricFamily(
                "forebay_engine_prefix_cache_queries_tokens", "Prompt tokens looked up.", stats.query_tokens
            ),
            CounterMetricFamily("forebay_engine_prefix_cache_hits_tokens", "Prompt tokens found.", stats.hit_tokens),
            evicted,
            guesses,
            held,
            CounterMetricFamily(
                "forebay_engine_kernels_compiled", "Kernels compiled while requests may have waited.", compiled
            ),
            GaugeMetricFamily("forebay_ranks_alive", "Processes that the model is divided among and run.", value=ranks),
            GaugeMetricFamily(
                "forebay_device_busy_ratio", f"Part of the last {BUSY_WINDOW_S:.0f} s spent in the model.", value=busy
            ),
        ]


def _tiers(tiers: Mapping[str, TierStats]) -> list[Metric]:
    """What lies below the device's memory."""
    held = GaugeMetricFamily("forebay_tier_bytes", "Bytes that a tier holds.", labels=["tier"])
    up = GaugeMetricFamily("forebay_tier_up", "1 where a tier is written to.", labels=["tier"])
    hits = CounterMetricFamily("forebay_tier_hits_tokens", "Prompt tokens found in a tier.", labels=["tier"])
    restored = CounterMetricFamily("forebay_tier_restored_blocks", "Blocks brought back.", labels=["tier"])
    saved = CounterMetricFamily("forebay_tier_saved_blocks", "Blocks taken in.", labels=["tier"])
    errors = CounterMetricFamily("forebay_tier_errors", "Files not written, or damaged.", labels=["tier"])
    early = CounterMetricFamily("forebay_tier_early_blocks", "Blocks read before their request.", labels=["tier"])
    for tier, stats in tiers.items():
        held.add_metric([tier], stats.bytes)
        up.add_metric([tier], stats.up)
        hits.add_metric([tier], stats.hit_tokens)
        restored.add_metric([tier], stats.restored_blocks)
        saved.add_metric([tier], stats.saved_blocks)
        errors.add_metric([tier], stats.errors)
        early.add_metric([tier], stats.early_blocks)
    return [held, up, hits, restored, saved, errors, early]


class WorkerMetrics:
    """All metrics of one worker process."""

    def __init__(
        self,
        sources: Sources,
        *,
        versions: Mapping[str, str] | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """``clock_ns`` is the clock of the step records."""
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's only switch
        self.registry = CollectorRegistry()
        self._clock_ns = clock_ns
        self._born_ns = clock_ns()
        self._runs: deque[tuple[int, int]] = deque()
        self._runs_lock = threading.Lock()
        histogram = self._histogram
        self._step_seconds = histogram("engine_step_seconds", "Duration of an engine step.", _SECONDS)
        self._batch_size = histogram("engine_batch_size", "Sequences in a step.", _COUNTS)
        tokens = histogram("engine_step_tokens", "Tokens computed in a step.", _COUNTS, "phase")
        self._prefill, self._decode = tokens.labels("prefill"), tokens.labels("decode")
        self._adapted = Counter(
            "forebay_adapter_tokens", "Tokens computed with a LoRA adapter.", registry=self.registry
        )
        self._transfer = histogram(
            "kv_transfer_seconds", "Waiting for a prompt's blocks from a prefill worker.", _SECONDS, "result"
        )
        self._exported = Counter("forebay_spans_exported", "Spans the collector took.", registry=self.registry)
        self._dropped = Counter(
            "forebay_spans_dropped", "Spans lost on the way to the collector.", ["reason"], registry=self.registry
        )
        Info("forebay_build", "Versions.", registry=self.registry).info(dict(versions or {}))
        self.registry.register(_Reader(sources, self.busy_ratio))

    def step(self, record: StepRecord) -> None:
        """Count one step. Engine thread."""
        self._step_seconds.observe((record.end_ns - record.start_ns) / 1e9)
        self._batch_size.observe(record.batch)
        self._prefill.observe(record.prefill_tokens)
        self._decode.observe(record.decode_tokens)
        if record.adapter_tokens:
            self._adapted.inc(record.adapter_tokens)
        with self._runs_lock:
            self._runs.append((record.end_ns, record.run_ns))
            self._expire(record.end_ns)

    def transferred(self, result: str, seconds: float) -> None:
        """Count one transfer to this worker: ``ok``, or why not everything came."""
        self._transfer.labels(result).observe(seconds)

    def busy_ratio(self) -> float:
        """Part of the last seconds that the model ran, 0 to 1."""
        now = self._clock_ns()
        with self._runs_lock:
            self._expire(now)
            ran = sum(run for _, run in self._runs)
        window = min(BUSY_WINDOW_S * 1e9, max(1, now - self._born_ns))
        return min(1.0, ran / window)

    def spans_exported(self, spans: int) -> None:
        """Count spans the collector took. Any thread."""
        self._exported.inc(spans)

    def spans_dropped(self, reason: str, spans: int) -> None:
        """Count spans that were lost. Any thread."""
        self._dropped.labels(reason).inc(spans)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> tuple[int, Callable[[], None]]:
        """Answer scrapes at ``http://host:port/metrics`` (0 picks a free port). Returns the port and how to stop."""
        server, thread = prometheus_client.start_http_server(port, host, self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join(2.0)

        return server.server_port, stop

    def _expire(self, now_ns: int) -> None:
        limit = now_ns - int(BUSY_WINDOW_S * 1e9)
        while self._runs and self._runs[0][0] <= limit:
            self._runs.popleft()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"forebay_{name}", text, labels, buckets=buckets, registry=self.registry)
