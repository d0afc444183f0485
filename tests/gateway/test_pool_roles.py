"""Roles of pools: what the configuration refuses, and that a canary's part is what it says."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gateway.pool_roles import in_canary
from gateway.settings import Settings
from tests.gateway.harness import BASE, merged


def settings(*pools: dict[str, Any]) -> Settings:
    named = [{"name": f"p{number}", **pool} for number, pool in enumerate(pools)]
    return Settings.model_validate(merged(BASE, {"models": [{"name": "m", "source": "model", "pools": named}]}))


@pytest.mark.parametrize(
    ("pools", "says"),
    [
        ([{}, {"canary": {"percent": 5}, "fallback": ["lost"]}], "a canary or a fallback, not both"),
        ([{}, {"canary": {"percent": 5}, "weight": 2}], "only ordinary pools share by weight"),
        ([{}, {"fallback": ["lost"], "weight": 2}], "only ordinary pools share by weight"),
        ([{}, {"fallback": ["lost"], "fallback_after_s": 2}], "counts with fallback"),
        ([{"fallback": ["lost"]}], "must be ordinary"),
        ([{"canary": {"percent": 100}}, {"fallback": ["overload"]}], "must be ordinary"),
        ([{}, {"canary": {"percent": 101}}], "less than or equal to 100"),
        ([{}, {"fallback": ["boredom"]}], "overload"),
        ([{"weight": 0}], "greater than or equal to 0.000001"),
    ],
)
def test_pools_whose_roles_make_no_sense_are_refused(pools: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        settings(*pools)


def test_pools_with_roles_are_read() -> None:
    made = settings({"weight": 3}, {"weight": 1}, {"canary": {"percent": 2.5, "by": "tenant"}}, {"fallback": ["lost"]})
    assert [pool.weight for pool in made.models[0].pools] == [3, 1, None, None]


def test_a_canary_takes_its_part_of_the_callers_and_each_pool_another_part() -> None:
    callers = [f"tenant-{number}" for number in range(20_000)]
    one = {caller for caller in callers if in_canary("m", "one", 5, caller)}
    two = {caller for caller in callers if in_canary("m", "two", 5, caller)}
    assert 850 <= len(one) <= 1150
    assert len(one & two) < 120
    assert one <= {caller for caller in callers if in_canary("m", "one", 6, caller)}, "more is more of the same"
    assert not any(in_canary("m", "one", 0, caller) for caller in callers)
    assert all(in_canary("m", "one", 100, caller) for caller in callers)
