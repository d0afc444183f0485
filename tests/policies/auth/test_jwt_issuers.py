"""Several issuers in one gateway: each by its own rules and keys, and claims by their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from policies.auth._claims import claim, claimed_issuer
from policies.auth.jwt import keys_url
from policies.manager import make_manager
from policies.registry import Registry
from policies.spi import AuthError, PolicyConfigError, PolicyContext, PolicyUnavailableError
from policies.types import AuthRequest
from tests.policies.auth.tokens import SECRET, bearer, jwk, part, public_pem, rsa_key, sign

REGISTRY = Registry.from_manager(make_manager())
A, B = "https://a.example", "https://b.example"
ENTRY_A = {"issuer": A, "audience": "forebay", "algorithms": ["HS256"], "key_env": "KEY"}
ENTRY_B = {
    "issuer": B,
    "audience": "gateway",
    "algorithms": ["RS256", "ES256"],
    "jwks_url": f"{B}/keys",
    "tenant_claim": "org.id",
    "roles_claim": "realm_access.roles",
}


class Provider:
    """Answers ``fetch_json``; counts what was asked."""

    def __init__(self, documents: dict[str, Any]) -> None:
        self.documents = documents
        self.asked: list[str] = []

    async def fetch(self, url: str) -> Any:
        self.asked.append(url)
        if url not in self.documents:
            raise ConnectionError(url)
        return self.documents[url]


def build(entries: list[dict[str, Any]], provider: Provider | None = None, name: str = "jwt_issuers") -> Any:
    context = PolicyContext(env={"KEY": SECRET}, fetch_json=provider.fetch if provider else None)
    with_ = {"issuers": entries} if name == "jwt_issuers" else entries[0]
    return REGISTRY.build("auth", name, with_, context)


def of_b(key: Any = None, algorithm: str = "RS256", kid: str = "b", **changes: Any) -> AuthRequest:
    return sign(
        key or rsa_key(),
        algorithm,
        {"kid": kid},
        **{"iss": B, "aud": "gateway", "org": {"id": "search"}, "tenant": "not this one", **changes},
    )


async def test_each_issuer_has_its_own_keys_audience_algorithms_and_claims() -> None:
    provider = Provider({f"{B}/keys": {"keys": [jwk(rsa_key(), "b")]}})
    auth = build([ENTRY_A, ENTRY_B], provider)
    assert (await auth.authenticate(sign(iss=A))).tenant == "search"
    principal = await auth.authenticate(of_b(realm_access={"roles": ["reader"]}))
    assert (principal.tenant, principal.roles) == ("search", {"reader"})


@pytest.mark.parametrize(
    "request_",
    [
        sign(iss=B),  # A's key and audience under B's name
        sign(iss=A, aud="gateway"),  # B's audience at A
        of_b(iss=A),  # B's key under A's name
        of_b(aud="forebay"),
        sign(iss="https://c.example"),
        sign(iss=None),
        sign(iss=f"{A}/"),
        bearer("a.b.c"),
        bearer(f"{part({'alg': 'HS256'})}.{part([A])}.x"),
        bearer("x" * 9000),
        bearer("ü"),
        AuthRequest({}),
    ],
    ids=range(12),
)
async def test_no_issuer_answers_for_another(request_: AuthRequest) -> None:
    """gateway D3, security 27."""
    auth = build([ENTRY_A, ENTRY_B], Provider({f"{B}/keys": {"keys": [jwk(rsa_key(), "b")]}}))
    with pytest.raises(AuthError):
        await auth.authenticate(request_)


async def test_one_provider_that_is_down_is_nobody_elses_trouble() -> None:
    auth = build([ENTRY_A, ENTRY_B], Provider({}))
    assert await auth.authenticate(sign(iss=A))
    with pytest.raises(AuthError):
        await auth.authenticate(sign(iss=A, tenant=None))
    with pytest.raises(PolicyUnavailableError):
        await auth.authenticate(of_b())


@pytest.mark.parametrize("name", ["jwt_issuers", "jwt"])
async def test_tokens_of_strangers_fetch_no_keys(name: str) -> None:
    """security 23: whoever is not an issuer here cannot make the gateway ask a provider."""
    provider = Provider({})
    auth = build([ENTRY_B], provider, name)
    for i in range(20):
        with pytest.raises(AuthError):
            await auth.authenticate(of_b(iss="https://c.example", kid=f"random{i}"))
    assert provider.asked == []


def test_mistakes_are_told_with_their_place() -> None:
    with pytest.raises(PolicyConfigError) as caught:
        build([ENTRY_A, {**ENTRY_A, "audience": "x"}, {**ENTRY_B, "jwks_url": None, "key_env": "UNSET"}])
    found = dict(caught.value.mistakes)
    assert "listed twice" in found["with.issuers.1.issuer"]
    assert "UNSET is not set" in found["with.issuers.2.key_env"]
    with pytest.raises(PolicyConfigError) as caught:
        build([])
    assert caught.value.mistakes[0][0] == "with.issuers"


async def test_discovery_finds_the_keys_where_the_issuer_says() -> None:
    provider = Provider(
        {
            f"{B}/.well-known/openid-configuration": {"issuer": B, "jwks_uri": "https://keys.example/b"},
            "https://keys.example/b": {"keys": [jwk(rsa_key(), "b")]},
        }
    )
    entry = {**ENTRY_B, "jwks_url": None, "discover": True}
    assert await build([entry], provider).authenticate(of_b())
    assert provider.asked == [f"{B}/.well-known/openid-configuration", "https://keys.example/b"]


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {"issuer": f"{B}/", "jwks_uri": "https://x/keys"},
        {"issuer": A, "jwks_uri": "https://x/keys"},
        {"issuer": B},
        {"issuer": B, "jwks_uri": 5},
        {"issuer": B, "jwks_uri": "http://x/keys"},
        {"issuer": B, "jwks_uri": "file:///etc/keys"},
    ],
    ids=str,
)
def test_a_discovery_document_of_another_or_over_a_weaker_connection_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match="discovery document"):
        keys_url(document, B)


def test_an_issuer_without_a_secure_url_may_name_keys_without_one() -> None:
    assert keys_url({"issuer": "http://127.0.0.1:1", "jwks_uri": "http://127.0.0.1:1/k"}, "http://127.0.0.1:1")


def test_discovery_needs_an_issuer_that_is_a_url() -> None:
    with pytest.raises(PolicyConfigError, match="asks the issuer at its URL"):
        build([{**ENTRY_B, "issuer": "corp", "jwks_url": None, "discover": True}], Provider({}))


def private_key(algorithm: str) -> Any:
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    if algorithm[0] in "RP":
        return rsa_key(algorithm)
    return ec.generate_private_key({"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}[algorithm]())


@pytest.mark.parametrize("algorithm", ["RS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"])
async def test_every_family_of_signatures_verifies_and_only_with_its_own_key(algorithm: str, tmp_path: Path) -> None:
    key = private_key(algorithm)
    (tmp_path / "key.pem").write_bytes(public_pem(key))
    entry = {"issuer": A, "audience": "forebay", "algorithms": [algorithm], "key_file": "key.pem"}
    auth = REGISTRY.build("auth", "jwt", entry, PolicyContext(base_dir=str(tmp_path)))
    assert await auth.authenticate(sign(key, algorithm, iss=A))
    other = rsa_key("other") if algorithm[0] in "RP" else private_key(algorithm)
    with pytest.raises(AuthError):
        await auth.authenticate(sign(other, algorithm, iss=A))


def test_claims_by_name_and_by_path() -> None:
    claims = {"a.b": 1, "a": {"b": 2, "c": {"d": [3]}}, "https://corp.example/tenant": "t"}
    assert claim(claims, "a.b") == 1
    assert claim(claims, "a.c.d") == [3]
    assert claim(claims, "https://corp.example/tenant") == "t"
    for absent in ("x", "a.x", "a.c.d.e", "a.b.c", ""):
        assert claim(claims, absent) is None


async def test_a_renewed_token_of_one_client_counts_as_the_same_key() -> None:
    entry = {**ENTRY_A, "key_claim": "azp"}
    auth = build([entry])
    first = await auth.authenticate(sign(iss=A, azp="app", jti="1"))
    second = await auth.authenticate(sign(iss=A, azp="app", jti="2"))
    other = await auth.authenticate(sign(iss=A, azp="another"))
    bare = await auth.authenticate(sign(iss=A))
    assert first.key_id == second.key_id
    assert len({first.key_id, other.key_id, bare.key_id}) == 3


@pytest.mark.parametrize("token", ["", "a", "a.!.c", "a.W10.c", f"a.{part({'iss': 5})}.c", "a." + "W1tb" * 9999 + ".c"])
def test_the_claimed_issuer_of_garbage_is_none(token: str) -> None:
    assert claimed_issuer(token) is None
