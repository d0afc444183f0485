"""Masks: what is shown never holds a secret, and a mask that comes back never becomes somebody else's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.policy_view import MASK, live, restored, without_secrets
from gateway.runtime import PolicySet
from gateway.settings import PolicyUse
from policies.spi import PolicyConfigError

ENTRIES = [
    {"name": "one", "with": {"secret": "s1", "audience": "a"}},
    {"name": "two", "with": {"secret": "s2", "audience": "a"}},
    {"name": "two", "with": {"secret": "s3", "audience": "a"}},
]


def policies(use: str, settings: Mapping[str, Any]) -> PolicySet:
    uses = {"auth": PolicyUse.model_validate({"use": use, "with": settings})}
    return PolicySet(1, uses, *([None] * 5))  # type: ignore[arg-type]


def put_back(value: Mapping[str, Any], settings: Mapping[str, Any], use: str = "x") -> Any:
    form = PolicyUse.model_validate({"use": use, "with": value})
    return restored("auth", form, policies("x", settings)).with_


def test_what_comes_back_unchanged_is_what_was_there() -> None:
    settings = {"token": "t", "key_env": "K", "nested": {"password": "p", "n": 1}, "items": ENTRIES}
    shown = without_secrets(settings)
    assert str(shown).count(MASK) == 5
    assert not any(secret in str(shown) for secret in ("s1", "s2", "s3", "'p'", "'t'"))
    assert put_back(shown, settings) == settings


def test_a_changed_value_beside_a_mask_is_taken() -> None:
    settings = {"token": "t", "n": 1}
    assert put_back({"token": MASK, "n": 2}, settings) == {"token": "t", "n": 2}


def test_a_secret_never_moves_to_another_entry() -> None:
    settings = {"items": ENTRIES}
    shown = copy.deepcopy(without_secrets(settings))["items"]
    turned = put_back({"items": [shown[1], shown[0]]}, {"items": ENTRIES[:2]})
    assert turned == {"items": [ENTRIES[1], ENTRIES[0]]}
    for posted in (
        [shown[1]],  # two looked like it
        [{**shown[0], "name": "other"}],  # none did
        [*shown, shown[1]],
    ):
        with pytest.raises(PolicyConfigError, match="give the value"):
            put_back({"items": posted}, settings)
    assert put_back({"items": [shown[0]]}, settings) == {"items": [ENTRIES[0]]}


def test_another_policys_secret_is_not_taken() -> None:
    with pytest.raises(PolicyConfigError, match=r"with\.token"):
        put_back({"token": MASK}, {"token": "t"}, use="y")


def test_a_mask_where_nothing_was_is_a_mistake() -> None:
    with pytest.raises(PolicyConfigError) as caught:
        put_back({"token": MASK, "deep": {"list": [MASK]}}, {})
    assert [path for path, _ in caught.value.mistakes] == ["with.token", "with.deep.list[0]"]


def test_live_shows_every_kind() -> None:
    from policies.manager import make_manager
    from policies.registry import Registry

    registry = Registry.from_manager(make_manager())
    uses = {
        "auth": PolicyUse.model_validate({"use": "none", "with": {"tenant": "t"}}),
        "quota": PolicyUse(use="unlimited"),
        "cache_scope": PolicyUse(use="tenant"),
        "scheduling": PolicyUse(use="vtc"),
        "routing": PolicyUse(use="round_robin"),
        "admission": PolicyUse(use="open"),
    }
    rows = live(PolicySet(3, uses, *([None] * 5)), registry)  # type: ignore[arg-type]
    assert [(row.kind, row.use) for row in rows] == [(kind, use.use) for kind, use in uses.items()]
    assert all(row.summary for row in rows)
