"""The table of switches is complete, and refuses with a text one can act on."""

from __future__ import annotations

import pytest

from workers import techniques
from workers.config import EngineConfig
from workers.techniques import NO_SWITCHES, REFUSALS, SWITCHES, Refusal


def test_every_switch_is_a_field_with_a_default() -> None:
    """Off by default; named once."""
    names = [switch.field for switch in SWITCHES]
    assert len(names) == len(set(names))
    assert not [name for name in names if techniques.is_on(EngineConfig(), name)]


def test_a_new_field_is_a_switch_or_says_why_not() -> None:
    """So that the matrix of pairs cannot miss one."""
    fields = set(EngineConfig.model_fields)
    assert {switch.field for switch in SWITCHES} | set(NO_SWITCHES) == fields
    assert not {switch.field for switch in SWITCHES} & set(NO_SWITCHES)


def test_every_refusal_names_two_switches() -> None:
    """Each pair once, in one order or the other."""
    names = {switch.field for switch in SWITCHES}
    pairs = [frozenset((one.first, one.second)) for one in REFUSALS]
    assert all(len(pair) == 2 and pair <= names for pair in pairs)
    assert len(pairs) == len(set(pairs))


def test_a_refused_pair_is_named_with_values_reason_and_remedy() -> None:
    """Either alone is fine."""
    refusals = (Refusal("mode", "prefix_cache", "nobody needs both; set prefix_cache: true"),)
    techniques.check(EngineConfig(mode="static"), refusals)
    techniques.check(EngineConfig(prefix_cache=False), refusals)
    with pytest.raises(
        ValueError, match="mode=static and prefix_cache=False exclude each other: nobody needs both; set"
    ):
        techniques.check(EngineConfig(mode="static", prefix_cache=False), refusals)
