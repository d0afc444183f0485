"""The refreshed key set under rotation, outage and floods. Time is a plain number here."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from policies.auth._jwks import RETRY_S, Freshness, KeySet
from policies.auth._keys import VerifyKey, key_set
from policies.auth.jwt import JwtAuth, JwtConfig
from policies.spi import AuthError, PolicyUnavailableError
from tests.policies.auth.tokens import jwk, rsa_key, sign

FRESH = Freshness(refresh_s=300.0, cooldown_s=30.0, max_stale_s=3600.0, fetch_timeout_s=5.0)


class Idp:
    """An identity provider: its key ids, whether it is up, whether it answers at all."""

    def __init__(self, *kids: str) -> None:
        self.kids = set(kids)
        self.up = True
        self.gate: asyncio.Event | None = None
        self.now = 1000.0
        self.keys = KeySet(self.fetch, self.parse, FRESH, lambda: self.now)

    async def fetch(self) -> Any:
        if self.gate is not None:
            await self.gate.wait()
        if not self.up:
            raise ConnectionError("down")
        return sorted(self.kids)

    @staticmethod
    def parse(document: Any) -> dict[str | None, VerifyKey]:
        if not document:
            raise ValueError("empty")
        return {kid: VerifyKey(kid, frozenset({"RS256"})) for kid in document}

    async def find(self, kid: str | None) -> str:
        return str((await self.keys.find(kid)).key)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_new_key_is_accepted_at_once_and_a_removed_one_within_the_refresh_time() -> None:
    """gateway D1: refetch on an unknown key id; the old key passes while it is published."""
    idp = Idp("old")
    assert await idp.find("old") == "old"
    idp.kids.add("new")
    idp.now += 31.0
    assert await idp.find("new") == "new"
    assert await idp.find("old") == "old"
    idp.kids.remove("old")
    idp.now += FRESH.refresh_s + 1
    await idp.find("new")
    await settle()
    with pytest.raises(AuthError):
        await idp.find("old")


async def test_a_removed_key_does_not_pass_because_nobody_came_for_a_while() -> None:
    """gateway D1: the stated time counts, not the time since somebody else asked."""
    idp = Idp("old", "new")
    await idp.find("old")
    idp.kids.remove("old")
    idp.now += FRESH.refresh_s + 1
    with pytest.raises(AuthError):
        await idp.find("old")
    assert await idp.find("new") == "new"


async def test_after_a_while_a_provider_that_is_down_is_waited_for_once() -> None:
    idp = Idp("good")
    await idp.find("good")
    idp.up = False
    idp.now += FRESH.refresh_s + 1
    assert await idp.find("good") == "good"
    assert idp.keys.fetches == 2
    idp.gate = asyncio.Event()
    idp.now += FRESH.cooldown_s + 1
    with pytest.raises(StopIteration):  # the next attempt runs, nobody waits for it
        idp.keys.find("good").send(None)
    assert idp.keys.fetches == 3
    idp.gate.set()
    await settle()


async def test_a_busy_set_is_fetched_anew_before_anybody_has_to_wait() -> None:
    idp = Idp("good")
    await idp.find("good")
    idp.now += FRESH.refresh_s / 2 + 1
    with pytest.raises(StopIteration):
        idp.keys.find("good").send(None)
    with pytest.raises(AuthError):
        await idp.find("unknown")  # waits for the fetch that runs
    assert idp.keys.fetches == 2
    idp.now += FRESH.refresh_s / 2
    with pytest.raises(StopIteration):
        idp.keys.find("good").send(None)


async def test_a_large_document_is_read_beside_the_loop() -> None:
    """A provider whose set takes long to read delays nobody's request."""
    loop_thread = threading.get_ident()
    read_in: list[int] = []

    async def fetch() -> Any:
        return ["a"]

    def parse(document: Any) -> dict[str | None, VerifyKey]:
        read_in.append(threading.get_ident())
        return Idp.parse(document)

    assert (await KeySet(fetch, parse, FRESH, lambda: 0.0).find("a")).key == "a"
    assert read_in != [loop_thread]


async def test_many_callers_share_one_fetch() -> None:
    idp = Idp("a")
    idp.gate = asyncio.Event()
    waiting = [asyncio.create_task(idp.find("a")) for _ in range(50)]
    await settle()
    idp.gate.set()
    assert await asyncio.gather(*waiting) == ["a"] * 50
    assert idp.keys.fetches == 1


async def test_a_flood_of_unknown_ids_fetches_once_per_cooldown_and_keeps_the_good_set() -> None:
    """security 23: JWKS down and 5,000 random key ids: valid tokens keep passing."""
    idp = Idp("good")
    await idp.find("good")
    idp.up = False
    idp.now += 40.0
    for i in range(5000):
        with pytest.raises(AuthError):
            await idp.find(f"random{i}")
        if i % 100 == 0:
            assert await idp.find("good") == "good"
    assert idp.keys.fetches == 2
    idp.now += 31.0
    with pytest.raises(AuthError):
        await idp.find("random")
    assert idp.keys.fetches == 3


async def test_a_flood_never_makes_a_known_id_wait() -> None:
    """security 29: while the fetch for unknown ids hangs, a known id is answered without a single turn of the loop."""
    idp = Idp("good")
    await idp.find("good")
    idp.now += 40.0
    idp.gate = asyncio.Event()
    flood = [asyncio.create_task(idp.find(f"random{i}")) for i in range(100)]
    await settle()
    with pytest.raises(StopIteration):
        idp.keys.find("good").send(None)
    idp.gate.set()
    outcomes = await asyncio.gather(*flood, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {AuthError}
    assert idp.keys.fetches == 2


async def test_an_outage_serves_the_last_good_set_until_it_is_too_old() -> None:
    """security 31: after max-stale 503 with Retry-After, not 401; and back as soon as the provider is."""
    idp = Idp("good")
    await idp.find("good")
    idp.up = False
    for _ in range(100):
        idp.now += 36.0
        assert await idp.find("good") == "good"
        await settle()
    idp.now += 1.0
    for kid in ("good", "random", None):
        with pytest.raises(PolicyUnavailableError) as caught:
            await idp.find(kid)
        assert caught.value.retry_after_s == RETRY_S
    idp.up = True
    idp.now += RETRY_S
    assert await idp.find("good") == "good"


async def test_an_empty_or_broken_document_is_a_failed_fetch() -> None:
    """security 23: a failed fetch must not overwrite the good set with nothing."""
    idp = Idp("good")
    await idp.find("good")
    idp.kids.clear()
    idp.now += 40.0
    with pytest.raises(AuthError):
        await idp.find("other")
    assert await idp.find("good") == "good"


async def test_a_first_fetch_that_fails_is_unavailable_and_soon_tried_again() -> None:
    idp = Idp("good")
    idp.up = False
    for _ in range(10):
        with pytest.raises(PolicyUnavailableError):
            await idp.find("good")
    assert idp.keys.fetches == 1
    idp.up = True
    idp.now += RETRY_S
    assert await idp.find("good") == "good"


async def test_a_caller_that_gives_up_does_not_cancel_the_fetch_of_the_others() -> None:
    idp = Idp("a")
    idp.gate = asyncio.Event()
    impatient = asyncio.create_task(idp.find("a"))
    patient = asyncio.create_task(idp.find("a"))
    await settle()
    impatient.cancel()
    await settle()
    idp.gate.set()
    assert await patient == "a"
    assert idp.keys.fetches == 1


async def test_a_token_without_key_id_passes_only_where_there_is_one_key() -> None:
    idp = Idp("only")
    assert await idp.find(None) == "only"
    idp = Idp("one", "two")
    with pytest.raises(AuthError):
        await idp.find(None)


async def test_a_hanging_provider_is_given_up_on() -> None:
    async def never() -> Any:
        await asyncio.Event().wait()

    keys = KeySet(never, Idp.parse, Freshness(fetch_timeout_s=0.01), lambda: 0.0)
    with pytest.raises(PolicyUnavailableError):
        await asyncio.wait_for(keys.find("a"), 30)


async def test_real_tokens_against_a_rotating_set() -> None:
    """gateway D1 with real signatures."""
    published = [jwk(rsa_key("first"), "k1")]

    async def fetch() -> Any:
        return {"keys": published}

    config = JwtConfig(
        algorithms=("RS256",), audience="forebay", issuer="https://idp.example", jwks_url="https://idp.example/keys"
    )
    now = 0.0
    keys = KeySet(fetch, lambda document: key_set(document, config.algorithms), FRESH, lambda: now)
    auth = JwtAuth(config, keys)
    assert (await auth.authenticate(sign(rsa_key("first"), "RS256", {"kid": "k1"}))).tenant == "search"
    published.append(jwk(rsa_key("second"), "k2"))
    now = 60.0
    assert await auth.authenticate(sign(rsa_key("second"), "RS256", {"kid": "k2"}))
    with pytest.raises(AuthError):
        await auth.authenticate(sign(rsa_key("first"), "RS256", {"kid": "k2"}))
