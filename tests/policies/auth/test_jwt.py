"""Tokens: what passes, and every way in which others let the wrong ones pass."""

from __future__ import annotations

import base64
import json
import time
import warnings
from pathlib import Path
from typing import Any

import jwt
import pytest

from policies.manager import make_manager
from policies.registry import Registry
from policies.spi import AuthError, PolicyConfigError, PolicyContext
from policies.types import AuthRequest
from tests.policies.auth.tokens import (
    SECRET,
    bearer,
    claims,
    ec_key,
    hand_made,
    jwk,
    part,
    private_pem,
    public_pem,
    rsa_key,
    sign,
)

REGISTRY = Registry.from_manager(make_manager())
BASE = {"audience": "forebay", "issuer": "https://idp.example"}
HMAC = {**BASE, "algorithms": ["HS256"], "key_env": "KEY"}


def build(with_: dict[str, Any], base_dir: Path = Path(), **context: Any) -> Any:
    context.setdefault("env", {"KEY": SECRET})
    return REGISTRY.build("auth", "jwt", with_, PolicyContext(base_dir=str(base_dir), **context))


def mistakes(with_: dict[str, Any], base_dir: Path = Path(), **context: Any) -> dict[str, str]:
    with pytest.raises(PolicyConfigError) as caught:
        build(with_, base_dir, **context)
    return dict(caught.value.mistakes)


async def test_a_good_token_names_tenant_user_groups_and_roles() -> None:
    auth = build({**HMAC, "groups_claim": "groups", "roles_claim": "role"})
    principal = await auth.authenticate(sign(groups=["b", "a"], role="admin"))
    assert (principal.tenant, principal.user) == ("search", "ann")
    assert principal.groups == {"a", "b"}
    assert principal.roles == {"admin"}
    assert principal.method == "jwt"
    assert len(principal.key_id) == 12
    assert principal.expires_at == pytest.approx(time.time() + 600, abs=60)


async def test_optional_claims_may_be_absent() -> None:
    principal = await build({**HMAC, "groups_claim": "groups"}).authenticate(sign(sub=None, iat=None))
    assert (principal.user, principal.groups) == (None, frozenset())


# Ids are numbers: the two processes of the suite must collect the same names, and these claims tell the time.
NOW = int(time.time())
BAD_CLAIMS: list[dict[str, Any]] = [
    {"aud": "another-service"},
    {"aud": ["x", "y"]},
    {"aud": None},
    {"aud": 5},
    {"iss": None},
    {"exp": None},
    {"exp": NOW - 60},
    {"exp": True},
    {"exp": "soon"},
    {"exp": float("inf")},
    {"exp": float("nan")},
    {"exp": [1]},
    {"exp": 10**400},
    {"nbf": NOW + 86_400},
    {"iat": NOW + 86_400},
    {"tenant": None},
    {"tenant": ""},
    {"tenant": "x" * 129},
    {"tenant": ["search"]},
    {"tenant": {"id": "search"}},
    {"tenant": 7},
    {"sub": 7},
    {"groups": 7},
    {"groups": [7]},
    {"groups": {"a": 1}},
]


@pytest.mark.parametrize(
    "changes", BAD_CLAIMS, ids=[f"{number}-{'-'.join(claim)}" for number, claim in enumerate(BAD_CLAIMS)]
)
async def test_wrong_claims_are_refused(changes: dict[str, Any]) -> None:
    """gateway D3: wrong aud, iss, expired, nbf in the future, missing tenant claim: all 401."""
    auth = build({**HMAC, "groups_claim": "groups"})
    with pytest.raises(AuthError):
        await auth.authenticate(hand_made({"alg": "HS256", "typ": "JWT"}, claims(**changes)))


@pytest.mark.parametrize(
    "issuer",
    [
        "",
        "https://idp",
        "https://idp.example/",
        "idp.example",
        "x https://idp.example",
        "https://ıdp.example",
        "HTTPS://IDP.EXAMPLE",
        ["https://idp.example"],
        ["https://idp.example", "x"],
        {"https://idp.example": 1},
        True,
        0,
    ],
    ids=str,
)
async def test_the_issuer_is_compared_as_a_whole_string(issuer: Any) -> None:
    """security 27: substring, prefix, suffix, list and look-alike issuers."""
    payload = {**claims(), "iss": issuer}
    with pytest.raises(AuthError):
        await build(HMAC).authenticate(hand_made({"alg": "HS256"}, payload))
    assert await build(HMAC).authenticate(hand_made({"alg": "HS256"}, claims()))


@pytest.mark.parametrize(
    "header",
    [
        {"crit": ["x"], "x": 1},
        {"crit": []},
        {"crit": ["exp"]},
        {"crit": None},
        {"b64": False},
        {"b64": True},
        {"crit": ["b64"], "b64": False},
        {"alg": "none"},
        {"alg": "None"},
        {"alg": "HS512"},
        {"alg": "hs256"},
        {"alg": ["HS256"]},
        {"alg": None},
        {"kid": 7},
        {"kid": ["a"]},
    ],
    ids=str,
)
async def test_headers_that_are_not_understood_are_refused(header: dict[str, Any]) -> None:
    """security 25: crit and b64 whatever they say. gateway D3: alg none, or not in the list."""
    with pytest.raises(AuthError):
        await build(HMAC).authenticate(hand_made({"alg": "HS256", **header}, claims()))


@pytest.mark.parametrize(
    "token",
    [
        "a",
        "a.b",
        "a.b.c",
        "..",
        "....",
        part({"alg": "HS256"}) + "..",
        part([]) + "." + part({}) + ".x",
        part({"alg": "none"}) + "." + part(claims()) + ".",
        "' OR 1=1; --",
        "\x00",
        "x" * 2**20,
        "e" + "[" * 5000,
        part({"alg": "HS256"}) + "." + "W1tb" * 1500 + ".AAAA",
    ],
    ids=lambda token: token[:20],
)
async def test_garbage_is_refused(token: str) -> None:
    """security 21: quotes, comment marks, NUL and 1 MB are nothing but bad tokens."""
    with pytest.raises(AuthError):
        await build(HMAC).authenticate(bearer(token))


async def test_a_token_over_8_kib_is_refused_although_it_is_signed() -> None:
    assert await build(HMAC).authenticate(sign(extra="x" * 4000))
    with pytest.raises(AuthError, match="too long"):
        await build(HMAC).authenticate(sign(extra="x" * 8000))


@pytest.mark.parametrize("noise", ["=", "==", "====", "!!!!", " ", "%3D", "\u00e9"])
async def test_a_token_is_written_in_one_way(noise: str) -> None:
    """Else whoever has one token counts as many credentials, each with limits of its own (``key_limits``)."""
    auth, token = build(HMAC), sign().bearer or ""
    assert await auth.authenticate(bearer(token))
    for other in (token + noise + "=", token[:-4] + noise + token[-4:], token.replace(".", f"{noise}.", 1)):
        with pytest.raises(AuthError, match="base64url"):
            await auth.authenticate(bearer(other))


async def test_a_signature_that_was_rewritten_is_the_same_credential(tmp_path: Path) -> None:
    """Anybody can make a second valid ECDSA signature of a first one, without the key."""
    (tmp_path / "key.pem").write_bytes(public_pem(ec_key()))
    auth = build({**BASE, "algorithms": ["ES256"], "key_file": "key.pem"}, tmp_path)
    token = sign(ec_key(), "ES256").bearer or ""
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    signed, _, text = token.rpartition(".")
    raw = base64.urlsafe_b64decode(text + "==")
    other = raw[:32] + (order - int.from_bytes(raw[32:], "big")).to_bytes(32, "big")
    twin = f"{signed}.{base64.urlsafe_b64encode(other).decode().rstrip('=')}"
    first, second = await auth.authenticate(bearer(token)), await auth.authenticate(bearer(twin))
    assert token != twin
    assert first.key_id == second.key_id


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        ('{"alg": "none", "alg": "HS256"}', "%s"),
        ('{"alg": "HS256", "kid": "a", "kid": "b"}', "%s"),
        ('{"alg": "HS256"}', '{"tenant": "other", %s'),
        ('{"alg": "HS256"}', '{"more": {"a": 1, "a": 2}, %s'),
        ('{"alg": "HS256"}', '{"more": NaN, %s'),
        ('{"alg": "HS256"}', '{"more": -Infinity, %s'),
    ],
    ids=range(6),
)
async def test_what_two_readers_could_read_differently_is_refused(header: str, payload: str) -> None:
    """A name that comes twice: a proxy in front may decide by the first one, we would by the last."""
    good = json.dumps(claims())
    body = payload % (good if payload == "%s" else good[1:])
    signed = ".".join(base64.urlsafe_b64encode(text.encode()).decode().rstrip("=") for text in (header, body))
    signature = jwt.get_algorithm_by_name("HS256").sign(signed.encode(), SECRET.encode())
    token = f"{signed}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"
    assert jwt.decode(token, SECRET, ["HS256"], audience="forebay")["tenant"] == "search"
    with pytest.raises(AuthError):
        await build(HMAC).authenticate(bearer(token))


async def test_an_issuer_speaks_only_for_the_tenants_that_it_may_name() -> None:
    """Whoever runs it can sign for any tenant that it may name: another company's provider must not name ours."""
    auth = build({**HMAC, "tenants": ["acme", "acme-*"]}, tenant_from_claims=lambda claims: claims.get("org"))
    for tenant in ("acme", "acme-eu"):
        assert (await auth.authenticate(sign(tenant=tenant))).tenant == tenant
    for changes in ({"tenant": "search"}, {"tenant": "ACME"}, {"tenant": "xacme"}, {"tenant": "acme", "org": "search"}):
        with pytest.raises(AuthError, match="may not speak"):
            await auth.authenticate(sign(**changes))


async def test_an_issuer_may_be_one_tenant_whatever_its_tokens_say() -> None:
    auth = build({**HMAC, "tenant": "acme"}, tenant_from_claims=lambda claims: claims.get("org"))
    for changes in ({"tenant": "search"}, {"tenant": None}, {"tenant": 7}, {"org": "search"}):
        assert (await auth.authenticate(sign(**changes))).tenant == "acme"


async def test_refusals_carry_nothing_of_the_token() -> None:
    """gateway D3: no detail leaks, not even into the log's message."""
    for request in (sign(key="k" * 64), sign(exp=NOW - 99, tenant="secret-tenant"), bearer("secret-tenant.x.y")):
        with pytest.raises(AuthError) as caught:
            await build(HMAC).authenticate(request)
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is None


async def test_no_credential_or_another_scheme() -> None:
    for headers in ({}, {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Basic YTpi"}):
        with pytest.raises(AuthError, match="no bearer token"):
            await build(HMAC).authenticate(AuthRequest(headers))


async def test_leeway_is_bounded_and_used() -> None:
    assert await build({**HMAC, "leeway_s": 30}).authenticate(sign(exp=int(time.time()) - 5))
    with pytest.raises(AuthError):
        await build({**HMAC, "leeway_s": 0}).authenticate(sign(exp=int(time.time()) - 5))
    assert "with.leeway_s" in mistakes({**HMAC, "leeway_s": 31})


async def test_asymmetric_keys_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(public_pem(rsa_key()))
    auth = build({**BASE, "algorithms": ["RS256", "PS256", "ES256"], "key_file": "key.pem"}, tmp_path)
    for algorithm in ("RS256", "PS256"):
        assert await auth.authenticate(sign(rsa_key(), algorithm))
    for request in (sign(rsa_key("other"), "RS256"), sign(ec_key(), "ES256"), sign(SECRET, "HS256")):
        with pytest.raises(AuthError):
            await auth.authenticate(request)


async def test_a_public_key_is_no_hmac_secret(tmp_path: Path) -> None:
    """gateway D3: HS256 signed with the public key, in either direction."""
    pem = public_pem(rsa_key())
    (tmp_path / "key.pem").write_bytes(pem)
    auth = build({**BASE, "algorithms": ["RS256"], "key_file": "key.pem"}, tmp_path)
    with pytest.raises(AuthError):
        await auth.authenticate(hand_made({"alg": "HS256"}, claims(), pem))
    for material in (pem, pem.strip()):
        with pytest.raises(AuthError):
            await auth.authenticate(hand_made({"alg": "RS256"}, claims(), material))
    found = mistakes({**BASE, "algorithms": ["HS256"], "key_file": "key.pem"}, tmp_path)
    assert "is a PEM or SSH key" in found["with.key_file"]


async def test_several_keys_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.key").write_text("b" * 64 + "\n")
    auth = build({**BASE, "algorithms": ["HS256"], "keys": {"a": {"env": "KEY"}, "b": {"file": "b.key"}}}, tmp_path)
    assert await auth.authenticate(sign(SECRET, headers={"kid": "a"}))
    assert await auth.authenticate(sign("b" * 64, headers={"kid": "b"}))
    for request in (sign(SECRET, headers={"kid": "b"}), sign(SECRET, headers={"kid": "c"}), sign(SECRET)):
        with pytest.raises(AuthError):
            await auth.authenticate(request)


async def test_the_plugin_hook_maps_claims_to_a_tenant() -> None:
    auth = build(HMAC, tenant_from_claims=lambda claims: claims.get("org"))
    assert (await auth.authenticate(sign(org="mapped"))).tenant == "mapped"
    assert (await auth.authenticate(sign())).tenant == "search"


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"audience": None}, "with.audience", ""),
        ({"audience": ""}, "with.audience", ""),
        ({"issuer": None}, "with.issuer", ""),
        ({"algorithms": []}, "with.algorithms", ""),
        ({"algorithms": ["none"]}, "with.algorithms", "unknown algorithm 'none'"),
        ({"algorithms": ["HS256", "RS256"]}, "with.algorithms", "cannot be mixed"),
        ({"key_env": None}, "with", "exactly one of"),
        ({"key_file": "x"}, "with", "exactly one of"),
        ({"key_env": "UNSET"}, "with.key_env", "UNSET is not set"),
        ({"key_env": "SHORT"}, "with.key_env", "31 bytes, HS256 needs at least 32"),
        ({"algorithms": ["HS256", "HS512"], "key_env": "MEDIUM"}, "with.key_env", "HS512 needs at least 64"),
        ({"key_env": None, "key_file": "absent.pem"}, "with.key_file", "cannot read 'absent.pem'"),
        ({"key_env": None, "jwks_url": "https://x/keys"}, "with", "JWKS holds public keys"),
        ({"key_env": None, "keys": {"a": {}}}, "with.keys.a", "either env"),
        ({"refresh_s": 7200}, "with", "refresh_s must not exceed"),
        ({"tenants": []}, "with.tenants", ""),
        ({"tenant": "a", "tenants": ["a"]}, "with", "leave out tenants"),
        ({"tenant": "a", "tenant_claim": "org"}, "with", "leave out tenants and tenant_claim"),
        ({"algorithms": ["RS256"]}, "with.key_env", "is not a PEM public key"),
        ({"algorithms": ["RS256"], "key_env": "PRIVATE"}, "with.key_env", "is a private key"),
        ({"algorithms": ["RS256"], "key_env": "WEAK"}, "with.key_env", "1024 bits"),
        ({"algorithms": ["RS256"], "key_env": None, "jwks_url": "https://x"}, "with.jwks_url", "no HTTP client"),
        ({"algorithms": ["RS256"], "key_env": None, "jwks_url": "ftp://x"}, "with.jwks_url", ""),
        ({"algorithms": ["RS256"], "key_env": None, "jwks_file": "absent"}, "with.jwks_file", "cannot be read"),
    ],
)
def test_unsafe_configurations_do_not_start(change: dict[str, Any], path: str, message: str, tmp_path: Path) -> None:
    """gateway D3: a config without audience refuses to start; so does everything else that would verify nothing."""
    env = {
        "KEY": SECRET,
        "SHORT": "s" * 31,
        "MEDIUM": "s" * 63,
        "PRIVATE": private_pem(rsa_key()).decode(),
        "WEAK": public_pem(rsa_key("weak", 1024)).decode(),
    }
    with_ = {name: value for name, value in {**HMAC, **change}.items() if value is not None}
    found = mistakes(with_, tmp_path, env=env)
    assert path in found, found
    assert message in found[path]
    assert SECRET not in str(found)


async def test_jwks_file_is_checked_at_start(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    with_ = {**BASE, "algorithms": ["RS256", "ES256"], "jwks_file": "jwks.json"}
    for text in ("{", "[]", '{"keys": {}}', '{"keys": []}', json.dumps({"keys": [{"kty": "oct", "k": "AAAA"}]})):
        file.write_text(text)
        assert "with.jwks_file" in mistakes(with_, tmp_path)
    file.write_text(json.dumps({"keys": [jwk(rsa_key(), "r"), jwk(ec_key(), "e"), {"kty": "odd", "kid": "o"}, 5]}))
    auth = build(with_, tmp_path)
    assert await auth.authenticate(sign(rsa_key(), "RS256", {"kid": "r"}))
    assert await auth.authenticate(sign(ec_key(), "ES256", {"kid": "e"}))
    with pytest.raises(AuthError):
        await auth.authenticate(sign(rsa_key(), "RS256", {"kid": "e"}))


async def test_key_set_entries_are_used_only_for_what_they_are(tmp_path: Path) -> None:
    entries = [
        jwk(rsa_key(), "enc", use="enc"),
        jwk(rsa_key(), "wraps", key_ops=["wrapKey"]),
        jwk(rsa_key(), "pinned", alg="PS256"),
        jwk(rsa_key("weak", 1024), "weak"),
        {"kty": "oct", "kid": "oct", "k": part("x" * 64)},
        jwk(rsa_key(), "good", use="sig", alg="RS256"),
    ]
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": entries}))
    auth = build({**BASE, "algorithms": ["RS256", "PS256"], "jwks_file": "jwks.json"}, tmp_path)
    assert await auth.authenticate(sign(rsa_key(), "RS256", {"kid": "good"}))
    assert await auth.authenticate(sign(rsa_key(), "PS256", {"kid": "pinned"}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyJWT warns of the weak key that this signs with on purpose
        weak = jwt.encode(claims(), rsa_key("weak", 1024), "RS256", headers={"kid": "weak"})
    for request in (
        sign(rsa_key(), "RS256", {"kid": "enc"}),
        sign(rsa_key(), "RS256", {"kid": "wraps"}),
        sign(rsa_key(), "RS256", {"kid": "pinned"}),
        sign(rsa_key(), "PS256", {"kid": "good"}),
        sign(rsa_key(), "RS256"),
        bearer(weak),
    ):
        with pytest.raises(AuthError):
            await auth.authenticate(request)
