"""Arrivals and lengths: the rates and shapes they promise, the same for the same seed."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from gateway.simulate.arrivals import Arrivals
from gateway.simulate.lengths import Lengths

ARRIVALS: TypeAdapter[Any] = TypeAdapter(Arrivals)
LENGTHS: TypeAdapter[Any] = TypeAdapter(Lengths)
END = 2000.0


def times(seed: int = 1, **spec: Any) -> list[float]:
    made = ARRIVALS.validate_python(spec)
    return list(made.times(Random(seed), END))


def lengths(count: int = 20_000, seed: int = 1, **spec: Any) -> list[int]:
    draw = LENGTHS.validate_python(spec).sampler(Random(seed))
    return [draw() for _ in range(count)]


def gaps(moments: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(moments)]


SPECS: list[dict[str, Any]] = [
    {"kind": "poisson", "rate": 3},
    {"kind": "gamma", "rate": 3, "cv": 2},
    {"kind": "on_off", "rate": 3, "on_s": 60, "off_s": 60},
    {"kind": "ramp", "from": 0, "to": 6},
    {"kind": "window", "rate": 3, "from_s": 300, "to_s": 600},
    {"kind": "burst", "count": 100, "at_s": 5},
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
def test_arrivals_ascend_inside_the_run_and_repeat_by_seed(spec: dict[str, Any]) -> None:
    moments = times(**spec)
    assert moments == sorted(moments)
    assert moments
    assert moments[0] >= 0
    assert moments[-1] < END
    assert times(**spec) == moments
    assert spec["kind"] == "burst" or times(seed=2, **spec) != moments


def test_poisson_has_its_rate_and_exponential_gaps() -> None:
    moments = times(kind="poisson", rate=3)
    assert len(moments) / END == pytest.approx(3, rel=0.05)
    between = gaps(moments)
    assert pstdev(between) / fmean(between) == pytest.approx(1, rel=0.06)


@pytest.mark.parametrize("cv", [0.3, 2.0])
def test_gamma_has_its_rate_and_its_spread(cv: float) -> None:
    between = gaps(times(kind="gamma", rate=3, cv=cv))
    assert 1 / fmean(between) == pytest.approx(3, rel=0.08)
    assert pstdev(between) / fmean(between) == pytest.approx(cv, rel=0.08)


def test_on_off_is_silent_when_off() -> None:
    moments = times(kind="on_off", rate=3, on_s=60, off_s=40)
    assert all(moment % 100 < 60 for moment in moments)
    assert len(moments) / (END * 0.6) == pytest.approx(3, rel=0.06)


def test_a_ramp_grows_linearly() -> None:
    moments = times(kind="ramp", **{"from": 0, "to": 6})
    first, last = (sum(a <= m < b for m in moments) for a, b in ((0, END / 4), (3 * END / 4, END)))
    assert first / (END / 4) == pytest.approx(0.75, rel=0.2)
    assert last / (END / 4) == pytest.approx(5.25, rel=0.06)


def test_a_window_and_a_burst_keep_to_their_time() -> None:
    moments = times(kind="window", rate=3, from_s=300, to_s=600)
    assert moments[0] >= 300
    assert moments[-1] < 600
    assert len(moments) / 300 == pytest.approx(3, rel=0.12)
    assert times(kind="burst", count=5, at_s=7) == [7.0] * 5
    assert times(kind="burst", count=5, at_s=END) == []


def test_lengths_have_their_means_and_bounds() -> None:
    assert set(lengths(kind="fixed", value=7)) == {7}
    uniform = lengths(kind="uniform", low=10, high=20)
    assert (min(uniform), max(uniform)) == (10, 20)
    assert fmean(uniform) == pytest.approx(15, rel=0.02)
    normal = lengths(kind="lognormal", mean=200, sigma=0.5, max=5000)
    assert fmean(normal) == pytest.approx(200, rel=0.03)
    assert pstdev([math.log(value) for value in normal]) == pytest.approx(0.5, rel=0.03)
    assert max(lengths(kind="lognormal", mean=200, sigma=1.5, max=300)) == 300


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "poisson", "rate": 0}, "greater than 0"),
        ({"kind": "poisson", "rate": float("nan")}, "rate"),
        ({"kind": "gamma", "rate": 1, "cv": -1}, "cv"),
        ({"kind": "bursts", "count": 1}, "bursts"),
        ({"kind": "burst", "count": 1, "colour": 1}, "colour"),
    ],
)
def test_nonsense_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ARRIVALS.validate_python(spec)


def test_a_range_the_wrong_way_round_is_refused() -> None:
    with pytest.raises(ValidationError, match="swap them"):
        LENGTHS.validate_python({"kind": "uniform", "low": 5, "high": 4})
