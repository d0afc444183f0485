"""What a run comes to: shares, fairness, waiting times. The keys of ``as_json`` are fixed; tools and tests read them.

Definitions
- ``share``: a tenant's part of the service over the intervals in which all tenants are backlogged; over the whole run
  where there is no such interval (``backlogged_s`` tells).
- ``jain``: Jain's index (Jain, Chiu and Hawe, 1984) of service ÷ weight over the same intervals.
- ``max_service_difference``: the largest difference between what two tenants got, service ÷ weight, over any interval
  throughout which both are backlogged (VTC, OSDI'24, theorem 4.4 bounds it). Over the first ``MANY`` tenants.
- Percentiles are over requests that got that far before the run ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gateway.simulate.ledger import MANY, Ledger
from gateway.simulate.simulation import Run

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Series:
    """Service over time."""

    times: Floats
    """Rows' moments, seconds, ascending."""
    service: Floats
    """Rows × tenants: service up to each moment."""
    weights: Floats
    masks: Sequence[int]

    @classmethod
    def of(cls, ledger: Ledger) -> Series:
        """A run's."""
        count = len(ledger.tenants)
        return cls(
            np.frombuffer(ledger.times, dtype=np.float64),
            np.frombuffer(ledger.series, dtype=np.float64).reshape(-1, count),
            np.array(ledger.weights),
            ledger.backlogged,
        )

    def backlogged(self, *tenants: int) -> NDArray[np.bool_]:
        """Per row: whether all of ``tenants`` (none given: all there are) are backlogged from then to the next row."""
        wanted = sum(1 << tenant for tenant in tenants) if tenants else (1 << len(self.weights)) - 1
        return np.fromiter((mask & wanted == wanted for mask in self.masks), dtype=np.bool_, count=len(self.masks))

    def gained(self, where: NDArray[np.bool_]) -> Floats:
        """Service per tenant over the intervals that begin at the rows chosen."""
        gains = np.diff(self.service, axis=0, prepend=np.zeros((1, self.service.shape[1])))
        chosen = np.concatenate([[False], where[:-1]])
        return np.asarray(gains[chosen].sum(axis=0))

    def seconds(self, where: NDArray[np.bool_]) -> float:
        """How long those intervals last."""
        return float(np.diff(self.times)[where[:-1]].sum())

    def between(self, start_s: float, end_s: float) -> Floats:
        """Service per tenant from one moment to another."""
        return self.at(end_s) - self.at(start_s)

    def at(self, moment_s: float) -> Floats:
        """Service per tenant up to a moment, linear between rows."""
        return np.array(
            [np.interp(moment_s, self.times, self.service[:, i], left=0.0) for i in range(len(self.weights))]
        )

    def difference(self) -> float:
        """``max_service_difference``."""
        level = self.service / self.weights
        most = 0.0
        for i in range(min(MANY, len(self.weights))):
            for j in range(i):
                gap = level[:, i] - level[:, j]
                for start, end in _stretches(self.backlogged(i, j)):
                    part = gap[start : end + 1]
                    most = max(most, float(part.max() - part.min()))
        return most


@dataclass(slots=True)
class Figures:
    """Everything the report shows, derived once."""

    run: Run
    series: Series
    shares: Floats
    backlogged_s: float
    jain: float
    max_service_difference: float

    @classmethod
    def of(cls, run: Run) -> Figures:
        """Derive them."""
        series = Series.of(run.ledger)
        where = series.backlogged()
        gains = series.gained(where)
        if gains.sum() <= 0:
            gains = series.service[-1]
        total = gains.sum()
        return cls(
            run,
            series,
            shares=gains / total if total > 0 else np.zeros_like(gains),
            backlogged_s=series.seconds(where),
            jain=jain(gains / series.weights),
            max_service_difference=series.difference(),
        )

    @property
    def tokens(self) -> int:
        """Tokens computed: prompts and output, without cached and recomputed ones."""
        return sum(account.prompt + account.output for account in self.run.ledger.accounts)

    def as_json(self) -> dict[str, Any]:
        """The figures by their fixed keys; null where nothing was measured."""
        run, ledger = self.run, self.run.ledger
        elapsed = run.elapsed_s
        return {
            "policy": run.scenario.policy.use,
            "seed": run.scenario.seed,
            "elapsed_s": round(elapsed, 6),
            "requests": run.requests,
            "tenants": {
                tenant: {
                    "weight": ledger.weights[i],
                    "share": round(float(self.shares[i]), 6),
                    "service": float(self.series.service[-1, i]),
                    "requests": account.arrived,
                    "finished": account.finished,
                    "failed": account.failed,
                    "shed": sum(account.shed.values()),
                    "prompt_tokens": account.prompt,
                    "cached_tokens": account.cached,
                    "output_tokens": account.output,
                    "ttft_p50_s": percentile(account.ttfts, 50),
                    "ttft_p95_s": percentile(account.ttfts, 95),
                    "queue_wait_p95_s": percentile(account.waits, 95),
                    "latency_mean_s": mean(account.latencies),
                }
                for i, (tenant, account) in enumerate(zip(ledger.tenants, ledger.accounts, strict=True))
            },
            "backlogged_s": round(self.backlogged_s, 6),
            "jain": round(self.jain, 6),
            "max_service_difference": self.max_service_difference,
            "throughput_tokens_s": round(self.tokens / elapsed, 3) if elapsed > 0 else 0.0,
            "preemptions": run.preemptions,
            "shed": sum(sum(account.shed.values()) for account in ledger.accounts),
            "shed_reasons": _reasons(account.shed for account in ledger.accounts),
            "unfinished": run.unfinished,
            "steps": run.steps,
            "busy_s": round(run.busy_s, 6),
        }


def percentile(values: Sequence[float], q: float) -> float | None:
    """The value that ``q`` per cent do not exceed (nearest rank); None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(q / 100 * len(ordered)) - 1)], 6)


def mean(values: Sequence[float]) -> float | None:
    """The arithmetic mean; None of no values."""
    return round(math.fsum(values) / len(values), 6) if values else None


def jain(values: Floats) -> float:
    """1 for equal values, 1/n when one has everything; 1 of nothing."""
    squares = float((values * values).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares > 0 else 1.0


def _stretches(where: NDArray[np.bool_]) -> Iterable[tuple[int, int]]:
    """(first row, row after the last) of each run of True; the row after is the moment at which it ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], where, [False]]).astype(np.int8)))
    last = len(where) - 1
    return ((int(start), min(int(end), last)) for start, end in zip(edges[::2], edges[1::2], strict=True))


def _reasons(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for part in parts:
        for reason, count in part.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return dict(sorted(reasons.items()))
