"""The last quarter of an hour, one sample a second: what the console draws and ``/admin/overview`` starts from.

Rules
- One object owns the ring; nobody else keeps samples. Requests pay nothing: every figure is read from what the request
  path counts anyway (service window, histograms, queues, ended requests).
- A sample costs O(tenants served or waiting in the last minute), not O(tenants configured), and keeps at most
  ``MAX_TENANTS`` of them.
- Latencies are quantiles over the last minute, interpolated inside histogram buckets: the figures that Prometheus'
  ``histogram_quantile`` gives for the same series.
- A sample that fails is logged and skipped; the gateway serves on.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway import log
from gateway.dispatch import Dispatcher
from gateway.gauges import jain
from gateway.metrics import Buckets, Metrics
from gateway.recent import RecentRequests
from gateway.tenants import Tenants
from policies.types import TenantId

_log = log.get("history")

KEEP_S = 900
WINDOW_S = 60
"""Over which shares, latencies and refusals are taken."""
RATE_S = 5
"""Over which tokens per second are taken."""
MAX_TENANTS = 24
COLOURS = 8
"""Tenants that get a colour of their own, in the order in which they first show up."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Standing:
    """One tenant's service against what its weight entitles it to, over the last minute."""

    tokens: int
    """Prompt and output tokens that ran for it."""
    share: float
    """Its part of all tokens, 0 … 1."""
    entitled: float
    """Its weight over the weights of all tenants that were served or waited."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One second."""

    at: int
    """Unix seconds."""
    tokens_per_s: float = 0.0
    running: int = 0
    queued: int = 0
    fairness: float | None = None
    """Jain's index of tokens by weight over the tenants that wanted service; None with fewer than two."""
    first_token: Quantiles | None = None
    """Arrival to first token; None while no request had one in the last minute."""
    between_tokens: Quantiles | None = None
    shed: int = 0
    """Requests in the last minute."""
    throttled: int = 0
    standings: Mapping[str, Standing] = field(default_factory=dict)
    """By tenant label, those with most tokens."""


class BucketWindow:
    """Quantiles of what a histogram counted in the last ``seconds``, from its cumulative counts once a second."""

    def __init__(self, seconds: int = WINDOW_S) -> None:
        self._counts: deque[tuple[int, ...]] = deque(maxlen=seconds + 1)

    def push(self, buckets: Buckets) -> Quantiles | None:
        """Take the counts of now; returns the window's quantiles, None when it is empty."""
        self._counts.append(buckets.counts)
        oldest = self._counts[0] or (0,) * len(buckets.counts)  # nothing had been observed then
        new = [now - before for now, before in zip(buckets.counts, oldest, strict=True)]
        if not new or not new[-1]:
            return None
        return Quantiles(*(_quantile(q, buckets.bounds, new) for q in (0.5, 0.95, 0.99)))


def _quantile(q: float, bounds: tuple[float, ...], cumulative: list[int]) -> float:
    """As Prometheus' ``histogram_quantile``: linear inside a bucket, the highest bound for what lies beyond it."""
    rank = q * cumulative[-1]
    index = bisect_left(cumulative, rank)
    if index >= len(bounds):
        return bounds[-1]
    lower, below = (bounds[index - 1], cumulative[index - 1]) if index else (0.0, 0)
    return lower + (bounds[index] - lower) * (rank - below) / max(1, cumulative[index] - below)


class History:
    """Takes the samples and keeps them."""

    def __init__(
        self,
        metrics: Metrics,
        tenants: Tenants,
        dispatchers: Mapping[str, Dispatcher],
        recent: RecentRequests,
        *,
        keep_s: int = KEEP_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock``: Unix seconds."""
        self._metrics = metrics
        self._tenants = tenants
        self._dispatchers = dispatchers
        self._recent = recent
        self._clock = clock
        self._ring: deque[Sample] = deque(maxlen=keep_s)
        self._first_token = BucketWindow()
        self._between_tokens = BucketWindow()
        self._refusals: deque[tuple[int, int]] = deque(maxlen=WINDOW_S + 1)
        self._colours: dict[str, int] = {}

    @property
    def samples(self) -> list[Sample]:
        """Oldest first."""
        return list(self._ring)

    @property
    def latest(self) -> Sample:
        """The last sample; an empty one before the first."""
        return self._ring[-1] if self._ring else Sample(int(self._clock()))

    def colour(self, tenant: str) -> int | None:
        """Which of the ``COLOURS`` a tenant is drawn in; None for the later ones."""
        return self._colours.get(tenant)

    async def run(self) -> None:
        """Sample once a second until cancelled."""
        while True:
            await asyncio.sleep(1.0 - self._clock() % 1.0)
            try:
                self.take()
            except Exception as error:
                _log.error("sample_failed", failure=log.describe(error))

    def take(self) -> Sample:
        """Take one sample now and keep it."""
        service, recent = self._metrics.service, self._recent
        self._refusals.append((recent.total("shed"), recent.total("throttled")))
        waiting = {self._metrics.tenant(tenant) for d in self._dispatchers.values() for tenant in d.queue.backlog()}
        served = service.totals()
        wanting = {*served, *waiting}
        weights = {tenant: self._tenants.weight(TenantId(tenant)) for tenant in wanting}
        sample = Sample(
            at=int(self._clock()),
            tokens_per_s=service.recent(RATE_S) / RATE_S,
            running=sum(dispatcher.queue.running for dispatcher in self._dispatchers.values()),
            queued=sum(len(dispatcher.queue) for dispatcher in self._dispatchers.values()),
            fairness=jain(served.get(t, 0) / weights[t] for t in wanting) if len(wanting) > 1 and served else None,
            first_token=self._first_token.push(self._metrics.first_token()),
            between_tokens=self._between_tokens.push(self._metrics.between_tokens()),
            shed=self._refusals[-1][0] - self._refusals[0][0],
            throttled=self._refusals[-1][1] - self._refusals[0][1],
            standings=_standings(served, weights),
        )
        for tenant in sorted(sample.standings):
            if len(self._colours) < COLOURS:
                self._colours.setdefault(tenant, len(self._colours))
        self._ring.append(sample)
        return sample


def _standings(served: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, Standing]:
    total, weight = sum(served.values()), sum(weights.values())
    largest = heapq.nlargest(MAX_TENANTS, weights, key=lambda tenant: (served.get(tenant, 0), weights[tenant]))
    return {
        tenant: Standing(
            tokens=served.get(tenant, 0),
            share=served.get(tenant, 0) / total if total else 0.0,
            entitled=weights[tenant] / weight,
        )
        for tenant in largest
    }
