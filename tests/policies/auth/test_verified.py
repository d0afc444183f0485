"""A remembered token passes exactly as long as it would pass if it were verified again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import jwt
import pytest

from policies.auth._jwks import Freshness, KeySet
from policies.auth._keys import VerifyKey, hmac_key, key_set
from policies.auth._verified import Verified, VerifiedTokens
from policies.auth.jwt import JwtAuth, JwtConfig, StaticKeys
from policies.spi import AuthError
from policies.types import Principal, TenantId
from tests.policies.auth.tokens import SECRET, jwk, rsa_key, sign

CONFIG = JwtConfig(algorithms=("HS256",), audience="forebay", issuer="https://idp.example", key_env="KEY", leeway_s=5)
KEY = hmac_key(SECRET.encode(), ["HS256"], "key_env")
ANN = Principal(TenantId("search"), user="ann")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens whose signature was computed."""
    computed: list[str] = []
    decode = jwt.decode

    def counting(token: str, *args: Any, **kwargs: Any) -> Any:
        computed.append(token)
        return decode(token, *args, **kwargs)

    monkeypatch.setattr(jwt, "decode", counting)
    return computed


async def test_a_signature_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = counted(monkeypatch)
    auth = JwtAuth(CONFIG, StaticKeys({None: KEY}))
    request = sign()
    first = await auth.authenticate(request)
    assert [await auth.authenticate(request) for _ in range(3)] == [first] * 3
    assert len(computed) == 1


async def test_it_ends_with_the_tokens_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a moment later than without being remembered: ``exp`` and the leeway."""
    computed = counted(monkeypatch)
    now = time.time()
    auth = JwtAuth(CONFIG, StaticKeys({None: KEY}), clock=lambda: now)
    request = sign(exp=int(time.time()) + 100)
    await auth.authenticate(request)
    now += 100 + CONFIG.leeway_s - 2
    await auth.authenticate(request)
    assert len(computed) == 1
    now += 3
    await auth.authenticate(request)  # asked anew, and by PyJWT's own clock it has not expired
    assert len(computed) == 2


async def test_an_expired_one_is_refused() -> None:
    auth = JwtAuth(CONFIG.model_copy(update={"leeway_s": 0.0}), StaticKeys({None: KEY}))
    request = sign(exp=int(time.time()) + 2)
    await auth.authenticate(request)
    await asyncio.sleep(2.1)
    with pytest.raises(AuthError, match="ExpiredSignatureError"):
        await auth.authenticate(request)


async def test_a_key_that_is_gone_takes_its_tokens_along() -> None:
    """Removed from the set, or replaced under its own id: what it signed is refused, remembered or not."""
    published = [jwk(rsa_key("first"), "k1"), jwk(rsa_key("second"), "k2")]

    async def fetch() -> Any:
        return {"keys": published}

    config = JwtConfig(
        algorithms=("RS256",), audience="forebay", issuer="https://idp.example", jwks_url="https://idp.example/keys"
    )
    now = 0.0
    fresh = Freshness(refresh_s=300, cooldown_s=30, max_stale_s=300)
    auth = JwtAuth(config, KeySet(fetch, lambda document: key_set(document, config.algorithms), fresh, lambda: now))
    first, second = (sign(rsa_key(name), "RS256", {"kid": kid}) for name, kid in (("first", "k1"), ("second", "k2")))
    await auth.authenticate(first)
    await auth.authenticate(second)
    published[:] = [jwk(rsa_key("third"), "k2")]
    now = 301.0
    with pytest.raises(AuthError):
        await auth.authenticate(first)
    with pytest.raises(AuthError):
        await auth.authenticate(second)


@pytest.mark.parametrize(
    "change", [lambda text: text[:-2] + "AA", lambda text: text + ".", lambda text: text.swapcase()]
)
async def test_any_other_text_is_another_token(change: Any) -> None:
    """The digest is of every byte: a remembered claim with another signature is verified, and refused."""
    auth = JwtAuth(CONFIG, StaticKeys({None: KEY}))
    request = sign()
    await auth.authenticate(request)
    token = request.headers["authorization"].removeprefix("Bearer ")
    with pytest.raises(AuthError):
        await auth.authenticate(type(request)({"authorization": f"Bearer {change(token)}"}, None))


async def test_refused_ones_are_not_remembered() -> None:
    auth = JwtAuth(CONFIG, StaticKeys({None: KEY}))
    with pytest.raises(AuthError):
        await auth.authenticate(sign(aud="another"))
    assert not len(auth._verified)


def test_the_oldest_goes_first() -> None:
    """Bounded; remembered again is young again."""
    key = VerifyKey("k", frozenset({"HS256"}))
    tokens = VerifiedTokens(lambda: 0.0, limit=2)
    for name in ("a", "b", "a", "c"):
        tokens.remember(name, Verified(None, key, 10.0, ANN))
    assert [tokens.look_up(name) is not None for name in "abc"] == [True, False, True]
    assert len(tokens) == 2
