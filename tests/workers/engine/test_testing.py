"""The runner that judges plans must itself see each kind of mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.workers.engine.drive import request
from workers.config import EngineConfig
from workers.engine.block_pool import BlockPool
from workers.engine.plan import Chunk, StepPlan
from workers.engine.planner import Planner
from workers.engine.sequence import Sequence
from workers.engine.testing import FakeRunner, PlanError
from workers.protocol import SamplingParams


def sequence(name: str, tokens: list[int], blocks: list[int], **fields: bytes | str) -> Sequence:
    made = Sequence(name, 0, tokens, len(tokens), 8, SamplingParams())
    made.blocks = blocks
    for field, value in fields.items():
        setattr(made, field, value)
    return made


A = sequence("a", [1, 2, 3, 4], [0, 1])
B = sequence("b", [1, 2, 9, 9], [0, 2])


def plan(step: int, *chunks: Chunk, **fields: list) -> StepPlan:  # type: ignore[type-arg]
    return StepPlan(step, list(chunks), **fields)


def written(*more: StepPlan) -> list[StepPlan]:
    return [plan(1, Chunk(A, 0, 4)), *more]


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ([plan(1, Chunk(A, 2, 2))], "position 0: block holds None"),
        (written(plan(2, Chunk(sequence("b", [1, 7, 9, 9], [0, 2]), 2, 2))), "position 1"),
        (written(plan(2, Chunk(sequence("b", [1, 2, 9, 9], [0, 2], scope=b"x"), 2, 2))), "another scope's"),
        (written(plan(2, Chunk(sequence("b", [1, 2, 9, 9], [0, 2], adapter="x"), 2, 2))), "another adapter's"),
        (written(plan(2, Chunk(B, 2, 2), zero=[0])), "position 0: block holds None"),
        (written(plan(2, Chunk(B, 2, 2), copies=[(3, 0)])), "position 0: block holds None"),
        ([plan(1, Chunk(A, 0, 2), Chunk(B, 0, 2))], "two sequences write"),
        ([plan(1, Chunk(A, 0, 2), Chunk(A, 2, 2))], "two chunks"),
        ([plan(1, Chunk(A, 0, 5))], "unknown tokens"),
        ([plan(1, Chunk(sequence("c", [1, 2, 3], [0]), 0, 3))], "past its blocks"),
        ([plan(1, Chunk(sequence("c", [1, 2, 3], [0, 0]), 0, 3))], "one block twice"),
        ([plan(1, Chunk(A, 0, 2, (A,)))], "before all was computed"),
        ([plan(1, Chunk(A, 0, 4, (B,)))], "another's tokens"),
        ([plan(1, Chunk(A, 0, 4), copies=[(2, 3), (1, 3)])], "two copies"),
        ([plan(1, Chunk(A, 0, 0))], "empty chunk"),
        ([plan(1)], "without chunks"),
        (written(plan(1, Chunk(B, 2, 2))), "step 1 follows step 1"),
        ([plan(1, Chunk(sequence("c", [1] * 9, [0, 1, 2, 3, 4]), 0, 9))], "exceed the budget"),
    ],
)
def test_sees(plans: list[StepPlan], message: str) -> None:
    runner = FakeRunner(5, 2, budget=8)
    for good in plans[:-1]:
        runner.run(good)
    with pytest.raises(PlanError, match=message):
        runner.run(plans[-1])


def test_accepts_sharing() -> None:
    runner = FakeRunner(5, 2)
    for good in written(plan(2, Chunk(B, 2, 2, (B,)))):
        runner.run(good)
    assert runner.rows == 6
    assert runner.holds(b"") == 6


class Blind:
    """A pool in which nobody seems to share a block."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.ref = [1] * pool.total

    def __getattr__(self, name: str) -> object:
        return getattr(self._pool, name)


def no_copy(planner: Planner) -> None:
    planner._batching._pool = Blind(planner.pool)  # type: ignore[assignment]


def early_publish(planner: Planner) -> None:
    start = planner.roster.start

    def eager(line: Sequence, blocks: list[int], hit: int, cached: int, now: int) -> None:
        start(line, blocks, hit, cached, now)
        planner._commit._publish(line, len(line.tokens) // 4)

    planner.roster.start = eager  # type: ignore[method-assign]


def one_scope(planner: Planner) -> None:
    lookup, index = planner.pool.lookup, planner.pool._index

    def foreign(keys: object) -> list[int]:
        return lookup(list(index)[:1])

    planner.pool.lookup = foreign  # type: ignore[method-assign]


@pytest.mark.parametrize(("sabotage", "cap"), [(no_copy, None), (early_publish, 3), (one_scope, None)])
def test_sabotaged_planner_is_caught(sabotage: Callable[[Planner], None], cap: int | None) -> None:
    """The mistakes that matter cannot hide from it, end to end."""
    planner = Planner(EngineConfig(block_size=4, max_step_tokens=16, max_chunk_tokens=cap), blocks=64, max_context=1000)
    sabotage(planner)
    runner = FakeRunner(64, 4)
    prompt = list(range(14))
    for name, scope in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        planner.add(request(name, prompt, 6, n=2, scope=scope))

    def drive() -> None:
        while (step := planner.plan()) is not None:
            planner.commit(step, runner.run(step))

    with pytest.raises(PlanError):
        drive()
