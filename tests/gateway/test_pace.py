"""Spacing by itself: when it applies, how far it spaces, and that it never closes an idle or restarted worker."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.gate import Load, Room
from gateway.pace import FREE, MIN_ANSWERS, Answers, Pace
from policies.types import Job, JobId, TenantId, WorkerView

CAPACITY = 10_000


def answers(*lengths: int, most: int = 256) -> Answers:
    learned = Answers()
    for length in lengths:
        learned.ended(length, most)
    return learned


def test_the_expected_length_is_learned() -> None:
    assert answers().expected(256) == 256
    assert answers(*[64] * 10).expected(256) == pytest.approx(64)
    assert answers(*[64] * 10).expected(1000) == pytest.approx(250)


def test_a_steady_state_is_kept() -> None:
    """Jobs of 256 + 256 tokens hold 98,304 token-steps: one may follow every 9.8 steps of a cache of 10,000."""
    pace = Pace(answers(*[256] * 20))
    committed = pace.footprint(256, 256) * 20
    assert committed > FREE * CAPACITY
    sent = []
    for step in range(1000):
        pace.begin(step, committed, CAPACITY)
        while not pace.rest:
            sent.append(step)
            pace.sent(256, 256)
    gaps = [b - a for a, b in pairwise(sent)]
    assert 1000 / 9.83 - 2 <= len(sent) <= 1000 / 9.83 + 2
    assert min(gaps[1:]) >= 8


def test_a_cache_with_room_is_filled_at_once() -> None:
    pace = Pace(answers(*[256] * 20))
    pace.begin(0, 0.0, CAPACITY)
    count = 0
    while not pace.rest:
        pace.sent(256, 256)
        count += 1
    assert count == 16, "15 jobs of 384 tokens each are 58 % of the cache; the 16th passes the mark"


def test_nothing_is_spaced_before_answers_have_ended() -> None:
    few = Pace(answers(*[256] * (MIN_ANSWERS - 1)))
    enough = Pace(answers(*[256] * MIN_ANSWERS))
    for pace in (few, enough):
        pace.begin(0, CAPACITY, CAPACITY)
        pace.sent(256, 256)
    assert few.rest == 0
    assert enough.rest > 0


def test_answers_of_many_lengths_end_apart_by_themselves() -> None:
    spread = Pace(answers(*[32, 256] * 10))
    alike = Pace(answers(*[250, 256] * 10))
    for pace in (spread, alike):
        pace.begin(0, CAPACITY, CAPACITY)
        pace.sent(256, 256)
    assert spread.rest == 0
    assert alike.rest > 0


def test_a_restarted_worker_is_not_held_to_the_steps_of_the_last() -> None:
    pace = Pace(answers(*[256] * 20))
    pace.begin(1_000_000, CAPACITY, CAPACITY)
    pace.sent(256, 256)
    assert pace.rest
    pace.begin(1, CAPACITY, CAPACITY)
    assert pace.rest == 0


@given(
    jobs=st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4000)), max_size=40),
    seen=st.lists(st.integers(1, 4000), max_size=40),
)
def test_every_rest_ends(jobs: list[tuple[int, int, int]], seen: list[int]) -> None:
    """No sequence of jobs and answers lets a worker rest longer than its own steps take it."""
    pace = Pace(answers(*seen, most=4000))
    step = 0
    for prompt, output, gap in jobs:
        step += gap
        pace.begin(step, CAPACITY, CAPACITY)
        pace.sent(prompt, output)
        pace.begin(step + pace.rest, CAPACITY, CAPACITY)
        assert pace.rest == 0


def room(pace: Pace, *loads: Load) -> Room:
    view = WorkerView("w", "m", "p", max_running=64, free_blocks=500, total_blocks=625, block_size=16)
    return Room.of(view, loads, 512, stale=False, pace=pace, step=1)


def test_a_room_at_rest_is_closed_unless_its_worker_is_idle() -> None:
    pace = Pace(answers(*[256] * 20))
    heavy = Load(0, 1, started=True, footprint=0.9 * CAPACITY)
    first = room(pace, heavy)
    assert first.open
    first.take(Job(JobId("j"), TenantId("t"), "m", 256, 256, 0.0), 1, suspect=False)
    assert not first.open
    assert not room(pace, heavy).open
    assert room(pace).open
