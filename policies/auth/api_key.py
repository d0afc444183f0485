"""``api_key``: opaque keys, stored as SHA-256 hashes.

Rules
- A key is 256 random bits (``make_key``), so a plain hash is enough: there is nothing to guess or to stretch.
- The config holds hashes only; a key is shown once, when it is made.
- Keys are found by a part of their hash and compared whole in constant time; an unknown key costs the same comparison.
- Keys of the configuration and keys that the admin API made (``PolicyContext.stored_keys``) pass alike. The latter are
  looked up per request, so one that is revoked is refused from the next request on.
- ``Authorization: Bearer`` or ``x-api-key``; two different credentials in one request are refused.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from policies.spi import AuthError, PolicyConfig, PolicyConfigError, PolicyContext, PolicySpec
from policies.types import AuthRequest, Principal, TenantId
from policies.wording import complaint

PREFIX = "fb_"
_MAX_KEY_CHARS = 512
INDEX_BYTES = 8
_SHOWN = 8
_NOBODY: list[tuple[bytes, Principal | None]] = [(bytes(32), None)]


def make_key() -> str:
    """A new random key, e.g. ``fb_4Zq…``. Store ``hash_key`` of it, give the key to its user, forget it."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> bytes:
    """What is stored of a key: its SHA-256."""
    return hashlib.sha256(key.encode()).digest()


def hash_key(key: str) -> str:
    """The same, as the config writes it: ``sha256:<hex>``."""
    return "sha256:" + digest_of(key).hex()


def key_prefix(key: str) -> str:
    """The first characters of a key, to tell keys apart in lists without knowing them."""
    return key[: len(PREFIX) + _SHOWN]


class KeyEntry(PolicyConfig):
    """One key."""

    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    tenant: str = Field(min_length=1, max_length=128)
    user: str | None = None
    groups: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()
    prefix: str | None = None
    """For people only; not used to decide."""
    expires: AwareDatetime | None = None
    """When it ends (ISO 8601 with an offset: ``2027-01-31T00:00:00Z``)."""


class ApiKeyConfig(PolicyConfig):
    """Keys here, in a JSON file (a list of the same entries), and those made through the admin API."""

    keys: tuple[KeyEntry, ...] = ()
    keys_file: str | None = None


class ApiKeyAuth:
    """O(1) in the number of keys."""

    def __init__(
        self,
        entries: Iterable[KeyEntry],
        stored: Callable[[bytes], Sequence[tuple[bytes, Principal]]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``stored``: see ``PolicyContext.stored_keys``. ``clock``: Unix seconds."""
        self._stored = stored
        self._clock = clock
        self._by_index: dict[bytes, list[tuple[bytes, Principal | None]]] = {}
        for entry in entries:
            digest = bytes.fromhex(entry.hash.removeprefix("sha256:"))
            principal = Principal(
                TenantId(entry.tenant),
                user=entry.user,
                groups=entry.groups,
                roles=entry.roles,
                method="api_key",
                key_id=digest.hex()[:12],
                expires_at=entry.expires.timestamp() if entry.expires is not None else None,
            )
            self._by_index.setdefault(digest[:INDEX_BYTES], []).append((digest, principal))

    async def authenticate(self, request: AuthRequest) -> Principal:
        """Raises AuthError; never says which check failed to the caller."""
        digest = digest_of(_presented(request))
        index = digest[:INDEX_BYTES]
        known = [*self._by_index.get(index, ()), *(self._stored(index) if self._stored is not None else ())]
        found: Principal | None = None
        for candidate, principal in known or _NOBODY:
            if hmac.compare_digest(candidate, digest):
                found = principal
        if found is None:
            raise AuthError("unknown API key")
        if found.expires_at is not None and found.expires_at <= self._clock():
            raise AuthError("the API key has ended")
        return found


def _presented(request: AuthRequest) -> str:
    bearer, header = request.bearer, request.headers.get("x-api-key")
    if bearer and header and bearer != header:
        raise AuthError("two different credentials")
    key = bearer or header
    if not key:
        raise AuthError("no API key")
    if len(key) > _MAX_KEY_CHARS or not key.isascii():
        raise AuthError("not the shape of an API key")
    return key


def _read(path: Path) -> list[KeyEntry]:
    try:
        return TypeAdapter(list[KeyEntry]).validate_python(json.loads(path.read_text()), strict=False)
    except OSError as error:
        raise PolicyConfigError(f"cannot be read: {error.strerror}", "keys_file") from error
    except (ValueError, ValidationError) as error:
        detail = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else None
        where = f"{'.'.join(map(str, detail['loc']))}: {complaint(detail, KeyEntry)}" if detail else "not JSON"
        raise PolicyConfigError(f"must be a JSON list of keys ({where})", "keys_file") from None


def _make(config: ApiKeyConfig, ctx: PolicyContext) -> ApiKeyAuth:
    entries = list(config.keys)
    if config.keys_file is not None:
        entries += _read(Path(ctx.base_dir) / config.keys_file)
    if not entries and ctx.stored_keys is None:
        raise PolicyConfigError("no keys; list them here or in keys_file, or set state.path and make some", "keys")
    seen: set[str] = set()
    for index, entry in enumerate(entries):
        if entry.hash in seen:
            path = f"keys.{index}.hash" if index < len(config.keys) else "keys_file"
            raise PolicyConfigError("the same key is listed twice", path)
        seen.add(entry.hash)
    return ApiKeyAuth(entries, ctx.stored_keys)


SPEC = PolicySpec("auth", "api_key", ApiKeyConfig, _make, "API keys, stored hashed and compared in constant time.")
