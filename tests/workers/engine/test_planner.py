"""Any mix of requests, pools, cancels and modes gives every sequence the tokens of its solo run and leaks nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.workers.engine.drive import Drive, request
from workers.protocol import SamplingParams

prompts = st.one_of(
    st.integers(1, 40).map(lambda n: [i * 7 % 5 for i in range(n)]),  # prefixes of each other: hits and shared blocks
    st.lists(st.integers(0, 800), min_size=1, max_size=30),
)


class PlannerMachine(RuleBasedStateMachine):
    """Tight pools, n in 1..3, cancels between and inside steps, several tenants and scopes, purges, runner failures."""

    @initialize(
        blocks=st.integers(2, 24),
        block_size=st.sampled_from([1, 2, 4]),
        budget=st.sampled_from([1, 2, 5, 16, 64]),
        cap=st.sampled_from([None, 1, 3]),
        running=st.sampled_from([1, 2, 4, 8]),
        prefix=st.booleans(),
        share=st.sampled_from([0.0, 1.0]),
        mode=st.sampled_from(["continuous", "continuous", "static"]),
        reuse=st.sampled_from([True, True, True, False]),
        twice_at=st.sampled_from([0, 0, 1, 8, 50]),
    )
    def start(self, blocks: int, block_size: int, budget: int, cap: int | None, running: int, **config: Any) -> None:
        self.drive = Drive(
            blocks=blocks,
            block_size=block_size,
            max_step_tokens=budget,
            max_chunk_tokens=cap,
            max_running=running,
            prefix_cache=config["prefix"],
            cache_share=config["share"],
            mode=config["mode"],
            kv_cache_reuse=config["reuse"],
            twice_at=config["twice_at"],
        )
        self.number = 0

    @rule(
        prompt=prompts,
        most=st.integers(1, 24),
        n=st.integers(1, 3),
        tenant=st.sampled_from("xyz"),
        weight=st.sampled_from([1.0, 2.5]),
        seed=st.integers(0, 50),
        public=st.sampled_from([0, 0, 6]),
    )
    def add(self, prompt: list[int], most: int, n: int, tenant: str, weight: float, seed: int, public: int) -> None:
        self.number += 1
        params = SamplingParams(seed=seed)
        # Public tokens are the same for everybody by definition; the same registered prefix here.
        public = public if prompt[:6] == [0, 2, 4, 1, 3, 0] else 0
        self.drive.add(
            request(
                f"q{self.number}",
                prompt,
                most,
                n=n,
                tenant_key=tenant,
                scope=tenant.encode(),
                weight=weight,
                params=params,
                public_prefix_tokens=public,
            )
        )

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.drive.step()

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.drive.planner.roster.requests)))

    @precondition(lambda self: len(self.drive.planner))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.drive.cancel(self.pick(data))

    @precondition(lambda self: len(self.drive.planner))
    @rule(data=st.data(), index=st.integers(0, 3))
    def cancel_one_choice(self, data: st.DataObject, index: int) -> None:
        name = self.pick(data)
        living = self.drive.planner.roster.requests[name]
        before = {sequence.index for sequence in living}
        lead = next((sequence for sequence in living if sequence.siblings), None)
        self.drive.cancel(name, index)
        after = {sequence.index for sequence in self.drive.planner.roster.requests.get(name, ())}
        assert after == (before if lead is not None and lead.index == index else before - {index})

    @precondition(lambda self: len(self.drive.planner))
    @rule(data=st.data(), index=st.integers(0, 2))
    def cancel_one_choice_inside_a_step(self, data: st.DataObject, index: int) -> None:
        name = self.pick(data)
        drive = self.drive
        plan = drive.planner.plan(drive.now)
        assert plan is not None
        assert drive.planner.cancel(name, drive.now, index) == []
        drive.take(drive.planner.commit(plan, drive.runner.run(plan), drive.now))
        left = drive.planner.roster.requests.get(name, ())
        assert all(sequence.index != index or sequence.siblings for sequence in left)

    @precondition(lambda self: len(self.drive.planner))
    @rule(data=st.data())
    def cancel_inside_a_step(self, data: st.DataObject) -> None:
        name = self.pick(data)
        drive = self.drive
        plan = drive.planner.plan(drive.now)
        assert plan is not None
        assert drive.planner.cancel(name, drive.now) == []
        assert name in drive.planner
        result = drive.runner.run(plan)
        drive.take(drive.planner.commit(plan, result, drive.now))
        assert name not in drive.planner

    @precondition(lambda self: len(self.drive.planner))
    @rule(data=st.data(), ran=st.booleans())
    def runner_fails(self, data: st.DataObject, ran: bool) -> None:
        """It may have written everything, or nothing."""
        drive = self.drive
        plan = drive.planner.plan(drive.now)
        assert plan is not None
        if ran and plan.chunks:
            drive.runner.run(plan)
        names = data.draw(
            st.sets(st.sampled_from([chunk.sequence.id for chunk in plan.chunks])) if plan.chunks else st.just(set())
        )
        outputs = drive.planner.fail(plan, names, "internal", drive.now)
        assert {output.id for output in outputs} == names
        assert all(output.finish == "error" for output in outputs)
        drive.take(outputs)

    @rule(tenant=st.sampled_from("xyz"))
    def purge(self, tenant: str) -> None:
        drive = self.drive
        ticket = drive.planner.purge([tenant.encode()])
        drive.runner.zero_blocks(drive.planner.take_dirty())
        assert bool(ticket.users) == (ticket.pending > 0)

    @invariant()
    def holds(self) -> None:
        drive = self.drive
        drive.planner.check()
        stats = drive.planner.stats()
        assert stats.free_blocks + stats.cached_blocks + stats.used_blocks == drive.planner.pool.total
        assert stats.running <= drive.config.max_running

    def teardown(self) -> None:
        self.drive.run()


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_schedule_is_deterministic(data: st.DataObject) -> None:
    """engine D7: the same requests over the same pool give the same plans, row by row."""
    jobs = [
        (data.draw(prompts), data.draw(st.integers(1, 12)), data.draw(st.integers(1, 2)))
        for _ in range(data.draw(st.integers(1, 6)))
    ]

    def trace() -> list[list[tuple[str, int, int, int]]]:
        drive = Drive(blocks=14, block_size=4, max_step_tokens=16)
        drive.add(*(request(f"q{i}", prompt, most, n=n) for i, (prompt, most, n) in enumerate(jobs)))
        drive.run()
        return [[(c.sequence.id, c.sequence.index, c.start, c.count) for c in plan.chunks] for plan in drive.plans]

    assert trace() == trace()


@pytest.mark.parametrize("n", [1, 3])
def test_thousand_requests_with_aborts(n: int) -> None:
    """engine C1, engine C5: 1,000 requests, 30 % aborted at random times; then nothing lives, the cache explains it."""
    dice = random.Random(n)
    drive = Drive(blocks=30, block_size=4, max_step_tokens=64, max_running=12)
    aborted: set[str] = set()
    number = 0
    while number < 1000 or len(drive.planner):
        for _ in range(dice.randrange(3)):
            if number < 1000:
                common = [1, 2, 3, 4, 5, 6, 7, 8] if dice.random() < 0.5 else []
                tail = [dice.randrange(800) for _ in range(dice.randint(1, 20))]
                choices = dice.randint(1, n)
                drive.add(request(f"q{number}", common + tail, dice.randint(1, 14), n=choices))
                number += 1
        live = sorted(drive.planner.roster.requests)
        if live and dice.random() < 0.5 and len(aborted) < 300:
            name = dice.choice(live)
            aborted.add(name)
            drive.cancel(name)
        plan = drive.planner.plan(drive.now)
        if plan is not None:
            drive.take(drive.planner.commit(plan, drive.runner.run(plan), drive.now))
    assert len(aborted) == 300
    assert sum(last.finish == "cancelled" for last in drive.last.values()) >= 300
    drive.idle()
    drive.planner.check()
    assert drive.planner.roster.preemptions > 0
    assert drive.planner.pool.hit_tokens > 0
    pool = drive.planner.pool
    assert pool.flush() > 0
    assert pool.free == pool.total


def test_gauges_do_not_mix_live_and_cached() -> None:
    """engine C5: 120 distinct prompts, then idle: live 0, and what is not free is cached."""
    drive = Drive(blocks=1000, block_size=4)
    drive.add(*(request(f"q{i}", [i, *range(15)], 2) for i in range(120)))
    drive.run()
    stats = drive.planner.stats()
    assert stats.used_blocks == 0
    assert stats.cached_blocks == 120 * 4
    assert stats.free_blocks == 1000 - 480
