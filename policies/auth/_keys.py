"""Keys that verify tokens: loading them, and keeping them apart by algorithm.

Rules
- HMAC and asymmetric algorithms are never configured together, and an HMAC secret never looks like a public key: so no
  public key can be used as a secret (algorithm confusion).
- Only public keys are loaded; RSA below 2048 bits and HMAC secrets shorter than their hash are refused.
- A key set (JWKS) yields signing keys of known types only; symmetric ones in it are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from policies.spi import PolicyConfigError

HMAC_MIN_BYTES: Mapping[str, int] = {"HS256": 32, "HS384": 48, "HS512": 64}
ASYMMETRIC = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_MIN_RSA_BITS = 2048


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """A loaded key and the algorithms it may verify."""

    key: Any
    algorithms: frozenset[str]


def hmac_key(secret: bytes, algorithms: Sequence[str], path: str) -> VerifyKey:
    """An HMAC secret. Raises PolicyConfigError."""
    if b"-----BEGIN" in secret or secret.startswith((b"ssh-", b"ecdsa-")):
        raise PolicyConfigError("is a PEM or SSH key; an HMAC algorithm needs a random secret instead", path)
    need = max(HMAC_MIN_BYTES[algorithm] for algorithm in algorithms)
    if len(secret) < need:
        raise PolicyConfigError(
            f"the secret has {len(secret)} bytes, {max(algorithms)} needs at least {need}; "
            "make one with: openssl rand -hex 64",
            path,
        )
    return VerifyKey(secret, frozenset(algorithms))


def public_key(pem: bytes, algorithms: Sequence[str], path: str) -> VerifyKey:
    """A PEM public key, for those of ``algorithms`` that suit its type. Raises PolicyConfigError."""
    for algorithm in algorithms:
        try:
            key = jwt.get_algorithm_by_name(algorithm).prepare_key(pem)
        except (jwt.InvalidKeyError, ValueError, TypeError):
            continue
        if hasattr(key, "private_bytes"):
            raise PolicyConfigError("is a private key; the gateway only needs the public one", path)
        _check_strength(key, path)
        return VerifyKey(key, frozenset(_suiting(key, algorithms)))
    raise PolicyConfigError(f"is not a PEM public key for {', '.join(algorithms)}", path)


def key_set(document: Any, algorithms: Sequence[str]) -> dict[str | None, VerifyKey]:
    """The usable signing keys of a JWKS by key id. Raises ValueError when the document is none or has no such key."""
    entries = document.get("keys") if isinstance(document, Mapping) else None
    if not isinstance(entries, list):
        raise ValueError("not a JWKS: no list 'keys'")
    keys: dict[str | None, VerifyKey] = {}
    for entry in entries:
        if not isinstance(entry, Mapping) or entry.get("kty") == "oct" or not _verifies(entry):
            continue
        kid = entry.get("kid")
        loaded = _load_jwk(dict(entry), algorithms)
        if loaded is not None and (kid is None or isinstance(kid, str)):
            keys[kid] = loaded
    if not keys:
        raise ValueError(f"no signing key for {', '.join(algorithms)} in the JWKS")
    return keys


def _verifies(entry: Mapping[str, Any]) -> bool:
    """Whether it is published for signatures (RFC 7517 §4.2, §4.3)."""
    operations = entry.get("key_ops")
    return entry.get("use", "sig") == "sig" and (not isinstance(operations, list) or "verify" in operations)


def _load_jwk(entry: dict[str, Any], algorithms: Sequence[str]) -> VerifyKey | None:
    """One entry; None when it is malformed, weak or for other algorithms: one odd key must not spoil the set."""
    pinned = entry.get("alg")
    wanted = [algorithm for algorithm in algorithms if pinned is None or algorithm == pinned]
    public = {name: value for name, value in entry.items() if name not in ("d", "p", "q", "dp", "dq", "qi")}
    for algorithm in wanted:
        try:
            key = jwt.PyJWK.from_dict(public, algorithm).key
            _check_strength(key, "")
        except (jwt.PyJWTError, ValueError, TypeError, KeyError):
            continue
        suiting = _suiting(key, wanted)
        if suiting:
            return VerifyKey(key, frozenset(suiting))
    return None


def _suiting(key: Any, algorithms: Sequence[str]) -> list[str]:
    """The algorithms that accept a key of this type (and, for ECDSA, of this curve)."""
    suiting = []
    for algorithm in algorithms:
        try:
            jwt.get_algorithm_by_name(algorithm).prepare_key(key)
        except (jwt.PyJWTError, ValueError, TypeError):
            continue
        suiting.append(algorithm)
    return suiting


def _check_strength(key: Any, path: str) -> None:
    if isinstance(key, RSAPublicKey) and key.key_size < _MIN_RSA_BITS:
        raise PolicyConfigError(f"the RSA key has {key.key_size} bits; at least {_MIN_RSA_BITS} are needed", path)
