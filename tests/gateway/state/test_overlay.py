"""Tenants of the file and of the admin API: the file wins, key by key."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.settings import Settings
from gateway.state.overlay import Combiner, effective, fixed, leaves, patched

FILE = {
    "policies": {"auth": {"use": "none", "with": {"tenant": "x"}}},
    "classes": {"interactive": {}, "batch": {}},
    "tenants": [{"id": "search", "weight": 4, "limits": {"concurrent": 8}, "requires": {"region": "eu"}}],
    "models": [{"name": "m", "source": "model", "pools": [{"name": "p"}]}],
}
SETTINGS = Settings.model_validate(FILE)
SEARCH = SETTINGS.tenants[0]


def test_what_the_file_sets_are_its_leaves() -> None:
    assert dict(leaves(SEARCH)) == {
        ("weight",): 4.0,
        ("limits", "concurrent"): 8,
        ("requires",): {"region": "eu"},
    }


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ({"weight": 2}, ["weight"]),
        ({"weight": None}, ["weight"]),
        ({"limits": {"concurrent": 1, "requests_per_minute": 5}}, ["limits.concurrent"]),
        ({"limits": {"requests_per_minute": 5}}, []),
        ({"requires": {"hardware": "gpu"}}, ["requires.hardware"]),
        ({"requires": {}}, ["requires"]),
        ({"limits": None}, ["limits"]),
        ({"limits": {"budget": {"tokens_per_month": 5}}, "groups": {"g": {}}}, []),
        ({"class": "batch", "privacy": {"allow_external": True}}, []),
        ({}, []),
    ],
    ids=str,
)
def test_keys_of_the_file_are_named(patch: dict[str, Any], named: list[str]) -> None:
    assert fixed(SEARCH, patch) == named
    assert fixed(None, patch) == []


def test_the_file_wins_over_what_is_stored_and_new_tenants_come_after_it() -> None:
    stored = {
        "search": {"weight": 9, "class": "batch", "limits": {"concurrent": 1, "requests_per_minute": 5}},
        "new": {"weight": 2},
        "assist": {},
    }
    settings, problems = Combiner().combined(SETTINGS, stored)
    assert problems == []
    assert [tenant.id for tenant in settings.tenants] == ["search", "assist", "new"]
    search = settings.tenants[0]
    assert (search.weight, search.class_) == (4, "batch")
    assert (search.limits.concurrent, search.limits.requests_per_minute) == (8, 5)
    assert SETTINGS.tenants[0].class_ == "interactive"


def test_a_stored_tenant_that_fits_no_more_is_left_out_and_named() -> None:
    stored = {"new": {"class": "gone"}, "odd": {"wieght": 1}, "other": {"organisation": "gone"}}
    settings, problems = Combiner().combined(SETTINGS, stored)
    assert [tenant.id for tenant in settings.tenants] == ["search"]
    assert [problem.split(":")[0] for problem in problems] == ["tenant new", "tenant odd", "tenant other"]
    assert "known: batch, interactive" in problems[0]


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ({"weight": -1}, "weight"),
        ({"weight": "4"}, "weight"),
        ({"weight": True}, "weight"),
        ({"limits": {"concurrent": 0}}, "limits.concurrent"),
        ({"limits": 5}, "limits"),
        ({"unknown": 1}, "unknown"),
        ({"class": "x"}, "class"),
        ({"organisation": "nobody"}, "organisation"),
        ({"limits": {"budget": {"tokens_per_month": -1}}}, "limits.budget.tokens_per_month"),
        ({"groups": {"g": {"weight": 1}}}, "groups.g.weight"),
        ({"limits": {"tokens_per_minute": 10**400}}, "limits.tokens_per_minute"),
        ({"user_limits": {"budget": {"tokens_per_month": 10**16}}}, "user_limits.budget.tokens_per_month"),
        ({"privacy": {"cache_retention_s": float("inf")}}, "privacy.cache_retention_s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_tenant_is_refused_by_name(raw: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        effective("new", None, raw, SETTINGS)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_unknown_key_is_told_with_those_that_are_there() -> None:
    with pytest.raises(ApiError, match=r"groups\.g\.weight: there is no such key \(known: classes, feat"):
        effective("new", None, {"groups": {"g": {"weight": 1}}}, SETTINGS)


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "-a", "a/b", "ä"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        effective(name, None, {}, SETTINGS)
    assert caught.value.param == "id"


def test_a_merge_patch_merges_sections_and_null_removes() -> None:
    old = {"weight": 2, "limits": {"concurrent": 1, "requests_per_minute": 5}, "requires": {"a": "b"}}
    new = patched(old, {"weight": None, "limits": {"concurrent": None}, "requires": {"c": "d"}})
    assert new == {"limits": {"requests_per_minute": 5}, "requires": {"a": "b", "c": "d"}}
    assert patched(new, {"requires": None}) == {"limits": {"requests_per_minute": 5}}
    assert patched({"weight": 2}, {"weight": {"x": 1}}) == {"weight": {"x": 1}}
    assert old["limits"] == {"concurrent": 1, "requests_per_minute": 5}
    assert patched({}, {"limits": None}) == {}


def test_only_what_has_changed_is_made_again() -> None:
    combiner = Combiner()
    first, _ = combiner.combined(SETTINGS, {"a": {"weight": 2}, "b": {"weight": 3}})
    second, _ = combiner.combined(SETTINGS, {"a": {"weight": 2}, "b": {"weight": 4}})
    assert first.tenants[1] is second.tenants[1]
    assert [tenant.weight for tenant in second.tenants] == [4, 2, 4]
    third, _ = combiner.combined(SETTINGS.model_copy(), {"a": {"weight": 2}})
    assert third.tenants[1] is not first.tenants[1]
    assert [tenant.id for tenant in third.tenants] == ["search", "a"]
