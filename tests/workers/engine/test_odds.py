"""When guesses pay: never where rows are dear or guesses are wrong, and always again where that changes."""

from __future__ import annotations

import random

import pytest

from workers.engine.odds import FIRST, HOPE, KINDS, Odds, StepCost, kind_of


def test_longer_matches_are_another_kind() -> None:
    assert [kind_of(match) for match in (1, 2, 3, 4, 5, 8, 9, 16)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert max(kind_of(match) for match in range(100)) == KINDS - 1


def test_a_sequence_learns_its_own_odds() -> None:
    """Right ones raise it, wrong ones lower it, quickly, and only for their kind."""
    odds = Odds(Odds())
    before = [odds.chance(kind) for kind in range(KINDS)]
    for _ in range(4):
        odds.learn(1, 4, 0)
        odds.learn(2, 0, 1)
    assert odds.chance(1) > 0.9
    assert odds.chance(2) < 0.3
    assert [odds.chance(kind) for kind in (0, 3)] == [before[0], before[3]]


def test_a_sequence_that_stopped_trying_tries_again() -> None:
    """What it learned fades while it does not try."""
    odds = Odds(Odds())
    for _ in range(20):
        odds.learn(0, 0, 1)
    assert odds.chance(0) < 0.1
    for _ in range(400):
        odds.untried(0)
    assert odds.chance(0) > 0.3


def test_what_came_before_does_not_take_away_all_hope() -> None:
    """A thousand sequences that guessed wrong: the next one still begins with some."""
    usual = Odds()
    for _ in range(1000):
        Odds(usual).learn(0, 0, 1)
    assert usual.chance(0) < 0.4
    assert Odds(usual).chance(0) == pytest.approx(HOPE)
    assert min(FIRST) >= HOPE


def test_the_cost_of_a_row_is_found() -> None:
    """A line through noisy steps of different sizes, and beside it what one guess of a draft model takes."""
    cost, chance = StepCost(), random.Random(1)
    for _ in range(200):
        rows = chance.choice([1, 1, 2, 5])
        cost.saw(rows, int(7_000_000 + 500_000 * rows + chance.gauss(0, 100_000)), 300_000)
    base, row = cost.line()
    assert 6_500_000 < base < 7_500_000
    assert 400_000 < row < 600_000
    assert cost.draft == 300_000


def test_steps_of_one_size_say_nothing_about_a_row() -> None:
    """Then it is assumed to cost a part of the step, never nothing and never less than nothing."""
    cost = StepCost()
    base, row = cost.line()
    assert 0 < row < base
    for _ in range(50):
        cost.saw(4, 8_000_000)
    base, row = cost.line()
    assert 0 < row < base
    assert abs(base + 4 * row - 8_000_000) < 1_000


def test_a_larger_step_that_was_quicker_makes_no_negative_price() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.saw(1, 9_000_000)
        cost.saw(5, 7_000_000)
    base, row = cost.line()
    assert base > 0
    assert row > 0


def test_one_slow_step_does_not_spoil_it() -> None:
    """Somebody else had the machine for a second."""
    cost = StepCost()
    for _ in range(50):
        cost.saw(1, 7_000_000)
        cost.saw(3, 8_000_000)
    cost.saw(5, 1_000_000_000)
    base, row = cost.line()
    assert base + row < 12_000_000
