"""Cache scopes: injective, keyed, and as narrow as the policy's name says."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cache_scope._key import encode, scope
from policies.cache_scope.group import GroupScope
from policies.cache_scope.tenant import TenantScope
from policies.cache_scope.user import UserScope
from policies.manager import make_manager
from policies.registry import Registry
from policies.spi import PolicyConfigError, PolicyContext
from policies.types import Principal, TenantId

SECRET = b"0123456789abcdef0123456789abcdef"
TEXT = st.text(st.characters(), max_size=6)
FIELDS = st.tuples(TEXT, TEXT, st.one_of(st.none(), TEXT), st.integers(0, 2**40))


@given(FIELDS, FIELDS)
def test_the_encoding_is_injective(
    one: tuple[str, str, str | None, int], two: tuple[str, str, str | None, int]
) -> None:
    """security 3, 11: fields are tagged and length-prefixed; no two callers encode alike."""
    assert (encode(*one) == encode(*two)) == (one == two)


@given(st.text("at:mn-e\x00\x01", max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_moving_a_border_between_fields_changes_the_encoding(text: str, first: int, second: int) -> None:
    """security 3: an adapter named like a salt must not be one."""
    left = (text[:first], text[first:], None, 0)
    right = (text[:second], text[second:], None, 0)
    assert (encode(*left) == encode(*right)) == (left == right)
    assert encode(text, "n", None, 0) != encode(text, "n", "", 0)


def test_the_key_is_an_hmac_under_the_server_secret() -> None:
    """security 1: a keyed 256-bit digest, the same in every process, useless without the secret."""
    made = scope(SECRET, "search", "tenant", None, 3)
    assert made.key == hmac.new(SECRET, encode("search", "tenant", None, 3), hashlib.sha256).digest()
    assert made.key != scope(SECRET + b"x", "search", "tenant", None, 3).key


def principal(tenant: str = "a", user: str | None = None, *groups: str) -> Principal:
    return Principal(TenantId(tenant), user, frozenset(groups))


def test_tenant_scope_is_shared_inside_a_tenant_only() -> None:
    policy = TenantScope(SECRET)
    assert policy.scope(principal("a", "u", "g"), 0) == policy.scope(principal("a", "v"), 0)
    assert policy.scope(principal("a"), 0) != policy.scope(principal("b"), 0)
    assert policy.scope(principal("a"), 0) != policy.scope(principal("a"), 1)


def test_user_scope_separates_users_of_a_tenant_and_tenants_of_a_user() -> None:
    policy = UserScope(SECRET)
    keys = [
        policy.scope(who, 0).key
        for who in (principal("a", "u"), principal("a", "v"), principal("b", "u"), principal("a"), principal("a", ""))
    ]
    assert len(set(keys)) == 5
    assert policy.scope(principal("a", "u", "g"), 0) == policy.scope(principal("a", "u"), 0)


def test_group_scope_chooses_the_same_group_every_time() -> None:
    policy = GroupScope(SECRET, prefer=("research", "ops"))
    ops = policy.scope(principal("a", "u", "ops", "a-team"), 0)
    assert ops == policy.scope(principal("a", "v", "ops"), 0)
    assert policy.scope(principal("a", "u", "ops", "research"), 0) == policy.scope(principal("a", "w", "research"), 0)
    assert policy.scope(principal("a", "u", "z", "b"), 0) == policy.scope(principal("a", "v", "b"), 0)
    assert ops != policy.scope(principal("b", "u", "ops"), 0)


def test_without_a_group_the_scope_is_the_users_own() -> None:
    policy = GroupScope(SECRET)
    assert policy.scope(principal("a", "u"), 0) != policy.scope(principal("a", "v"), 0)
    assert policy.scope(principal("a", "u"), 0) != policy.scope(principal("a", "u", "u"), 0), (
        "a group named like a user"
    )
    assert policy.scope(principal("a", "x", ""), 0) == policy.scope(principal("a", "y", ""), 0)


@pytest.mark.parametrize("name", ["tenant", "user", "group"])
def test_a_missing_or_short_secret_stops_the_start(name: str) -> None:
    registry = Registry.from_manager(make_manager())
    for secret in (b"", b"short"):
        with pytest.raises(PolicyConfigError, match="at least 16 bytes"):
            registry.build("cache_scope", name, {}, PolicyContext(server_secret=secret))  # type: ignore[arg-type]
