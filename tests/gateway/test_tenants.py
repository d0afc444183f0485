"""Snapshots of tenants: shared where nothing narrows a caller, and never older than what they are of."""

from __future__ import annotations

from typing import Any

from gateway.settings import Settings
from gateway.tenants import Tenants
from policies.types import Principal, TenantId
from tests.gateway.harness import BASE, merged

ALPHA = TenantId("alpha")


def settings(**tenant: Any) -> Settings:
    listed = {"id": "alpha", "groups": {"night": {"classes": ["batch"]}}, "users": {"eve": {"models": []}}, **tenant}
    return Settings.model_validate(merged(BASE, {"tenants": [listed], "tenant_defaults": {"weight": 3}}))


def caller(user: str | None = None, *groups: str, tenant: str = "alpha") -> Principal:
    return Principal(TenantId(tenant), method="jwt", user=user, groups=frozenset(groups))


def test_callers_whom_nothing_narrows_share_one_snapshot() -> None:
    tenants = Tenants(settings())
    plain = tenants.of(caller())
    assert tenants.of(caller("bob", "day")) is plain
    assert plain.grants == (plain.grant,)
    assert [grant.whose for grant in tenants.of(caller("bob", "day", "night")).grants][1:] == ["The group 'night'"]
    assert [grant.whose for grant in tenants.of(caller("eve")).grants][1:] == ["The user 'eve'"]
    assert tenants.of(caller()) is plain


def test_a_snapshot_ends_with_its_epoch_its_window_and_its_configuration() -> None:
    now = 1000.0
    tenants = Tenants(settings(privacy={"cache_retention_s": 100}), wall=lambda: now)
    first = tenants.of(caller())
    tenants.bump(ALPHA)
    second = tenants.of(caller())
    assert (first.epoch, second.epoch) == (0, 1)
    now += 100
    third = tenants.of(caller())
    assert third.window == second.window + 1
    assert third.scope_epoch == tenants.scope_epoch(ALPHA)
    tenants.reload(settings(weight=7))
    assert tenants.of(caller()).weight == 7


def test_tenants_that_nobody_listed_are_not_remembered() -> None:
    tenants = Tenants(settings())
    for number in range(50):
        found = tenants.of(caller(tenant=f"stranger-{number}"))
        assert (found.weight, found.listed) == (3, False)
    assert not tenants._plain
