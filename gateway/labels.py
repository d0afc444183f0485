"""Labels of a request: whose it is and what it is about, so that a purge can find its blocks without naming anybody.

Rules
- A label is a keyed digest of (tenant, kind, name): a worker cannot read it, another tenant's equal name has another.
- Kinds: the verified user, each verified group, and the document tags of ``metadata.cache_tags``. Tags are the caller's
  words: they only make more of its own cache purgeable.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gateway.errors import bad_request
from policies.types import Principal, TenantId

Kind = Literal["user", "group", "tag"]
LABEL_BYTES = 16
MAX_TAGS = 16
MAX_TAG_CHARS = 128
TAGS_FIELD = "cache_tags"
_REMEMBERED = 16_384


@dataclass(frozen=True, slots=True)
class Subject:
    """What a purge is about: a whole tenant, or the users, groups and tags of it that are named."""

    tenant: TenantId
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is all of the tenant."""
        return not (self.users or self.groups or self.tags)

    def as_json(self) -> dict[str, list[str]]:
        """What was named, by kind; empty for a whole tenant."""
        named = {"user": self.users, "group": self.groups, "tag": self.tags}
        return {kind: list(names) for kind, names in named.items() if names}


class Labels:
    """Makes labels under one secret."""

    def __init__(self, secret: bytes) -> None:
        @lru_cache(_REMEMBERED)
        def label(tenant: str, kind: Kind, name: str) -> bytes:
            fields = [part.encode("utf-8", "surrogatepass") for part in (tenant, kind, name)]
            text = b"label\0" + b"".join(len(field).to_bytes(8, "big") + field for field in fields)
            return hmac.new(secret, text, hashlib.sha256).digest()[:LABEL_BYTES]

        self._label = label

    def of_request(self, principal: Principal, metadata: Mapping[str, str]) -> list[bytes]:
        """The labels of a request. Raises ApiError 400 for tags that cannot be read."""
        tenant = principal.tenant
        found = [self._label(tenant, "user", principal.user)] if principal.user is not None else []
        if principal.groups:
            found += [self._label(tenant, "group", group) for group in sorted(principal.groups)]
        return found + [self._label(tenant, "tag", tag) for tag in cache_tags(metadata)]

    def of_subject(self, subject: Subject) -> list[bytes]:
        """The labels that a purge of ``subject`` names."""
        named: Iterable[tuple[Kind, tuple[str, ...]]] = (
            ("user", subject.users),
            ("group", subject.groups),
            ("tag", subject.tags),
        )
        return [self._label(subject.tenant, kind, name) for kind, names in named for name in names]


def cache_tags(metadata: Mapping[str, str]) -> list[str]:
    """The tags of ``metadata.cache_tags``, which lists them with commas. Raises ApiError 400."""
    if TAGS_FIELD not in metadata:
        return []
    tags = list(dict.fromkeys(part.strip() for part in metadata[TAGS_FIELD].split(",") if part.strip()))
    param = f"metadata.{TAGS_FIELD}"
    if len(tags) > MAX_TAGS:
        raise bad_request(f"{param} takes at most {MAX_TAGS} tags, got {len(tags)}.", param=param)
    if any(len(tag) > MAX_TAG_CHARS or not tag.isprintable() for tag in tags):
        raise bad_request(f"{param}: a tag has at most {MAX_TAG_CHARS} printable characters.", param=param)
    return tags
