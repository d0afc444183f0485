"""What the state store keeps of keys, and how the auth policy finds them. Values only: no file is touched here.

Rules
- Of a secret there is its SHA-256 and its first characters, never the secret.
- A key's id is random and stays when its secret is rotated: what counts by key (quotas, fairness) goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from policies.auth.api_key import INDEX_BYTES
from policies.types import Principal, TenantId


@dataclass(frozen=True, slots=True)
class Secret:
    """One secret of a key."""

    digest: bytes
    prefix: str
    created_at: float
    ends_at: float | None = None
    """Unix time from which it is refused, because another took its place."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One API key. Times are Unix seconds."""

    id: str
    tenant: str
    created_at: float
    user: str | None = None
    groups: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    name: str | None = None
    """What people call it."""
    expires_at: float | None = None
    revoked_at: float | None = None
    secrets: tuple[Secret, ...] = field(default=(), repr=False)
    """Oldest first."""

    def state(self, now: float) -> str:
        """``active``, ``expired`` or ``revoked``."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"

    def as_json(self, now: float) -> dict[str, Any]:
        """For the admin API and the audit log: nothing of it opens anything."""
        return {
            "id": self.id,
            "tenant": self.tenant,
            "user": self.user,
            "groups": list(self.groups),
            "roles": list(self.roles),
            "name": self.name,
            "state": self.state(now),
            "created_at": written(self.created_at),
            "expires_at": written(self.expires_at),
            "revoked_at": written(self.revoked_at),
            "secrets": [
                {
                    "prefix": secret.prefix,
                    "created_at": written(secret.created_at),
                    "ends_at": written(secret.ends_at),
                }
                for secret in self.secrets
                if secret.ends_at is None or secret.ends_at > now
            ],
        }


def written(at: float | None) -> str | None:
    """A Unix time as ISO 8601 in UTC."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


Entry = tuple[bytes, Principal]
"""A secret's hash, and whom it stands for until ``Principal.expires_at``."""
Entries = Mapping[bytes, Sequence[Entry]]


class KeyDirectory:
    """The keys that are not revoked, by the first bytes of their hashes. Replaced whole, read by the auth policy."""

    def __init__(self) -> None:
        self._entries: Entries = {}

    def find(self, index: bytes) -> Sequence[Entry]:
        """The entries whose hash begins with these ``INDEX_BYTES`` bytes. O(1)."""
        return self._entries.get(index, ())

    def replace(self, keys: Iterable[KeyRecord]) -> None:
        """Take the keys as they are now. O(keys)."""
        self.take(self.made(keys))

    def take(self, entries: Entries) -> None:
        """Take what ``made`` has made. O(1)."""
        self._entries = entries

    @staticmethod
    def made(keys: Iterable[KeyRecord]) -> Entries:
        """The keys as they are looked for. O(keys); in any thread."""
        entries: dict[bytes, list[Entry]] = {}
        for key in keys:
            if key.revoked_at is not None:
                continue
            for secret in key.secrets:
                ends = [at for at in (key.expires_at, secret.ends_at) if at is not None]
                principal = Principal(
                    TenantId(key.tenant),
                    user=key.user,
                    groups=frozenset(key.groups),
                    roles=frozenset(key.roles),
                    method="api_key",
                    key_id=key.id,
                    expires_at=min(ends, default=None),
                )
                entries.setdefault(secret.digest[:INDEX_BYTES], []).append((secret.digest, principal))
        return entries
