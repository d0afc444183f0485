"""Tokens of a real identity provider over HTTP: discovery, rotation, outage and floods, seen by a client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import jwt
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site
from tests.gateway.http.serving import serving
from tests.policies.auth.tokens import jwk, rsa_key

COOLDOWN_S = 0.2
MAX_STALE_S = 3.0


class Provider:
    """Publishes keys by name under a real port; may be down."""

    def __init__(self) -> None:
        self.published = {"first"}
        self.up = True
        self.fault: Callable[[], Response] | None = None
        self.fetches = 0
        self.url = ""
        self.app = Starlette(
            routes=[Route("/.well-known/openid-configuration", self.discovery), Route("/keys", self.keys)]
        )

    async def discovery(self, _: Request) -> Response:
        return JSONResponse({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

    async def keys(self, _: Request) -> Response:
        self.fetches += 1
        if self.fault is not None:
            return self.fault()
        if not self.up:
            return JSONResponse({"keys": []}, 500)
        return JSONResponse({"keys": [jwk(rsa_key(name), name) for name in sorted(self.published)]})

    def token(self, key: str = "first", **changes: Any) -> str:
        now = int(time.time())
        claims = {"iss": self.url, "aud": "forebay", "exp": now + 600, "org": {"tenant": "alpha"}, **changes}
        return jwt.encode(claims, rsa_key(key), "RS256", headers={"kid": changes.get("kid", key)})


@contextlib.asynccontextmanager
async def gateway(start: Start, max_stale_s: float = MAX_STALE_S) -> AsyncIterator[tuple[Site, Provider]]:
    provider = Provider()
    async with serving(provider.app) as port:
        provider.url = f"http://127.0.0.1:{port}"
        issuer = {
            "issuer": provider.url,
            "audience": "forebay",
            "algorithms": ["RS256"],
            "discover": True,
            "tenant_claim": "org.tenant",
            "cooldown_s": COOLDOWN_S,
            "refresh_s": 0.5,
            "max_stale_s": max_stale_s,
        }
        auth = {"use": "jwt_issuers", "with": {"issuers": [issuer]}}
        async with start({"policies": {"auth": auth}}, ready=False) as site:
            yield site, provider


async def ask(site: Site, token: str) -> httpx.Response:
    return await site.http.get("/v1/models", headers={"authorization": f"Bearer {token}"})


async def test_a_rotated_key_passes_at_once_and_a_removed_one_ends(start: Start) -> None:
    """gateway D1: accepted on the first try; the old key while it is published, and no longer than the stated time."""
    async with gateway(start) as (site, provider):
        answer = await ask(site, provider.token())
        assert answer.status_code == 200
        assert [model["id"] for model in answer.json()["data"]] == [MODEL]
        provider.published.add("second")
        await asyncio.sleep(COOLDOWN_S)
        assert (await ask(site, provider.token("second"))).status_code == 200
        assert (await ask(site, provider.token("first"))).status_code == 200
        provider.published.remove("first")
        async with asyncio.timeout(30):
            while (await ask(site, provider.token("first"))).status_code != 401:
                await asyncio.sleep(0.05)
        assert (await ask(site, provider.token("second"))).status_code == 200


async def test_an_outage_is_bridged_and_then_503_with_a_time_to_retry(start: Start) -> None:
    """security 31: the last good set serves until it is too old; then 503, not 401; and back by itself."""
    async with gateway(start) as (site, provider):
        assert (await ask(site, provider.token())).status_code == 200
        provider.up = False
        assert (await ask(site, provider.token())).status_code == 200
        async with asyncio.timeout(30):
            while (answer := await ask(site, provider.token())).status_code == 200:
                await asyncio.sleep(0.05)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "auth_unavailable"
        assert int(answer.headers["retry-after"]) >= 1
        provider.up = True
        await asyncio.sleep(float(answer.headers["retry-after"]))
        assert (await ask(site, provider.token())).status_code == 200


async def test_a_flood_of_unknown_keys_asks_the_provider_once_per_cooldown(start: Start) -> None:
    """security 23 and 29, over HTTP: known keys pass meanwhile, and the provider hears next to nothing of it."""
    async with gateway(start) as (site, provider):
        assert (await ask(site, provider.token())).status_code == 200
        began, before = time.monotonic(), provider.fetches
        for _ in range(5):
            refused = await asyncio.gather(*(ask(site, provider.token(kid=f"random{i}")) for i in range(20)))
            assert {answer.status_code for answer in refused} == {401}
            assert (await ask(site, provider.token())).status_code == 200
        most = 1 + (time.monotonic() - began) / COOLDOWN_S
        assert provider.fetches - before <= most


async def _drip() -> AsyncIterator[bytes]:
    while True:
        yield b" "
        await asyncio.sleep(0.1)


FAULTS: dict[str, Callable[[], Response]] = {
    "page": lambda: Response("<html>Sign in</html>", media_type="text/html"),
    "nothing": lambda: Response(status_code=204),
    "no keys": lambda: JSONResponse({"keys": []}),
    "no list": lambda: JSONResponse({"keys": {"first": 1}}),
    "odd keys": lambda: JSONResponse({"keys": [None, 5, {"kty": "RSA"}, {"kty": "RSA", "n": 5, "e": []}]}),
    "secrets": lambda: JSONResponse({"keys": [{"kty": "oct", "kid": "second", "k": "AAAA"}]}),
    "too large": lambda: JSONResponse({"keys": [], "more": "x" * 2**21}),
    "deep": lambda: Response("[" * 100_000, media_type="application/json"),
    "zipped": lambda: Response(b"\x1f\x8b\x08", headers={"content-encoding": "gzip"}),
    "in circles": lambda: RedirectResponse("/keys"),
    "elsewhere": lambda: RedirectResponse("file:///etc/passwd"),
    "never ends": lambda: StreamingResponse(_drip()),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_whatever_the_provider_says_the_good_keys_stay(start: Start, fault: str) -> None:
    """security 23: a page, a flood, a circle: no new key, no lost key, and new ones as soon as it is well again."""
    async with gateway(start, max_stale_s=600.0) as (site, provider):
        assert (await ask(site, provider.token())).status_code == 200
        provider.fault = FAULTS[fault]
        await asyncio.sleep(COOLDOWN_S)
        assert (await ask(site, provider.token("second"))).status_code == 401
        assert provider.fetches >= 2
        assert (await ask(site, provider.token())).status_code == 200
        provider.fault = None
        provider.published.add("second")
        async with asyncio.timeout(30):  # a fetch that hangs is waited for, and fails
            while (await ask(site, provider.token("second"))).status_code != 200:
                await asyncio.sleep(COOLDOWN_S)


async def test_a_provider_of_two_minds_lets_both_keys_pass(start: Start) -> None:
    """Two of its replicas publish different sets: a key that is published passes, at the latest after a cooldown."""
    async with gateway(start) as (site, provider):
        for turn in range(6):
            key = ("first", "second")[turn % 2]
            provider.published = {key}
            await asyncio.sleep(COOLDOWN_S)
            assert (await ask(site, provider.token(key))).status_code == 200


@pytest.mark.parametrize(
    "changes", [{"aud": "other"}, {"iss": "http://127.0.0.1:1"}, {"exp": 5}, {"org": {}}, {"org": "alpha"}], ids=str
)
async def test_other_tokens_are_401_with_one_body(start: Start, changes: dict[str, Any]) -> None:
    """gateway D3."""
    async with gateway(start) as (site, provider):
        answer = await ask(site, provider.token(**changes))
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_credential"
