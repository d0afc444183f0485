"""The state store: durable, never without its audit entry, shared, and refused when it is not understood."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.state.audit import Actor, Event
from gateway.state.folder import StateError
from gateway.state.records import KeyDirectory, KeyRecord, Secret
from gateway.state.store import FILE, ChangedMeanwhile, Store

EVENT = Event(Actor("admin", "api"), "x", "y")
KEY = KeyRecord("k1", "search", 1.0, "ann", ("g",), ("r",), "laptop", secrets=(Secret(b"d" * 32, "fb_abc", 1.0),))


def test_what_was_put_is_there_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_key(KEY, EVENT)
    store.put_tenant("search", {"weight": 2}, EVENT)
    store.put_tenant("search", {"weight": 3}, EVENT)
    store.close()
    again = Store(tmp_path)
    assert again.snapshot().keys == {"k1": KEY}
    assert again.snapshot().tenants == {"search": {"weight": 3}}
    handed: list[str] = []

    def append(entry: Mapping[str, Any]) -> None:
        if len(handed) == 2:
            raise OSError("full")
        handed.append(entry["id"])

    with pytest.raises(OSError, match="full"):
        again.hand_on(append)
    assert (handed, again.pending()) == ([EVENT.id] * 2, 1)
    again.close()
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_change_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_key(KEY, EVENT)
    other = replace(KEY, id="k2")
    with pytest.raises(sqlite3.IntegrityError):  # the same secret twice
        store.put_key(other, EVENT)
    assert list(store.snapshot().keys) == ["k1"]
    assert store.pending() == 1
    store.close()


def test_the_keys_of_a_deleted_tenant_end_where_nobody_else_knows_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_key(KEY, EVENT)
    store.delete_tenant("search", None, EVENT)
    assert store.snapshot().keys["k1"].revoked_at is None
    store.delete_tenant("search", 7.0, EVENT)
    assert store.snapshot().keys["k1"].revoked_at == 7.0
    store.close()


def test_another_connections_change_shows_in_the_version(tmp_path: Path) -> None:
    one, two = Store(tmp_path), Store(tmp_path)
    seen = two.version()
    assert two.version() == seen
    one.put_key(KEY, EVENT)
    assert two.version() != seen
    assert two.snapshot().keys == {"k1": KEY}
    one.close()
    two.close()


def test_a_change_that_was_thought_out_over_an_older_state_is_refused(tmp_path: Path) -> None:
    """Written, a rotation by one gateway would take back another's revocation."""
    one, two = Store(tmp_path), Store(tmp_path)
    one.put_key(KEY, EVENT)
    rotated = replace(two.snapshot().keys["k1"], secrets=(Secret(b"n" * 32, "fb_new", 2.0),))
    one.put_key(replace(KEY, revoked_at=2.0), EVENT)
    with pytest.raises(ChangedMeanwhile):
        two.put_key(rotated, EVENT)
    assert two.snapshot().keys["k1"].revoked_at == 2.0
    assert two.pending() == 2
    two.put_tenant("search", {}, EVENT)
    one.close()
    two.close()


def test_a_file_of_a_newer_release_and_one_that_is_no_database_are_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StateError, match="newer release"):
        Store(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    with pytest.raises(StateError, match="not usable"):
        Store(tmp_path)


def test_the_directory_knows_live_secrets_with_the_end_that_comes_first() -> None:
    directory = KeyDirectory()
    old, new = Secret(b"o" * 32, "fb_o", 1.0, ends_at=50.0), Secret(b"n" * 32, "fb_n", 2.0)
    directory.replace(
        [
            replace(KEY, expires_at=90.0, secrets=(old, new)),
            replace(KEY, id="k2", revoked_at=3.0, secrets=(Secret(b"r" * 32, "fb_r", 1.0),)),
        ]
    )
    ((digest, principal),) = directory.find(b"o" * 8)
    assert (digest, principal.key_id, principal.expires_at) == (b"o" * 32, "k1", 50.0)
    assert (principal.tenant, principal.user, principal.groups, principal.roles) == ("search", "ann", {"g"}, {"r"})
    assert directory.find(b"n" * 8)[0][1].expires_at == 90.0
    assert directory.find(b"r" * 8) == ()
    directory.replace([])
    assert directory.find(b"n" * 8) == ()


def test_nothing_of_a_key_that_is_shown_opens_anything() -> None:
    shown = KEY.as_json(2.0)
    assert shown["secrets"] == [{"prefix": "fb_abc", "created_at": "1970-01-01T00:00:01+00:00", "ends_at": None}]
    assert b"d" * 32 not in repr(KEY).encode()
    assert "digest" not in str(shown)
    assert [replace(KEY, **end).state(5.0) for end in ({}, {"expires_at": 5.0}, {"revoked_at": 1.0})] == [
        "active",
        "expired",
        "revoked",
    ]
