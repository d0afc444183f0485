"""From timelines to the figures of a run. Pure arithmetic; every engine, ours or another's, is measured by it.

* TTFT: from when the request was due to its first token.
* ITL: gaps between a request's consecutive tokens, over all requests. Tokens that came together have gaps of 0.
* TPOT: (last - first token) ÷ (tokens - 1), one figure per request.
* E2E: from when it was due to its end.
* Goodput: requests per second that met every objective given, and their share. A failed request met none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.bench.load import Timeline

Figures = dict[str, Any]


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile (0 ≤ q ≤ 1), linear between the two nearest ranks (Hyndman & Fan 1996, type 7). None: no values.

    Raises ValueError for a q outside [0, 1].
    """
    if not 0 <= q <= 1:
        raise ValueError(f"q={q} must be between 0 and 1")
    if not values:
        return None
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives in milliseconds; None: no such objective."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))

    def met(self, line: Timeline) -> bool:
        """Whether a request ended well and within every objective."""
        if line.error is not None or not line.times:
            return False
        figures = ((self.ttft_ms, ttft(line)), (self.tpot_ms, tpot(line)), (self.e2e_ms, e2e(line)))
        return all(limit is None or figure is None or figure * 1e3 <= limit for limit, figure in figures)


def ttft(line: Timeline) -> float | None:
    """Seconds to the first token."""
    return line.times[0] - line.submitted if line.times else None


def tpot(line: Timeline) -> float | None:
    """Mean seconds per token after the first; None below two tokens."""
    return (line.times[-1] - line.times[0]) / (line.outputs - 1) if line.times and line.outputs > 1 else None


def e2e(line: Timeline) -> float | None:
    """Seconds to the end."""
    return None if line.end is None else line.end - line.submitted


def gaps(line: Timeline) -> list[float]:
    """Seconds between consecutive tokens."""
    return [after - before for before, after in zip(line.times, line.times[1:], strict=False)]


def summarise(lines: Sequence[Timeline], slo: Slo | None = None) -> Figures:
    """The figures of a run. Times in ms; a figure that there is nothing to make of is None."""
    ended = [line for line in lines if line.error is None and line.times]
    inputs, outputs = sum(line.input_tokens for line in ended), sum(line.outputs for line in ended)
    begin = min((line.submitted for line in lines), default=0.0)
    duration = max((line.end for line in lines if line.end is not None), default=begin) - begin
    figures: Figures = {
        "requests": len(lines),
        "failed": len(lines) - len(ended),
        "duration_s": _round(duration),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "output_tokens_s": _rate(outputs, duration),
        "total_tokens_s": _rate(inputs + outputs, duration),
        "requests_s": _rate(len(ended), duration),
        **_spread("ttft", (ttft(line) for line in ended)),
        **_spread("itl", (gap for line in ended for gap in gaps(line))),
        **_spread("tpot", (tpot(line) for line in ended)),
        **_spread("e2e", (e2e(line) for line in ended)),
        **_spread("queue", (None if line.scheduled is None else line.scheduled - line.submitted for line in ended)),
    }
    cached = [line.cached for line in ended if line.cached is not None]
    figures["cached_tokens"] = sum(cached) if cached else None
    figures["hit_rate"] = _round(sum(cached) / inputs) if cached and inputs else None
    if slo:
        good = sum(map(slo.met, lines))
        figures["goodput_requests_s"] = _rate(good, duration)
        figures["goodput_share"] = _round(good / len(lines)) if lines else None
    errors = sorted({line.error for line in lines if line.error is not None})
    if errors:
        figures["errors"] = {code: sum(line.error == code for line in lines) for code in errors}
    return figures


def by_tenant(lines: Sequence[Timeline], slo: Slo | None = None) -> dict[str, Figures]:
    """The same per tenant, over the run's whole duration being theirs; empty where there is but one."""
    names = sorted({line.tenant for line in lines})
    if len(names) < 2:
        return {}
    return {name: summarise([line for line in lines if line.tenant == name], slo) for name in names}


def _spread(name: str, seconds: Iterable[float | None]) -> Figures:
    values = [value for value in seconds if value is not None]
    figures = {f"{name}_p{round(q * 100)}_ms": percentile(values, q) for q in (0.5, 0.95, 0.99)}
    figures[f"{name}_max_ms"] = max(values, default=None)
    return {key: None if value is None else _round(value * 1e3) for key, value in figures.items()}


def _rate(amount: float, seconds: float) -> float | None:
    return _round(amount / seconds) if seconds > 0 else None


def _round(value: float) -> float:
    """Five significant digits: more would be noise."""
    return float(f"{value:.5g}")
