"""The scope's key: HMAC over tagged, length-prefixed fields, so that different callers never encode alike."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache

from policies.spi import PolicyConfigError, PolicyContext
from policies.types import CacheScope

_VERSION = b"forebay.cache_scope.1"
MIN_SECRET_BYTES = 16
REMEMBERED = 4096


def encode(tenant: str, name: str, member: str | None, epoch: int) -> bytes:
    """An injective encoding: every field carries its tag and its length; an absent member has a tag of its own."""
    fields = (
        (b"t", _text(tenant)),
        (b"n", _text(name)),
        (b"-", b"") if member is None else (b"m", _text(member)),
        (b"e", str(epoch).encode()),
    )
    return _VERSION + b"".join(tag + len(value).to_bytes(8, "big") + value for tag, value in fields)


@lru_cache(REMEMBERED)
def scope(secret: bytes, tenant: str, name: str, member: str | None, epoch: int) -> CacheScope:
    """The scope whose key only a holder of ``secret`` can make. The last ones are remembered: callers come again."""
    return CacheScope(name, hmac.new(secret, encode(tenant, name, member, epoch), hashlib.sha256).digest())


def server_secret(ctx: PolicyContext) -> bytes:
    """The gateway's secret. Raises PolicyConfigError when it is missing or short."""
    if len(ctx.server_secret) < MIN_SECRET_BYTES:
        raise PolicyConfigError(f"the gateway's server secret must have at least {MIN_SECRET_BYTES} bytes")
    return ctx.server_secret


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")
