"""The shipped scenarios come out as promised, with three seeds each; what fcfs does to them, for contrast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.simulate.figures import Figures
from gateway.simulate.front import Front
from gateway.simulate.simulation import simulate
from tests.gateway.simulate.experiments import (
    BY_KEY,
    NO_LIFT,
    SEEDS,
    Case,
    Runs,
    prepared,
    share_between,
    two_turnovers,
)

VTC_BOUND = 2 * max(1 * 256, 2 * 10_000)
"""2·U of VTC, OSDI'24, theorem 4.4: U = max(input_cost · longest prompt, output_cost · tokens in the cache)."""

FAIR = [
    *("two-tenants", "eight-tenants", "weights", "below-share", "on-off-below", "on-off-over", "flooder"),
    *("lengths-a", "lengths-b", "return", "work-conservation", "many-keys"),
]
CONTRASTED = ("below-share", "on-off-below", "flooder", "two-tenants", "eight-tenants", "work-conservation")
"""What is promised of these is told from fcfs, seed by seed."""

CASES = [
    *(Case(name, seed) for name in FAIR for seed in SEEDS),
    *(Case(name, seed, "fcfs") for name in CONTRASTED for seed in SEEDS),
    *(Case("flooder", seed, None, "victim") for seed in SEEDS),
    *(Case("return", seed, NO_LIFT) for seed in SEEDS),
    *(Case("many-keys", seed, BY_KEY) for seed in SEEDS),
]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs(CASES) as made:
        yield made


each_seed = pytest.mark.parametrize("seed", SEEDS)
pytestmark = pytest.mark.timeout(600)


def shares(figures: Figures) -> list[float]:
    """Of the time in which all tenants wait: there has to be some, and not a moment only."""
    assert figures.backlogged_s > 30
    return [float(share) for share in figures.shares]


def p95(figures: Figures, tenant: str) -> float:
    value = figures.as_json()["tenants"][tenant]["ttft_p95_s"]
    assert value is not None
    return float(value)


@each_seed
def test_two_tenants_share_equally(runs: Runs, seed: int) -> None:
    figures = runs("two-tenants", seed)
    assert shares(figures) == pytest.approx([0.5, 0.5], abs=0.02)
    assert figures.max_service_difference <= VTC_BOUND
    assert figures.backlogged_s > 300


@each_seed
def test_first_come_first_served_gives_two_tenants_what_they_ask(runs: Runs, seed: int) -> None:
    assert shares(runs("two-tenants", seed, "fcfs")) == pytest.approx([1 / 3, 2 / 3], abs=0.03)


@each_seed
def test_eight_tenants_share_equally(runs: Runs, seed: int) -> None:
    figures = runs("eight-tenants", seed)
    assert figures.jain >= 0.99
    assert figures.backlogged_s > 30


@each_seed
def test_first_come_first_served_is_unfair_to_eight(runs: Runs, seed: int) -> None:
    figures = runs("eight-tenants", seed, "fcfs")
    assert figures.jain <= 0.93
    assert figures.backlogged_s > 30


@each_seed
def test_shares_follow_the_weights(runs: Runs, seed: int) -> None:
    assert shares(runs("weights", seed)) == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.02)


@each_seed
def test_who_asks_for_less_than_its_share_gets_it_at_once(runs: Runs, seed: int) -> None:
    fair, fcfs = runs("below-share", seed), runs("below-share", seed, "fcfs")
    accounts = fair.run.ledger.accounts
    for i, tenant in enumerate(("quarter", "half")):
        assert accounts[i].finished >= accounts[i].arrived - 6, (
            "what is still running at the end is all that is missing"
        )
        assert p95(fair, tenant) <= p95(fcfs, tenant) / 10


@each_seed
def test_who_comes_and_goes_below_its_share_hardly_waits(runs: Runs, seed: int) -> None:
    fair, fcfs = runs("on-off-below", seed), runs("on-off-below", seed, "fcfs")
    assert p95(fair, "on-off") <= p95(fcfs, "on-off") / 10


@each_seed
def test_who_comes_and_goes_over_its_share_gets_half_and_then_leaves_all(runs: Runs, seed: int) -> None:
    """Half while it waits (it goes on waiting into the OFF phase), all to the other once its line is empty."""
    figures = runs("on-off-over", seed)
    assert shares(figures) == pytest.approx([0.5, 0.5], abs=0.02)
    alone = figures.series.backlogged(1) & ~figures.series.backlogged(0)
    assert figures.series.seconds(alone) > 0
    gained = figures.series.gained(alone)
    # Its last answers still run when nothing of it waits any more: at most a cache full of them per phase.
    assert gained[0] <= 5 * VTC_BOUND / 4
    rate = figures.series.service[-1].sum() / figures.run.elapsed_s
    assert gained.sum() / figures.series.seconds(alone) >= 0.9 * rate


@each_seed
def test_a_flood_costs_the_others_two_turnovers_at_most(runs: Runs, seed: int) -> None:
    flooded, fcfs, alone = runs("flooder", seed), runs("flooder", seed, "fcfs"), runs("flooder", seed, only="victim")
    assert p95(flooded, "victim") <= p95(alone, "victim") + two_turnovers(flooded, from_s=300)
    assert p95(flooded, "victim") < 2
    assert p95(fcfs, "victim") > 60


@each_seed
@pytest.mark.parametrize("name", ["lengths-a", "lengths-b"])
def test_lengths_do_not_matter(runs: Runs, name: str, seed: int) -> None:
    assert shares(runs(name, seed)) == pytest.approx([0.5, 0.5], abs=0.02)


def from_first_2u(figures: Figures) -> float:
    """The late tenant's share from the moment at which it got 2·U of service."""
    series = figures.series
    began = float(series.times[int((series.service[:, 1] >= VTC_BOUND).argmax())])
    return share_between(figures, "late", began, figures.run.elapsed_s)


@each_seed
def test_who_comes_late_gets_its_share_and_no_credit(runs: Runs, seed: int) -> None:
    assert from_first_2u(runs("return", seed)) == pytest.approx(0.5, abs=0.03)


@each_seed
def test_without_the_lift_it_would_take_more(runs: Runs, seed: int) -> None:
    assert from_first_2u(runs("return", seed, NO_LIFT)) > 0.6


@each_seed
def test_fairness_costs_no_throughput(runs: Runs, seed: int) -> None:
    fcfs = runs("work-conservation", seed, "fcfs").as_json()["throughput_tokens_s"]
    assert runs("work-conservation", seed).as_json()["throughput_tokens_s"] >= 0.97 * fcfs


def test_after_each_turn_nothing_queued_fits_a_worker_by_the_gate_s_own_figures() -> None:
    """Of the first minute; ``test_work_conservation.py`` asks the workers."""
    loaded = prepared(Case("work-conservation", 1))
    loaded = type(loaded)(loaded.scenario.model_copy(update={"duration_s": 60}), loaded.path, loaded.registry)
    turns = 0

    def look(front: Front, now: float) -> None:
        nonlocal turns
        turns += 1
        assert not front.idle_room(now)

    simulate(loaded, observer=look)
    assert turns > 300


@each_seed
def test_many_keys_gain_nothing(runs: Runs, seed: int) -> None:
    assert shares(runs("many-keys", seed)) == pytest.approx([0.5, 0.5], abs=0.02)


@each_seed
def test_by_key_they_would_gain_nearly_everything(runs: Runs, seed: int) -> None:
    """What ``hierarchical`` is for: with a share per key, the one key of the other tenant gets about its 51st."""
    assert shares(runs("many-keys", seed, BY_KEY))[0] > 0.9
