"""Two gateways that change the same tenants and keys at the same moment: nothing is undone, all is told once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from gateway.errors import ApiError
from gateway.state.audit import LOG_FILE, Actor, find_key, verify
from gateway.state.records import KeyDirectory
from gateway.state.registrar import NewKey, Registrar
from policies.auth.api_key import INDEX_BYTES, digest_of

ADMIN = Actor("admin", "api")
EACH = 40


@contextlib.asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[Registrar, Registrar]]:
    both = Registrar(folder, KeyDirectory(), {}), Registrar(folder, KeyDirectory(), {})
    for registrar in both:
        registrar.start(lambda: None)
    try:
        yield both
    finally:
        for registrar in both:
            await registrar.stop()


def counted(old: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {"weight": (old or {"weight": 0})["weight"] + 1}


async def test_no_change_is_lost_and_each_is_in_the_log_once(tmp_path: Path) -> None:
    async with two(tmp_path) as both:

        async def work(registrar: Registrar) -> None:
            for _ in range(EACH):
                await registrar.change_tenant(ADMIN, "tenant.update", "search", counted)

        await asyncio.gather(*map(work, both))
        entries = await both[0].last_events(2 * EACH + 1)
    assert [entry["after"]["weight"] for entry in reversed(entries)] == list(range(1, 2 * EACH + 1))
    assert all(entry["before"] in (None, {"weight": entry["after"]["weight"] - 1}) for entry in entries)
    assert set(Counter(entry["id"] for entry in entries).values()) == {1}
    verdict = verify(tmp_path / LOG_FILE, find_key(tmp_path, {}))
    assert (verdict.ok, verdict.head.seq) == (True, 2 * EACH)


async def test_a_changed_key_is_in_force_and_makes_no_tenant_anew(tmp_path: Path) -> None:
    """With thousands of tenants that would hold up the event loop for each key that is made."""
    keys, renewed = KeyDirectory(), 0
    registrar = Registrar(tmp_path, keys, {})

    def changed() -> None:
        nonlocal renewed
        renewed += 1

    registrar.start(changed)
    try:
        key, secret = await registrar.create_key(ADMIN, NewKey("search"))
        digest = digest_of(secret)
        assert [principal.key_id for _, principal in keys.find(digest[:INDEX_BYTES])] == [key.id]
        await registrar.revoke_key(ADMIN, key.id)
        assert not keys.find(digest[:INDEX_BYTES])
        assert renewed == 0
        await registrar.change_tenant(ADMIN, "tenant.update", "search", counted)
        assert renewed == 1
    finally:
        await registrar.stop()


async def test_a_revoked_key_stays_revoked_whoever_rotates_it_meanwhile(tmp_path: Path) -> None:
    async with two(tmp_path) as (one, other):
        for _ in range(EACH // 2):
            key, _ = await one.create_key(ADMIN, NewKey("search"))
            await other.rotate_key(ADMIN, key.id, 60.0)  # it has heard of the key
            revoked, rotated = await asyncio.gather(
                one.revoke_key(ADMIN, key.id), other.rotate_key(ADMIN, key.id, 60.0), return_exceptions=True
            )
            assert not isinstance(revoked, BaseException)
            assert isinstance(rotated, tuple | ApiError)
            with contextlib.suppress(ApiError):
                await other.rotate_key(ADMIN, "unknown", 0.0)  # looks at the file first
            assert other.keys[key.id].revoked_at is not None
