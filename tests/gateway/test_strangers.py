"""Floods of bad credentials: slowed by address, and nobody with a good one is locked out."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest

from gateway import strangers
from gateway.errors import ApiError
from gateway.strangers import GOOD_S, REMEMBERED, WINDOW_S, Strangers, address
from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, token

HERE = "192.0.2.1"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def at_once(known: Strangers, host: str | None = HERE) -> bool:
    """Whether a request from there goes on without waiting."""
    try:
        known.let_in(host).send(None)
    except StopIteration:
        return True
    except RuntimeError:  # it would wait, and no loop runs here
        return False
    raise AssertionError("neither")


def test_so_many_in_a_minute_and_then_they_wait() -> None:
    clock = Clock()
    known = Strangers(60, clock)
    assert not known
    for _ in range(60):
        assert at_once(known)
        known.bad(HERE)
    assert not at_once(known)
    assert at_once(known, "192.0.2.2")
    assert at_once(known, None)
    clock.now += WINDOW_S / 60 + 0.01
    assert at_once(known), "what is forgotten makes room"
    known.bad(HERE)
    assert not at_once(known)


def test_one_good_credential_speaks_for_its_address() -> None:
    clock = Clock()
    known = Strangers(5, clock)
    known.good(HERE)
    for _ in range(1000):
        known.bad(HERE)
    assert at_once(known)
    assert len(known) == 0
    clock.now += GOOD_S + 1
    for _ in range(5):
        known.bad(HERE)
    assert not at_once(known)
    known.good(HERE)
    assert at_once(known)


def test_an_address_of_version_6_is_its_network() -> None:
    assert address("2001:db8::1") == address("2001:db8::ffff") == "2001:db8::/64"
    assert address("2001:db8:0:1::1") != address("2001:db8::1")
    assert address("fe80::1%eth0") == "fe80::/64"
    assert address("::ffff:192.0.2.1") == HERE
    assert [address(text) for text in (None, HERE, "a:b")] == ["", HERE, "a:b"]


def test_little_is_remembered_and_nothing_without_a_limit() -> None:
    clock = Clock()
    known = Strangers(600, clock)
    for number in range(3 * REMEMBERED):
        clock.now += 1.0
        known.bad(f"10.0.{number // 256}.{number % 256}")
    assert len(known) <= REMEMBERED
    off = Strangers(None, clock)
    for _ in range(9):
        off.bad(HERE)
    assert not off


async def test_only_so_many_wait_and_whoever_gives_up_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "MOST_WAITING", 2)
    known = Strangers(1)
    for _ in range(2):
        known.bad(HERE)
    waiting = [asyncio.create_task(known.let_in(HERE)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await known.let_in(HERE)
    assert (caught.value.status, caught.value.code) == (429, "too_many_bad_credentials")
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert not known._waiting


def bad(number: int) -> dict[str, str]:
    return {"authorization": f"Bearer {token('alpha')[:-4]}{number:04d}"}


async def test_a_flood_waits_and_a_good_credential_from_the_same_address_ends_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared address is never locked out: what waited is looked at, and one that is good speaks for all."""
    monkeypatch.setattr(strangers, "MOST_WAITING", 4)
    monkeypatch.setattr(strangers, "PAUSE_S", 2.0)
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2}

    async def ask(client: httpx.AsyncClient, headers: dict[str, str]) -> httpx.Response:
        return await client.post("/v1/completions", json=body, headers=headers)

    async def flood(site: Site) -> Counter[int]:
        answers = await asyncio.gather(*(ask(elsewhere, bad(number)) for number in range(40)))
        for answer in answers:
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "too_many_bad_credentials"
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.headers["x-request-id"]
        assert (await ask(site.http, {"authorization": f"Bearer {token('alpha')}"})).status_code == 200
        return Counter(answer.status_code for answer in answers)

    async with start({"listen": {"port": 0, "unauthenticated_per_minute": 5}}) as site:
        there = httpx.AsyncHTTPTransport(local_address="127.0.0.2", limits=httpx.Limits(max_connections=None))
        async with httpx.AsyncClient(base_url=site.url, transport=there, timeout=30) as elsewhere:
            for number in range(5):
                assert (await ask(elsewhere, bad(number))).status_code == 401
            counts = await flood(site)
            assert set(counts) == {401, 429}
            assert counts[401] >= 4
            assert (await elsewhere.get("/healthz")).status_code == 200
            assert (await ask(elsewhere, {"authorization": f"Bearer {token('beta')}"})).status_code == 200
            assert await flood(site) == Counter({401: 40})
