"""Steps advanced together leave the engine as if they had been made one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import EngineConfig
from workers.engine.plan import Sampled, StepPlan, StepResult
from workers.engine.planner import Planner
from workers.engine.sequence import Sequence
from workers.engine.stretch import Stretch
from workers.protocol import Generate, SamplingParams, SequenceOutput


def draw(sequence: Sequence, count: int) -> list[int]:
    """Tokens that depend on nothing but the sequence and the position, so that both ways give the same."""
    first = sequence.output_len
    return [1 + (sequence.arrival * 7 + first + i) % 900 for i in range(count)]


class Bench:
    """One planner; ``coalesce`` takes every stretch it may."""

    def __init__(self, coalesce: bool, blocks: int, twice_at: int = 0, **config: Any) -> None:
        self.coalesce = coalesce
        self.planner = Planner(
            EngineConfig(block_size=4, **config), blocks=blocks, max_context=10_000, twice_at=twice_at
        )
        self.stretch = Stretch(self.planner)
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, int] = {}
        self.advanced = 0

    def until(self, step: int) -> None:
        """Run up to and including ``step``, or until there is nothing to do."""
        planner = self.planner
        while planner.step < step and len(planner):
            steps, closes = self.stretch.length() if self.coalesce else (0, False)
            left = step - planner.step
            if closes and steps < left:
                outputs = self.close(steps)
            elif steps := min(steps, left):
                outputs = self.stretch.advance(steps, draw)
                self.advanced += steps
            else:
                plan = planner.plan(planner.step)
                if plan is None:
                    return
                outputs = planner.commit(plan, run(plan), planner.step)
            planner.check()
            for output in outputs:
                self.tokens.setdefault(output.id, []).extend(output.tokens)
                assert output.output_tokens == len(self.tokens[output.id])
                if output.finish is not None:
                    self.finished[output.id] = planner.step

    def close(self, steps: int) -> list[SequenceOutput]:
        """A stretch and the step that ends a sequence: one token for everybody who runs, as was foretold."""
        planner = self.planner
        outputs = self.stretch.advance(steps, draw) if steps else []
        self.advanced += steps
        running = list(planner.roster.running)
        plan = planner.plan(planner.step)
        assert plan is not None
        assert [chunk.sequence for chunk in plan.chunks] == running
        assert all(chunk.is_decode for chunk in plan.chunks)
        last = planner.commit(plan, run(plan), planner.step)
        assert any(output.finish is not None for output in last)
        return outputs + last

    def state(self) -> dict[str, Any]:
        """Everything that later steps depend on."""
        planner, pool = self.planner, self.planner.pool
        return {
            "step": planner.step,
            "tokens": self.tokens,
            "finished": self.finished,
            "stats": planner.stats(),
            "running": [(s.id, s.computed, s.published, s.preemptions, s.blocks) for s in planner.roster.running],
            "service": {key: planner.roster.service.ratio(key) for key in ("a", "b")},
            "index": dict(pool._index),
            "evictions": dict(pool.evictions),
        }


def run(plan: StepPlan) -> StepResult:
    return StepResult([Sampled(draw(s, 1)) for chunk in plan.chunks for s in chunk.samplers])


def generate(name: str, prompt: int, output: int, tenant: str) -> Generate:
    tokens = [1000 + len(name)] * min(prompt, 8) + [2000 + int(name)] * max(0, prompt - 8)
    params = SamplingParams(seed=0, ignore_eos=True)
    return Generate(name, tokens, output, params, scope=tenant.encode(), tenant_key=tenant)


JOB = st.tuples(st.integers(1, 30), st.integers(1, 40), st.sampled_from("ab"), st.integers(0, 25))


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(JOB, min_size=1, max_size=12),
    blocks=st.integers(20, 80),
    max_running=st.integers(1, 6),
    budget=st.integers(2, 64),
    prefix_cache=st.booleans(),
    mode=st.sampled_from(["continuous", "static"]),
    twice_at=st.sampled_from([0, 2, 30]),
)
def test_a_stretch_is_its_steps(
    jobs: list[tuple[int, int, str, int]],
    blocks: int,
    max_running: int,
    budget: int,
    prefix_cache: bool,
    mode: str,
    twice_at: int,
) -> None:
    benches = [
        Bench(
            coalesce,
            blocks,
            twice_at,
            max_running=max_running,
            max_step_tokens=budget,
            prefix_cache=prefix_cache,
            mode=mode,
            cache_share=0.5,
        )
        for coalesce in (False, True)
    ]
    at = 0
    for number, (prompt, output, tenant, gap) in enumerate(jobs):
        at += gap
        for bench in benches:
            bench.until(at)
            bench.planner.add(generate(str(number), prompt, output, tenant), at)
        assert benches[0].planner.step == benches[1].planner.step
    for bench in benches:
        bench.until(100_000)
    assert benches[0].state() == benches[1].state()
    assert len(benches[0].finished) == len(jobs)


def test_most_steps_of_long_answers_are_advanced() -> None:
    bench = Bench(True, 100, max_running=4)
    for number in range(4):
        bench.planner.add(generate(str(number), 8, 50, "a"))
    bench.until(1000)
    assert len(bench.finished) == 4
    assert bench.advanced == 48, "all but the prompts' step and the last"


def test_a_silent_stretch_does_the_same_and_says_nothing() -> None:
    states = []
    for silent in (False, True):
        bench = Bench(True, 100, max_running=4)
        bench.planner.add(generate("1", 8, 50, "a"))
        bench.until(1)
        assert bool(bench.stretch.advance(20, draw, silent=silent)) is not silent
        states.append({**bench.state(), "tokens": bench.planner.roster.running[0].tokens})
    assert states[0] == states[1]


def test_more_steps_than_the_blocks_allow_are_refused() -> None:
    bench = Bench(True, 6, max_running=2)
    for number in range(2):
        bench.planner.add(generate(str(number), 4, 12, "a"))
    bench.until(1)
    assert bench.stretch.length() == (8, False), "12 computed tokens each fill 3 + 3 blocks of 6"
    with pytest.raises(RuntimeError, match="ask length"):
        bench.stretch.advance(11, draw)
