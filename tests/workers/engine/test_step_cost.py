"""What a step of the engine costs, counted in executed bytecodes: linear in what runs, and in nothing else.

Counts repeat exactly, on any machine; times are in ``bench engine`` (``bookkeeping_ms_per_step``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tests.workers.engine.drive import request
from workers.config import EngineConfig
from workers.engine.loop import Engine
from workers.engine.plan import Sampled, StepPlan, StepResult
from workers.protocol import StepOutputs

SIZE = 16
STEPS = 2 * SIZE
"""Counted steps: every running sequence takes a block twice."""
LONG = 4 * STEPS


class Silent:
    """A runner that computes nothing; its own cost is not counted."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult([Sampled([7]) for chunk in plan.chunks for _ in chunk.samplers])

    def zero_blocks(self, blocks: list[int]) -> None:
        raise AssertionError("nothing is purged here")


class Bytecodes:
    """How many bytecodes of the engine's modules were executed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        if "/workers/engine/" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._inside

    def _inside(self, frame: FrameType, event: str, arg: object) -> Any:
        self.count += event == "opcode"
        return self._inside

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def cost(running: int, *, cached: int = 0, waiting: int = 0, full: bool = False) -> float:
    """Bytecodes per step while ``running`` sequences decode. ``full``: the cached blocks are all that is left."""
    sent: list[StepOutputs] = []
    own = running * (2 + LONG // SIZE + 1)
    engine = Engine(
        EngineConfig(block_size=SIZE, max_running=running, max_step_tokens=2048),
        Silent(),
        blocks=own + cached + (0 if full else own),
        max_context=100_000,
        revision="",
        eos_ids=(),
        on_outputs=sent.append,
        clock_ns=iter(range(10**9)).__next__,
        on_record=lambda record: None,
        on_step=lambda record: None,
    )
    for number in range(0, cached, 8):  # 8 full blocks and a token that fills none
        engine.submit(request(f"old-{number}", [number] * (8 * SIZE + 1), 1, scope=b"%d" % number))
    while engine.step():
        pass
    pool = engine.planner.pool
    assert pool.cached == cached
    for number in range(running):
        engine.submit(request(f"r{number}", 20, LONG, scope=b"%d" % number, tenant_key=f"t{number % 8}"))
    engine.step()
    if full:
        while pool.free:  # hold what is free: from now on each block is somebody's cached one
            pool.take(b"held", "held", 1.0)
    for number in range(waiting):
        engine.submit(request(f"w{number}", 20, 4))
    engine.step()
    evicted = pool.evictions.copy()
    counter = Bytecodes()
    with counter.counting():
        for _ in range(STEPS):
            engine.step()
    stats = sent[-1].stats
    assert (stats.running, stats.waiting) == (running, waiting)
    assert (pool.evictions != evicted) is full
    return counter.count / STEPS


def test_it_is_linear_in_what_runs() -> None:
    small, middle, large = cost(16), cost(32), cost(64)
    assert middle - small > 16 * 100, "the counter sees the work"
    assert abs((large - middle) - 2 * (middle - small)) <= 0.02 * (large - middle)


def test_it_does_not_grow_with_cached_blocks() -> None:
    none, some, many = cost(16), cost(16, cached=160), cost(16, cached=1600)
    assert some == many
    assert many <= 1.01 * none
    assert cost(16, cached=1600, full=True) <= 1.01 * cost(16, cached=320, full=True)


def test_it_does_not_grow_with_those_that_wait() -> None:
    none, some, many = cost(16), cost(16, waiting=10), cost(16, waiting=1000)
    assert some == many
    assert many <= 1.02 * none
