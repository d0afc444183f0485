"""The opaque names that workers count tenants by."""

from __future__ import annotations

from gateway.tenant_keys import MOST, TenantKeys
from policies.types import TenantId


def test_a_key_names_nobody_and_leads_back_here_only() -> None:
    keys, others = TenantKeys(b"s" * 32), TenantKeys(b"t" * 32)
    key = keys.key(TenantId("search"))
    assert "search" not in key
    assert key == keys.key(TenantId("search"))
    assert key != keys.key(TenantId("batch")) != others.key(TenantId("batch"))
    assert keys.tenant(key) == "search"
    assert others.tenant(key) is None


def test_what_is_remembered_is_bounded_and_the_busy_ones_stay() -> None:
    keys = TenantKeys(b"s" * 32)
    first = keys.key(TenantId("busy"))
    for number in range(2 * MOST):
        keys.key(TenantId(f"t{number}"))
        keys.key(TenantId("busy"))
    assert keys.tenant(first) == "busy"
    assert keys.tenant(TenantKeys(b"s" * 32).key(TenantId("t0"))) is None
    assert len(keys._keys) == len(keys._tenants) == MOST
