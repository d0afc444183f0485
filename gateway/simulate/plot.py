"""PNG plots of one or several runs of a scenario. Needs matplotlib (extra ``plot``), imported when called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gateway.simulate.figures import Figures, Floats

MAX_LINES = 12
"""Tenants drawn; more are unreadable."""
_POINTS = 600
_DPI = 80


class NoPlots(RuntimeError):  # noqa: N818 - a statement about the installation
    """matplotlib is not installed."""


def plot(runs: Mapping[str, Figures], path: Path, *, title: str = "") -> None:
    """``draw``, into a PNG file. Raises NoPlots, OSError."""
    draw(runs, title=title).savefig(path, format="png")


def draw(runs: Mapping[str, Figures], *, title: str = "") -> Any:
    """Three panels per run: service per tenant over time, its accumulated difference, distribution of the TTFT.

    ``runs``: label → figures, one row of panels each. Returns a matplotlib Figure. Raises NoPlots.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoPlots("plots need matplotlib: pip install 'forebay[plot]'") from None
    figure: Any = Figure(figsize=(15, 4.2 * len(runs)), dpi=_DPI, layout="constrained")
    axes = figure.subplots(len(runs), 3, squeeze=False)
    for row, (label, figures) in zip(axes, runs.items(), strict=True):
        _service(row[0], figures, label)
        _difference(row[1], figures, label)
        _ttft(row[2], figures, label)
    if title:
        figure.suptitle(title)
    return figure


def _service(axes: Any, figures: Figures, label: str) -> None:
    moments = np.linspace(0, figures.run.elapsed_s, _POINTS)
    for i, tenant in _drawn(figures):
        axes.plot(moments, np.interp(moments, figures.series.times, figures.series.service[:, i], left=0), label=tenant)
    axes.set(title=f"{label}: service per tenant", xlabel="seconds", ylabel="cost of tokens served")
    axes.legend(fontsize="small")


def _difference(axes: Any, figures: Figures, label: str) -> None:
    """Between the most and the least served of those that are backlogged, counted from when they began to be so."""
    series = figures.series
    moments, gaps = _accumulated(series.times, series.service / series.weights, series.masks)
    keep = np.linspace(0, len(gaps) - 1, min(len(gaps), 4 * _POINTS)).astype(int)
    axes.plot(moments[keep], gaps[keep], color="tab:red", linewidth=1)
    axes.set(
        title=f"{label}: difference while both are backlogged",
        xlabel="seconds",
        ylabel="service ÷ weight",
        xlim=(0, figures.run.elapsed_s),
        ylim=(0, None),
    )


def _accumulated(times: Floats, level: Floats, masks: Sequence[int]) -> tuple[Floats, Floats]:
    """Moments and differences; a common backlog begins anew whenever the set of backlogged tenants changes."""
    gaps = np.full(len(times), np.nan)
    start = 0
    for row in range(1, len(times) + 1):
        if row < len(times) and masks[row] == masks[start]:
            continue
        waiting = [i for i in range(level.shape[1]) if masks[start] >> i & 1]
        if len(waiting) > 1:
            since = level[start : row + 1][:, waiting] - level[start, waiting]
            gaps[start : row + 1] = since.max(axis=1) - since.min(axis=1)
        start = row
    return times, gaps


def _ttft(axes: Any, figures: Figures, label: str) -> None:
    drawn = False
    for i, tenant in _drawn(figures):
        values = np.sort(np.array(figures.run.ledger.accounts[i].ttfts))
        if not len(values):
            continue
        keep = np.linspace(0, len(values) - 1, min(len(values), _POINTS)).astype(int)
        axes.plot(np.maximum(values[keep], 1e-3), (keep + 1) / len(values), label=tenant)
        drawn = True
    axes.set(title=f"{label}: time to first token", xlabel="seconds", ylabel="share of requests", ylim=(0, 1))
    if drawn:
        axes.set_xscale("log")
        axes.legend(fontsize="small")


def _drawn(figures: Figures) -> list[tuple[int, str]]:
    return list(enumerate(figures.run.ledger.tenants))[:MAX_LINES]
