"""The event loop: times that can be worked out by hand, runs that repeat, and steps advanced together or one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.simulate.figures import Figures
from gateway.simulate.front import Front, NotSimulable
from gateway.simulate.simulation import Run, Simulation, simulate
from policies.manager import make_manager, register
from policies.registry import Registry
from policies.spi import Json, NoConfig, PolicyContext, PolicySpec, hookimpl
from policies.types import Job, JobId, QuotaDecision, Usage
from tests.gateway.simulate.scenarios import burst, make, poisson, tenant


def story(run: Run) -> list[Any]:
    """Everything that a run decided, as plain values."""
    accounts = [
        (list(a.waits), list(a.ttfts), list(a.finishes), a.prompt, a.cached, a.output, a.shed)
        for a in run.ledger.accounts
    ]
    return [accounts, run.steps, run.preemptions, run.requests, run.unfinished, run.elapsed_s]


def test_one_request_takes_the_time_of_its_steps(tmp_path: Path) -> None:
    """32 prompt tokens: one step of 10 + 32·0.5 = 26 ms gives the first of 8 tokens; 7 more steps of 10 + 1 ms."""
    run = simulate(make(tmp_path, tenant("a", burst(1, 1.0)), drain=True))
    account = run.ledger.accounts[0]
    assert list(account.waits) == [0.0]
    assert list(account.ttfts) == pytest.approx([0.026])
    assert list(account.latencies) == pytest.approx([0.026 + 7 * 0.011])
    assert run.elapsed_s == pytest.approx(1.103)
    assert (run.steps, account.prompt, account.output) == (8, 32, 8)


def test_a_prompt_longer_than_the_budget_is_chunked(tmp_path: Path) -> None:
    """100 tokens at 64 per step: steps of 10 + 32 and 10 + 18 ms until the first token."""
    run = simulate(make(tmp_path, tenant("a", burst(1), prompt=100, output=1), drain=True))
    assert list(run.ledger.accounts[0].ttfts) == pytest.approx([0.042 + 0.028])


def test_what_arrives_during_a_step_joins_a_later_one(tmp_path: Path) -> None:
    """At 5 ms the first step (26 ms) is under way; the next begins at 26 with 1 decode and 32 prompt tokens."""
    run = simulate(make(tmp_path, tenant("a", burst(1)), tenant("b", burst(1, 0.005)), drain=True))
    assert list(run.ledger.accounts[1].ttfts) == pytest.approx([0.021 + 0.010 + 0.001 + 0.016])


def test_attended_positions_cost_time_where_they_are_priced(tmp_path: Path) -> None:
    """Prompt of 4: 4·5/2 positions; then tokens that attend to 5, 6 and 7."""
    steps = {"base": 10, "per_context_token": 1}
    one = tenant("a", burst(1), prompt=4, output=4)
    run = simulate(make(tmp_path, one, drain=True, workers={"step_ms": steps}))
    assert list(run.ledger.accounts[0].latencies) == pytest.approx([(20 + 15 + 16 + 17) / 1000])


@pytest.mark.parametrize(("twice_at", "chunks"), [(0, (63, 37)), (20, (63, 32, 5))])
def test_chunks_are_cut_as_the_engine_cuts_them(tmp_path: Path, twice_at: int, chunks: tuple[int, ...]) -> None:
    """By the model's shape where that is told, and not by what positions cost. From 26 ms on, each beside a decode."""
    steps = {"base": 10, "per_decode": 1, "per_prefill_token": 0.5, "per_context_token": 0, "twice_at": twice_at}
    tenants = tenant("a", burst(1)), tenant("b", burst(1, 0.005), prompt=100)
    run = simulate(make(tmp_path, *tenants, drain=True, workers={"step_ms": steps}))
    waited = 0.021 + sum(0.011 + 0.0005 * rows for rows in chunks)
    assert list(run.ledger.accounts[1].ttfts) == pytest.approx([waited])


def test_two_workers_share_the_work(tmp_path: Path) -> None:
    alone = simulate(make(tmp_path, tenant("a", burst(40)), drain=True))
    both = simulate(make(tmp_path, tenant("a", burst(40)), drain=True, workers={"count": 2}))
    assert both.elapsed_s < 0.6 * alone.elapsed_s
    assert both.ledger.accounts[0].finished == 40


MIXED = (
    tenant("a", poisson(12), prompt=40, output=30, weight=2),
    tenant("b", {"kind": "gamma", "rate": 9, "cv": 2}, prompt=20, output=50),
)


def test_a_run_repeats_by_seed(tmp_path: Path) -> None:
    first, second, other = (
        story(simulate(make(tmp_path, *MIXED, seed=seed, policy={"use": "vtc"}))) for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_a_tenant_more_leaves_the_traffic_of_the_others_as_it_was(tmp_path: Path) -> None:
    arrived = []
    for tenants in (MIXED[:1], MIXED):
        loaded = make(tmp_path, *tenants, admission={"use": "open"})
        simulation = Simulation(loaded)
        arrived.append([r.at for r in simulation._workload.requests() if r.tenant == 0])
    assert arrived[0] == arrived[1]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1000),
    policy=st.sampled_from(["fcfs", "vtc"]),
    kv_tokens=st.sampled_from([320, 640, 2048]),
    count=st.integers(1, 2),
    cached=st.booleans(),
    context=st.sampled_from([0, 0.001]),
    rates=st.tuples(st.floats(1, 30), st.floats(1, 30)),
)
def test_steps_advanced_together_change_nothing(
    tmp_path: Path,
    seed: int,
    policy: str,
    kv_tokens: int,
    count: int,
    cached: bool,
    context: float,
    rates: tuple[float, float],
) -> None:
    """Every wait, first token, finish and preemption is the same as when each step is planned."""
    workers = {
        "kv_tokens": kv_tokens,
        "count": count,
        "prefix_cache": cached,
        "step_ms": {"base": 10, "per_decode": 1, "per_prefill_token": 0.5, "per_context_token": context},
    }
    prefix = {"prefix": {"groups": 2, "tokens": 32}} if cached else {}
    loaded = make(
        tmp_path,
        tenant("a", poisson(rates[0]), prompt=40, output=30, max_tokens=50, **prefix),
        tenant("b", poisson(rates[1]), prompt=20, output=70, max_wait_s=2),
        seed=seed,
        duration_s=6,
        policy={"use": policy},
        workers=workers,
    )
    assert story(simulate(loaded)) == story(simulate(loaded, coalesce=False))


def test_most_steps_are_advanced_together(tmp_path: Path) -> None:
    planned = 0
    simulation = Simulation(make(tmp_path, tenant("a", burst(8), output=200), drain=True))
    plan = simulation.workers[0].planner.plan

    def counting(now: int = 0) -> Any:
        nonlocal planned
        planned += 1
        return plan(now)

    simulation.workers[0].planner.plan = counting  # type: ignore[method-assign]
    run = simulation.run()
    assert run.steps > 200
    assert planned < 0.2 * run.steps


def test_nothing_is_lost(tmp_path: Path) -> None:
    """Afterwards no block is in use, no job queued or running, and every request finished or was refused."""
    loaded = make(
        tmp_path,
        tenant("a", poisson(20), output=40, max_wait_s=1),
        tenant("b", poisson(20), output=40),
        policy={"use": "vtc"},
        drain=True,
        admission={"use": "bounded", "with": {"max_queued": 30}},
    )
    simulation = Simulation(loaded)
    run = simulation.run()
    for account in run.ledger.accounts:
        assert account.finished + sum(account.shed.values()) == account.arrived
    assert not simulation.front.busy
    planner = simulation.workers[0].planner
    planner.check()
    assert planner.pool.available == planner.pool.total
    assert {"queue_full", "queue_timeout"} <= set(Figures.of(run).as_json()["shed_reasons"])


def test_a_prompt_that_fits_no_worker_is_a_failure_not_a_hang(tmp_path: Path) -> None:
    loaded = make(tmp_path, tenant("a", burst(2), prompt=2000), tenant("b", burst(2)), drain=True)
    run = simulate(loaded)
    assert [account.failed for account in run.ledger.accounts] == [2, 0]
    assert run.ledger.accounts[1].finished == 2
    assert run.unfinished == 0


def test_quota_is_reserved_and_settled(tmp_path: Path) -> None:
    """60 requests a minute: of 100 at once 60 pass; what ends early gives its tokens back."""
    limits = {"requests_per_minute": 60}
    run = simulate(make(tmp_path, tenant("a", burst(100), limits=limits), quota={"use": "token_bucket"}, drain=True))
    assert run.ledger.accounts[0].shed == {"requests_per_minute": 40}
    tokens = {"tokens_per_minute": 1000}
    run = simulate(
        make(tmp_path, tenant("a", burst(3), limits=tokens, max_tokens=300), quota={"use": "token_bucket"}, drain=True)
    )
    assert run.ledger.accounts[0].finished == 3
    assert run.ledger.accounts[0].output == 24, "an answer ends where it ends, not at max_tokens"


def test_who_left_the_queue_no_longer_counts_as_waiting(tmp_path: Path) -> None:
    """Two may wait: of five that come in one moment two do; of those that start at once any number runs."""
    limits, quota = {"queued": 2}, {"use": "token_bucket"}
    run = simulate(make(tmp_path, tenant("a", burst(5), limits=limits), quota=quota, drain=True))
    assert run.ledger.accounts[0].shed == {"queued": 3}
    together = 0

    def look(front: Front, now: float) -> None:
        nonlocal together
        together = max(together, front.queue.running)

    arriving = tenant("a", poisson(1.5), output=100, limits=limits)
    account = simulate(make(tmp_path, arriving, quota=quota, drain=True), observer=look).ledger.accounts[0]
    assert together > 3
    assert account.shed == {}
    assert account.finished == account.arrived


def test_admission_clamps_answers_and_its_fallback_is_a_refusal(tmp_path: Path) -> None:
    """Answers of 200 tokens, clamped to 20 once a wait of 1 s is foreseen; there is no other model to fall back to."""
    overload = {"clamp_max_tokens": 20, "after_s": 1.0, "fallback_model": "small"}
    loaded = make(
        tmp_path,
        tenant("a", poisson(10), output=200),
        admission={"use": "bounded", "with": {"max_queued": 10, "overload": overload}},
        drain=True,
    )
    account = simulate(loaded).ledger.accounts[0]
    assert 20 * account.finished < account.output < 200 * account.finished, "some are clamped, the first are not"
    assert set(account.shed) <= {"queue_full", "predicted_wait"}
    assert account.shed
    assert account.finished + sum(account.shed.values()) == account.arrived


def test_prefixes_are_hit_within_a_tenant_and_never_across(tmp_path: Path) -> None:
    prefix = {"groups": 1, "tokens": 64}
    loaded = make(
        tmp_path,
        tenant("a", poisson(4), prefix=prefix),
        tenant("b", burst(1, 10.0), prefix=prefix),
        workers={"prefix_cache": True, "kv_tokens": 8192},
    )
    run = simulate(loaded)
    first, second = run.ledger.accounts
    assert first.cached >= 64 * (first.finished - 8)
    assert second.cached == 0


def test_a_wait_that_runs_out_ends_at_its_time(tmp_path: Path) -> None:
    waiting = tenant("a", burst(20), output=100, max_wait_s=0.5)
    run = simulate(make(tmp_path, waiting, drain=True, workers={"max_running": 1}))
    account = run.ledger.accounts[0]
    assert account.shed["queue_timeout"] + account.finished == 20
    assert max(account.waits) <= 0.5


def test_after_every_turn_no_open_room_fits_a_queued_job(tmp_path: Path) -> None:
    looked = 0

    def look(front: Front, now: float) -> None:
        nonlocal looked
        looked += 1
        assert not front.idle_room(now)

    simulate(make(tmp_path, *MIXED, policy={"use": "vtc"}), observer=look)
    assert looked > 200


class Remote:
    """A quota policy that asks somebody else."""

    async def reserve(self, job: Job, now: float) -> QuotaDecision:
        import asyncio

        await asyncio.sleep(0)
        return QuotaDecision(True)

    async def settle(self, job_id: JobId, usage: Usage, now: float) -> Json:
        return {}

    def dump(self) -> Json:
        return {}

    def load(self, state: Json) -> None:
        pass


class RemotePlugin:
    @hookimpl
    def forebay_policies(self) -> list[PolicySpec]:
        def make_remote(config: NoConfig, ctx: PolicyContext) -> Remote:
            return Remote()

        return [PolicySpec("quota", "remote", NoConfig, make_remote, "Asks somebody else.")]


def test_a_policy_that_waits_for_others_is_refused_in_words(tmp_path: Path) -> None:
    manager = make_manager()
    register(manager, RemotePlugin(), "remote")
    registry = Registry.from_manager(manager)
    loaded = make(tmp_path, tenant("a", burst(1)), quota={"use": "remote"}, registry=registry)
    with pytest.raises(NotSimulable, match="waits for something outside"):
        simulate(loaded)
