"""The gateway's Prometheus metrics (docs/telemetry.md): counters and histograms here, gauges in ``gauges.py``.

Rules
- One registry per gateway, nothing global. Written on the event loop; span counts also from the exporter's threads.
- Labels are bounded: tenants and models that are not configured are counted under ``other``; worker, reason and policy
  names, which are ours or a plugin's, are capped. Random names never grow the series.
- Exemplars carry trace ids, of kept traces only, in OpenMetrics only: what is observed when a request ends has them.
- What is counted on a request's way is noted, and booked when the request is over, or somebody reads (``Later``): the
  library takes locks and looks through buckets, and the request is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from gateway.gauges import BuildInfo, GaugeCollector, ServiceWindow, Source
from gateway.later import Later
from gateway.log import RequestSummary
from gateway.settings import Settings
from policies.types import Charge

OTHER = "other"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# Finer than _SECONDS where objectives lie, so that interpolated percentiles are close.
_FIRST_TOKEN_SECONDS = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0,
    30.0, 60.0, 120.0,
)  # fmt: skip
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_CALL_SECONDS = (1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.025, 0.1, 0.5, 1.0, 5.0)


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram's counts, all label values added up."""

    bounds: tuple[float, ...]
    """Upper bounds in seconds, rising, without +Inf."""
    counts: tuple[int, ...]
    """Cumulative; one more than bounds: the last is everything. Empty before the first observation."""


M = TypeVar("M", Counter, Histogram)


class Names:
    """A label's values: the known ones, or the first ``room`` that come; everything else is ``other``."""

    def __init__(self, known: Iterable[str] = (), room: int = 0) -> None:
        self._known = set(known)
        self._room = room

    def label(self, name: str | None) -> str:
        """The value to use as label."""
        if name is None:
            return OTHER
        if name not in self._known:
            if self._room <= 0:
                return OTHER
            self._room -= 1
            self._known.add(name)
        return name


class Observe(Protocol):
    """A histogram's ``observe``."""

    def __call__(self, amount: float, exemplar: dict[str, str] | None = None) -> None: ...


class Children(Generic[M]):
    """A metric's children by their labels, for what is counted per token or several times a request: the library's own
    look-up converts and locks each time. As bounded as the labels are.
    """

    def __init__(self, metric: M) -> None:
        self.metric: M = metric
        self._found: dict[tuple[str, ...], M] = {}

    def labels(self, *values: str) -> M:
        """As the metric's."""
        child = self._found.get(values)
        if child is None:
            child = self._found[values] = self.metric.labels(*values)
        return child


class _Booking(Collector):
    """To the registry a collector without series of its own: what it is asked before is complete."""

    def __init__(self, later: Later) -> None:
        self._later = later

    def collect(self) -> Iterable[prometheus_client.Metric]:
        """Nothing."""
        self._later.book()
        return ()


class Metrics:
    """All metrics of one gateway process."""

    def __init__(
        self,
        settings: Settings,
        *,
        versions: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``versions``: the gateway's own, for the info metric; see ``add_workers`` for the others."""
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library's only switch for the `_created` twin of each series
        self.registry = CollectorRegistry()
        self._later = Later(self._book_service)
        self.registry.register(_Booking(self._later))  # before all others: what they say is complete then
        self._workers = Names(room=256)
        self._reasons = Names(room=64)
        self._policies = Names(room=64)
        self._limits = Names(room=16)
        self._window = ServiceWindow(clock)
        self._objectives = Gauge(
            "forebay_slo_seconds", "What a class promises.", ["class", "objective"], registry=self.registry
        )
        self.configure(settings)
        new = self._counter
        self._requests = Children(new("requests", "Requests that ended.", "tenant", "class", "model", "outcome"))
        self._shed = new("shed", "Requests turned away although well-formed.", "tenant", "class", "reason")
        self._service = Children(new("service_tokens", "Tokens charged.", "tenant", "class", "kind"))
        self._quota = Children(new("quota_decisions", "Verdicts of the quota policy.", "tenant", "class", "decision"))
        self._routes = Children(new("route_decisions", "Dispatches.", "worker", "reason"))
        self._disconnects = new("client_disconnects", "Clients that left before their answer was complete.")
        self._slow_readers = new("slow_readers", "Streams ended because their reader did not read.")
        self._source_errors = new("gauge_source_errors", "Gauge sources that failed during a scrape.")
        self._faults = new("isolated_faults", "Failures of a part that the request path went on without.", "part")
        self._stale = new("stale_worker_dispatches", "Dispatches without fresh figures of the worker.", "worker")
        self._spans_exported = new("spans_exported", "Spans the collector took.")
        self._spans_dropped = new("spans_dropped", "Spans lost on the way to the collector.", "reason")
        self._queue_wait = Children(
            self._histogram("queue_wait_seconds", "From entry to dispatch.", _SECONDS, "model", "class")
        )
        first, whole = "From arrival to the first output token.", "From arrival to the last byte."
        self._first_token = Children(
            self._histogram("time_to_first_token_seconds", first, _FIRST_TOKEN_SECONDS, "model", "class")
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between output tokens of a choice.", _TOKEN_SECONDS, "model", "class"
        )
        self._duration = Children(self._histogram("request_duration_seconds", whole, _SECONDS, "model", "class"))
        self._policy = self._histogram("policy_seconds", "Time inside a policy's call.", _CALL_SECONDS, "policy")
        self._loop_lag = self._histogram(
            "event_loop_lag_seconds", "How late the event loop runs what is due.", _TOKEN_SECONDS
        )
        self._build = BuildInfo(versions or {})
        self.registry.register(self._build)
        self._gauges = GaugeCollector(
            self._window, self.tenant, self._class_of, lambda: self._weights, self._source_errors.inc
        )
        self.registry.register(self._gauges)

    def configure(self, settings: Settings) -> None:
        """Take the known tenants, models, classes, weights and objectives: at start and after a reload."""
        self._tenants = Names(tenant.id for tenant in settings.tenants)
        self._models = Names(model.name for model in settings.models)
        self._classes = Names(settings.classes)
        self._weights = {tenant.id: tenant.weight for tenant in settings.tenants}
        self._tenant_classes = {tenant.id: tenant.class_ for tenant in settings.tenants}
        self._objectives.clear()
        for name, service_class in settings.classes.items():
            for objective, seconds in service_class.slo.seconds().items():
                self._objectives.labels(name, objective).set(seconds)

    def add_workers(self, versions: Callable[[], Iterable[Mapping[str, str]]]) -> None:
        """Where the info metric finds, at every scrape, what runs behind the gateway (``versions.of_workers``)."""
        self._build.workers = versions

    def add_source(self, source: Source) -> None:
        """Ask ``source`` for gauges at every scrape."""
        self._gauges.sources.append(source)

    @property
    def service(self) -> ServiceWindow:
        """Tokens charged in the last minute, to read."""
        self._later.book()
        return self._window

    def first_token(self) -> Buckets:
        """Times to first token, since the start."""
        return _buckets(self._first_token.metric)

    def between_tokens(self) -> Buckets:
        """Times between tokens, since the start."""
        return _buckets(self._inter_token)

    def tenant(self, tenant: str | None) -> str:
        """The label of a tenant."""
        return self._tenants.label(tenant)

    def request_finished(self, summary: RequestSummary) -> None:
        """Count one request and its times; call it with the log line."""
        self._later.book()
        model, class_ = self._models.label(summary.model), self._classes.label(summary.service_class)
        self._requests.labels(self.tenant(summary.tenant), class_, model, summary.outcome).inc()
        exemplar = {"trace_id": summary.trace_id} if summary.trace_kept and summary.trace_id else None
        self._duration.labels(model, class_).observe(summary.duration_s, exemplar)
        if summary.queue_wait_s is not None:
            self._queue_wait.labels(model, class_).observe(summary.queue_wait_s, exemplar)
        if summary.first_token_s is not None:
            self._first_token.labels(model, class_).observe(summary.first_token_s, exemplar)
        if summary.outcome == "shed":
            reason = self._reasons.label(summary.reason)
            self._shed.labels(self.tenant(summary.tenant), class_, reason).inc()

    def inter_token(self, model: str, service_class: str) -> Observe:
        """The ``observe(seconds, exemplar)`` of one request's tokens: look it up once, call it per token."""
        return self._inter_token.labels(self._models.label(model), self._classes.label(service_class)).observe

    def charged(self, tenant: str, service_class: str, charge: Charge) -> None:
        """Count service as it is charged."""
        self._later.served(tenant, service_class, charge)

    def _book_service(self, tenant: str, service_class: str, charged: Mapping[str, int]) -> None:
        label, class_ = self.tenant(tenant), self._classes.label(service_class)
        for kind, tokens in charged.items():
            if tokens > 0:
                self._service.labels(label, class_, kind).inc(tokens)
        if (computed := charged["prompt"] + charged["output"]) > 0:
            self._window.add(label, computed)

    def quota_decided(self, tenant: str, service_class: str, verdict: str) -> None:
        """``verdict``: ``trace_attributes.quota_verdict(decision)``."""
        self._later.note((self._book_verdict, (tenant, service_class, verdict)))

    def _book_verdict(self, decided: tuple[str, str, str]) -> None:
        tenant, service_class, verdict = decided
        self._quota.labels(self.tenant(tenant), self._classes.label(service_class), self._limits.label(verdict)).inc()

    def routed(self, worker: str, reason: str) -> None:
        """Count one dispatch."""
        self._later.note((self._book_route, (worker, reason)))

    def _book_route(self, routed: tuple[str, str]) -> None:
        worker, reason = routed
        self._routes.labels(self._workers.label(worker), self._reasons.label(reason)).inc()

    def client_disconnected(self) -> None:
        """Count a client that left before its answer was complete."""
        self._disconnects.inc()

    def slow_reader(self) -> None:
        """Count a stream whose reader was given up."""
        self._slow_readers.inc()

    def fault(self, part: str) -> None:
        """Count a failure of an isolated part: a policy, an observer, a settlement."""
        self._faults.labels(self._reasons.label(part)).inc()

    def stale_dispatch(self, worker: str) -> None:
        """Count a dispatch that was gated by the in-flight count alone, since the worker's figures are too old."""
        self._stale.labels(self._workers.label(worker)).inc()

    def policy_timer(self, policy: str) -> Callable[[float], None]:
        """The ``observe(seconds)`` of one policy (``scheduling/vtc``)."""
        observe, note = self._policy.labels(self._policies.label(policy)).observe, self._later.note
        return lambda seconds: note((observe, seconds))

    def spans_exported(self, spans: int) -> None:
        """Count spans the collector took. Called from the exporter's thread."""
        self._spans_exported.inc(spans)

    def spans_dropped(self, reason: str, spans: int) -> None:
        """Count spans that were lost (``queue_full``, ``export_failed`` …). Called from any thread."""
        self._spans_dropped.labels(reason).inc(spans)

    async def watch_loop(self, interval_s: float = 0.1) -> None:
        """Measure the event loop's lag until cancelled; run it as a task of the gateway."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            self._loop_lag.observe(max(0.0, loop.time() - due))
            self._later.book()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type for a scrape with this ``Accept`` header: OpenMetrics where asked for, else text."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def _class_of(self, tenant: str) -> str:
        return self._tenant_classes.get(tenant, OTHER)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"forebay_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"forebay_{name}", text, labels, buckets=buckets, registry=self.registry)


def _buckets(histogram: Histogram) -> Buckets:
    counts: dict[float, int] = {}
    for family in histogram.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0) + int(sample.value)
    bounds = sorted(counts)
    return Buckets(tuple(bounds[:-1]), tuple(counts[bound] for bound in bounds))
