"""The table of scopes in use: bounded, and never silent about what it forgot."""

from __future__ import annotations

from gateway.scopes import ScopesInUse
from policies.types import TenantId

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


def test_a_tenants_oldest_scope_goes_and_is_remembered_as_gone() -> None:
    table = ScopesInUse(per_tenant=2)
    table.note(A, b"1")
    table.note(A, b"2")
    table.note(A, b"1")
    assert table.of(A) == [b"2", b"1"]
    assert table.complete(A)
    table.note(A, b"3")
    assert table.of(A) == [b"1", b"3"]
    assert not table.complete(A)
    assert table.complete(B), "what one tenant used up is nobody else's loss"


def test_tenants_without_end_take_no_room_without_end() -> None:
    """``tenant_defaults``: every token may name a new tenant."""
    table = ScopesInUse(total=100)
    for number in range(10_000):
        table.note(TenantId(f"t{number}"), b"scope")
        table.note(A, b"scope")
    assert len(table) == 100
    assert table.of(A) == [b"scope"], "the tenant that keeps coming stays"
    assert table.complete(A)
    assert table.of(TenantId("t0")) == []
    assert not table.complete(TenantId("t0"))


def test_a_forgotten_tenant_that_comes_back_is_not_known_completely() -> None:
    table = ScopesInUse(total=2)
    for tenant in (A, B, C):
        table.note(tenant, b"one")
    table.note(A, b"two")
    assert table.of(A) == [b"two"]
    assert not table.complete(A)


def test_one_tenant_alone_keeps_its_own_bound() -> None:
    table = ScopesInUse(per_tenant=5, total=3)
    for number in range(9):
        table.note(A, b"%d" % number)
    assert len(table) == len(table.of(A)) == 5
