"""Figures: worked out by hand on small series, and the keys that tools read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.simulate.figures import Figures, Series, jain, mean, percentile
from gateway.simulate.ledger import MANY, Ledger
from gateway.simulate.simulation import simulate
from policies.types import Charge
from tests.gateway.simulate.scenarios import burst, make, poisson, tenant


def series(rows: list[tuple[float, list[float], int]], weights: list[float]) -> Series:
    """Rows of (moment, service per tenant, backlog mask)."""
    return Series(
        np.array([row[0] for row in rows]),
        np.array([row[1] for row in rows]),
        np.array(weights),
        [row[2] for row in rows],
    )


BOTH = 0b11
STORY = series(
    [
        (0, [0, 0], BOTH),
        (1, [10, 0], BOTH),
        (2, [20, 20], 0b10),
        (3, [20, 60], BOTH),
        (4, [50, 60], 0),
    ],
    [1, 1],
)


def test_shares_count_only_while_all_are_backlogged() -> None:
    """From 0 to 2 and from 3 to 4: 20 + 30 against 20 + 0."""
    where = STORY.backlogged()
    assert list(where) == [True, True, False, True, False]
    assert list(STORY.gained(where)) == [50, 20]
    assert STORY.seconds(where) == 3


def test_the_difference_is_the_largest_over_any_interval_of_a_common_backlog() -> None:
    """Levels 0, 10, 0 in the first stretch, -40 to -10 in the second: 30. What happens between is no unfairness."""
    assert STORY.difference() == 30


def test_the_difference_is_in_service_per_weight() -> None:
    weighted = series([(0, [0, 0], BOTH), (1, [10, 40], BOTH)], [1, 4])
    assert weighted.difference() == 0


def test_service_is_linear_between_rows() -> None:
    assert list(STORY.between(0.5, 3.5)) == [35 - 5, 60]


def test_three_tenants_are_compared_in_pairs() -> None:
    rows: list[tuple[float, list[float], int]] = [(0, [0, 0, 0], 0b011), (1, [5, 0, 90], 0b011)]
    assert series(rows, [1, 1, 1]).difference() == 5, "the third has no backlog"


@pytest.mark.parametrize(("values", "index"), [([1, 1, 1, 1], 1.0), ([4, 0, 0, 0], 0.25), ([1, 2], 0.9), ([0, 0], 1.0)])
def test_jains_index(values: list[float], index: float) -> None:
    assert jain(np.array(values)) == pytest.approx(index)


def test_percentiles_are_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, 50) == 3
    assert percentile(values, 95) == 5
    assert percentile(values, 20) == 1
    assert percentile([], 50) is None
    assert mean([]) is None
    assert mean(values) == 3


def test_the_keys_that_tools_read(tmp_path: Path) -> None:
    loaded = make(tmp_path, tenant("a", poisson(3)), tenant("b", burst(50)), policy={"use": "vtc"})
    data = Figures.of(simulate(loaded)).as_json()
    wanted = {"share", "service", "requests", "ttft_p50_s", "ttft_p95_s", "queue_wait_p95_s"}
    assert all(wanted <= set(row) for row in data["tenants"].values())
    assert {"jain", "max_service_difference", "throughput_tokens_s", "preemptions", "shed"} <= set(data)
    assert sum(row["share"] for row in data["tenants"].values()) == pytest.approx(1, abs=1e-5)
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_service_is_what_ran_at_its_cost(tmp_path: Path) -> None:
    """50 requests of 32 + 8 tokens at 1 and 3 each."""
    with_ = {"input_cost": 1, "output_cost": 3}
    loaded = make(tmp_path, tenant("a", burst(50)), policy={"use": "vtc", "with": with_}, drain=True)
    figures = Figures.of(simulate(loaded))
    assert figures.as_json()["tenants"]["a"]["service"] == 50 * (32 + 3 * 8)
    assert figures.tokens == 50 * 40
    assert Figures.of(simulate(loaded.under("fcfs"))).as_json()["tenants"]["a"]["service"] == 50 * (32 + 3 * 8)


def test_a_run_without_requests_has_figures_all_the_same(tmp_path: Path) -> None:
    figures = Figures.of(simulate(make(tmp_path, tenant("a", burst(1, 19.99)), duration_s=10)))
    data = figures.as_json()
    assert data["requests"] == 0
    assert data["tenants"]["a"]["ttft_p50_s"] is None
    assert data["throughput_tokens_s"] == 0


def test_many_tenants_need_bounded_memory(tmp_path: Path) -> None:
    crowd = [tenant(f"t{i}", burst(1)) for i in range(MANY + 1)]
    ledger = Ledger(make(tmp_path, *crowd, duration_s=100).scenario)
    for step in range(10_000):
        ledger.served(step % 10, Charge(output=1))
        ledger.mark(step / 100)
    assert len(ledger.times) <= 1001
    few: Any = Ledger(make(tmp_path, *crowd[:2], duration_s=100).scenario)
    for step in range(2000):
        few.served(0, Charge(output=1))
        few.mark(step / 100)
    assert len(few.times) == 2000
    assert math.isclose(few.series[-2], 2000 * 2)
