"""Reading a token: its parts as text and JSON, and claims by name. Nothing here verifies anything.

Rules
- A token is three parts of base64url without padding (RFC 7515 §3.1) and nothing else: one text for one token, or
  whoever has one could write it in several ways and count as several credentials.
- A name that comes twice in an object, and numbers that JSON has not (NaN), make it unreadable: whoever else reads the
  same token might take the other one (RFC 8725 §2.4).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any

from policies.spi import AuthError

MAX_TOKEN_BYTES = 8192
_COMPACT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")


def presented(bearer: str | None) -> str:
    """The token as it came. Raises AuthError for what cannot be one."""
    if bearer is None:
        raise AuthError("no bearer token")
    if len(bearer) > MAX_TOKEN_BYTES:
        raise AuthError("the token is too long")
    if _COMPACT.fullmatch(bearer) is None:
        raise AuthError("the token is not three parts of base64url")
    return bearer


def signed_part(token: str) -> str:
    """What its signature is over. The signature itself can be rewritten without a key (ECDSA), this cannot."""
    return token.rpartition(".")[0]


def unverified(token: str, part: int) -> Mapping[str, Any] | None:
    """Its header (0) or its claims (1), as it says itself; None where that is no object, or an ambiguous one."""
    text = token.split(".", 2)[part : part + 1]
    try:
        found = _read(base64.urlsafe_b64decode(text[0] + "=" * (-len(text[0]) % 4))) if text else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def claimed_issuer(token: str) -> str | None:
    """Who a token says it is from, unverified: good for choosing where to look for its key, and for nothing else."""
    claims = unverified(token, 1)
    issuer = claims.get("iss") if claims is not None else None
    return issuer if isinstance(issuer, str) else None


def claim(claims: Mapping[str, Any], path: str) -> Any:
    """The claim at ``path`` (``jwt.py`` says how paths are read), or None."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def text(claims: Mapping[str, Any], path: str | None) -> str | None:
    """A claim's text; absent or empty is None. Raises AuthError for anything else."""
    value = claim(claims, path) if path else None
    if value is not None and not isinstance(value, str):
        raise AuthError(f"the claim {path!r} is not a string")
    return value or None


def names(claims: Mapping[str, Any], path: str | None) -> frozenset[str]:
    """A list of strings, or one string; absent is empty. Raises AuthError for anything else."""
    value = claim(claims, path) if path else None
    values: Any = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise AuthError(f"the claim {path!r} is not a list of strings")
    return frozenset(values)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


_decode = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number).decode


def _read(raw: bytes) -> Any:
    return _decode(raw.decode())
