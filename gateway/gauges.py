"""What is read when Prometheus asks, not counted: queue, shares, quota, workers.

The owners (dispatcher, pool, quota) hand ``Metrics.add_source`` a callable that returns ``Gauges``; it runs on the
event loop during a scrape, so it must be cheap and must not wait. Several sources add up: queue figures by tenant, the
rest side by side. Service shares and the Jain index are computed here, over the last minute of charged tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class TenantGauge:
    """A tenant in one model's queue."""

    tenant: str
    depth: int = 0
    """Queued jobs."""
    tokens: int = 0
    """Prompt + max output tokens of the queued jobs."""
    lag: float | None = None
    """Its virtual time less the smallest of all backlogged tenants; None where the policy has no virtual time."""
    share: float = 0.0
    """Part of what the model's workers served in about the last half minute."""
    model: str | None = None
    """Whose queue it is; None: not said, and no figures by model."""


@dataclass(frozen=True, slots=True)
class WorkerGauge:
    """A worker's last report."""

    worker: str
    up: bool | None
    """None: nobody expects it to answer yet, since it starts for the first time."""
    running: int = 0
    waiting: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)
    """By state: ``free``, ``cached``, ``used``."""


@dataclass(frozen=True, slots=True)
class QuotaGauge:
    """What is left of one limit (``requests``, ``tokens``, ``concurrent``)."""

    tenant: str
    limit: str
    remaining: float


@dataclass(frozen=True, slots=True)
class Gauges:
    """One source's figures."""

    tenants: Iterable[TenantGauge] = ()
    workers: Iterable[WorkerGauge] = ()
    quotas: Iterable[QuotaGauge] = ()
    stalled: Mapping[str, bool] = field(default_factory=dict)
    """By model: queue not empty although slots and blocks are free."""
    ledger_writable: bool | None = None
    """Whether what is settled can be kept; None where the quota policy keeps nothing."""


Source = Callable[[], Gauges]

WANTING_SHARE = 1e-3
"""A smaller part of a model's service is what is left of long ago (it decays), not a competitor."""


class ServiceWindow:
    """Tokens charged per tenant over the last ``seconds``, in one-second buckets: O(1) per charge."""

    def __init__(self, clock: Callable[[], float], seconds: int = 60) -> None:
        self._clock = clock
        self._seconds = seconds
        self._buckets: deque[tuple[int, dict[str, int]]] = deque()
        self._totals: dict[str, int] = {}

    def add(self, tenant: str, tokens: int) -> None:
        """Count service now."""
        second = int(self._clock())
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append((second, {}))
            self._expire(second)
        bucket = self._buckets[-1][1]
        bucket[tenant] = bucket.get(tenant, 0) + tokens
        self._totals[tenant] = self._totals.get(tenant, 0) + tokens

    def totals(self) -> dict[str, int]:
        """Tokens by tenant. O(tenants served)."""
        self._expire(int(self._clock()))
        return dict(self._totals)

    def recent(self, seconds: int) -> int:
        """Tokens of all tenants in the last ``seconds`` whole seconds, without the one that is running."""
        now = int(self._clock())
        return sum(sum(bucket.values()) for second, bucket in self._buckets if now - seconds <= second < now)

    def _expire(self, second: int) -> None:
        while self._buckets and self._buckets[0][0] <= second - self._seconds:
            for tenant, tokens in self._buckets.popleft()[1].items():
                left = self._totals[tenant] - tokens
                if left:
                    self._totals[tenant] = left
                else:
                    del self._totals[tenant]


def jain(values: Iterable[float]) -> float:
    """Jain's fairness index (Jain, Chiu, Hawe 1984): (Σx)² ÷ (n Σx²); 1 is fair, 1/n is one taking all."""
    xs = list(values)
    squares = sum(x * x for x in xs)
    return 1.0 if len(xs) < 2 or not squares else sum(xs) ** 2 / (len(xs) * squares)


class GaugeCollector(Collector):
    """Asks the sources at every scrape."""

    def __init__(
        self,
        window: ServiceWindow,
        tenant_label: Callable[[str], str],
        class_of: Callable[[str], str],
        weights: Callable[[], Mapping[str, float]],
        failed: Callable[[], None],
    ) -> None:
        """``failed`` is told of a source that raised: its figures are missing, the others still come."""
        self._window = window
        self._tenant_label = tenant_label
        self._class_of = class_of
        self._weights = weights
        self._failed = failed
        self.sources: list[Source] = []

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Names, for the registry's duplicate check; asks no source."""
        return _families().values()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Fresh families."""
        families = _families()
        gathered: list[Gauges] = []
        for source in self.sources:
            try:
                gathered.append(source())
            except Exception:  # a source's bug must not blind the operator to all other figures; it is counted
                self._failed()
        self._tenants(families, gathered)
        self._models(families, gathered)
        for gauges in gathered:
            _workers(families, gauges.workers)
            for quota in gauges.quotas:
                families["quota_remaining"].add_metric([*self._labels(quota.tenant), quota.limit], quota.remaining)
            for model, stalled in gauges.stalled.items():
                families["stalled"].add_metric([model], int(stalled))
            if gauges.ledger_writable is not None:
                families["ledger_writable"].add_metric([], int(gauges.ledger_writable))
        return families.values()

    def _labels(self, tenant: str) -> list[str]:
        return [self._tenant_label(tenant), self._class_of(tenant)]

    def _tenants(self, families: Mapping[str, GaugeMetricFamily], gathered: list[Gauges]) -> None:
        weights = self._weights()
        depth: dict[str, int] = dict.fromkeys(weights, 0)
        tokens: dict[str, int] = dict.fromkeys(weights, 0)
        lags: dict[str, float] = {}
        for gauge in (gauge for gauges in gathered for gauge in gauges.tenants):
            tenant = self._tenant_label(gauge.tenant)
            depth[tenant] = depth.get(tenant, 0) + gauge.depth
            tokens[tenant] = tokens.get(tenant, 0) + gauge.tokens
            if gauge.lag is not None:
                lags[tenant] = max(gauge.lag, lags.get(tenant, gauge.lag))
        for tenant, weight in weights.items():
            families["weight"].add_metric(self._labels(tenant), weight)
        served = self._window.totals()
        total = sum(served.values())
        for tenant in depth:
            families["queue_depth"].add_metric(self._labels(tenant), depth[tenant])
            families["queue_tokens"].add_metric(self._labels(tenant), tokens[tenant])
            share = served.get(tenant, 0) / total if total else 0.0
            families["service_share"].add_metric(self._labels(tenant), share)
        for tenant, lag in lags.items():
            families["virtual_time_lag"].add_metric(self._labels(tenant), lag)
        wanting = {tenant for tenant, queued in depth.items() if queued} | set(served)
        index = jain(served.get(tenant, 0) / weights.get(tenant, 1.0) for tenant in wanting)
        families["fairness_jain"].add_metric([], index)

    def _models(self, families: Mapping[str, GaugeMetricFamily], gathered: list[Gauges]) -> None:
        """Per model: competitors are those that wait there or were served there lately, and nobody else."""
        weights = self._weights()
        models: dict[str, dict[str, tuple[int, float]]] = {}
        for gauge in (gauge for gauges in gathered for gauge in gauges.tenants):
            if gauge.model is not None and (gauge.depth or gauge.share >= WANTING_SHARE):
                tenant, competitors = self._tenant_label(gauge.tenant), models.setdefault(gauge.model, {})
                depth, share = competitors.get(tenant, (0, 0.0))
                competitors[tenant] = (depth + gauge.depth, share + gauge.share)
        for model, competitors in models.items():
            whole = sum(weights.get(tenant, 1.0) for tenant in competitors)
            for tenant, (depth, share) in competitors.items():
                due = weights.get(tenant, 1.0) / whole
                families["model_service_share"].add_metric([model, *self._labels(tenant)], share)
                families["model_due_share"].add_metric([model, *self._labels(tenant)], due)
                families["model_queue_depth"].add_metric([model, *self._labels(tenant)], depth)


def _workers(families: Mapping[str, GaugeMetricFamily], workers: Iterable[WorkerGauge]) -> None:
    for gauge in workers:
        if gauge.up is not None:
            families["worker_up"].add_metric([gauge.worker], int(gauge.up))
        families["worker_running"].add_metric([gauge.worker], gauge.running)
        families["worker_waiting"].add_metric([gauge.worker], gauge.waiting)
        for state, blocks in gauge.blocks.items():
            families["worker_kv_blocks"].add_metric([gauge.worker, state], blocks)


class BuildInfo(Collector):
    """``forebay_build_info``: the gateway's versions, in one series per kind of worker once there are workers."""

    def __init__(self, versions: Mapping[str, str]) -> None:
        """``versions``: the gateway's own."""
        self._versions = dict(versions)
        self.workers: Callable[[], Iterable[Mapping[str, str]]] = tuple
        """What is told of each kind of worker, asked at every scrape: workers come and go."""

    def collect(self) -> Iterable[InfoMetricFamily]:
        """The family, for a scrape."""
        family = InfoMetricFamily("forebay_build", "Versions.", labels=())
        for worker in list(self.workers()) or [{}]:
            family.add_metric((), {**self._versions, **worker})
        return [family]


_GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "queue_depth": ("Jobs that wait.", ("tenant", "class")),
    "queue_tokens": ("Prompt and maximal output tokens of the jobs that wait.", ("tenant", "class")),
    "weight": ("Configured weight.", ("tenant", "class")),
    "service_share": ("Part of the tokens charged in the last minute.", ("tenant", "class")),
    "fairness_jain": ("Jain index of tokens by weight over tenants that wanted service in the last minute.", ()),
    "model_service_share": ("Part of the model's tokens of about the last half minute.", ("model", "tenant", "class")),
    "model_due_share": (
        "Its weight over the weights of all that wait or were served at the model.",
        ("model", "tenant", "class"),
    ),
    "model_queue_depth": ("Jobs that wait for the model.", ("model", "tenant", "class")),
    "virtual_time_lag": ("Virtual time ahead of the least served tenant that waits.", ("tenant", "class")),
    "quota_remaining": ("What is left of a limit.", ("tenant", "class", "limit")),
    "worker_up": ("1 when the worker answers, also while it drains; none in its first start.", ("worker",)),
    "worker_running": ("Sequences the worker runs.", ("worker",)),
    "worker_waiting": ("Sequences in the worker's own waiting line.", ("worker",)),
    "worker_kv_blocks": ("KV blocks of the worker.", ("worker", "state")),
    "ledger_writable": ("1 when what is settled can be kept.", ()),
    "stalled": ("1 when jobs wait although slots and blocks are free; must be 0.", ("model",)),
}


def _families() -> dict[str, GaugeMetricFamily]:
    return {name: GaugeMetricFamily(f"forebay_{name}", text, labels=labels) for name, (text, labels) in _GAUGES.items()}
