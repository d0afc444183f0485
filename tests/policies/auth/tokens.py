"""Keys and tokens for the auth tests, made once per run."""

from __future__ import annotations

import base64
import json
import time
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from policies.types import AuthRequest

SECRET = "an-hmac-secret-of-more-than-sixty-four-bytes-for-all-three-of-the-algorithms"


@cache
def rsa_key(name: str = "first", bits: int = 2048) -> Any:
    return rsa.generate_private_key(public_exponent=65537, key_size=bits)


@cache
def ec_key(name: str = "first") -> Any:
    return ec.generate_private_key(ec.SECP256R1())


def public_pem(private: Any) -> bytes:
    return bytes(
        private.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def private_pem(private: Any) -> bytes:
    return bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


def jwk(private: Any, kid: str | None, **fields: Any) -> dict[str, Any]:
    algorithm = jwt.get_algorithm_by_name("RS256" if isinstance(private, rsa.RSAPrivateKey) else "ES256")
    entry: dict[str, Any] = json.loads(algorithm.to_jwk(private.public_key()))
    entry.pop("key_ops", None)
    return {**entry, **({"kid": kid} if kid is not None else {}), **fields}


def claims(**changes: Any) -> dict[str, Any]:
    """Good ones; a change of None removes a claim."""
    now = int(time.time())
    good = {
        "iss": "https://idp.example",
        "aud": "forebay",
        "exp": now + 600,
        "iat": now,
        "tenant": "search",
        "sub": "ann",
    }
    return {name: value for name, value in {**good, **changes}.items() if value is not None}


def bearer(token: str) -> AuthRequest:
    return AuthRequest({"authorization": f"Bearer {token}"})


def sign(
    key: Any = SECRET, algorithm: str = "HS256", headers: dict[str, Any] | None = None, **changes: Any
) -> AuthRequest:
    return bearer(jwt.encode(claims(**changes), key, algorithm, headers=headers))


def part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def hand_made(header: Any, payload: Any, key: Any = SECRET) -> AuthRequest:
    """A token with any header and payload at all, correctly signed with HS256."""
    text = f"{part(header)}.{part(payload)}"
    signature = jwt.get_algorithm_by_name("HS256").sign(text.encode(), key.encode() if isinstance(key, str) else key)
    return bearer(f"{text}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}")
