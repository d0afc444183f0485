"""A scenario whose traffic is like a recorded one: per tenant, distributions fitted to gaps and lengths.

Rules
- A fit counts only when the Kolmogorov-Smirnov distance to what was recorded is at most ``MAX_KS``; where no named
  distribution is that close, the recorded values themselves are the distribution: an ``empirical`` one of at most
  ``QUANTILES`` equally likely values (its distance is at most 1/QUANTILES by construction).
- Arrivals: poisson where the gaps are exponential, else gamma, else the recorded arrivals are replayed as a log.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gateway.simulate.traffic_log import Row

MAX_KS = 0.05
QUANTILES = 64
Cdf = Callable[[float], float]
Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fit:
    """A distribution and how far it is from what was recorded."""

    spec: Spec
    ks: float


@dataclass(frozen=True, slots=True)
class TenantFit:
    """One tenant's traffic."""

    tenant: str
    count: int
    arrivals: Fit | None
    """None: no named process is close; replay the log."""
    prompt: Fit
    output: Fit


def fit(rows: Sequence[Row]) -> list[TenantFit]:
    """Per tenant, in order of id. Tenants with fewer than two requests cannot be fitted and are left out."""
    by_tenant: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_tenant[row.tenant].append(row)
    return [
        TenantFit(
            tenant,
            len(mine),
            fit_arrivals([row.arrival for row in mine]),
            fit_lengths([row.prompt for row in mine]),
            fit_lengths([row.output for row in mine]),
        )
        for tenant, mine in sorted(by_tenant.items())
        if len(mine) > 1
    ]


def fit_arrivals(moments: Sequence[float]) -> Fit | None:
    """Poisson or gamma for the gaps between ascending ``moments``; None when neither is close."""
    gaps = sorted(after - before for before, after in pairwise(moments))
    mean = math.fsum(gaps) / len(gaps) if gaps else 0.0
    if mean <= 0:
        return None
    rate = round(1 / mean, 6)
    poisson = Fit({"kind": "poisson", "rate": rate}, ks(gaps, lambda gap: 1 - math.exp(-gap / mean)))
    if poisson.ks <= MAX_KS:
        return poisson
    variance = math.fsum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    cv = math.sqrt(variance) / mean
    if not 0.05 <= cv <= 20:
        return None
    shape = 1 / cv**2
    gamma = Fit(
        {"kind": "gamma", "rate": rate, "cv": round(cv, 4)}, ks(gaps, lambda gap: gamma_cdf(shape, gap * shape / mean))
    )
    return gamma if gamma.ks <= MAX_KS else None


def fit_lengths(values: Sequence[int]) -> Fit:
    """The simplest distribution of whole numbers that is close enough."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    if low == high:
        return Fit({"kind": "fixed", "value": low}, 0.0)
    span = high - low + 1
    candidates = [
        Fit(
            {"kind": "uniform", "low": low, "high": high},
            ks(ordered, lambda x: min(1.0, max(0.0, (x - low + 1) / span))),
        ),
        _lognormal(ordered),
    ]
    best = min(candidates, key=lambda found: found.ks)
    return best if best.ks <= MAX_KS else _empirical(ordered)


def ks(ordered: Sequence[float], cdf: Cdf) -> float:
    """Kolmogorov-Smirnov distance between ascending values and a distribution; equal values count as one step."""
    count = len(ordered)
    worst = 0.0
    at = 0
    while at < count:
        value = ordered[at]
        end = bisect_right(ordered, value, at)
        worst = max(worst, abs(cdf(value) - end / count))
        if not isinstance(value, int):
            worst = max(worst, abs(cdf(value) - at / count))
        else:
            worst = max(worst, abs(cdf(value - 1) - at / count))
        at = end
    return worst


def gamma_cdf(shape: float, x: float) -> float:
    """Regularised lower incomplete gamma function: series below shape + 1, continued fraction above."""
    if x <= 0:
        return 0.0
    scale = math.exp(-x + shape * math.log(x) - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        k = shape
        while term > total * 1e-12:
            k += 1
            term *= x / k
            total += term
        return min(1.0, total * scale)
    tiny = 1e-300
    b = x + 1 - shape
    c = 1 / tiny
    d = 1 / b
    h = d
    for i in range(1, 500):
        an = -i * (i - shape)
        b += 2
        d = 1 / (an * d + b or tiny)
        c = b + an / c or tiny
        step = d * c
        h *= step
        if abs(step - 1) < 1e-12:
            break
    return max(0.0, 1 - scale * h)


def _lognormal(ordered: Sequence[int]) -> Fit:
    logs = [math.log(value) for value in ordered]
    mu = math.fsum(logs) / len(logs)
    sigma = math.sqrt(math.fsum((value - mu) ** 2 for value in logs) / len(logs))
    high = ordered[-1]

    def cdf(x: float) -> float:
        if x >= high:
            return 1.0
        # A length is rounded: everything up to x + 1/2 becomes x; and nothing is below 1.
        return 0.5 * (1 + math.erf((math.log(x + 0.5) - mu) / (sigma * math.sqrt(2)))) if x >= 1 else 0.0

    mean = round(math.exp(mu + sigma * sigma / 2), 4)
    return Fit({"kind": "lognormal", "mean": mean, "sigma": round(sigma, 6), "max": high}, ks(ordered, cdf))


def _empirical(ordered: Sequence[int]) -> Fit:
    """Mid-quantiles of what was recorded, each equally likely."""
    count = len(ordered)
    size = min(QUANTILES, count)
    values = [ordered[min(count - 1, int((i + 0.5) * count / size))] for i in range(size)]

    def cdf(x: float) -> float:
        return bisect_right(values, x) / size

    return Fit({"kind": "empirical", "values": values}, ks(ordered, cdf))


def scenario(
    rows: Sequence[Row], *, log_file: str, weights: dict[str, float] | None = None, description: str = ""
) -> tuple[Spec, list[TenantFit]]:
    """A scenario's data with fitted traffic, and the fits. ``log_file``: what tenants that fit nothing replay.

    Raises ValueError when no tenant has two requests.
    """
    fits = fit(rows)
    if not fits:
        raise ValueError("no tenant has two requests with output; there is nothing to fit")
    duration = math.ceil(max(row.arrival for row in rows)) + 1
    tenants = [_tenant(found, [row for row in rows if row.tenant == found.tenant], log_file) for found in fits]
    for tenant in tenants:
        weight = (weights or {}).get(tenant["id"])
        if weight is not None:
            tenant["weight"] = weight
    return {"description": description, "seed": 1, "duration_s": duration, "tenants": tenants}, fits


def _tenant(found: TenantFit, rows: Sequence[Row], log_file: str) -> Spec:
    if found.arrivals is None:
        return {"id": found.tenant, "arrivals": {"kind": "log", "file": log_file}}
    spec: Spec = {"id": found.tenant, "arrivals": found.arrivals.spec}
    tokens = min(row.prefix_tokens for row in rows)
    if tokens and all(row.prompt > tokens for row in rows):
        spec["prefix"] = {"groups": len({row.prefix for row in rows}), "tokens": tokens}
        spec["input"] = fit_lengths([row.prompt - tokens for row in rows]).spec
    else:
        spec["input"] = found.prompt.spec
    return {**spec, "output": found.output.spec}
