"""``jwt``: signed tokens (RFC 7519) with a pinned issuer, audience and list of algorithms.

Rules
- The algorithms come from the config; a token's header only picks one of them, and only one that suits its key.
- exp, iss and aud are required; nbf and iat are checked where present, with at most 30 s of leeway. The issuer is
  compared as a whole string; a list or any other type is refused.
- A token has one way to be written, and no name in it comes twice (``_claims.py``).
- An issuer may be confined to ``tenants``, or be one ``tenant``: whoever runs it can sign for any it may name, so
  another company's provider must not be able to name ours.
- ``crit`` and ``b64`` in the header are refused whatever they say: no extension is understood here (RFC 7515 §4.1.11).
- A token of another issuer is refused before its key is looked for: it can make nobody fetch keys. What a token says of
  its issuer is checked again once it is verified.
- A claim is named by its path: ``realm_access.roles`` is ``roles`` inside ``realm_access``, unless there is a claim
  with the whole name (issuers use URLs as names).
- A token that was verified is taken again without its signature being computed anew, while the same key stands
  (``_verified.py``).
- Whatever is wrong with a token is AuthError (401); only missing keys are PolicyUnavailableError (503).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import jwt
from pydantic import Field, field_validator, model_validator

from policies.auth import _claims
from policies.auth._claims import claim, claimed_issuer
from policies.auth._jwks import Freshness, KeySet
from policies.auth._keys import ASYMMETRIC, HMAC_MIN_BYTES, VerifyKey, hmac_key, key_set, public_key
from policies.auth._verified import Verified, VerifiedTokens
from policies.spi import AuthError, PolicyConfig, PolicyConfigError, PolicyContext, PolicySpec
from policies.types import AuthRequest, Principal, TenantId

WELL_KNOWN = "/.well-known/openid-configuration"
_SOURCES = ("key_env", "key_file", "keys", "jwks_url", "jwks_file", "discover")
_MAX_TENANT_CHARS = 128
_END_OF_TIME = 1e15
"""Unix seconds; what is not below (NaN is not either) fits no clock."""

Fetch = Callable[[], Awaitable[Any]]


class StaticKey(PolicyConfig):
    """One key of ``keys``, from a variable or a file."""

    env: str | None = None
    file: str | None = None

    @model_validator(mode="after")
    def _one(self) -> StaticKey:
        if (self.env is None) == (self.file is None):
            raise ValueError("give either env (a variable's name) or file (a path)")
        return self


class JwtConfig(PolicyConfig):
    """What a valid token looks like, and one source of keys."""

    algorithms: tuple[str, ...] = Field(min_length=1)
    audience: str = Field(min_length=1)
    issuer: str = Field(min_length=1)
    key_env: str | None = None
    """Variable with the HMAC secret, or with a PEM public key."""
    key_file: str | None = None
    """File with the same."""
    keys: dict[str, StaticKey] = Field(default_factory=dict)
    """Several of them by key id (``kid``)."""
    jwks_url: str | None = Field(None, pattern=r"^https?://")
    jwks_file: str | None = None
    discover: bool = False
    """Ask the issuer where its JWKS is (OpenID Connect discovery); ``issuer`` is its URL then."""
    tenant_claim: str = Field("tenant", min_length=1)
    tenant: str | None = Field(None, min_length=1, max_length=_MAX_TENANT_CHARS)
    """All of this issuer's tokens are this tenant's, whatever they claim; null: ``tenant_claim`` names it."""
    tenants: tuple[str, ...] | None = Field(None, min_length=1)
    """Names or shell patterns (``acme-*``) of the tenants that its tokens may name; null: any."""
    user_claim: str | None = "sub"
    groups_claim: str | None = None
    roles_claim: str | None = None
    key_claim: str | None = None
    """Names the client (``azp``, ``client_id``): a renewed token then counts as the same key. None: each is its own."""
    leeway_s: float = Field(10.0, ge=0, le=30)
    refresh_s: float = Field(300.0, gt=0, allow_inf_nan=False)
    """Age at which a JWKS is fetched again, so also the longest time a removed key is still accepted."""
    cooldown_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    """Least time between two fetches."""
    max_stale_s: float = Field(3600.0, gt=0, allow_inf_nan=False)
    """Longest time a JWKS is trusted that cannot be fetched again."""

    @field_validator("algorithms")
    @classmethod
    def _known(cls, algorithms: tuple[str, ...]) -> tuple[str, ...]:
        for algorithm in algorithms:
            if algorithm not in HMAC_MIN_BYTES and algorithm not in ASYMMETRIC:
                raise ValueError(f"unknown algorithm {algorithm!r}; known: {', '.join([*HMAC_MIN_BYTES, *ASYMMETRIC])}")
        symmetric = [algorithm for algorithm in algorithms if algorithm in HMAC_MIN_BYTES]
        if symmetric and len(symmetric) != len(algorithms):
            raise ValueError("HMAC (HS…) and public-key algorithms cannot be mixed; use chain with two jwt policies")
        return algorithms

    @model_validator(mode="after")
    def _one_source(self) -> JwtConfig:
        given = [name for name in _SOURCES if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(_SOURCES)}; given: {', '.join(given) or 'none'}")
        if self.symmetric and given[0] in ("jwks_url", "jwks_file", "discover"):
            raise ValueError("a JWKS holds public keys; HMAC (HS…) algorithms take key_env, key_file or keys")
        if self.discover and not self.issuer.startswith(("https://", "http://")):
            raise ValueError("discover asks the issuer at its URL; issuer must be one (https://…), or name jwks_url")
        if self.tenant is not None and (self.tenants is not None or "tenant_claim" in self.model_fields_set):
            raise ValueError("tenant says whose all its tokens are; leave out tenants and tenant_claim")
        if self.refresh_s > self.max_stale_s:
            raise ValueError("refresh_s must not exceed max_stale_s")
        return self

    @property
    def symmetric(self) -> bool:
        """Whether the algorithms are HMAC."""
        return self.algorithms[0] in HMAC_MIN_BYTES


class KeySource(Protocol):
    """Finds the key for a token's ``kid``."""

    async def find(self, kid: str | None) -> VerifyKey:
        """Raises AuthError or PolicyUnavailableError."""
        ...


class StaticKeys:
    """Keys that are known from the start. With one key without a name, a token's ``kid`` does not matter."""

    def __init__(self, keys: Mapping[str | None, VerifyKey]) -> None:
        self._keys = dict(keys)
        self._only = self._keys.get(None)

    async def find(self, kid: str | None) -> VerifyKey:
        """Raises AuthError."""
        key = self._only or self._keys.get(kid)
        if key is None:
            raise AuthError("unknown key id")
        return key


class JwtAuth:
    """See the module's rules."""

    def __init__(
        self,
        config: JwtConfig,
        keys: KeySource,
        tenant_from_claims: Callable[[Mapping[str, Any]], str | None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock``: UNIX time, by which a verified token expires."""
        self._config = config
        self._keys = keys
        self._tenant_from_claims = tenant_from_claims
        self._verified = VerifiedTokens(clock)

    async def authenticate(self, request: AuthRequest) -> Principal:
        """Verify the bearer token. Raises AuthError or PolicyUnavailableError."""
        token = _claims.presented(request.bearer)
        known = self._verified.look_up(token)
        if known is not None and await self._keys.find(known.kid) is known.key:
            return known.principal
        algorithm, kid = self._header(token)
        if claimed_issuer(token) != self._config.issuer:
            raise AuthError("wrong issuer")
        key = await self._keys.find(kid)
        if algorithm not in key.algorithms:
            raise AuthError("the token's algorithm does not suit its key")
        claims = self._claims(token, key, algorithm)
        principal = self._principal(token, claims)
        until = int(claims["exp"]) + self._config.leeway_s
        self._verified.remember(token, Verified(kid, key, until, principal))
        return principal

    def _header(self, token: str) -> tuple[str, str | None]:
        header = _claims.unverified(token, 0)
        if header is None:
            raise AuthError("malformed token")
        if "crit" in header or "b64" in header:
            raise AuthError("the header has crit or b64")
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in self._config.algorithms:
            raise AuthError("algorithm not allowed")
        if kid is not None and not isinstance(kid, str):
            raise AuthError("kid is not a string")
        return algorithm, kid

    def _claims(self, token: str, key: VerifyKey, algorithm: str) -> dict[str, Any]:
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=self._config.audience,
                leeway=self._config.leeway_s,
                options={"require": ["exp", "iss", "aud"], "verify_iss": False, "verify_sub": False},
            )
        except Exception as error:  # the caller's bytes: whatever they provoke, the token is bad
            raise AuthError(f"token refused ({type(error).__name__})") from None
        issuer, expires = claims["iss"], claims["exp"]
        if issuer != self._config.issuer:
            raise AuthError("wrong issuer")
        if isinstance(expires, bool) or not isinstance(expires, int | float) or not expires < _END_OF_TIME:
            raise AuthError("exp is no time")
        return claims

    def _principal(self, token: str, claims: Mapping[str, Any]) -> Principal:
        config = self._config
        client = _claims.text(claims, config.key_claim)
        named = f"{config.issuer}\0{client}" if client else _claims.signed_part(token)
        return Principal(
            self._tenant(claims),
            user=_claims.text(claims, config.user_claim),
            groups=_claims.names(claims, config.groups_claim),
            roles=_claims.names(claims, config.roles_claim),
            method="jwt",
            key_id=hashlib.sha256(named.encode()).hexdigest()[:12],
            expires_at=float(claims["exp"]),
        )

    def _tenant(self, claims: Mapping[str, Any]) -> TenantId:
        config = self._config
        if config.tenant is not None:
            return TenantId(config.tenant)
        tenant = self._tenant_from_claims(claims) if self._tenant_from_claims else None
        if tenant is None:
            tenant = claim(claims, config.tenant_claim)
        if not isinstance(tenant, str) or not 0 < len(tenant) <= _MAX_TENANT_CHARS:
            raise AuthError("no tenant in the token")
        if config.tenants is not None and not any(fnmatchcase(tenant, pattern) for pattern in config.tenants):
            raise AuthError("a tenant for which this issuer may not speak")
        return TenantId(tenant)


def _secret(ctx: PolicyContext, env: str | None, file: str | None, path: str) -> bytes:
    if env is not None:
        if not ctx.env.get(env):
            raise PolicyConfigError(f"the environment variable {env} is not set or empty", path)
        return ctx.env[env].encode()
    try:
        return (Path(ctx.base_dir) / str(file)).read_bytes().strip()
    except OSError as error:
        raise PolicyConfigError(f"cannot read {str(file)!r}: {error.strerror}", path) from error


def _static(config: JwtConfig, ctx: PolicyContext) -> StaticKeys:
    load = hmac_key if config.symmetric else public_key
    if config.key_env is not None or config.key_file is not None:
        path = "key_env" if config.key_env is not None else "key_file"
        material = _secret(ctx, config.key_env, config.key_file, path)
        return StaticKeys({None: load(material, config.algorithms, path)})
    keys: dict[str | None, VerifyKey] = {}
    for kid, item in config.keys.items():
        path = f"keys.{kid}"
        keys[kid] = load(_secret(ctx, item.env, item.file, path), config.algorithms, path)
    return StaticKeys(keys)


def _jwks(config: JwtConfig, ctx: PolicyContext) -> KeySet:
    freshness = Freshness(config.refresh_s, config.cooldown_s, config.max_stale_s)
    fetch = _from_file(config, ctx) if config.jwks_file is not None else _from_provider(config, ctx)
    return KeySet(fetch, lambda document: key_set(document, config.algorithms), freshness, time.monotonic)


def _from_file(config: JwtConfig, ctx: PolicyContext) -> Fetch:
    path = Path(ctx.base_dir) / str(config.jwks_file)
    try:
        key_set(json.loads(path.read_text()), config.algorithms)
    except OSError as error:
        raise PolicyConfigError(f"cannot be read: {error.strerror}", "jwks_file") from error
    except ValueError as error:
        raise PolicyConfigError(str(error), "jwks_file") from error

    async def fetch() -> Any:
        return json.loads(await asyncio.to_thread(path.read_text))

    return fetch


def _from_provider(config: JwtConfig, ctx: PolicyContext) -> Fetch:
    if ctx.fetch_json is None:
        raise PolicyConfigError(
            "no HTTP client is available here; use jwks_file", "jwks_url" if config.jwks_url else "discover"
        )
    issuer, url, fetch_json = config.issuer, config.jwks_url, ctx.fetch_json

    async def fetch() -> Any:
        return await fetch_json(url or keys_url(await fetch_json(f"{issuer.rstrip('/')}{WELL_KNOWN}"), issuer))

    return fetch


def keys_url(document: Any, issuer: str) -> str:
    """Where an OpenID provider says its JWKS is (OpenID Connect Discovery 1.0, §4.3).

    Raises ValueError for the document of another issuer, and where keys would come over a connection less safe.
    """
    if not isinstance(document, Mapping) or document.get("issuer") != issuer:
        raise ValueError("the discovery document is not this issuer's")
    url = document.get("jwks_uri")
    safe = ("https://",) if issuer.startswith("https://") else ("https://", "http://")
    if not isinstance(url, str) or not url.startswith(safe):
        raise ValueError("the discovery document names no usable jwks_uri")
    return url


def make(config: JwtConfig, ctx: PolicyContext) -> JwtAuth:
    """One issuer's tokens. Raises PolicyConfigError."""
    fetched = config.jwks_url or config.jwks_file or config.discover
    keys: KeySource = _jwks(config, ctx) if fetched else _static(config, ctx)
    return JwtAuth(config, keys, ctx.tenant_from_claims)


SPEC = PolicySpec(
    "auth", "jwt", JwtConfig, make, "Signed tokens: pinned algorithms, issuer and audience; static keys or JWKS."
)
